"""States of models for the node: whatever happens to the models, no state is older than its model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from runtime.core.device.events import Arrived, Ordered, Placed, Warmed, Withdrawn
from runtime.core.device.request import ModelKey
from runtime.device.states import LOOK_S, ModelStates
from store.contract.wire import EngineSpec, ModelState
from tests.runtime.core.device.test_instance_any_order import KEYS, AnyOrder
from tests.runtime.world import World, request, spec


class ShownInAnyOrder(AnyOrder):
    """The states of all models are asked for after every event."""

    def __init__(self) -> None:
        super().__init__()
        self.disk: set[str] = set()
        self.shown = ModelStates(self.world.instance, {}, self.on_disk, lambda: self.world.now)

    def on_disk(self, spec: EngineSpec) -> bool:
        return spec.key in self.disk

    @rule(key=KEYS, warm=st.booleans())
    def keep_warm(self, key: str, warm: bool) -> None:
        self.world.hear(Warmed(ModelKey(key), warm))

    @invariant()
    def each_state_is_what_the_model_is_now(self) -> None:
        instance = self.world.instance
        shown = self.shown.all()
        assert list(shown) == list(instance.models)
        for key, model in instance.models.items():
            assert _but_disk(shown[key]) == _but_disk(model.state(instance.pages.of(key)))


TestShownInAnyOrder = ShownInAnyOrder.TestCase
TestShownInAnyOrder.settings = settings(max_examples=40, stateful_step_count=50)


def _but_disk(state: ModelState) -> ModelState:
    return ModelState(**{name: getattr(state, name) for name in state.__struct_fields__ if name != "on_disk"})


def test_models_at_rest_keep_their_states_until_something_happens_to_them() -> None:
    world = World(10, {"a": 2, "b": 3, "c": 4})
    disk, asked = set[str](), list[str]()

    def on_disk(spec: EngineSpec) -> bool:
        asked.append(spec.key)
        return spec.key in disk

    states = ModelStates(world.instance, {}, on_disk, lambda: world.now)
    for key in "abc":
        world.hear(Placed(spec(key), prove=False))
    first = states.all()
    assert asked == ["a", "b", "c"]
    asked.clear()
    assert all(state is first[key] for key, state in states.all().items()) and not asked

    world.hear(Warmed(ModelKey("b"), True))
    second = states.all()
    assert second["b"].warm and second["a"] is first["a"] and second["c"] is first["c"]

    world.hear(Withdrawn(ModelKey("c")))
    assert list(states.all()) == ["a", "b"]
    world.hear(Placed(spec("c"), prove=False))
    assert list(states.all()) == ["a", "b", "c"]

    disk.add("a")
    assert states.all()["a"] is first["a"], "the disk is not looked at again and again"
    world.now += LOOK_S
    assert states.all()["a"].on_disk is True and states.all()["c"].on_disk is not True
    disk.clear()
    world.now += LOOK_S
    assert states.all()["a"].on_disk is not True


def test_a_model_with_requests_is_shown_with_the_requests_it_has_now() -> None:
    world = World(10, {"a": 2})
    states = ModelStates(world.instance, {}, lambda spec: False, lambda: world.now)
    world.hear(Placed(spec("a"), prove=False))
    assert states.all()["a"].waiting == 0
    for number in (1, 2, 3):
        arrived = request(number, "a", world.now)
        world.open.add(arrived.id)
        world.hear(Arrived(arrived))
        assert states.all()["a"].waiting + states.all()["a"].running == number
    world.hear(Ordered(ModelKey("a"), True))
    assert states.all()["a"].waiting + states.all()["a"].running == 3
