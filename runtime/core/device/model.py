"""A model as a single runtime knows the model: phase, requests that wait or run, and pages needed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.core.device.deadlines import Deadlines
from runtime.core.device.queues import Queues
from runtime.core.device.record import LoadRecord, ModelFailures, PageDemand, Staging, TurnRecord
from runtime.core.device.request import ModelKey
from runtime.core.engine import Held, Output
from runtime.core.ledgers.estimate import CostEstimate
from runtime.core.ledgers.fair_share import FairShares
from store.contract.kv_curve import KvCurve
from store.contract.wire import EngineSpec, ModelState, Residency

WAKE_S = 10.0  # after a wish to wake, a model without requests is due to be resident within 10 s
_NEVER = float("inf")


class Phase(Enum):
    """Phase of a model on a device. From STAGED to PARKING the model has an engine, which may have requests."""

    COLD = auto()
    BUILDING = auto()
    STAGED = auto()  # nothing moves; the model's pages are clean weights
    FETCHING = auto()
    CHECKING = auto()  # the engine can step; if a check is due, the model must pass before it serves
    RESIDENT = auto()
    PARKING = auto()
    CLOSING = auto()  # the engine is to be closed; its requests have ended
    FAILED = auto()


WITH_ENGINE = (Phase.STAGED, Phase.FETCHING, Phase.CHECKING, Phase.RESIDENT, Phase.PARKING)
WITH_PAGES = (*WITH_ENGINE, Phase.CLOSING, Phase.BUILDING)
MOVING = (Phase.FETCHING, Phase.PARKING)


class Wish(Enum):
    """Change wanted of a model while the model has no requests."""

    NONE = auto()
    AWAKE = auto()  # become resident, once
    ASLEEP = auto()  # hold no pages


_STAGED, _RESIDENT = Phase.STAGED, Phase.RESIDENT  # globals, since every decision looks at every model's phase

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


@dataclass(slots=True, eq=False)
class Model:
    """A model placed on a device: facts and phase, and objects with requests, deadlines, page demand and records."""

    spec: EngineSpec
    costs: CostEstimate
    page_bytes: int
    key: ModelKey = field(init=False)
    kv: KvCurve[int] = field(init=False)  # KV cache that requests hold
    phase: Phase = Phase.COLD
    wish: Wish = Wish.NONE
    withdrawn: bool = False  # the model is to be closed and forgotten
    used_at: float = 0.0  # when the model last had work, became resident or failed to
    sequential: bool = False  # the engine runs one request at a time: in a batch the model answers otherwise
    shares: FairShares = field(default_factory=FairShares)  # tenants' shares of the device
    queues: Queues = field(default_factory=Queues)
    deadlines: Deadlines = field(default_factory=Deadlines)  # as of the last call of `next_due`
    demand: PageDemand = field(default_factory=PageDemand)
    failures: ModelFailures = field(default_factory=ModelFailures)
    loads: LoadRecord = field(default_factory=LoadRecord)
    staging: Staging = field(default_factory=Staging)
    record: TurnRecord = field(default_factory=TurnRecord)

    def __post_init__(self) -> None:
        self.key, self.kv = ModelKey(self.spec.key), self.spec.kv
        self.loads.load_s = self.costs.load(self.spec.weight_bytes)

    @property
    def residency(self) -> Residency:
        return Residency.FAILED if self.failures.error else _RESIDENCY[self.phase]

    @property
    def has_requests(self) -> bool:
        return bool(self.queues.running or self.queues.waiting)

    @property
    def works(self) -> bool:
        """Whether a request or an operator waits for the model to be resident, or for its tokens."""
        return bool(self.queues.running or self.queues.waiting) or self.wish is Wish.AWAKE

    @property
    def builds(self) -> bool:
        """Whether the model's engine is being built, or has to be built."""
        return self.phase is Phase.BUILDING or (self.phase is Phase.COLD and self.works and not self.withdrawn)

    @property
    def stages(self) -> bool:
        """Whether the model comes up to the host cache, or is to come up, and nothing waits for the model."""
        return self.staging.under_way and not self.works

    @property
    def can_step(self) -> bool:
        return self.phase is _RESIDENT and not self.demand.stuck and self.takes_turns

    @property
    def needy(self) -> bool:
        """Whether the model has work and cannot go on without more pages."""
        return self.demand.stuck or (self.phase is _STAGED and self.works and not self.retired)

    @property
    def takes_turns(self) -> bool:
        """Whether a request runs, or waits to run."""
        return bool(self.queues.running or (self.queues.waiting and not self.demand.retires))

    @property
    def retired(self) -> bool:
        """Whether the model has retired, and no request is in its engine any more."""
        return self.demand.retires and not (self.queues.running or self.queues.leaving)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_due(self, now: float) -> float:
        """When the next token of the model is due; a first token is due earlier by the duration of its prefill.

        Lost tokens do not count, but a request without a token for `STARVED_S` counts again. Returns `inf` if no token
        is due."""
        deadlines = self.deadlines
        if now > deadlines.dues.until:
            deadlines.look(self.queues, self.costs, self.shares.over, self._wake_at(), now)
        return deadlines.dues.at

    def next_due_within(self, now: float) -> float:
        """As `next_due`, without requests of tenants over their share."""
        self.next_due(now)
        return self.deadlines.within.at

    def _wake_at(self) -> float:
        return self.used_at + WAKE_S if self.wish is Wish.AWAKE else _NEVER

    def observe(self, outputs: Sequence[Output], step_s: float) -> None:
        """Correct the cost estimates by the outputs and the duration of a step."""
        queues = self.queues
        running = queues.running
        if not queues.prompts:
            self.costs.observe_step(len(running), queues.context, step_s)
        elif len(outputs) == len(running):  # the step computed every prompt completely
            cached = {output.request: output.cached_tokens for output in outputs}
            prompts = [
                (request.to_compute, cached.get(id, 0)) for id, request in running.items() if not request.computed
            ]
            context = queues.context - sum([tokens for tokens, _ in prompts])
            computed_s = step_s - sum([output.brought_s for output in outputs])
            self.costs.observe_prefill(prompts, len(running) - len(prompts), context, computed_s)

    # ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def kv_pages(self, kv_bytes: int) -> int:
        """Number of pages for `kv_bytes` bytes of KV cache."""
        return -(-kv_bytes // self.page_bytes)

    def kv_joined(self, held: Held, kv_bytes: int) -> int:
        """Approximate number of KV pages wanted once requests that hold `kv_bytes` have joined the running requests.

        Includes a page for the memory lost where requests end within a block. The engine tells the exact number once
        the engine has the requests. Requests of an encoder keep nothing, and the engine has no further page."""
        if not kv_bytes and self.spec.pools:
            return held.kv_wanted
        own = held.kv_wanted if self.queues.running else 0  # without running requests `kv_wanted` is what a check needs
        return max(held.kv_wanted, own + self.kv_pages(kv_bytes) + 1)

    def kv_wanted(self, held: Held, room_pages: float) -> int:
        """KV pages needed by running and waiting requests.

        Waiting requests of tenants over their share count only up to `room_over(room_pages)` bytes."""
        waiting = self.queues.waiting.values()
        if not waiting:
            return held.kv_wanted
        kv_bytes = self.kv.each([request.context + 1 for request in waiting])
        if over := self.shares.over:
            each = [self.kv.bytes(request.context + 1) for request in waiting if request.tenant in over]
            room = self.room_over(room_pages)
            if not self.queues.running:
                room = max([room, *each])  # at least a single request
            kv_bytes -= max(0, sum(each) - room)
            if not kv_bytes and not room:
                return held.kv_wanted
        return self.kv_joined(held, kv_bytes)

    def room_over(self, room_pages: float) -> int:
        """Bytes of KV cache by which requests of tenants over their share may join, given the pages that the turn
        policy leaves to the requests of such tenants. The bytes are those of whole tokens."""
        token_bytes = max(1, self.kv.token_bytes)
        return int(room_pages * self.page_bytes // token_bytes) * token_bytes

    def kv_needed(self, held: Held, total: int, room_pages: float) -> int:
        """Pages of KV cache for the next step: at least the pages held, and with the weights at most `total` pages."""
        return max(1, held.kv, min(self.kv_wanted(held, room_pages), total - self.demand.weights_pages))

    def short(self, held: Held, total: int, room_pages: float) -> int:
        """Pages, of weights and KV cache, that the model lacks for its next step."""
        return self.demand.weights_pages - held.weights + self.kv_needed(held, total, room_pages) - held.kv

    @property
    def busy(self) -> float:
        """Share of the device's time that the model's requests need to keep their pace once all of them run."""
        requests = [*self.queues.running.values(), *self.queues.waiting.values()]
        if not requests:
            return 0.0
        context = self.queues.context + sum([request.context for request in self.queues.waiting.values()])
        return self.costs.step(len(requests), context) / self.queues.tbt_s

    def _queue_bytes(self) -> tuple[int, int]:
        """Bytes of KV cache needed by the first waiting request, and by the waiting requests behind the first."""
        contexts = [request.context + 1 for request in self.queues.waiting.values()]
        return self.kv.each(contexts[:1]), self.kv.each(contexts[1:])

    def _least_bytes(self) -> int | None:
        """Bytes of KV cache that the smallest request has on the device or waits for; None without requests."""
        if self.queues.running and self.phase is not _RESIDENT:
            return 0  # running requests are parked
        tokens = [request.context for request in self.queues.running.values()]
        tokens += [request.context + 1 for request in self.queues.waiting.values()]
        return self.kv.bytes(min(tokens)) if tokens else None

    def due_at(self) -> float | None:
        """When time alone changes the model: a failed model is tried again, an idle model is parked. None: never."""
        if self.phase is Phase.FAILED:
            return self.failures.retry_at
        if self.phase is not Phase.RESIDENT or self.has_requests:
            return None
        idle_s = 0.0 if self.wish is Wish.ASLEEP else self.spec.idle_s
        return None if idle_s is None else self.used_at + idle_s

    @property
    def at_rest(self) -> bool:
        """Whether the model has no engine and no requests, and no engine is being built."""
        return (self.phase is Phase.COLD or self.phase is Phase.FAILED) and not self.has_requests

    @property
    def where(self) -> str:
        """The model and its phase, for errors."""
        return f"{self.key} in {self.phase.name}"

    def check(self, held: Held) -> None:
        """Assert what holds of the model alone between two events. `held` are the model's pages."""
        inside, demand, phase = self.queues.running or self.queues.leaving, self.demand, self.phase
        assert held == Held() or phase in WITH_PAGES, f"{self.where} holds {held}"
        assert not inside or phase in WITH_ENGINE, f"{self.where} has requests in an engine it lacks"
        assert not (demand.stuck or demand.fresh) or phase is Phase.RESIDENT, f"{self.where} is stuck or fresh"
        assert not (demand.stuck and not self.has_requests), f"{self.where} is stuck without requests"
        assert not demand.lacks_room or phase is Phase.COLD, f"{self.where} has an image and waits for room"
        assert self.wish is not Wish.AWAKE or phase is not Phase.RESIDENT, f"{self.where} is to become it again"
        assert self.wish is not Wish.ASLEEP or not self.has_requests, f"{self.where} is to sleep amid its requests"
        self.queues.check(self.key)

    def fail(self, error: str, now: float, mends: bool) -> None:
        """Note that the model cannot serve because of `error`; see `ModelFailures.note` for the next try."""
        self.wish, self.used_at, self.loads.loading_s = Wish.NONE, now, 0.0
        self.failures.note(error, now, mends)

    def state(self, held: Held, kv_fragmentation: float = 0.0) -> ModelState:
        head_bytes, queued_bytes = self._queue_bytes()
        return ModelState(
            residency=self.residency,
            error=self.failures.error,
            sequential=self.sequential,
            load_ms=round(self.loads.load_ms, 3),
            ever_resident=self.loads.ever_resident,
            loaded_before=self.loads.noted,
            running=len(self.queues.running),
            waiting=len(self.queues.waiting),
            high=self.queues.high,
            turns=self.record.turns,
            tokens=self.record.tokens,
            weights_pages=held.weights,
            kv_pages=held.kv,
            spare_pages=held.kv_spare,
            wanted_pages=held.kv_wanted if self.queues.running else 0,
            kv_fragmentation=round(kv_fragmentation, 3),
            fetches=self.loads.fetches,
            fetch_ms=round(self.loads.fetch_ms, 3),
            step_ms=round(self.costs.step(1, 1) * 1e3, 3) if self.record.tokens else 0.0,
            busy=round(self.busy, 4),
            tbt_s=self.queues.tbt_s,
            head_bytes=head_bytes,
            queued_bytes=queued_bytes,
            least_bytes=self._least_bytes(),
            warm=self.staging.warm,
            staged=self.staging.staged,
            staged_unused=self.staging.unused,
            prefill_ms=round(self.costs.prefill(self.spec.max_model_len) * 1e3, 3) if self.record.tokens else 0.0,
        )
