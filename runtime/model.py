"""A model as one runtime knows it: where it is, and whose requests wait for it or run in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.engine.base import Held
from runtime.request import ModelKey, Request, RequestId
from store.wire import EngineSpec, ModelState, Residency

RETRY_S_FIRST, RETRY_S_MOST = 30.0, 3600.0
CHECKED_FIRST, CHECKED_EVERY = 3, 16  # fetches


class Phase(Enum):
    """Where it is. Between STAGED and PARKING there is an engine, which may have requests."""

    COLD = auto()
    BUILDING = auto()
    STAGED = auto()  # still; what it has of the pool is clean weights
    FETCHING = auto()
    CHECKING = auto()  # all there, and to prove it before it serves
    RESIDENT = auto()
    PARKING = auto()
    CLOSING = auto()  # to be closed: its requests were ended
    FAILED = auto()


class Wish(Enum):
    """What is to happen to it while it has no requests."""

    NONE = auto()
    AWAKE = auto()  # become resident, once
    ASLEEP = auto()  # hold nothing


_RESIDENCY = {
    Phase.COLD: Residency.COLD,
    Phase.BUILDING: Residency.LOADING,
    Phase.STAGED: Residency.STAGED,
    Phase.FETCHING: Residency.LOADING,
    Phase.CHECKING: Residency.LOADING,
    Phase.RESIDENT: Residency.RESIDENT,
    Phase.PARKING: Residency.LEAVING,
    Phase.CLOSING: Residency.LEAVING,
    Phase.FAILED: Residency.FAILED,
}


def check_due(fetches: int) -> bool:
    """Whether it must prove itself after its `fetches`-th fetch: often while it is new, then now and then."""
    return fetches <= CHECKED_FIRST or fetches % CHECKED_EVERY == 0


@dataclass(slots=True)
class Model:
    """`waiting` requests have not reached the engine; `running` ones have, and may be parked in it."""

    spec: EngineSpec
    phase: Phase = Phase.COLD
    wish: Wish = Wish.NONE
    withdrawn: bool = False  # close it and forget it
    error: str = ""  # why it can't serve
    waiting: dict[RequestId, Request] = field(default_factory=dict)
    running: dict[RequestId, Request] = field(default_factory=dict)
    used_at: float = 0.0  # last time it had work, became resident or failed to
    weights_pages: int = 0  # all of its weights; known once it was built
    stuck: bool = False  # it can't make a token before it gets more pages
    fresh: bool = False  # it got pages for its next step and has not made it
    loading_s: float = 0.0  # of its way to RESIDENT so far
    load_ms: float = 0.0  # of the last such way
    fetches: int = 0
    fetch_ms: float = 0.0
    fetch_failures: int = 0  # in a row
    failures: int = 0  # times it became FAILED since it was last resident
    retry_at: float | None = None  # when FAILED; None: what was wrong does not mend itself
    turns: int = 0
    tokens: int = 0

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.spec.key)

    @property
    def residency(self) -> Residency:
        return Residency.FAILED if self.error else _RESIDENCY[self.phase]

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def works(self) -> bool:
        """Somebody waits for it to be resident, or for its tokens."""
        return self.has_requests or self.wish is Wish.AWAKE

    @property
    def can_step(self) -> bool:
        return self.phase is Phase.RESIDENT and not self.stuck and bool(self.running)

    @property
    def needy(self) -> bool:
        """It can't go on before it gets pages."""
        return self.stuck or (self.phase is Phase.STAGED and self.works)

    def kv_needed(self, held: Held, total: int) -> int:
        """Pages of KV cache for its next step, which together with its weights are never more than `total`."""
        return max(1, held.kv, min(held.kv_wanted, total - self.weights_pages))

    def short(self, held: Held, total: int) -> int:
        """Pages it lacks for its next step."""
        return self.weights_pages - held.weights + self.kv_needed(held, total) - held.kv

    def due_at(self) -> float | None:
        """When time alone changes it: it is tried again, or goes to sleep for want of requests; None: never."""
        if self.phase is Phase.FAILED:
            return self.retry_at
        if self.phase is not Phase.RESIDENT or self.has_requests:
            return None
        idle_s = 0.0 if self.wish is Wish.ASLEEP else self.spec.idle_s
        return None if idle_s is None else self.used_at + idle_s

    def fail(self, error: str, now: float, mends: bool) -> None:
        """It can't serve. A try costs everybody time, so the pauses between tries grow."""
        self.error, self.wish = error, Wish.NONE
        self.used_at, self.loading_s, self.fetch_failures = now, 0.0, 0
        self.failures += 1
        pause_s = min(RETRY_S_MOST, RETRY_S_FIRST * (1 << min(10, self.failures - 1)))
        self.retry_at = now + pause_s if mends else None

    def state(self, held: Held, kv_fragmentation: float = 0.0) -> ModelState:
        return ModelState(
            residency=self.residency,
            error=self.error,
            load_ms=round(self.load_ms, 3),  # a wake may take microseconds, and 0 says that it never was resident
            running=len(self.running),
            waiting=len(self.waiting),
            turns=self.turns,
            tokens=self.tokens,
            weights_pages=held.weights,
            kv_pages=held.kv,
            kv_fragmentation=round(kv_fragmentation, 3),
            fetches=self.fetches,
            fetch_ms=round(self.fetch_ms, 3),
        )
