"""A model as one runtime knows it: where it is, and whose requests wait for it or run in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.request import ModelKey, Request, RequestId
from store.wire import EngineSpec, ModelState, Residency

RETRY_S_FIRST, RETRY_S_MOST = 30.0, 3600.0


@dataclass(slots=True)
class Model:
    """`waiting` requests have not reached the engine; `running` ones have."""

    spec: EngineSpec
    residency: Residency = Residency.COLD
    error: str = ""
    load_ms: float = 0.0
    waiting: dict[RequestId, Request] = field(default_factory=dict)
    running: dict[RequestId, Request] = field(default_factory=dict)
    wanted: bool = False  # somebody waits for it or an operator asked for it: load it
    withdrawn: bool = False  # unload it and forget it
    used_at: float = 0.0  # last time it had work, was loaded or failed to
    failures: int = 0  # loads that failed since the last one that did not
    turns: int = 0
    tokens: int = 0

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.spec.key)

    @property
    def has_work(self) -> bool:
        return bool(self.running) and self.residency is Residency.RESIDENT

    def idle_at(self) -> float | None:
        """When it may go to sleep for want of requests; None while it has any, or never."""
        if self.residency is not Residency.RESIDENT or self.running or self.waiting or self.spec.idle_s is None:
            return None
        return self.used_at + self.spec.idle_s

    def retry_at(self) -> float | None:
        """When a failed load is to be tried again: what was wrong may be mended, and a try costs everybody time."""
        if self.residency is not Residency.FAILED:
            return None
        return self.used_at + min(RETRY_S_MOST, RETRY_S_FIRST * (1 << min(10, self.failures - 1)))

    def state(self) -> ModelState:
        return ModelState(
            residency=self.residency,
            error=self.error,
            load_ms=round(self.load_ms, 1),
            running=len(self.running),
            waiting=len(self.waiting),
            turns=self.turns,
            tokens=self.tokens,
        )
