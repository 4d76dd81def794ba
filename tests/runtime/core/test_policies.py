"""The field's policies, asked with models as by the machine, and run under the machine in any order of events."""

from __future__ import annotations

from collections.abc import Callable
from unittest import TestCase

import pytest
from hypothesis import settings

from runtime.core.device.deadlines import STARVED_S
from runtime.core.device.events import Arrived, Placed, Step
from runtime.core.device.model import Model, Phase
from runtime.core.device.record import PageDemand, Turn
from runtime.core.device.request import ModelKey, Objective, Request, RequestId
from runtime.core.ledgers.costs import ModelCosts
from runtime.core.ledgers.estimate import CostEstimate
from runtime.core.turns.aegaeon import Aegaeon
from runtime.core.turns.fixed import PROMPTS_MOST, RequestLevel, Resident
from runtime.core.turns.prism import Prism
from runtime.core.turns.quota import STEPS_MOST, Batch, paper_round
from runtime.core.turns.registry import POLICIES
from runtime.core.turns.turn import Turns
from tests.runtime.core.device.test_instance_any_order import SIZES, AnyOrder
from tests.runtime.world import World, request, spec

STEP_S, LOAD_S, SWITCH_S, PREFILL_S = 0.01, 0.63, 0.02, 0.05
COSTS = ModelCosts(
    weight_bytes=2 << 20,
    kv_bytes_per_token=0.0,
    step_s=STEP_S,
    step_s_per_request=0.0,
    step_s_per_token=0.0,
    prefill_s=0.0,
    prefill_s_per_token=PREFILL_S,
    prefill_s_per_token2=0.0,
    load_s=LOAD_S,
    switch_s=SWITCH_S,
    copy_s_per_byte=0.0,
)


class Device:
    """Asks a policy the machine's questions, for models placed by the test."""

    def __init__(self, turns: Turns, *resident: str, away: str = "") -> None:
        self.turns = turns
        self.models = {key: self.model(key, Phase.RESIDENT) for key in resident}
        self.models |= {key: self.model(key, Phase.STAGED) for key in away}
        self.turn: Turn | None = None
        self.now = 0.0
        self.count = 0
        self.log: list[str] = []  # models that stepped; in capitals with a prompt
        self.prefilled: list[RequestId] = []

    @staticmethod
    def model(key: str, phase: Phase) -> Model:
        return Model(
            spec(key), CostEstimate(COSTS), page_bytes=1 << 20, phase=phase, demand=PageDemand(weights_pages=2)
        )

    def ask(self, key: str, running: bool = False, prompt_tokens: int = 1, **objective: float) -> Request:
        """Let a request arrive. `running`: the request is decoding already."""
        self.count += 1
        model, id = self.models[key], RequestId(f"g/{self.count:03}")
        at = self.now + self.count * 1e-6
        asked = Request(id, "g", self.count, ModelKey(key), b"", at, prompt_tokens, objective=Objective(**objective))
        if running:
            asked.progress.deliver(self.now, 1, 0.0)
            asked.computed = True
            model.queues.running[id] = asked
        else:
            model.queues.waiting[id] = asked
            self.turns.arrived(asked, self.now)
        model.deadlines.changed()
        return asked

    def order(self) -> list[Model]:
        working = [model for model in self.models.values() if model.works]
        order = [self.models[model.key] for model in self.turns.order(working, self.now).models]
        assert sorted(model.key for model in order) == sorted(model.key for model in working)
        return order

    def step(self, room: bool = True) -> Model | None:
        """Make a step of the model chosen by the policy, after the policy was asked until no request is admitted."""
        for _ in range(100):
            order = self.order()
            chosen = self.turns.next(order, self.turn, self.now)
            if chosen is None:
                assert not any(model.can_step for model in order)
                return None
            model, steps = self.models[chosen[0].key], chosen[1]
            assert model.can_step and steps >= 1
            admitted = self.turns.admit(model, self.now) if model.queues.waiting else []
            if not admitted or not room:
                break
            for each in admitted:
                model.queues.running[each.id] = model.queues.waiting.pop(each.id)
                model.queues.prompts += not each.computed
        assert model.queues.running, f"{model.key} is to step, and nobody is in it"
        self._make_step(model)
        return model

    def _make_step(self, model: Model) -> None:
        if self.turn is None or self.turn.holder != model.key:
            model.record.turn_no = max(each.record.turn_no for each in self.models.values()) + 1
            self.turn = Turn(model.key, self.now)
        self.turn.steps += 1
        first = [each for each in model.queues.running.values() if not each.computed]
        self.now += PREFILL_S * len(first) + STEP_S
        self.prefilled += [each.id for each in first]
        self.log.append(model.key.upper() if first else model.key)
        for each in model.queues.running.values():
            each.progress.deliver(self.now, 1, 0.0)
            each.computed = True
        model.queues.prompts = 0

    def end(self, key: str) -> None:
        self.models[key].queues.running.clear()

    def steps(self, count: int) -> str:
        start = len(self.log)
        for _ in range(count):
            self.step()
        return "".join(self.log[start:])

    def yields(self, model: str, needy: str) -> bool:
        return self.turns.yields(self.models[model], self.models[needy], self.turn, self.now)


# ── aegaeon ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_group_is_prefilled_one_by_one_before_another_models() -> None:
    device = Device(Aegaeon(), "a", "b")
    for key in "abab":
        device.ask(key)
    # A decoding model has a turn between the groups: b's group waits for eight steps of a, as fewer steps are not worth
    # a switch.
    assert device.steps(12) == "AA" + "a" * 8 + "BB"


def test_all_get_as_many_decode_steps_in_a_round() -> None:
    device = Device(Aegaeon(quota_s_most=4.0), "a", "b", away="c")
    for key in "abc":
        device.ask(key, running=True)
    overhead = 3 * (LOAD_S + SWITCH_S)
    (steps, *_) = paper_round([Batch(STEP_S, 0.1)] * 3, overhead).steps
    device.order()
    device.models["c"].phase = Phase.RESIDENT
    assert device.steps(3 * steps) == "a" * steps + "b" * steps + "c" * steps


def test_a_round_ends_with_the_model_that_begins_the_next() -> None:
    device = Device(Aegaeon(), "a", "b", "c")
    for key in "abc":
        device.ask(key, running=True)
    turns = [key for key in device.steps(48)[::8]]
    assert turns == ["a", "b", "c", "c", "a", "b"]


def test_a_model_alone_goes_on_until_another_is_asked_for() -> None:
    device = Device(Aegaeon(), "a", "b")
    device.ask("a", running=True)
    assert device.steps(200) == "a" * 200
    device.ask("b")
    assert device.steps(1) == "B"


def test_the_next_one_of_the_round_is_the_next_to_be_brought_in() -> None:
    device = Device(Aegaeon(), "a", away="bc")
    for key in "cab":
        device.ask(key, running=True)
    device.step()
    assert [model.key for model in device.order()] == ["a", "b", "c"]
    assert device.yields("b", "c") and not device.yields("a", "b")


def test_a_model_in_its_turn_is_not_parked_and_after_it_is() -> None:
    device = Device(Aegaeon(), "a", "b")
    device.ask("a", running=True)
    device.ask("b", running=True)
    device.steps(7)
    assert not device.yields("a", "b")
    device.step()
    assert device.yields("a", "b")


def test_a_prefill_device_serves_groups_alone() -> None:
    device = Device(Aegaeon(), "a", "b")
    for key in "abab":
        device.ask(key)
    for _ in range(4):
        device.end(device.step().key)  # type: ignore[union-attr]
    assert "".join(device.log) == "AABB" and device.prefilled == ["g/001", "g/003", "g/002", "g/004"]


def test_requests_that_bring_their_keys_and_values_join_the_next_turn_of_their_model_at_once() -> None:
    device = Device(Aegaeon(), "a")
    for _ in range(3):
        arriving = device.ask("a", running=True)
        device.models["a"].queues.waiting[arriving.id] = device.models["a"].queues.running.pop(arriving.id)
    device.step()
    assert len(device.models["a"].queues.running) == 3


def test_a_group_without_room_does_not_hold_up_who_decodes() -> None:
    device = Device(Aegaeon(), "a", "b")
    device.ask("a", running=True)
    device.ask("b", running=True)
    device.ask("a")
    stepped = [device.step(room=False).key for _ in range(40)]  # type: ignore[union-attr]
    assert stepped.count(ModelKey("b")) >= 16


def test_who_cancelled_is_not_prefilled() -> None:
    device = Device(Aegaeon(), "a", "b")
    gone = device.ask("a")
    device.ask("b")
    device.order()
    del device.models["a"].queues.waiting[gone.id]
    assert device.steps(1) == "B"


# ── prism and resident ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", [Resident, Prism])
def test_models_take_turns_so_short_that_switches_are_a_tenth_of_the_time(policy: Callable[[], Turns]) -> None:
    device = Device(policy(), "a", "b")
    device.ask("a", running=True)
    device.ask("b", running=True)
    assert device.steps(72) == ("a" * 18 + "b" * 18) * 2


def test_prompts_go_first_one_at_a_time_in_their_order() -> None:
    device = Device(Resident(), "a", "b")
    device.ask("a", running=True)
    for key in "bab":
        device.ask(key)
    assert device.steps(3) == "BAB"
    assert device.prefilled == ["g/002", "g/003", "g/004"]


def test_prompts_do_not_keep_others_from_decoding_for_ever() -> None:
    device = Device(Resident(), "a", "b")
    device.ask("b", running=True)
    for _ in range(60):
        device.ask("a")
    log = device.steps(PROMPTS_MOST + 1)
    assert log == "A" * PROMPTS_MOST + "b"


def test_a_prompt_without_room_lets_others_go_on() -> None:
    device = Device(Resident(), "a", "b")
    device.ask("a", running=True)
    device.ask("b", running=True)
    device.ask("a")
    stepped = [device.step(room=False).key for _ in range(80)]  # type: ignore[union-attr]
    assert stepped.count(ModelKey("b")) >= 36
    assert device.steps(40).count("A") == 1  # there is room again
    while device.steps(1) != "b":
        pass
    device.ask("a")
    assert device.steps(1) == "A"


def test_prism_gives_up_the_longest_prompt_when_not_all_can_be_in_time() -> None:
    device = Device(Prism(), "a", "b")
    device.ask("a", prompt_tokens=16, ttft_s=1.0)
    for _ in range(6):
        device.ask("b", prompt_tokens=2, ttft_s=1.0)
    device.steps(7 + 18)
    assert device.prefilled == [f"g/{n:03}" for n in (2, 3, 4, 5, 6, 7, 1)]


def test_prism_promotes_who_was_late_for_long_but_not_before_everybody() -> None:
    device = Device(Prism(), "a")
    late = [device.ask("a", ttft_s=0.1) for _ in range(3)]
    device.now = 1.0
    for _ in range(20):
        device.ask("a", ttft_s=60.0)
    device.steps(20)
    places = [device.prefilled.index(request.id) for request in late]
    assert places == [0, 4, 8]


@pytest.mark.parametrize("policy", [Resident, Prism])
def test_work_is_parked_only_for_who_starves(policy: Callable[[], Turns]) -> None:
    device = Device(policy(), "a", away="b")
    device.ask("a", running=True)
    device.ask("b", ttft_s=2.0)
    device.step()
    device.now = 6.0
    assert not device.yields("a", "b")
    device.now = 6.1
    assert device.yields("a", "b")


# ── request and dedicated ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_keeps_the_device_until_its_requests_are_done() -> None:
    device = Device(RequestLevel(), "a", "b")
    device.ask("b")
    device.ask("a")
    assert device.steps(30) == "B" + "b" * 29
    assert not device.yields("b", "a") and device.yields("a", "b")
    assert device.turns.next(device.order(), device.turn, 0.0) == (device.models["b"], STEPS_MOST)
    device.end("b")
    assert device.steps(2) == "Aa"


def test_the_oldest_request_begins_and_others_of_its_model_join() -> None:
    device = Device(RequestLevel(), "a", "b")
    for key in "bba":
        device.ask(key)
    device.step()
    assert device.prefilled == ["g/001", "g/002"]
    device.ask("b")
    assert device.steps(1) == "B"


@pytest.mark.parametrize(("patience_s", "log"), [(STARVED_S, "b"), (float("inf"), "B")])
def test_nobody_joins_once_another_model_waited_for_long_unless_the_device_is_dedicated(
    patience_s: float, log: str
) -> None:
    device = Device(RequestLevel(patience_s), "a", "b")
    device.ask("b")
    device.ask("a")
    device.step()
    device.now = STARVED_S + 1.0
    device.ask("b")
    assert device.steps(1) == log


# ── under the machine ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_more_models_than_fit_are_all_served(policy: Callable[[], Turns]) -> None:
    world = World(10, SIZES, turns=policy())
    for stream in range(1, 25):
        asked = request(stream, "abcd"[stream % 4])
        if stream <= 4:
            world.hear(Placed(spec(asked.model)))
        world.open.add(asked.id)
        world.hear(Arrived(asked))
    world.settle(2000)
    assert not world.open
    assert {effect.model for effect in world.log if isinstance(effect, Step)} == set(SIZES)


def under(policy: Callable[[], Turns]) -> type[TestCase]:
    """The test case of the machine under the policy, in any order of events."""

    class Under(AnyOrder):
        def __init__(self) -> None:
            super().__init__()
            self.world = World(10, {**SIZES, "huge": 9}, turns=policy())

    made: type[TestCase] = Under.TestCase
    made.settings = settings(max_examples=40, stateful_step_count=40)  # type: ignore[attr-defined]
    return made


TestAegaeon, TestPaper = under(POLICIES["aegaeon"]), under(POLICIES["aegaeon-paper"])
TestPrism, TestResident = under(POLICIES["prism"]), under(POLICIES["resident"])
TestRequest, TestDedicated = under(POLICIES["request"]), under(POLICIES["dedicated"])
