"""Settings of a runtime and of the scheduler, from the environment set by `staccato up` or an operator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import BeforeValidator, ByteSize, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from runtime.core.ledgers.costs import load_profile
from runtime.core.turns.registry import POLICIES
from runtime.migration import nixl, tls
from runtime.migration.transport import is_loopback
from store.contract.joining.proofs import TOKEN
from store.contract.wire import Role
from store.kept import kept
from store.keypairs import new_seed
from store.settings import MemoryShare, Replicas, size_or_share


def _threads() -> int:
    return max(1, (os.cpu_count() or 1) // 2)


def _memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _numbers(value: object) -> object:
    return value.replace(",", " ").split() if isinstance(value, str) else value


_Helper = Annotated[int, Field(ge=1, le=31)]


class SchedulerSettings(BaseSettings):
    """Settings of the scheduler: `STACCATO_NATS_URL`, `STACCATO_RUNTIMES_MOST`, ..."""

    model_config = SettingsConfigDict(env_prefix="STACCATO_", extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    nats_credentials: Path | None = None  # file with the seed of its nkey, or a .creds file
    nats_ca: Path | None = None  # PEM file of the authority of a tls:// server
    nats_replicas: Replicas = None
    # With `runtimes_most`, the scheduler says how many runtimes there should be:
    runtimes_least: Annotated[int, Field(ge=1)] = 1
    runtimes_most: Annotated[int, Field(ge=0)] = 0  # 0: the scheduler does not
    # With `nodes_scaled`, runtimes come and go by nodes of `node_runtimes` runtimes: NODES_SCALED-0-r1, -0-r2, -1-r1
    # and so on, as the pods of a StatefulSet. The node with the highest number goes first.
    nodes_scaled: str = ""
    node_runtimes: Annotated[int, Field(ge=1)] = 1

    # auto: the scheduler gives runtimes roles while prompts make tokens late, and takes the roles back
    roles: Literal["fixed", "auto"] = "fixed"

    def check(self) -> None:
        """Raises ValueError with a single sentence if settings contradict each other."""
        if 0 < self.runtimes_most < self.runtimes_least:
            least = f"STACCATO_RUNTIMES_LEAST={self.runtimes_least}"
            most = f"STACCATO_RUNTIMES_MOST={self.runtimes_most}"
            raise ValueError(f"{least} is more than {most}: lower it, or raise the other")
        if self.nodes_scaled and not self.runtimes_most:
            scaled = f"STACCATO_NODES_SCALED={self.nodes_scaled}"
            raise ValueError(f"{scaled} without a number of runtimes: set STACCATO_RUNTIMES_MOST, or leave it out")


class RuntimeSettings(BaseSettings):
    """Settings of a runtime: `STACCATO_RUNTIME_ID`, `STACCATO_NATS_URL`, ..."""

    model_config = SettingsConfigDict(env_prefix="STACCATO_", extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    nats_credentials: Path | None = None  # file with the seed of its nkey, or a .creds file
    nats_ca: Path | None = None  # PEM file of the authority of a tls:// server
    nats_replicas: Replicas = None
    # A join token, itself or in a file: shown beside the key in `nats_credentials`, which is made if absent.
    join_token: SecretStr | None = None
    join_token_file: Path | None = None
    runtime_id: str = "r1"
    policy: str = "slack"
    role: Role = Role.BOTH  # until the runtime is told a new role
    # Device pool for weights and KV cache, of each device: a size, or a part of the device's memory as 90%.
    device_memory: Annotated[ByteSize | MemoryShare, BeforeValidator(size_or_share)] = ByteSize(512 << 20)
    tensor_parallel: Annotated[int, Field(ge=1)] = 1  # devices of this runtime, over which each model is split
    # Further GPUs visible to the process, "1,2": weights come over the links of these GPUs to the host as well.
    load_helpers: Annotated[tuple[_Helper, ...], NoDecode, BeforeValidator(_numbers)] = ()
    host_cache: ByteSize = ByteSize(_memory() // 2)  # bound on images of models and parked requests in host memory
    # Bound on KV blocks of ended requests in the host cache: a size, or a part of the host cache; 0: none are kept.
    prefix_cache: Annotated[ByteSize | MemoryShare, BeforeValidator(size_or_share)] = ByteSize(0)
    prefix_ttl_s: Annotated[float, Field(gt=0)] = 900.0  # time after its last use until such a block is forgotten
    # With a GPU, the most bytes of the host cache that are registered with its driver (pinned) at a time; 0: no limit.
    cache_pinned: ByteSize = ByteSize(0)
    # With a GPU, the most requests of a decode step that is replayed from a CUDA graph; 0: every step is eager.
    cuda_graphs: Annotated[int, Field(ge=0, le=512)] = 64
    compiled: bool = False  # on GPUs: torch compiles each model, as vLLM does by default; builds take longer
    async_scheduling: bool | None = None  # begin a step before the last step's tokens are known; None: on GPUs alone
    numa_node: int = -1  # node of the host whose processors and memory are next to the GPU; -1: any
    host_cache_fd: int = -1  # host cache file shared by the runtimes of a node; -1: the runtime has a private cache
    disk_cache: ByteSize = ByteSize(0)  # bound on images of models on disk; 0: images are not kept on disk
    disk_folder: Path | None = None  # folder of images on disk, perhaps shared with other nodes
    fork_server: bool = True  # fork the device process from a process that has imported vLLM
    fork_server_fd: int = -1  # inherited socket for orders to a fork server; -1: the runtime starts a server of its own
    threads: int = _threads()  # compute threads of the device process, without a GPU
    journal: Path | None = None  # folder in which each runtime keeps a journal of its decisions
    profile: Path | None = None  # costs of this machine (`staccato profile`); without a profile, guessed at first
    drain_s: float = 30.0  # time after SIGTERM for streams to end; then different runtimes continue the streams
    hang_s: float = 60.0  # longest step, and longest silence of a device owing an answer; then its process is ended
    build_hang_s: float = 900.0  # longest time that a build from files reads no further; then its process is ended
    grammar_cpu_s: Annotated[float, Field(gt=0, le=600)] = 5.0  # processor time for compiling a grammar
    grammar_memory: ByteSize = ByteSize(512 << 20)  # memory for compiling a grammar
    grammar_compiled_max: ByteSize = ByteSize(8 << 20)  # size of a compiled grammar, which the device process reads
    grammar_cache: ByteSize = ByteSize(64 << 20)  # compressed size of the compiled grammars kept for tenants
    grammar_jobs: Annotated[int, Field(ge=1)] = 2  # grammars compiled at the same time, of different tenants
    transport: Literal["tcp", "nixl"] = "tcp"  # for blocks from remote hosts, and to remote hosts with equal transport
    transport_bind: str = "127.0.0.1"  # address of this host at which blocks from remote hosts are received
    transport_port: int = 0  # 0: any free port
    transport_advertise: str = ""  # address at which remote hosts reach `transport_bind`; empty: `transport_bind`
    # PEM files of TLS between hosts: this runtime's certificate and key, and the authority of every runtime.
    transport_tls_cert: Path | None = None
    transport_tls_key: Path | None = None
    transport_tls_ca: Path | None = None
    transport_plaintext: bool = False  # blocks of requests cross hosts without TLS: for a private network of the hosts

    @property
    def pool(self) -> tuple[int, int]:
        """Bytes of each device's pool and 0; or 0 and the percent of the device's memory."""
        memory = self.device_memory
        return (0, memory.percent) if isinstance(memory, MemoryShare) else (int(memory), 0)

    @property
    def prefixes(self) -> tuple[int, float]:
        """Bytes for KV blocks of ended requests, and the seconds until an unused block goes."""
        kept = self.prefix_cache
        size = int(self.host_cache) * kept.percent // 100 if isinstance(kept, MemoryShare) else int(kept)
        return size, self.prefix_ttl_s

    @property
    def law(self) -> dict[str, float]:
        """Law of the profile, as a dict of runtime/core/ledgers/costs.Law; empty without a measured law.

        Raises OSError or ValueError if the profile can't be read."""
        profile = load_profile(self.profile.read_bytes(), str(self.profile)) if self.profile else None
        return msgspec.to_builtins(profile.law) if profile and profile.law else {}

    def join_with(self) -> str | None:
        """Return the join token to show, and make the runtime's key if the key's file is missing; None: no token.

        Raises ValueError with a single sentence if a file can't be read or written. A missing file of a token is no
        error once the runtime has a key: the token was needed only to join."""
        if self.join_token is None and self.join_token_file is None:
            return None
        if self.nats_credentials is None:
            raise ValueError(
                "a join token needs STACCATO_NATS_CREDENTIALS: the file in which the runtime keeps its key"
            )
        try:
            token = self._token(self.nats_credentials.exists())
            if token is None:
                return None
            if not TOKEN.fullmatch(token):
                raise ValueError("the join token is malformed: `staccato join-token create` prints a token")
            kept(self.nats_credentials, new_seed("user"))
            return token
        except OSError as error:
            raise ValueError(
                f"{error.filename}: {error.strerror}: a runtime reads its token, and keeps a key"
            ) from error

    def _token(self, has_key: bool) -> str | None:
        if self.join_token is not None:
            return self.join_token.get_secret_value()
        assert self.join_token_file is not None
        if has_key and not self.join_token_file.exists():
            return None
        return self.join_token_file.read_text().strip()

    def check(self) -> None:
        """Raises ValueError with a single sentence if a setting can't work on this machine."""
        if self.policy not in POLICIES:
            raise ValueError(f"no turn policy {self.policy!r}: choose one of {', '.join(POLICIES)}")
        if self.fork_server_fd >= 0:
            try:
                os.fstat(self.fork_server_fd)
            except OSError as error:
                said = f"STACCATO_FORK_SERVER_FD={self.fork_server_fd} is no open file of this process"
                raise ValueError(f"{said}: leave the variable out, and the runtime starts a fork server") from error
        if self.journal is not None and not (self.journal.is_dir() and os.access(self.journal, os.W_OK)):
            raise ValueError(f"STACCATO_JOURNAL={self.journal} is no folder to write into: make it, or name another")
        if self.profile is not None:
            try:
                load_profile(self.profile.read_bytes(), str(self.profile))
            except OSError as error:
                raise ValueError(
                    f"STACCATO_PROFILE={self.profile}: {error.strerror}: `staccato profile` writes one"
                ) from error
        if self.disk_cache and self.disk_folder is None:
            raise ValueError(
                f"STACCATO_DISK_CACHE={self.disk_cache} without a folder: name one with STACCATO_DISK_FOLDER, or say 0"
            )
        if self.load_helpers and self.tensor_parallel > 1:
            helpers = ",".join(map(str, self.load_helpers))
            raise ValueError(
                f"STACCATO_LOAD_HELPERS={helpers} with STACCATO_TENSOR_PARALLEL={self.tensor_parallel}: each device "
                "loads its own part over its own link already, so leave the helpers out"
            )
        if self.transport == "nixl" and not nixl.installed():
            raise ValueError(f"STACCATO_TRANSPORT=nixl, and NIXL is not installed: {nixl.INSTALL}, or use tcp")
        if not self.transport_advertise and self.transport_bind in ("0.0.0.0", "::"):
            raise ValueError(
                f"STACCATO_TRANSPORT_BIND={self.transport_bind} is no address to be reached by: say with "
                "STACCATO_TRANSPORT_ADVERTISE which one this host has"
            )
        self._check_security()
        if not self.runtime_id.replace("-", "").isalnum():
            raise ValueError(
                f"runtime id {self.runtime_id!r} has other than letters, digits and '-': it names subjects"
            )

    def _check_security(self) -> None:
        """Raises ValueError with a single sentence if blocks of requests would cross hosts in plaintext unasked."""
        secured = self.transport_security() is not None and self.transport != "nixl"
        named = [host for host in (self.transport_advertise, self.transport_bind) if host]
        crosses = [host for host in named if not is_loopback(f"[{host}]:0")]
        if secured or self.transport_plaintext or not crosses:
            return
        remedy = f"give {tls.WANTED}, as `staccato nats-users` makes them"
        if self.transport == "nixl":
            remedy = "NIXL encrypts nothing, so use STACCATO_TRANSPORT=tcp"
        raise ValueError(
            f"blocks of requests, which hold prompts, would cross hosts without TLS at {crosses[0]}: {remedy}, or say "
            "STACCATO_TRANSPORT_PLAINTEXT=true where the network between the hosts is theirs alone"
        )

    def transport_agents(self) -> nixl.Agents | None:
        """Agents of NIXL; None if NIXL is not the transport."""
        return nixl.Agents() if self.transport == "nixl" else None

    def transport_security(self) -> tls.Security | None:
        """TLS between hosts; None without certificates.

        Raises ValueError with a single sentence if only some of the three files are given or a file can't be used."""
        files = (self.transport_tls_cert, self.transport_tls_key, self.transport_tls_ca)
        certificate, key, authority = files
        if certificate is None or key is None or authority is None:
            if any(files):
                raise ValueError(f"TLS between hosts needs three files: give all of {tls.WANTED}, or none")
            return None
        return tls.Security.load(certificate, key, authority)
