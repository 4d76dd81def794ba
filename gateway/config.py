"""Every setting of the platform: read from `STACCATO_*` variables, checked once, printed by `staccato doctor`.

What should not stand in an environment may stand in a file of that name in the folder that STACCATO_SECRETS names.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gateway.extent import ExtentLimits
from runtime.policy.by_name import POLICIES
from store.settings import PREFIX, read


def _memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _paths(value: object) -> object:
    return [Path(part) for part in value.split(os.pathsep) if part] if isinstance(value, str) else value


def _words(value: object) -> object:
    return value.replace(",", " ").split() if isinstance(value, str) else value


_Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]


class Settings(BaseSettings):
    """Read it with `load()`, which turns what is wrong into one sentence."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, env_ignore_empty=True)

    data: Path = Path(".staccato")  # folder of everything this machine keeps
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=1, le=65535)
    database_url: str = Field(default_factory=lambda values: f"sqlite:///{values['data'] / 'staccato.db'}")
    nats_url: str | None = None  # None: `staccato up` starts a nats-server of its own
    nats_credentials: Path | None = None  # file of a role's user; a folder with one for each, NAME.nk, for `up`
    admin_key: SecretStr | None = None  # None: the one in DATA/admin.key, made on the first start
    model_roots: Annotated[list[Path], NoDecode, BeforeValidator(_paths)] = []  # tenants may register below these
    models: Path = Field(
        default_factory=lambda values: values["data"] / "models"
    )  # what was imported; runtimes read it
    models_most: ByteSize | None = None  # bytes of that; None: as much as the disk has
    model_sources: _Words = ()  # tenants may import what begins so: hf://org/, s3://bucket/models/
    hf_endpoint: str = "https://huggingface.co"
    hf_hosts: _Words = (".huggingface.co", ".hf.co")  # to which it may send us on for files; host:port where it is odd
    hf_token: SecretStr | None = None
    s3_endpoint: str | None = None  # None: Amazon's, in the region
    s3_region: str = "us-east-1"
    s3_key_id: SecretStr | None = None  # None: without a signature
    s3_secret: SecretStr | None = None
    s3_session_token: SecretStr | None = None
    runtimes: int = Field(1, ge=0, le=64)
    prefill: int = Field(0, ge=0)  # so many of them compute prompts, and hand requests on to the others
    device_memory: ByteSize = Field(ByteSize(512 << 20), ge=4 << 20)  # each runtime's pool of pages
    # Images of models and parked requests, of all runtimes together:
    host_cache: ByteSize = Field(ByteSize(_memory() // 2), ge=16 << 20)
    policy: str = "slack"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    body_limit_bytes: ByteSize = ByteSize(8 << 20)
    # The most that one request may ask for; more is a 400 with the number:
    answers_max: int = Field(ExtentLimits.answers_max, ge=1)  # sequences: `n` times prompts
    messages_max: int = Field(ExtentLimits.messages_max, ge=1)
    logprobs_max: int = Field(ExtentLimits.logprobs_max, ge=0)  # for each generated token
    prompt_logprobs_max: int = Field(ExtentLimits.prompt_logprobs_max, ge=0)  # for each token of the prompt
    text_bytes_max: ByteSize = ByteSize(ExtentLimits.text_bytes_max)  # of prompt, messages or input
    grammar_bytes_max: ByteSize = ByteSize(ExtentLimits.grammar_bytes_max)  # of a schema, regex, choice or grammar
    header_deadline_s: float = Field(8.0, gt=0)
    body_deadline_s: float = Field(8.0, gt=0)  # and 1 s more for each 32 KiB that came
    read_deadline_s: float = Field(8.0, gt=0)  # an answer of which nothing is read for so long is given up
    connections_per_address: int = Field(1024, ge=1)
    hold_deadline_s: float = Field(60.0, gt=0)  # longest wait for a model that wakes
    resume_deadline_s: float = Field(60.0, gt=0)  # longest wait of a stream whose runtime died for another one

    @field_validator("data", "models")
    @classmethod
    def _absolute(cls, data: Path) -> Path:
        return data.expanduser().absolute()  # children may run elsewhere

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

    @field_validator("prefill")
    @classmethod
    def _leaves_some(cls, prefill: int, info: ValidationInfo) -> int:
        runtimes = info.data.get("runtimes", prefill + 1)
        if prefill and prefill >= runtimes:
            raise ValueError(f"of {runtimes} runtimes at most {max(0, runtimes - 1)} can be for prompts")
        return prefill

    @field_validator("policy")
    @classmethod
    def _known(cls, policy: str) -> str:
        if policy not in POLICIES:
            raise ValueError(f"choose one of {', '.join(POLICIES)}")
        return policy

    def extent(self) -> ExtentLimits:
        """What one request may ask for at most."""
        return ExtentLimits(**{field.name: getattr(self, field.name) for field in fields(ExtentLimits)})

    @property
    def admin_key_file(self) -> Path:
        return self.data / "admin.key"

    @property
    def pepper_file(self) -> Path:
        return self.data / "pepper"

    @property
    def url(self) -> str:
        """Where a client on this machine finds the gateway."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else "[::1]" if self.host == "::" else self.host
        return f"http://{host}:{self.port}"


def load(**overrides: object) -> Settings:
    """The settings of the environment, `overrides` (None: not given) before it. Raises SettingsError."""
    return read(Settings, _SECRET, **{name: value for name, value in overrides.items() if value is not None})


def shown(settings: Settings) -> dict[str, str]:
    """Variable → value, secrets and passwords replaced by asterisks."""
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


_SECRET = {"admin_key", "hf_token", "s3_key_id", "s3_secret", "s3_session_token"}
_ABSENT = {
    "nats_url": "a child of `staccato up`",
    "nats_credentials": "in DATA/nats-users, for that child",
    "admin_key": "in DATA/admin.key",
    "models_most": "what the disk has",
    "s3_endpoint": "Amazon's, in the region",
    **dict.fromkeys(("hf_token", "s3_key_id", "s3_secret", "s3_session_token"), "(none)"),
}


def on_this_machine(url: str) -> bool:
    """Whether it names a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def redacted(url: str) -> str:
    """The URL without its password; any other text as it is."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{host}"))


# ── secrets kept in the data folder ───────────────────────────────────────────────────────────────────────────────────


def admin_key(settings: Settings) -> str:
    """The operator's key: the one of the environment, else DATA/admin.key, which is made when it is not there."""
    if settings.admin_key is not None:
        return settings.admin_key.get_secret_value()
    return kept(settings.admin_key_file, "sk-st-admin-" + secrets.token_urlsafe(32))


def pepper(settings: Settings) -> bytes:
    """What tenants' keys are hashed with, DATA/pepper; made when it is not there."""
    return bytes.fromhex(kept(settings.pepper_file, secrets.token_hex(32)))


def kept(path: Path, fresh: str) -> str:
    """The text of `path`; where there is none, `fresh` is written first. Two processes at once agree on one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    if not path.exists():
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(fresh + "\n")
            file.flush()
            os.fsync(descriptor)
        try:
            os.link(draft, path)  # fails, instead of replacing, when another process was first
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text().strip()
