"""A model as one runtime knows it: where it is, and whose requests wait for it or run in it. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.engine.base import Held
from runtime.estimate import Estimate
from runtime.policy.idle import IdleThreshold
from runtime.request import ModelKey, Request, RequestId
from runtime.shares import Shares
from store.wire import EngineSpec, ModelState, Residency

RETRY_S_FIRST, RETRY_S_MOST = 30.0, 3600.0
WAKE_S = 10.0  # a model that nobody asks for is to be awake so long after it was wished
LATER_PATIENCE = 0.2  # of its patience a request has for later tokens: who has fallen behind has to catch up first
STARVED_S = 60.0  # a request whose tokens are lost makes others wait again after so long without one
_NEVER = float("inf")
_NOBODY: frozenset[str] = frozenset()
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


WITH_ENGINE = (Phase.STAGED, Phase.FETCHING, Phase.CHECKING, Phase.RESIDENT, Phase.PARKING)
MOVING = (Phase.FETCHING, Phase.PARKING)


class Wish(Enum):
    """What is to happen to it while it has no requests."""

    NONE = auto()
    AWAKE = auto()  # become resident, once
    ASLEEP = auto()  # hold nothing


_STAGED, _RESIDENT = Phase.STAGED, Phase.RESIDENT  # looked up for every model and decision

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


@dataclass(slots=True, eq=False)
class Dues:
    """When a model's next token is due, and what is at stake for it."""

    until: float = -_NEVER  # this holds up to then
    at: float = _NEVER
    running_at: float = _NEVER  # the same of those that run alone
    hopeful: int = 0  # requests that are not lost
    stake_s: float = 0.0  # their patience, all in all
    pace_s: float = _NEVER  # the shortest TBT of theirs
    starves_at: float = _NEVER  # when one that is lost has had no token for STARVED_S

    def add(self, request: Request, due_at: float, lost_at: float, now: float) -> None:
        if lost_at < now:
            due_at = request.progress.last_at + STARVED_S
            self.starves_at = min(self.starves_at, due_at)
        else:
            self.until = min(self.until, lost_at)
            self.hopeful += 1
            self.stake_s += request.objective.patience_s
            self.pace_s = min(self.pace_s, request.objective.tbt_s)
        self.at = min(self.at, due_at)


@dataclass(slots=True, eq=False)
class Model:
    """`waiting` requests have not reached the engine; `running` ones have, and may be parked in it."""

    spec: EngineSpec
    costs: Estimate
    page_bytes: int
    key: ModelKey = field(init=False)
    phase: Phase = Phase.COLD
    wish: Wish = Wish.NONE
    withdrawn: bool = False  # close it and forget it
    error: str = ""  # why it can't serve
    waiting: dict[RequestId, Request] = field(default_factory=dict)
    running: dict[RequestId, Request] = field(default_factory=dict)
    leaving: dict[RequestId, Request] = field(default_factory=dict)  # still in the engine, and in none of its steps
    context: int = 0  # tokens of all that run, made and given
    prompts: int = 0  # of those that run, those that have made no token here yet
    used_at: float = 0.0  # last time it had work, became resident or failed to
    weights_pages: int = 0  # all of its weights; known once it was built
    stuck: bool = False  # it can't make a token before it gets more pages
    cramped: bool = False  # it makes tokens, and lacks pages for some of those that it has or that wait for it
    fresh: bool = False  # it got pages for its next step and has not made it
    loading_s: float = 0.0  # of its way to RESIDENT so far
    load_ms: float = 0.0  # of the last such way
    came_at: float = -_NEVER  # became resident, and was not stepped since
    left_at: float | None = None  # told to leave the device, and is not back yet
    away_us: int = 0  # from such a moment until it was back, all in all
    ttft_s: float = 10.0  # objective of the last request
    idle: IdleThreshold = field(default_factory=IdleThreshold)
    least_pages: int = 0  # with fewer it can't serve its longest request
    missing_bytes: int = 0  # of the weights, at the last fetch
    fetches: int = 0
    fetch_ms: float = 0.0
    fetch_failures: int = 0  # in a row
    failures: int = 0  # times it became FAILED since it was last resident
    retry_at: float | None = None  # when FAILED; None: what was wrong does not mend itself
    turn_no: int = 0  # of its last turn, among all of the device
    turns: int = 0
    tokens: int = 0
    load_s: float = 0.0  # about what it takes to bring it in, if nothing of it is there
    urgency: float = 0.0  # what the policy sorted by
    share: float = 0.0  # of the device's time, that the policy thinks it needs
    shares: Shares = field(default_factory=Shares)  # of the device that it is on
    pool_pages: int = 0  # of that device
    dues: Dues = field(default_factory=Dues)  # as they were when `next_due` was asked last
    _dues_within: Dues = field(default_factory=Dues)  # of tenants that are not over their share

    def __post_init__(self) -> None:
        self.key = ModelKey(self.spec.key)
        self.load_s = self.costs.load(self.spec.weight_bytes)

    @property
    def residency(self) -> Residency:
        return Residency.FAILED if self.error else _RESIDENCY[self.phase]

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def works(self) -> bool:
        """Somebody waits for it to be resident, or for its tokens."""
        return bool(self.running or self.waiting) or self.wish is Wish.AWAKE

    @property
    def can_step(self) -> bool:
        return self.phase is _RESIDENT and not self.stuck and bool(self.running or self.waiting)

    @property
    def needy(self) -> bool:
        """It can't go on before it gets pages."""
        return self.stuck or (self.phase is _STAGED and self.works)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_due(self, now: float) -> float:
        """When its next token is due, or has to be begun if it is a first one; `inf` if it makes nobody late.

        Tokens that are lost don't count, but a request that waits for `STARVED_S` counts again."""
        if now > self.dues.until:
            self._look_at_dues(now)
        return self.dues.at

    def next_due_within(self, now: float) -> float:
        """The same, of tenants that are not over their share."""
        if now > self.dues.until:
            self._look_at_dues(now)
        return self._dues_within.at

    def _look_at_dues(self, now: float) -> None:
        over = self.shares.over
        self.dues = self._look(now, _NOBODY)
        self._dues_within = self._look(now, over) if over else self.dues

    def _look(self, now: float, but: Set[str]) -> Dues:
        """Of all tenants but these."""
        dues = Dues(_NEVER)
        for request in self.running.values():
            if request.tenant not in but:
                due = request.progress.due_at
                dues.add(request, due, due + LATER_PATIENCE * request.objective.patience_s, now)
        dues.running_at = dues.at
        for request in self.waiting.values():
            if request.tenant not in but:
                due = request.progress.due_at - self.costs.prefill(request.to_compute)
                dues.add(request, due, due + request.objective.patience_s, now)
        if self.wish is Wish.AWAKE:
            dues.at = min(dues.at, self.used_at + WAKE_S)
        return dues

    def dues_changed(self) -> None:
        self.dues.until = -_NEVER

    # ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def kv_pages(self, tokens: int) -> int:
        """About so many hold the KV cache of so many tokens; the engine says exactly, once it has the requests."""
        return -(-tokens * self.spec.kv_bytes_per_token // self.page_bytes)

    def kv_joined(self, held: Held, tokens: int) -> int:
        """About so many pages it wants when requests of so many tokens join those that it has; one of them for what is
        lost where requests end within a block."""
        if not tokens:
            return held.kv_wanted
        own = held.kv_wanted if self.running else 0  # else that is what a check wants
        return max(held.kv_wanted, own + self.kv_pages(tokens) + 1)

    def kv_wanted(self, held: Held) -> int:
        """For all that it has and all that wait; of those over their share no more than have room."""
        tokens = sum([request.context + 1 for request in self.waiting.values()])
        if over := self.shares.over:
            each = [request.context + 1 for request in self.waiting.values() if request.tenant in over]
            room = self.room_over() if self.running else max([self.room_over(), *each])  # one of them in any case
            tokens -= max(0, sum(each) - room)
        return self.kv_joined(held, tokens)

    def room_over(self) -> int:
        """Tokens of those over their share that may join."""
        return int(self.shares.room_pages * self.page_bytes // max(1, self.spec.kv_bytes_per_token))

    def kv_needed(self, held: Held, total: int) -> int:
        """Pages of KV cache for its next step, which together with its weights are never more than `total`."""
        return max(1, held.kv, min(self.kv_wanted(held), total - self.weights_pages))

    def short(self, held: Held, total: int) -> int:
        """Pages it lacks for its next step."""
        return self.weights_pages - held.weights + self.kv_needed(held, total) - held.kv

    @property
    def busy(self) -> float:
        """Share of the device's time that its requests need to keep their pace, once all of them run."""
        requests = [*self.running.values(), *self.waiting.values()]
        if not requests:
            return 0.0
        context = self.context + sum([request.context for request in self.waiting.values()])
        return self.costs.step(len(requests), context) / self.tbt_s

    @property
    def tbt_s(self) -> float:
        """The shortest objective of its requests; 0 without any."""
        requests = [*self.running.values(), *self.waiting.values()]
        return min([request.objective.tbt_s for request in requests], default=0.0)

    def _queue_bytes(self) -> tuple[int, int]:
        """Of KV cache, that the first waiting request and all the others will need."""
        contexts = [request.context + 1 for request in self.waiting.values()]
        each = self.spec.kv_bytes_per_token
        return sum(contexts[:1]) * each, sum(contexts[1:]) * each

    def _least_bytes(self) -> int | None:
        """Of KV cache, that its smallest request has on the device or waits for."""
        here = self.phase is _RESIDENT  # else those that run are parked
        tokens = [request.context * here for request in self.running.values()]
        tokens += [request.context + 1 for request in self.waiting.values()]
        return min(tokens) * self.spec.kv_bytes_per_token if tokens else None

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
        head_bytes, queued_bytes = self._queue_bytes()
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
            step_ms=round(self.costs.step(1, 1) * 1e3, 3) if self.tokens else 0.0,
            busy=round(self.busy, 4),
            tbt_s=self.tbt_s,
            head_bytes=head_bytes,
            queued_bytes=queued_bytes,
            least_bytes=self._least_bytes(),
            prefill_ms=round(self.costs.prefill(self.spec.max_model_len) * 1e3, 3) if self.tokens else 0.0,
        )
