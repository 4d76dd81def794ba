"""A world for the Instance machine: engines that only count pages, and transfers that end when somebody says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.engine.base import Held, Output
from runtime.events import (
    Abort,
    Add,
    Build,
    BuildFailed,
    Built,
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
    Lose,
    Park,
    Parked,
    Refused,
    Shrink,
    Step,
    StepFailed,
    Stepped,
    Tell,
    Told,
)
from runtime.instance import Instance
from runtime.pages import Pages
from runtime.policy.turns import RoundRobin
from runtime.request import ModelKey, Request, RequestId, request_id
from store.wire import EngineSpec, Finish

MIB = 1 << 20


def spec(key: str, idle_s: float | None = None) -> EngineSpec:
    return EngineSpec(
        key=key,
        path="",
        digest="",
        architecture="",
        dtype="float32",
        max_model_len=64,
        weight_bytes=0,
        kv_bytes_per_token=0,
        idle_s=idle_s,
    )


def request(stream: int, model: str, payload: bytes = b"") -> Request:
    return Request(request_id("g", stream), "g", stream, ModelKey(model), payload, 0.0)


@dataclass
class Growing:
    """A request in an engine: it needs a page for every `tokens_a_page` tokens it has, the next one included."""

    tokens: int
    tokens_most: int
    tokens_a_page: int

    @property
    def pages(self) -> int:
        return 1 + self.tokens // self.tokens_a_page


@dataclass
class Engine:
    """What an engine has of the pool, and for whom."""

    weights_pages: int
    kv_pages_least: int
    weights: int = 0
    kv: int = 0
    arrived: bool = False
    requests: dict[RequestId, Growing] = field(default_factory=dict)

    def held(self) -> Held:
        wanted = sum(growing.pages for growing in self.requests.values())
        return Held(self.weights, self.kv, wanted, max(0, self.kv - wanted))

    def step(self, finishes: Callable[[RequestId], bool]) -> list[Output]:
        """A token for each that fits, in the order in which they came, until the first that does not."""
        outputs, left = [], self.kv
        for id, growing in list(self.requests.items()):
            left -= growing.pages
            if left < 0:
                break
            growing.tokens += 1
            finish = Finish.STOP if growing.tokens >= growing.tokens_most or finishes(id) else None
            outputs.append(Output(id, [growing.tokens], finish))
            if finish is not None:
                del self.requests[id]
        return outputs


class World:
    """An Instance over a pool of `total` pages. Models are of `sizes` pages of weights, by key."""

    def __init__(
        self, total: int, sizes: dict[str, int], quota: int = 2, tokens_most: int = 6, tokens_a_page: int = 2
    ) -> None:
        self.instance = Instance(RoundRobin(quota), Pages(total, 2 * MIB))
        self.now = 0.0
        self.out: DeviceEffect | None = None
        self.engines: dict[ModelKey, Engine] = {}
        self.fetching: ModelKey | None = None
        self.parking: list[ModelKey] = []
        self.log: list[Effect] = []  # all effects, in order
        self.asked: list[RequestId] = []
        self.open: set[RequestId] = set()
        self.refuses: set[RequestId] = set()  # the engine will not take these
        self.grants: Callable[[int], int] = lambda pages: pages  # of what Grow asks
        self.sizes = sizes
        self._tokens_most, self._tokens_a_page = tokens_most, tokens_a_page

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, *events: Event) -> list[Effect]:
        """And decide, if the device is free. What was asked for, requests' effects included."""
        start = len(self.log)
        for event in events:
            self._carry_out(self.instance.hear(event, self.now))
        if self.out is None:
            self._carry_out(self.instance.decide(self.now))
        self.check()
        return self.log[start:]

    def answer(self, fails: bool = False, finishes: Callable[[RequestId], bool] = lambda id: False) -> list[Effect]:
        """The device effect that is out comes to its end."""
        out, self.out = self.out, None
        assert out is not None
        return self.hear(self._answer(out, fails, finishes))

    def arrive(self, fails: bool = False) -> list[Effect]:
        """The fetch that is under way comes to its end."""
        key, self.fetching = self.fetching, None
        assert key is not None
        engine = self.engines[key]
        if fails:
            engine.kv = 0
            return self.hear(FetchFailed(key, "the copy failed", engine.held()))
        engine.arrived = True
        return self.hear(Fetched(key, 0.5, engine.held()))

    def leave(self, key: ModelKey) -> list[Effect]:
        """The park of this model comes to its end."""
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
        return self.hear(EngineFailed(key, "boom"))

    def settle(self, most: int = 100) -> None:
        """Everything that is under way comes to its end, again and again, until nothing is; at most so many times."""
        for _ in range(most):
            if self.fetching is not None:
                self.arrive()
            elif self.parking:
                self.leave(self.parking[0])
            elif self.out is not None:
                self.answer()
            else:
                return
        raise AssertionError(f"after {most} answers {self.out} is out and {self.open} are open")

    # ── carrying out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.log.append(effect)
            match effect:
                case Build() | Step() | Check() | Close():
                    assert self.out is None, "two device effects at once"
                    self.out = effect
                case Tell(request, _, output):
                    if output.finish is not None:
                        self._end(request.id)
                case Lose(request, error, _):
                    assert error
                    self._end(request.id)
                case Add(request):
                    self._add(request)
                case Abort(key, requests):
                    engine = self.engines[key]
                    for id in requests:
                        engine.requests.pop(id, None)
                    self._tell(key)
                case Fetch(key, kv_pages):
                    self._fetch(key, kv_pages)
                case Park(key):
                    assert self.engines[key].arrived, f"{key} is parked and not in"
                    self.engines[key].arrived = False
                    self.parking.append(key)
                case Evict(key, pages):
                    engine = self.engines[key]
                    assert 0 < pages <= engine.weights and not engine.arrived and key not in self.parking
                    engine.weights -= pages
                case Shrink(key, pages):
                    assert 0 < pages <= self.engines[key].held().kv_spare, "pages that are in use are given back"
                    self.engines[key].kv -= pages
                case Grow(key, pages):
                    assert 0 < pages <= self.free and self.engines[key].arrived
                    self.engines[key].kv += self.grants(pages)
                    self._tell(key)

    def _tell(self, key: ModelKey) -> None:
        """While pages are on their way an engine may count them or not."""
        held = self.engines[key].held()
        if key == self.fetching or key in self.parking:
            held = Held(0, 0, held.kv_wanted, 0)
        self._carry_out(self.instance.hear(Told(key, held), self.now))

    def _add(self, request: Request) -> None:
        engine = self.engines[request.model]
        if request.id in self.refuses:
            self._carry_out(self.instance.hear(Refused(request.id, request.model, "too long"), self.now))
            return
        engine.requests[request.id] = Growing(0, self._tokens_most, self._tokens_a_page)
        self._tell(request.model)

    def _fetch(self, key: ModelKey, kv_pages: int) -> None:
        engine = self.engines[key]
        assert self.fetching is None, "two fetches at once"
        assert not engine.arrived and key not in self.parking, f"{key} is fetched and not out"
        assert kv_pages >= 1 and engine.weights_pages - engine.weights + kv_pages <= self.free, "no room for the fetch"
        engine.weights, engine.kv, self.fetching = engine.weights_pages, kv_pages, key

    def _answer(self, out: DeviceEffect, fails: bool, finishes: Callable[[RequestId], bool]) -> Event:
        match out:
            case Build(spec):
                key = ModelKey(spec.key)
                if fails:
                    return BuildFailed(key, "no such file")
                assert key not in self.engines, "built twice"
                weights, least = self.sizes[spec.key], 1 + self._tokens_most // self._tokens_a_page
                self.engines[key] = Engine(weights, least)
                return Built(key, 2.0, weights, least)
            case Check(key):
                engine = self.engines[key]
                return Checked(key, "it says other words" if fails else None, engine.held())
            case Close(key):
                engine = self.engines.pop(key)
                assert not engine.requests, "closed with requests in it"
                assert key != self.fetching and key not in self.parking, "closed while pages are on their way"
                return Closed(key)
            case Step(key):
                engine = self.engines[key]
                if fails:
                    engine.requests.clear()
                    return StepFailed(key, "boom")
                assert engine.arrived, f"{key} steps and is not in"
                return Stepped(key, engine.step(finishes), bool(engine.requests), engine.held())

    def _end(self, id: RequestId) -> None:
        assert id in self.open, f"{id} ended twice"
        self.open.remove(id)

    # ── what holds at any time ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def free(self) -> int:
        return self.instance.pages.total - sum(engine.weights + engine.kv for engine in self.engines.values())

    def check(self) -> None:
        self.instance.check()
        for key in self.instance.models:
            booked = self.instance.pages.of(key)
            engine = self.engines.get(key) or Engine(0, 0)
            assert (booked.weights, booked.kv) == (engine.weights, engine.kv), f"the books are wrong about {key}"
        assert set(self.engines) <= set(self.instance.models), "an engine of a model that is not there"
        assert self.free >= 0
        assert {id for model in self.instance.models.values() for id in (*model.waiting, *model.running)} == self.open
        if self.out is None and self.fetching is None and not self.parking:
            assert not self.open, "requests are open, and nothing is under way for them"
