"""The Instance machine under any order of events: nothing is lost, nothing runs where it can't."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from runtime.engine.base import Output
from runtime.events import (
    Abort,
    Add,
    Arrived,
    Cancelled,
    Effect,
    Event,
    Load,
    Loaded,
    LoadFailed,
    Lose,
    Ordered,
    Placed,
    Refused,
    Step,
    StepFailed,
    Stepped,
    Tell,
    Tick,
    Unload,
    Unloaded,
    Withdrawn,
)
from runtime.instance import Instance
from runtime.policy.turns import RoundRobin
from runtime.request import ModelKey, Request, RequestId, request_id
from store.wire import EngineSpec, Finish, Residency


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


def request(stream: int, model: str) -> Request:
    return Request(request_id("g", stream), "g", stream, ModelKey(model), b"", 0.0)


def step(key: str, *outputs: Output, busy: bool = True) -> Stepped:
    return Stepped(ModelKey(key), list(outputs), busy)


def ready(*keys: str, quota: int = 2) -> Instance:
    """An instance with these models resident."""
    instance = Instance(RoundRobin(quota))
    for key in keys:
        (effect,) = instance.on(Placed(spec(key)), 0.0)
        assert isinstance(effect, Load)
        assert instance.on(Loaded(ModelKey(key), 0.1), 0.0) == []
    return instance


def test_models_with_work_take_turns_of_the_quota() -> None:
    instance = ready("a", "b")
    effects = instance.on(Arrived(request(1, "a")), 1.0) + instance.hear(Arrived(request(2, "b")), 1.0)
    held = [effect.model for effect in effects if isinstance(effect, Step)]
    for n in range(7):
        id = RequestId(f"g/{1 if held[-1] == 'a' else 2}")
        effects = instance.on(step(held[-1], Output(id, [n])), 1.0)
        held += [effect.model for effect in effects if isinstance(effect, Step)]
    assert held == ["a", "a", "b", "b", "a", "a", "b", "b"]
    assert instance.switches == 3


def test_a_request_for_a_sleeping_model_waits_for_its_load() -> None:
    instance = ready("a")
    instance.on(Ordered(ModelKey("a"), awake=False), 1.0)
    instance.on(Unloaded(ModelKey("a")), 1.0)
    assert instance.models[ModelKey("a")].residency is Residency.COLD
    (load,) = instance.on(Arrived(request(1, "a")), 2.0)
    assert isinstance(load, Load)
    effects = instance.on(Loaded(ModelKey("a"), 0.1), 3.0)
    assert [type(effect) for effect in effects] == [Add, Step]


def test_an_idle_model_leaves_when_its_time_is_up() -> None:
    instance = Instance(RoundRobin())
    instance.on(Placed(spec("a", idle_s=5.0)), 0.0)
    instance.on(Loaded(ModelKey("a"), 0.1), 1.0)
    assert instance.next_tick() == 6.0
    assert instance.on(Tick(), 5.9) == []
    assert instance.on(Tick(), 6.0) == [Unload(ModelKey("a"))]


def test_a_failed_step_loses_that_models_requests_and_no_other() -> None:
    instance = ready("a", "b")
    instance.on(Arrived(request(1, "a")), 1.0)
    instance.hear(Arrived(request(2, "b")), 1.0)
    effects = instance.on(StepFailed(ModelKey("a"), "boom"), 1.0)
    assert [type(effect) for effect in effects] == [Lose, Unload]
    assert [type(effect) for effect in instance.on(Unloaded(ModelKey("a")), 1.0)] == [Step]
    assert instance.models[ModelKey("b")].running


def test_a_model_that_cannot_be_loaded_says_why_to_all_who_wait() -> None:
    instance = Instance(RoundRobin())
    instance.on(Placed(spec("a")), 0.0)
    instance.hear(Arrived(request(1, "a")), 0.0)
    (lost,) = instance.on(LoadFailed(ModelKey("a"), "no such file"), 1.0)
    assert isinstance(lost, Lose) and "no such file" in lost.error
    (late,) = instance.on(Arrived(request(2, "a")), 2.0)
    assert isinstance(late, Lose) and "no such file" in late.error


def test_a_failed_load_is_tried_again_later_and_later() -> None:
    instance = Instance(RoundRobin())
    instance.on(Placed(spec("a")), 0.0)
    now, pauses = 0.0, []
    for _ in range(3):
        assert instance.on(LoadFailed(ModelKey("a"), "no memory"), now) == []
        retry_at = instance.next_tick()
        assert retry_at is not None and instance.on(Tick(), retry_at - 0.1) == []
        (load,) = instance.on(Tick(), retry_at)
        assert isinstance(load, Load)
        pauses.append(retry_at - now)
        now = retry_at
    assert pauses == [30.0, 60.0, 120.0]


class AnyOrder(RuleBasedStateMachine):
    """Commands in any order, an engine that does anything it may: the machine's books stay right."""

    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.instance = Instance(RoundRobin(2))
        self.now = 0.0
        self.next_stream = 0
        self.out: Load | Unload | Step | None = None  # the device effect under way
        self.in_engine: dict[ModelKey, set[RequestId]] = {}  # what a real engine would hold
        self.open: set[RequestId] = set()
        self.ended: set[RequestId] = set()

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Load() | Unload() | Step():
                    assert self.out is None, "two device effects at once"
                    self.out = effect
                case Add(request):
                    self.in_engine[request.model].add(request.id)  # KeyError: added to an engine that is not there
                case Abort(model, requests):
                    self.in_engine[model].difference_update(requests)
                case Tell(request, _, output):
                    if output.finish is not None:
                        self.end(request.id)
                case Lose(request, error, _):
                    assert error
                    self.end(request.id)

    def end(self, id: RequestId) -> None:
        assert id in self.open, f"{id} ended twice"
        self.open.remove(id)
        self.ended.add(id)

    def hear(self, event: Event) -> None:
        act = self.instance.on if self.out is None else self.instance.hear
        self.carry_out(act(event, self.now))

    @rule(key=st.sampled_from("abc"), idle=st.sampled_from([None, 1.0]))
    def place(self, key: str, idle: float | None) -> None:
        self.hear(Placed(spec(key, idle)))

    @rule(key=st.sampled_from("abc"))
    def withdraw(self, key: str) -> None:
        self.hear(Withdrawn(ModelKey(key)))

    @rule(key=st.sampled_from("abc"), target=streams)
    def arrive(self, key: str) -> RequestId:
        self.next_stream += 1
        arrived = request(self.next_stream, key)
        self.open.add(arrived.id)
        self.hear(Arrived(arrived))
        return arrived.id

    @rule(id=streams)
    def cancel(self, id: RequestId) -> None:
        self.open.discard(id)  # the client is gone: nothing is owed to it
        self.hear(Cancelled([id]))

    @rule(key=st.sampled_from("abc"), awake=st.booleans())
    def order(self, key: str, awake: bool) -> None:
        self.hear(Ordered(ModelKey(key), awake))

    @rule(id=streams)
    def refuse(self, id: RequestId) -> None:
        for key, held in self.in_engine.items():
            if id in held:
                held.remove(id)
                self.hear(Refused(id, key, "too long"))
                return

    @rule(dt=st.sampled_from([0.1, 2.0, 100.0]))
    def wait(self, dt: float) -> None:
        self.now += dt
        self.hear(Tick())

    @precondition(lambda self: self.out is not None)
    @rule(fails=st.integers(0, 9), finish=st.booleans(), data=st.data())
    def device_is_done(self, fails: int, finish: bool, data: st.DataObject) -> None:
        out, self.out = self.out, None
        match out:
            case Load(placed):
                key = ModelKey(placed.key)
                if fails == 0:
                    self.carry_out(self.instance.on(LoadFailed(key, "no memory"), self.now))
                else:
                    self.in_engine[key] = set()
                    self.carry_out(self.instance.on(Loaded(key, 0.1), self.now))
            case Unload(key):
                assert self.in_engine.pop(key) == set(), "an engine is closed with requests in it"
                self.carry_out(self.instance.on(Unloaded(key), self.now))
            case Step(key):
                held = self.in_engine[key]
                if fails == 0:
                    held.clear()
                    self.carry_out(self.instance.on(StepFailed(key, "boom"), self.now))
                    return
                outputs = []
                for id in sorted(held):
                    done = finish and data.draw(st.booleans())
                    outputs.append(Output(id, [1], Finish.STOP if done else None))
                    if done:
                        held.remove(id)
                self.carry_out(self.instance.on(Stepped(key, outputs, bool(held)), self.now))

    @invariant()
    def the_books_are_right(self) -> None:
        self.instance.check()
        running = {id for model in self.instance.models.values() for id in model.running}
        waiting = {id for model in self.instance.models.values() for id in model.waiting}
        assert running | waiting == self.open, "a request is owed an answer and nobody holds it"
        for model in self.instance.models.values():
            if model.residency is Residency.RESIDENT:
                assert self.in_engine[model.key] == set(model.running)

    @invariant()
    def work_is_never_forgotten(self) -> None:
        if self.out is None:
            assert not self.open, "requests are open and the device was left idle"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
