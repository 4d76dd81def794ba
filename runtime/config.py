"""Settings of a runtime and of the scheduler, from the environment `staccato up` or an operator gives it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import BeforeValidator, ByteSize, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from runtime import nixl
from runtime.costs import load_profile
from runtime.policy.by_name import POLICIES
from store.wire import Role


def _threads() -> int:
    return max(1, (os.cpu_count() or 1) // 2)


def _memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _numbers(value: object) -> object:
    return value.replace(",", " ").split() if isinstance(value, str) else value


_Helper = Annotated[int, Field(ge=1, le=31)]


class SchedulerSettings(BaseSettings):
    """`STACCATO_NATS_URL`, `STACCATO_RUNTIMES_MOST`, ..."""

    model_config = SettingsConfigDict(env_prefix="STACCATO_", extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    nats_credentials: Path | None = None  # file with the seed of its nkey, or a .creds file
    runtimes_least: Annotated[int, Field(ge=1)] = (
        1  # with `runtimes_most`: the scheduler says how many runtimes there should be
    )
    runtimes_most: Annotated[int, Field(ge=0)] = 0  # 0: it does not

    def check(self) -> None:
        """Raises ValueError with one sentence."""
        if 0 < self.runtimes_most < self.runtimes_least:
            least = f"STACCATO_RUNTIMES_LEAST={self.runtimes_least}"
            most = f"STACCATO_RUNTIMES_MOST={self.runtimes_most}"
            raise ValueError(f"{least} is more than {most}: lower it, or raise the other")


class RuntimeSettings(BaseSettings):
    """`STACCATO_RUNTIME_ID`, `STACCATO_NATS_URL`, ..."""

    model_config = SettingsConfigDict(env_prefix="STACCATO_", extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    nats_credentials: Path | None = None  # file with the seed of its nkey, or a .creds file
    runtime_id: str = "r1"
    policy: str = "slack"
    role: Role = Role.BOTH  # until it is told another one
    device_memory: ByteSize = ByteSize(512 << 20)  # the pool of pages for weights and KV cache, of each device
    tensor_parallel: Annotated[int, Field(ge=1)] = 1  # devices of this runtime, over which each model is split
    # Other GPUs that the process sees, "1,2", over whose links to the host weights come as well:
    load_helpers: Annotated[tuple[_Helper, ...], NoDecode, BeforeValidator(_numbers)] = ()
    host_cache: ByteSize = ByteSize(_memory() // 2)  # the most that images of models and parked requests take
    host_cache_fd: int = -1  # the file that the runtimes of a node share for that; without one it is this runtime's own
    threads: int = _threads()  # compute threads of the device process, without a GPU
    journal: Path | None = None  # folder in which each runtime keeps a journal of what it decides
    profile: Path | None = None  # of this machine's costs (`staccato profile`); without one they are guessed at first
    drain_s: float = 30.0  # after SIGTERM streams may end for so long, then other runtimes go on with them
    hang_s: float = 60.0  # longer no step takes, and no device is silent that is waited for: else its process is ended
    build_hang_s: float = 900.0  # longer no build of an engine goes without having read more of the weights: likewise
    transport: Literal["tcp", "nixl"] = "tcp"  # for blocks from other hosts, and to those that say the same
    transport_bind: str = "127.0.0.1"  # address of this host on which blocks from other hosts are received
    transport_port: int = 0  # any
    transport_advertise: str = ""  # what other hosts reach that address by; empty: by itself

    @property
    def law(self) -> dict[str, float]:
        """What any model costs on this machine, as runtime/costs.Law; empty where it was not measured."""
        profile = load_profile(self.profile.read_bytes(), str(self.profile)) if self.profile else None
        return msgspec.to_builtins(profile.law) if profile and profile.law else {}

    def check(self) -> None:
        """Raises ValueError with one sentence."""
        if self.policy not in POLICIES:
            raise ValueError(f"no turn policy {self.policy!r}: choose one of {', '.join(POLICIES)}")
        if self.journal is not None and not (self.journal.is_dir() and os.access(self.journal, os.W_OK)):
            raise ValueError(f"STACCATO_JOURNAL={self.journal} is no folder to write into: make it, or name another")
        if self.profile is not None:
            try:
                load_profile(self.profile.read_bytes(), str(self.profile))
            except OSError as error:
                raise ValueError(
                    f"STACCATO_PROFILE={self.profile}: {error.strerror}: `staccato profile` writes one"
                ) from error
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
        if not self.runtime_id.replace("-", "").isalnum():
            raise ValueError(
                f"runtime id {self.runtime_id!r} has other than letters, digits and '-': it names subjects"
            )
