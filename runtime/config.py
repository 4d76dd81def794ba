"""Settings of one runtime, from the environment `staccato up` or an operator gives it."""

from __future__ import annotations

import os

from pydantic import ByteSize
from pydantic_settings import BaseSettings, SettingsConfigDict

from runtime.policy.turns import POLICIES


def _threads() -> int:
    return max(1, (os.cpu_count() or 1) // 2)


class RuntimeSettings(BaseSettings):
    """`STACCATO_RUNTIME_ID`, `STACCATO_NATS_URL`, ..."""

    model_config = SettingsConfigDict(env_prefix="STACCATO_", extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    runtime_id: str = "r1"
    policy: str = "round-robin"
    device_memory: ByteSize = ByteSize(512 << 20)  # of the device, where there is no GPU
    threads: int = _threads()  # compute threads of the device process, without a GPU
    drain_s: float = 30.0  # longest wait for streams to end after SIGTERM

    @property
    def kv_bytes(self) -> int:
        """KV cache of each engine: a fixed share, until weights and KV take pages from one pool."""
        return self.device_memory // 8

    def check(self) -> None:
        """Raises ValueError with one sentence."""
        if self.policy not in POLICIES:
            raise ValueError(f"no turn policy {self.policy!r}: choose one of {', '.join(POLICIES)}")
        if not self.runtime_id.replace("-", "").isalnum():
            raise ValueError(
                f"runtime id {self.runtime_id!r} has other than letters, digits and '-': it names subjects"
            )
