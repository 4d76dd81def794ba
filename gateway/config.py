"""Settings of the platform: read from `STACCATO_*` variables, checked once, printed by `staccato doctor`.

Secrets may stand in files instead of the environment: a file named like the variable, in the folder given by
STACCATO_SECRETS.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gateway.core.extent import ExtentLimits
from runtime.core.turns.registry import POLICIES
from store.contract.elapsed import KEPT_DAYS
from store.kept import kept
from store.settings import PREFIX, USAGE_DAYS, MemoryShare, Replicas, SettingsError, UsageDays, read, size_or_share


def _memory() -> int:
    """Return the bytes of memory of the host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _disk(folder: Path) -> int:
    """Return the size in bytes of the disk that has, or will have, the folder."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(there).total


def _paths(value: object) -> object:
    return [Path(part) for part in value.split(os.pathsep) if part] if isinstance(value, str) else value


def _words(value: object) -> object:
    return value.replace(",", " ").split() if isinstance(value, str) else value


_Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]


class Settings(BaseSettings):
    """Settings of the platform, to be read with `load()`: it reports an invalid value in a single sentence."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, env_ignore_empty=True)

    data: Path = Path(".staccato")  # folder for all data of the platform on this host
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=1, le=65535)
    gateways: int = Field(1, ge=1, le=64)  # processes of this host behind the port
    gateway_number: int = Field(1, ge=1, le=64)  # of a gateway process, from 1 to `gateways`
    listen_fds: _Words = ()  # numbers of inherited listening sockets; empty: the gateway opens the port
    database_url: str = Field(default_factory=lambda values: f"sqlite:///{values['data'] / 'staccato.db'}")
    nats_url: str | None = None  # with commas between servers; None: `staccato up` starts a nats-server of its own
    nats_cluster: int = Field(1, ge=1, le=5)  # servers that `staccato up` starts: an odd number, for a majority
    nats_credentials: Path | None = None  # file of a role's user; for `up`, a folder with a file NAME.nk per role
    nats_ca: Path | None = None  # PEM file of a tls:// server's authority; None: the host's authorities
    # With servers of `staccato up`, all of these servers.
    nats_replicas: Replicas = Field(default_factory=lambda its: None if its["nats_url"] else its["nats_cluster"])
    admin_key: SecretStr | None = None  # None: the key in DATA/admin.key, made on the first start
    metrics_key: SecretStr | None = None  # reads only /api/v1/metrics: for Prometheus
    # Tenants may register models below these folders.
    model_roots: Annotated[list[Path], NoDecode, BeforeValidator(_paths)] = []
    models: Path = Field(
        default_factory=lambda values: values["data"] / "models"
    )  # imported models; runtimes read them
    # The gateway takes no new requests below so many free bytes; usage is still booked.
    disk_reserve: ByteSize = ByteSize(64 << 20)
    models_most: ByteSize | None = None  # bytes of imported models; None: as much as the disk has
    model_sources: _Words = ()  # prefixes of sources that tenants may import: hf://org/, s3://bucket/models/
    hf_endpoint: str = "https://huggingface.co"
    # The endpoint may redirect to these hosts for files; host:port if the port is unusual.
    hf_hosts: _Words = (".huggingface.co", ".hf.co")
    hf_token: SecretStr | None = None
    s3_endpoint: str | None = None  # None: Amazon's, in the region
    s3_region: str = "us-east-1"
    s3_key_id: SecretStr | None = None  # None: requests are not signed
    s3_secret: SecretStr | None = None
    s3_session_token: SecretStr | None = None
    runtimes: int = Field(1, ge=0, le=64)  # least number
    # Most runtimes: above `runtimes`, `staccato up` starts and ends runtimes as the load needs.
    runtimes_most: int = Field(default_factory=lambda values: values["runtimes"], ge=0, le=64)
    prefill: int = Field(0, ge=0)  # runtimes that compute prompts and hand requests on to the decode runtimes
    roles: Literal["fixed", "auto"] = "fixed"  # auto: the scheduler gives and takes back roles, as prompts need
    # Pool of pages of each runtime: a size, or a part of the device's memory as 90%.
    device_memory: Annotated[Annotated[ByteSize, Field(ge=4 << 20)] | MemoryShare, BeforeValidator(size_or_share)] = (
        ByteSize(512 << 20)
    )
    # Host memory for images of models and parked requests, shared by all runtimes:
    host_cache: ByteSize = Field(ByteSize(_memory() // 2), ge=16 << 20)
    # Disk memory for images of models, shared by all runtimes; 0: none. Images outlive the platform.
    disk_cache: ByteSize = Field(default_factory=lambda values: ByteSize(_disk(values["data"]) // 4), ge=0)
    disk_folder: Path = Field(default_factory=lambda values: values["data"] / "images")
    # With GPUs, the most bytes of the host cache that all runtimes together register with their drivers; 0: no limit.
    cache_pinned: ByteSize = ByteSize(0)
    gpus: _Words = ()  # a runtime for each of these GPUs, by number or UUID; empty: for each GPU of the host
    tensor_parallel: int = Field(1, ge=1)  # devices of each runtime, over which the runtime's models are split
    drain_s: float = Field(30.0, gt=0)  # time after SIGTERM for streams of a runtime to end
    policy: str = "slack"
    fork_server: bool = True  # fork the gateway and the device processes from a process that has imported vLLM
    fork_server_fd: int = -1  # inherited socket for orders to a fork server that runs already
    fast_way: bool = True  # False: vLLM's own handlers answer every request
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Days for which the ledger keeps a request's stage times; 0: keeps none.
    request_days: float = Field(KEPT_DAYS, ge=0)
    usage_days: UsageDays = USAGE_DAYS
    database_away_s: float = Field(3600.0, ge=0)  # known keys and deployments go on so long without the database
    journal: Path | None = None  # folder in which gateways and runtimes record their decisions
    body_limit_bytes: ByteSize = ByteSize(12 << 20)
    # Largest extent of a request; a larger request gets a 400 that names the number:
    answers_max: int = Field(ExtentLimits.answers_max, ge=1)  # sequences: `n` times prompts
    messages_max: int = Field(ExtentLimits.messages_max, ge=1)
    entries_max: int = Field(ExtentLimits.entries_max, ge=1)  # of logit_bias, metadata or vllm_xargs
    inputs_max: int = Field(ExtentLimits.inputs_max, ge=1)  # texts of a call for vectors or scores
    pictures_max: int = Field(ExtentLimits.pictures_max, ge=0, le=64)  # the runtime takes no more than 64
    logprobs_max: int = Field(ExtentLimits.logprobs_max, ge=0)  # per generated token
    prompt_logprobs_max: int = Field(ExtentLimits.prompt_logprobs_max, ge=0)  # per token of the prompt
    # Text of prompt, messages, input, tools and similar fields, pictures aside.
    text_bytes_max: ByteSize = ByteSize(ExtentLimits.text_bytes_max)
    # Text of these fields if the request generates no tokens.
    tokenize_bytes_max: ByteSize = ByteSize(ExtentLimits.tokenize_bytes_max)
    grammar_bytes_max: ByteSize = ByteSize(ExtentLimits.grammar_bytes_max)  # schema, regex, choice or grammar
    header_deadline_s: float = Field(8.0, gt=0)
    body_deadline_s: float = Field(8.0, gt=0)  # plus 1 s for each 32 KiB received
    read_deadline_s: float = Field(8.0, gt=0)  # the gateway gives up an answer left unread for this long
    connections_per_address: int = Field(1024, ge=1)
    hold_deadline_s: float = Field(60.0, gt=0)  # longest wait for a model to wake
    # Time in which a client may resume a stream after the loss of the connection or of a gateway; 0: never.
    resumable_s: float = Field(10.0, ge=0, le=600)
    resume_deadline_s: float = Field(60.0, gt=0)  # longest wait of a stream for a new runtime, if the old one died

    @field_validator("data", "models", "disk_folder")
    @classmethod
    def _absolute(cls, data: Path) -> Path:
        return data.expanduser().absolute()  # child processes may run in another folder

    @field_validator("hf_endpoint", "s3_endpoint")
    @classmethod
    def _is_endpoint(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "https://-")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError("write it as https://host or http://host:port, without a user or a password")
        return url

    @field_validator("model_sources")
    @classmethod
    def _are_sources(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [word for word in words if not word.startswith(("hf://", "s3://"))]:
            raise ValueError(f"{wrong[0]!r} is no source: write hf://org/ or s3://bucket/prefix/, with commas between")
        return words

    @field_validator("nats_cluster")
    @classmethod
    def _has_a_majority(cls, servers: int) -> int:
        if servers % 2 == 0:
            raise ValueError("choose 1, 3 or 5: an even number of servers survives no more losses than one server less")
        return servers

    @field_validator("prefill")
    @classmethod
    def _leaves_some(cls, prefill: int, info: ValidationInfo) -> int:
        runtimes = info.data.get("runtimes", prefill + 1)
        if prefill and prefill >= runtimes:
            raise ValueError(f"of {runtimes} runtimes at most {max(0, runtimes - 1)} can be for prompts")
        return prefill

    @field_validator("roles")
    @classmethod
    def _given_by_one(cls, roles: str, info: ValidationInfo) -> str:
        if roles == "auto" and info.data.get("prefill"):
            raise ValueError(f"the scheduler can't choose roles that {PREFIX}PREFILL fixes: leave one of the two out")
        return roles

    @field_validator("policy")
    @classmethod
    def _known(cls, policy: str) -> str:
        if policy not in POLICIES:
            raise ValueError(f"choose one of {', '.join(POLICIES)}")
        return policy

    @property
    def elastic(self) -> bool:
        """Whether the number of runtimes of `staccato up` follows the load."""
        return self.runtimes_most > self.runtimes

    def check_runtimes(self) -> None:
        """Raise SettingsError if `staccato up` can't keep the number of runtimes between least and most."""
        least, most = f"{PREFIX}RUNTIMES={self.runtimes}", f"{PREFIX}RUNTIMES_MOST={self.runtimes_most}"
        if self.runtimes_most < self.runtimes:
            raise SettingsError(f"{least} is more than {most}: lower the least number, or raise the most")
        if self.elastic and not self.runtimes:
            raise SettingsError(f"{least} with {most}: no runtime would tell of a load; let at least 1 runtime stay")

    def extent(self) -> ExtentLimits:
        """Largest extent of a request."""
        return ExtentLimits(**{field.name: getattr(self, field.name) for field in fields(ExtentLimits)})

    @property
    def admin_key_file(self) -> Path:
        return self.data / "admin.key"

    @property
    def pepper_file(self) -> Path:
        return self.data / "pepper"

    def usage_journal(self, number: int) -> Path:
        """File of the usage that gateway `number` of this host has not booked yet."""
        return self.data / ("gateway.journal" if number == 1 else f"gateway-{number}.journal")

    @property
    def left_journals(self) -> list[Path]:
        """Files of gateways that this host no longer has, for the first gateway to book."""
        if self.gateway_number > 1:
            return []
        kept = {self.usage_journal(number) for number in range(1, self.gateways + 1)}
        return sorted(path for path in self.data.glob("gateway-*.journal") if path not in kept)

    @property
    def database_file(self) -> Path | None:
        """File of an SQLite database; None: the database is a server."""
        scheme, _, path = self.database_url.partition(":///")
        return Path(path) if scheme.startswith("sqlite") and path else None

    @property
    def kept_in(self) -> list[Path]:
        """Folders in which this host books the usage of requests."""
        return [self.data, *([self.database_file.parent] if self.database_file else [])]

    @property
    def url(self) -> str:
        """URL of the gateway for a client on the same host."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else "[::1]" if self.host == "::" else self.host
        return f"http://{host}:{self.port}"


def load(**overrides: object) -> Settings:
    """Read the settings from the environment; `overrides` that are not None take precedence. Raises SettingsError."""
    return read(Settings, _SECRET, **{name: value for name, value in overrides.items() if value is not None})


def shown(settings: Settings) -> dict[str, str]:
    """Return variable → value, with asterisks in place of secrets and passwords."""
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    return {PREFIX + name.upper(): _shown(name, value) for name, value in values.items()}


def _shown(name: str, value: object) -> str:
    if isinstance(value, ByteSize):
        return value.human_readable()
    if isinstance(value, list):
        return os.pathsep.join(map(str, value))
    if isinstance(value, tuple):
        return ",".join(value)
    if value is None:
        return _ABSENT[name]
    return redacted(str(value))


_SECRET = {"admin_key", "metrics_key", "hf_token", "s3_key_id", "s3_secret", "s3_session_token"}
_ABSENT = {
    "nats_url": "a child of `staccato up`",
    "nats_credentials": "in DATA/nats-users, for that child",
    "nats_ca": "the machine's authorities",
    "nats_replicas": "1, where a stream is made",
    "journal": "(none)",
    "admin_key": "in DATA/admin.key",
    "metrics_key": "(none)",
    "models_most": "what the disk has",
    "s3_endpoint": "Amazon's, in the region",
    **dict.fromkeys(("hf_token", "s3_key_id", "s3_secret", "s3_session_token"), "(none)"),
}


def on_this_machine(url: str) -> bool:
    """Whether the URL names a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def redacted(url: str) -> str:
    """Return the URL, or the URLs with commas between, without passwords; any other text unchanged."""
    return ",".join(map(_without_password, re.split(r",(?=[a-z]+://)", url)))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{host}"))


# ── secrets kept in the data folder ───────────────────────────────────────────────────────────────────────────────────


def admin_key(settings: Settings) -> str:
    """Return the operator's key: from the environment, else from DATA/admin.key, made on first use."""
    if settings.admin_key is not None:
        return settings.admin_key.get_secret_value()
    return kept(settings.admin_key_file, "sk-st-admin-" + secrets.token_urlsafe(32))


def metrics_key(settings: Settings) -> str:
    """Return the key given by STACCATO_METRICS_KEY; empty if there is none."""
    return settings.metrics_key.get_secret_value() if settings.metrics_key else ""


def pepper(settings: Settings) -> bytes:
    """Return DATA/pepper, the secret for hashing tenants' keys; made on first use."""
    return bytes.fromhex(kept(settings.pepper_file, secrets.token_hex(32)))
