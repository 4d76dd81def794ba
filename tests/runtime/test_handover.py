"""Requests that come to a device from another runtime: what happens to them when the engine that expected them is full,
closed or never there. Over engines that do what the test says."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from runtime import pipe
from runtime.engine.base import EngineError, Told
from runtime.request import RequestId
from store.wire import Departure, EngineSpec, KvForm, Residency
from tests.runtime.test_device import TOKENS, Builder, Node, Scripted
from tests.runtime.world import spec

OWNER = 7  # the source's device process
LEFT = Departure([1], 1, [4, 5], b"")


class Movable(Scripted):
    """Has room for who is expected unless told otherwise; copies are over at once."""

    room, sound = True, True
    full = False  # there is room for those alone that the machine admitted

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = ()) -> None:
        super().add(request, payload, made)
        self.requests[request] = len(made)
        if made:
            self.calls.append("compute again")

    def expect(self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False) -> bool:
        self.calls.append("expect")
        return self.room

    def receive(self, request: RequestId, first: int, host: list[int], admitted: bool = False) -> bool:
        self.calls.append(f"receive {first}: {host}")
        return self.room and (admitted or not self.full)

    def received(self, request: RequestId) -> bool:
        if not self.sound:
            self.sound = True
            raise EngineError("the copy failed")
        return True

    def adopt(self, request: RequestId, departure: Departure) -> None:
        self.calls.append("adopt")
        if not departure.host:
            raise EngineError("it needs blocks that were not handed over")
        self.requests[request] = len(departure.made)

    def abort(self, requests: list[RequestId]) -> None:
        self.calls.append("abort")
        super().abort(requests)


class Holding:
    """On blocks of another runtime."""

    def __init__(self) -> None:
        self.released = False

    def release(self) -> None:
        self.released = True


class MovableBuilder(Builder):
    alive = True  # who wrote what comes

    def __init__(self, made: list[list[int]]) -> None:
        super().__init__(made)
        self.holds: list[Holding] = []

    def hold(self, blocks: list[int], block_bytes: int, life: int) -> Holding | None:
        assert life == OWNER and block_bytes == Movable.kv_form.bytes
        if not self.alive:
            return None
        self.holds.append(Holding())
        return self.holds[-1]

    def __call__(self, spec: EngineSpec, told: Told, /) -> Scripted:
        engine = self.engines[spec.key] = Movable(self._made)
        self.change(engine)
        return engine


class Target(Node):
    """A device with model `a`, and what it answers."""

    builder = MovableBuilder
    build: MovableBuilder

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[pipe.ToNode] = []
        self.send(pipe.Place(spec("a")))

    def _note(self, message: pipe.ToNode) -> None:
        if isinstance(message, pipe.Answered | pipe.LandedHere):
            self.answers.append(message)
        super()._note(message)

    def resident(self) -> bool:
        return self.model("a").residency is Residency.RESIDENT

    def answered(self, count: int) -> bool:
        return len(self.answers) >= count

    def landed(self) -> bool:
        return any(isinstance(answer, pipe.LandedHere) for answer in self.answers)

    def coming(self) -> pipe.Coming:
        return pipe.Coming("m", self.start().run, 2, Movable.kv_form, OWNER)

    def calls(self) -> list[str]:
        wanted = ("expect", "receive", "adopt", "abort", "compute")
        return [call for call in self.build.engines["a"].calls if call.startswith(wanted)]


def taken_over(target: Target) -> None:
    """The whole handshake, to the last token."""
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), pipe.Take("m", 0, [4]))
    target.when(lambda: target.answered(2), pipe.Adopt("m", LEFT))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])


def test_a_request_that_is_expected_goes_on_with_what_it_brings() -> None:
    target = Target()
    taken_over(target)
    assert target.calls() == ["expect", "receive 0: [4]", "receive 1: [5]", "adopt"]
    assert target.build.holds and all(hold.released for hold in target.build.holds)
    assert not any(isinstance(answer, pipe.Answered) and answer.refusal for answer in target.answers)


def test_without_room_it_is_computed_again() -> None:
    target = Target()
    target.build.change = lambda engine: setattr(engine, "room", False)
    taken_over(target)
    assert target.calls()[-1] == "compute again" and "adopt" not in target.calls()


def test_what_the_machine_made_room_for_is_received_though_it_is_the_last() -> None:
    target = Target()
    target.build.change = lambda engine: setattr(engine, "full", True)
    taken_over(target)
    assert target.calls() == ["expect", "receive 0: [4]", "receive 0: [4, 5]", "adopt"]


def test_after_a_copy_that_failed_all_is_copied_again() -> None:
    target = Target()
    target.build.change = lambda engine: setattr(engine, "sound", False)
    taken_over(target)
    assert target.calls() == ["expect", "receive 0: [4]", "abort", "expect", "receive 0: [4, 5]", "adopt"]


def test_a_model_that_is_withdrawn_takes_its_guests_with_it_and_nobody_else() -> None:
    target = Target()
    target.when(target.resident, target.coming(), pipe.Place(spec("b")))
    target.when(lambda: target.model("b").residency is Residency.RESIDENT, pipe.Withdraw("a"))
    target.when(lambda: "a" not in target.states[-1].models, pipe.Take("m", 0, [4]))
    target.when(lambda: target.answered(2), pipe.NotComing("m"), target.start(model="b"))
    target.run(until=lambda: len(target.tokens) == TOKENS)
    assert not target.lost, "the device lives"


def test_one_whose_engine_was_closed_while_it_waited_is_for_the_next_engine() -> None:
    target = Target()
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), pipe.Withdraw("a"))
    target.when(lambda: "a" not in target.states[-1].models, pipe.Place(spec("a")))
    target.when(target.resident, pipe.Adopt("m", LEFT))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])
    assert target.calls() == ["expect", "receive 0: [4, 5]", "adopt"]


def test_what_is_not_expected_is_refused() -> None:
    target = Target()
    target.when(target.resident, pipe.Take("x", 0, [4]), pipe.Adopt("x", LEFT), pipe.NotComing("x"))
    target.run(until=lambda: target.answered(2))
    refusals = [answer.refusal for answer in target.answers if isinstance(answer, pipe.Answered)]
    assert refusals == ["it is not expected here"] * 2


def test_what_a_runtime_wrote_that_died_is_not_read() -> None:
    target = Target()
    target.when(target.resident, target.coming())

    def die() -> bool:
        target.build.alive = False
        return True

    target.when(lambda: target.answered(1) and die(), pipe.Take("m", 0, [4]))
    target.run(until=lambda: target.answered(2))
    assert target.answers[-1] == pipe.Answered("m", "who wrote its blocks is gone, and they with it")
    assert target.calls() == ["expect"]


def test_one_whose_source_dies_after_the_commit_is_computed_again() -> None:
    target = Target()

    def die() -> bool:
        target.build.alive = False
        return True

    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), pipe.Take("m", 0, [4]))
    target.when(lambda: target.answered(2) and die(), pipe.Adopt("m", LEFT))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])
    assert target.calls()[-2:] == ["abort", "compute again"] and "receive 1: [5]" not in target.calls()
    assert all(hold.released for hold in target.build.holds)


OTHER = KvForm(16, 4096, "another")


def test_blocks_of_another_form_are_refused_by_name() -> None:
    target = Target()
    target.when(target.resident, replace(target.coming(), form=OTHER))
    target.run(until=lambda: target.answered(1))
    here = "here they are 1 tokens in 2097152 bytes, scripted"
    assert target.answers == [pipe.Answered("m", f"its blocks are 16 tokens in 4096 bytes, another, {here}")]
    assert target.calls() == []


def test_an_engine_that_was_built_later_and_has_another_form_computes_again() -> None:
    target = Target()
    forms = iter([Movable.kv_form, OTHER])
    target.build.change = lambda engine: setattr(engine, "kv_form", next(forms))
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), pipe.Withdraw("a"))
    target.when(lambda: "a" not in target.states[-1].models, pipe.Place(spec("a")))
    target.when(target.resident, pipe.Adopt("m", LEFT))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])
    assert target.calls() == ["abort", "compute again"]


def test_who_does_not_come_lands_when_nothing_of_it_is_read_any_more() -> None:
    target = Target()
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), pipe.Take("m", 0, [4]), pipe.NotComing("m"), pipe.NotComing("unknown"))
    target.run(until=lambda: sum(isinstance(answer, pipe.LandedHere) for answer in target.answers) == 2)
    assert target.calls() == ["expect", "receive 0: [4]", "abort"]


def test_who_is_ours_already_lands_once() -> None:
    target = Target()
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), pipe.Adopt("m", LEFT), pipe.NotComing("m"))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])
    assert [type(answer) for answer in target.answers].count(pipe.LandedHere) == 1
