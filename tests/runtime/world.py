"""A world for the Instance machine: engines that only count pages, and transfers that end when a test says so.

Time passes while an engine steps, in fractions of a power of two, so that sums of times are exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from unittest.mock import ANY

from msgspec.structs import replace

from runtime.core.device.events import (
    Abort,
    Add,
    Arrived,
    Build,
    BuildFailed,
    Built,
    Cancelled,
    Check,
    Checked,
    Close,
    Closed,
    DeviceEffect,
    Effect,
    EngineFailed,
    Event,
    Evict,
    Fetch,
    Fetched,
    FetchFailed,
    Grow,
    ImageOver,
    Lose,
    MoveStep,
    Park,
    Parked,
    Refused,
    Shrink,
    StageImage,
    Step,
    StepFailed,
    Stepped,
    Tell,
    Told,
    Unfinished,
)
from runtime.core.device.instance import Instance
from runtime.core.device.model import Phase
from runtime.core.device.pages import Pages
from runtime.core.device.request import ModelKey, Objective, Request, RequestId, request_id
from runtime.core.engine import Held, Output
from runtime.core.ledgers.costs import model_size, unknown
from runtime.core.ledgers.device_time import DeviceTime
from runtime.core.turns.turn import RoundRobin, Turns
from store.contract.wire import EngineSpec, Finish

MIB = 1 << 20
PAGE_BYTES = 2 * MIB
USUAL = Objective()
DECISIONS_MOST = 50  # until the device gets an effect to carry out, or none is left


def spec(key: str, idle_s: float | None = None, kv_bytes_per_token: int = 0) -> EngineSpec:
    return EngineSpec(
        key=key,
        path="",
        digest="",
        architecture="",
        dtype="float32",
        max_model_len=64,
        weight_bytes=0,
        kv_bytes_per_token=kv_bytes_per_token,
        idle_s=idle_s,
    )


def request(
    stream: int,
    model: str,
    now: float = 0.0,
    prompt_tokens: int = 0,
    objective: Objective = USUAL,
    made: int = 0,
    handed: bool = False,
    tenant: str = "",
    weight: float = 1.0,
) -> Request:
    """A request of the gateway "g". By default the prompt has no tokens, which keeps sums over pages short."""
    id, tokens = request_id("g", stream), [0] * made
    return Request(
        *(id, "g", stream, ModelKey(model), b"", now, prompt_tokens),
        objective=objective,
        label=model,
        tenant=tenant,
        weight=weight,
        made=tokens,
        handed=handed,
    )


def prepared(model: ModelKey, tokens: int) -> MoveStep:
    """The event of a request of `tokens` tokens that may come from another device."""
    return MoveStep("prepare", model, RequestId(""), tokens)


def step(model: ModelKey) -> Step:
    """A `Step` effect equal to any step of the model, with any number of further steps."""
    return Step(model, ANY)


@dataclass
class Growing:
    """A request in an engine. The request needs a page for every `tokens_a_page` tokens, the next token included."""

    tokens: int
    tokens_most: int
    tokens_a_page: int
    made: int = 0  # tokens made in this engine; more than 0 as well if the KV cache came with the request

    @property
    def pages(self) -> int:
        return 1 + self.tokens // self.tokens_a_page


@dataclass
class Engine:
    """Pages of the pool that an engine holds, and the requests in the engine."""

    weights_pages: int
    kv_pages_least: int
    weights: int = 0
    kv: int = 0
    arrived: bool = False
    requests: dict[RequestId, Growing] = field(default_factory=dict)
    left: dict[RequestId, Growing] = field(default_factory=dict)  # out of the batch, to go on elsewhere

    def held(self) -> Held:
        wanted = sum(growing.pages for growing in (*self.requests.values(), *self.left.values()))
        return Held(self.weights, self.kv, wanted, max(0, self.kv - wanted))

    def fitting(self) -> list[RequestId]:
        """Requests that have pages for the next token, in order of arrival, up to the first request without."""
        wanted = accumulate(growing.pages for growing in self.requests.values())
        room = self.kv - sum(growing.pages for growing in self.left.values())
        return [id for id, pages in zip(self.requests, wanted, strict=True) if pages <= room]

    def step(self, finishes: Callable[[RequestId], bool]) -> list[Output]:
        """Make a token for each fitting request."""
        outputs = []
        for id in self.fitting():
            growing = self.requests[id]
            growing.tokens, growing.made = growing.tokens + 1, growing.made + 1
            finish = Finish.STOP if growing.tokens >= growing.tokens_most or finishes(id) else None
            outputs.append(Output(id, [growing.tokens], finish))
            if finish is not None:
                del self.requests[id]
        return outputs


class World:
    """An Instance over a pool of `total` pages.

    `sizes` has the pages of weights by model key. A request ends at the latest with the `tokens_most`-th token. A step
    takes `step_s` seconds, and up to `segment` steps are answered at once.
    """

    def __init__(
        self,
        total: int,
        sizes: dict[str, int],
        quota: int = 2,
        tokens_most: int = 6,
        tokens_a_page: int = 2,
        turns: Turns | None = None,
        prompt_most: int = 0,
        step_s: float = 1 / 64,
        by_history: bool = False,
    ) -> None:
        pages = Pages(total, PAGE_BYTES)
        self.account = DeviceTime.open(0.0)
        turns = turns or RoundRobin(quota)
        self.instance = Instance(turns, pages, lambda spec: unknown(model_size(spec)), self.account, by_history)
        self.now, self.step_s = 0.0, step_s
        self.segment = 1
        self.runs_ahead: Callable[[], bool] = lambda: False  # whether an engine begins a further step if allowed
        self.ahead: ModelKey | None = None  # the model of a step whose outputs nobody has read
        self.out: DeviceEffect | None = None
        self.engines: dict[ModelKey, Engine] = {}
        self.fetching: ModelKey | None = None
        self.parking: list[ModelKey] = []
        self.unfinished = 0  # so many answers to builds and checks say that the effect is not over
        self.images_wait = False  # an unfinished build waits for its image
        self.imaging: list[ModelKey] = []  # models whose builds wait
        self.log: list[Effect] = []  # every effect, in order
        self.host_pages: int | None = None  # room of the host cache, in pages; None: for every image
        self.kept: tuple[ModelKey, ...] = ()  # models whose images must stay in the host cache
        self.asked: list[RequestId] = []
        self.open: set[RequestId] = set()
        self.refuses: set[RequestId] = set()  # requests that the engine will refuse
        self.grants: Callable[[int], int] = lambda pages: pages  # pages granted of the pages that Grow asks for
        self.attained: dict[str, Counter[str]] = {}  # by label, the fate of taken requests
        self.sizes = sizes
        self.prompt_most, self.tokens_most, self.tokens_a_page = prompt_most, tokens_most, tokens_a_page
        self._made_at: dict[RequestId, list[float]] = {}  # times of tokens, by open taken request
        self._requests: dict[RequestId, Request] = {}
        self.taken: list[Request] = []  # every request ever taken
        self.leaving: list[RequestId] = []
        self._alone = False  # no event was heard since the outstanding step was asked for

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, *events: Event) -> list[Effect]:
        """Let the Instance hear events and, if the device is free, decide. Returns the effects asked for, including
        effects on requests."""
        start = len(self.log)
        for event in events:
            self._hear(event)
        for _ in range(DECISIONS_MOST):
            effects = [] if self.out is not None else self.instance.decide(self.now)
            self._carry_out(effects)
            if not effects:
                break
        else:
            raise AssertionError(f"it decides again and again: {self.log[-10:]}")
        self.check()
        return self.log[start:]

    def _hear(self, event: Event) -> None:
        self._alone = False
        effects = self.instance.hear(event, self.now)
        match event:
            case Arrived(request) if not effects:
                self._requests[request.id], self._made_at[request.id] = request, []
                self.taken.append(request)
            case Cancelled(requests):
                for id in requests:
                    if id in self._made_at:
                        asked = self._requests[id]
                        late = self.now > asked.progress.due_at
                        self._attain(id, owed=int(late and not asked.progress.sent))
        self._carry_out(effects)

    def answer(self, fails: bool = False, finishes: Callable[[RequestId], bool] = lambda id: False) -> list[Effect]:
        """End the outstanding device effect. Returns the effects asked for."""
        out, self.out = self.out, None
        assert out is not None
        return self.hear(self._answer(out, fails, finishes))

    def arrive(self, fails: bool = False) -> list[Effect]:
        """End the fetch under way."""
        key, self.fetching = self.fetching, None
        assert key is not None
        engine = self.engines[key]
        if fails:
            engine.kv = 0
            return self.hear(FetchFailed(key, "the copy failed", engine.held()))
        engine.arrived = True
        return self.hear(Fetched(key, 0.5, engine.held()))

    def leave(self, key: ModelKey) -> list[Effect]:
        """End the park of the model."""
        self.parking.remove(key)
        engine = self.engines[key]
        engine.kv = 0
        return self.hear(Parked(key, engine.held()))

    def break_engine(self, key: ModelKey) -> list[Effect]:
        if self.fetching == key:
            self.fetching = None
        if key in self.parking:
            self.parking.remove(key)
        self.engines[key].requests.clear()
        self.engines[key].left.clear()
        return self.hear(EngineFailed(key, "boom"))

    def begin_to_leave(self, id: RequestId) -> list[Effect]:
        model = self.instance.requests.owner(id)
        assert model is not None
        engine = self.engines[model.key]
        engine.left[id] = engine.requests.pop(id)
        self.leaving.append(id)
        return self.hear(MoveStep("commit", model.key, id))

    def stay(self, id: RequestId) -> list[Effect]:
        model = self.instance.requests.owner(id)
        assert model is not None
        engine = self.engines[model.key]
        engine.requests[id] = engine.left.pop(id)
        self.leaving.remove(id)
        return self.hear(MoveStep("abort", model.key, id))

    def depart(self, id: RequestId) -> list[Effect]:
        """Let the request go on at a second runtime: in this world, only tokens made here count."""
        self.leaving.remove(id)
        model = self._requests[id].model
        self._attain(id, owed=0, ended=False)
        self._end(id)
        return self.hear(MoveStep("release", model, id))

    def settle(self, most: int = 100) -> None:
        """End fetches, parks and device effects until none is under way; fail after `most` ends."""
        for _ in range(most):
            if self.fetching is not None:
                self.arrive()
            elif self.parking:
                self.leave(self.parking[0])
            elif self.imaging:
                self.image_over(self.imaging[0])
            elif self.out is not None:
                self.answer()
            elif any(model.demand.lacks_room for model in self.instance.models.values()):
                tick_at = self.instance.next_tick()
                assert tick_at is not None, "a model waits for room, and nothing would wake the device"
                self.now = max(self.now, tick_at)
                self.hear()
            else:
                return
        raise AssertionError(f"after {most} answers {self.out} is out and {self.open} are open")

    # ── carrying out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.log.append(effect)
            if self.ahead is not None and not isinstance(effect, Tell | Lose | Abort | Grow):
                is_next = isinstance(effect, Step) and effect.model == self.ahead
                closing = self.instance.models[self.ahead].phase is Phase.CLOSING
                assert is_next or closing, f"{effect} while a step of {self.ahead} is under way"
            match effect:
                case Build() | StageImage() | Step() | Check() | Close():
                    assert self.out is None, "two device effects at once"
                    self.out, self._alone = effect, True
                case Tell(request, at, output):
                    self._told(request, at, output)
                case Lose(request, error, _):
                    assert error
                    if request.id in self._made_at:
                        self._attain(request.id, owed=1)
                    self._end(request.id)
                case Add(request):
                    self._add(request)
                case Abort(key, requests):
                    engine = self.engines[key]
                    for id in requests:
                        engine.requests.pop(id, None)
                        engine.left.pop(id, None)
                    if key == self.ahead and not engine.requests:
                        self.ahead = None
                    self._tell(key)
                case Fetch(key, kv_pages):
                    self._fetch(key, kv_pages)
                case Park(key):
                    assert self.engines[key].arrived, f"{key} is parked and not in"
                    self.engines[key].arrived = False
                    self.parking.append(key)
                case Evict(key, pages):
                    engine = self.engines[key]
                    assert 0 < pages <= engine.weights and not engine.arrived, "pages of weights in use are given back"
                    engine.weights -= pages
                case Shrink(key, pages):
                    assert 0 < pages <= self.engines[key].held().kv_spare, "pages that are in use are given back"
                    self.engines[key].kv -= pages
                case Grow(key, pages):
                    assert 0 < pages <= self.free and self.engines[key].arrived
                    self.engines[key].kv += self.grants(pages)
                    self._tell(key)

    def _tell(self, key: ModelKey) -> None:
        """Let the engine tell its pages. Pages in transfer count as none: an engine may count such pages or not."""
        held = self.engines[key].held()
        if key == self.fetching or key in self.parking:
            held = Held(0, 0, held.kv_wanted, 0)
        self._hear(Told(key, held))

    def _add(self, request: Request) -> None:
        engine = self.engines[request.model]
        if request.id in self.refuses:
            self._hear(Refused(request.id, request.model, "too long"))
            return
        prompt, before = request.prompt_tokens, len(request.made)
        growing = Growing(prompt + before, prompt + self.tokens_most, self.tokens_a_page, made=int(request.handed))
        engine.requests[request.id] = growing
        self._tell(request.model)

    def _fetch(self, key: ModelKey, kv_pages: int) -> None:
        engine = self.engines[key]
        assert self.fetching is None, "two fetches at once"
        assert not engine.arrived and key not in self.parking, f"{key} is fetched and not out"
        assert kv_pages >= 1 and engine.weights_pages - engine.weights + kv_pages <= self.free, "no room for the fetch"
        engine.weights, engine.kv, self.fetching = engine.weights_pages, kv_pages, key

    def image_over(self, key: ModelKey, fails: bool = False) -> None:
        """End the making of an image that a build waits for."""
        self.imaging.remove(key)
        self.hear(BuildFailed(key, "no such file") if fails else ImageOver(key))

    def _answer(self, out: DeviceEffect, fails: bool, finishes: Callable[[RequestId], bool]) -> Event:
        if self.unfinished and isinstance(out, Build | StageImage | Check):
            self.unfinished -= 1
            key = out.model if isinstance(out, Check) else ModelKey(out.spec.key)
            if waits := not isinstance(out, Check) and self.images_wait:
                self.imaging.append(key)
            return Unfinished(key, waits)
        match out:
            case Build(spec) | StageImage(spec):
                key = ModelKey(spec.key)
                if fails:
                    return BuildFailed(key, "no such file")
                assert key not in self.engines, "built twice"
                weights = self.sizes[spec.key]
                if self.host_pages is not None:
                    lacks = weights + sum(engine.weights_pages for engine in self.engines.values()) - self.host_pages
                    if lacks > 0:
                        return BuildFailed(key, "no room", lacks * PAGE_BYTES, self.kept)
                least = 1 + (self.prompt_most + self.tokens_most) // self.tokens_a_page
                self.engines[key] = Engine(weights, least)
                return Built(key, 2.0, weights, least)
            case Check(key):
                engine = self.engines[key]
                return Checked(key, "it says other words" if fails else None, engine.held())
            case Close(key):
                self.ahead = None if key == self.ahead else self.ahead
                engine = self.engines.pop(key)
                assert not engine.requests and not engine.left, "closed with requests in it"
                assert key != self.fetching and key not in self.parking, "closed while pages are on their way"
                return Closed(key)
            case Step(key, steps):
                engine, self.ahead = self.engines[key], None
                if fails:
                    engine.requests.clear()
                    engine.left.clear()
                    return StepFailed(key, "boom")
                assert engine.arrived and engine.weights == engine.weights_pages, f"{key} steps and is not in"
                return self._step(key, engine, steps, finishes)

    def _step(self, key: ModelKey, engine: Engine, most: int, finishes: Callable[[RequestId], bool]) -> Stepped:
        """Make one step, or further steps of the batch as long as the machine has no reason to decide anew."""
        segment = min(most, self.segment) if self._alone else 1
        tick_at, booked = self.instance.next_tick() or float("inf"), self.instance.pages.of(key)
        prompts = any(not growing.made for growing in engine.requests.values())
        outputs, steps = engine.step(finishes), 1
        while steps < segment and outputs and not prompts and engine.held() == booked:
            if any(output.finish for output in outputs) or self.now + steps * self.step_s >= tick_at:
                break
            if len(engine.fitting()) != len(outputs):  # a request has no page for the next token
                break
            more, steps = engine.step(finishes), steps + 1
            pairs = zip(outputs, more, strict=True)
            outputs = [replace(new, tokens=old.tokens + new.tokens) for old, new in pairs]
        self.now += steps * self.step_s
        if engine.requests and most > steps and self.runs_ahead():
            self.ahead = key
        ahead = self.ahead is not None
        return Stepped(key, outputs, bool(engine.requests), engine.held(), self.step_s, steps, ahead)

    def _told(self, request: Request, at: int, output: Output) -> None:
        made_at, count = self._made_at[request.id], len(output.tokens)
        before = len(request.made)
        assert at == before + len(made_at), f"token {before + len(made_at)} of {request.id} is told as token {at}"
        made_at += [self.now - (count - 1 - place) * self.step_s for place in range(count)]
        progress = request.progress
        assert (progress.sent, progress.last_at) == (before + len(made_at), made_at[-1]), f"{request} lost count"
        if output.finish is not None:
            self._attain(request.id, owed=0)
            self._end(request.id)

    def _attain(self, id: RequestId, owed: int, ended: bool = True) -> None:
        """Count the request, which ended with `owed` tokens that will never come, or (`ended` False) moved away."""
        request, made_at = self._requests.pop(id), self._made_at.pop(id)
        objective = request.objective
        places = range(len(request.made), len(request.made) + len(made_at))
        due = [request.arrived_at + objective.ttft_s + place * objective.tbt_s for place in places]
        if made_at or owed or request.made:
            on_time = sum(at <= due_at for at, due_at in zip(made_at, due, strict=True))
            total = self.attained.setdefault(request.label, Counter())
            total.update(requests=int(ended), tokens=len(made_at) + owed, on_time=on_time)

    def _end(self, id: RequestId) -> None:
        assert id in self.open, f"{id} ended twice"
        self.open.remove(id)

    # ── what holds at any time ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def free(self) -> int:
        lent = sum(self._lent(key) for key in self.instance.models)
        return self.instance.pages.total - lent - sum(engine.weights + engine.kv for engine in self.engines.values())

    def _lent(self, key: ModelKey) -> int:
        """Pages that a build of the model takes now."""
        model = self.instance.models[key]
        return model.demand.build_pages if model.phase is Phase.BUILDING else 0

    def check_account(self) -> None:
        """Check that requests paid as much as the requests' labels, and that no label pays without a request."""
        paid: Counter[str] = Counter()
        for request in self.taken:
            paid[request.label] += request.spent.gpu_us + request.spent.switch_us
        totals = self.account.totals.items()
        assert {label: total.gpu_us + total.switch_us for label, total in totals} == {
            label: us for label, us in paid.items() if us or label in self.account.totals
        }

    def check(self) -> None:
        self.instance.check()
        for key in self.instance.models:
            booked = self.instance.pages.of(key)
            engine = self.engines.get(key) or Engine(0, 0, self._lent(key))
            assert (booked.weights, booked.kv) == (engine.weights, engine.kv), f"the books are wrong about {key}"
        assert set(self.engines) <= set(self.instance.models), "an engine of a model that is not there"
        assert self.free >= 0
        models = self.instance.models.values()
        assert {
            id for model in models for id in (*model.queues.waiting, *model.queues.running, *model.queues.leaving)
        } == self.open
        self.leaving = [id for id in self.leaving if id in self.open]  # the rest was lost with the engine
        assert {id for model in models for id in model.queues.leaving} == set(self.leaving)
        counted = self.instance.requests.attainment.totals
        assert self.attained == {
            label: Counter(requests=total.requests, tokens=total.tokens, on_time=total.on_time)
            for label, total in counted.items()
        }
        self.check_account()
        lacking = any(model.demand.lacks_room for model in models)
        if self.out is None and self.fetching is None and not (self.parking or self.imaging or lacking):
            assert self.open == set(self.leaving), (
                f"requests are open, and nothing is under way for them: {self.instance.models}"
            )
