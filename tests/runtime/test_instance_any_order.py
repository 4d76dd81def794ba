"""The Instance machine under any order of events: nothing is lost, nothing runs where it cannot, nobody starves."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from runtime.events import Arrived, Cancelled, Ordered, Placed, Step, Withdrawn
from runtime.model import Phase
from runtime.request import ModelKey, RequestId
from tests.runtime.world import World, request, spec

SIZES = {"a": 2, "b": 3, "c": 4, "d": 6}
KEYS = st.sampled_from([*SIZES, "huge"])


class AnyOrder(RuleBasedStateMachine):
    """Commands in any order, engines that do anything they may, and a pool too small for all."""

    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.world = World(10, {**SIZES, "huge": 9})
        self.next_stream = 0

    @rule(key=KEYS, idle=st.sampled_from([None, 1.0]))
    def place(self, key: str, idle: float | None) -> None:
        self.world.hear(Placed(spec(key, idle)))

    @rule(key=KEYS)
    def withdraw(self, key: str) -> None:
        self.world.hear(Withdrawn(ModelKey(key)))

    @rule(key=KEYS, target=streams, refused=st.integers(0, 9))
    def arrive(self, key: str, refused: int) -> RequestId:
        self.next_stream += 1
        arrived = request(self.next_stream, key)
        self.world.open.add(arrived.id)
        if refused == 0:
            self.world.refuses.add(arrived.id)
        self.world.hear(Arrived(arrived))
        return arrived.id

    @rule(id=streams)
    def cancel(self, id: RequestId) -> None:
        self.world.open.discard(id)  # the client is gone: nothing is owed to it
        self.world.hear(Cancelled([id]))

    @rule(key=KEYS, awake=st.booleans())
    def order(self, key: str, awake: bool) -> None:
        self.world.hear(Ordered(ModelKey(key), awake))

    @rule(dt=st.sampled_from([0.1, 2.0, 100.0]))
    def wait(self, dt: float) -> None:
        self.world.now += dt
        self.world.hear()

    @rule(refuses=st.integers(0, 2))
    def the_pool_grants_less(self, refuses: int) -> None:
        self.world.grants = lambda pages: max(0, pages - refuses)

    @precondition(lambda self: self.world.out is not None)
    @rule(fails=st.integers(0, 12), finish=st.booleans(), data=st.data())
    def device_is_done(self, fails: int, finish: bool, data: st.DataObject) -> None:
        self.world.answer(fails == 0, lambda id: finish and data.draw(st.booleans()))

    @precondition(lambda self: self.world.fetching is not None)
    @rule(fails=st.integers(0, 5))
    def fetch_is_done(self, fails: int) -> None:
        self.world.arrive(fails == 0)

    @precondition(lambda self: self.world.parking)
    @rule(data=st.data())
    def park_is_done(self, data: st.DataObject) -> None:
        self.world.leave(data.draw(st.sampled_from(self.world.parking)))

    @precondition(lambda self: self.engines_at_rest())
    @rule(data=st.data(), rare=st.integers(0, 9))
    def engine_breaks(self, data: st.DataObject, rare: int) -> None:
        if rare == 0:
            self.world.break_engine(data.draw(st.sampled_from(self.engines_at_rest())))

    def engines_at_rest(self) -> list[ModelKey]:
        """Those that are asked for something outside a step: what breaks them is one of our calls."""
        models = self.world.instance.models
        phases = (Phase.STAGED, Phase.RESIDENT, Phase.PARKING)
        stepping = self.world.out.model if isinstance(self.world.out, Step) else None
        return [key for key in self.world.engines if models[key].phase in phases and key != stepping]

    @invariant()
    def the_books_are_right(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """The engines work again: everybody is served to the end."""
        self.world.grants = lambda pages: pages
        self.world.settle(2000)
        models = self.world.instance.models.values()
        assert not self.world.open
        assert {model.phase for model in models} <= {Phase.COLD, Phase.STAGED, Phase.RESIDENT, Phase.FAILED}
        assert not any(model.withdrawn for model in models), "what was withdrawn is still there"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
