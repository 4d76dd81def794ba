"""Requests that come to a device from another runtime: what happens to them when the engine that expected them is full,
closed or never there. Over engines that do what the test says."""

from __future__ import annotations

from collections.abc import Sequence

from runtime import pipe
from runtime.engine.base import EngineError
from runtime.request import RequestId
from store.wire import Departure, EngineSpec, Residency
from tests.runtime.test_device import TOKENS, Builder, Node, Scripted
from tests.runtime.world import spec

LEFT = Departure([1], 1, [4, 5], b"")


class Movable(Scripted):
    """Has room for who is expected unless told otherwise; copies are over at once."""

    room, sound = True, True

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = ()) -> None:
        super().add(request, payload, made)
        self.requests[request] = len(made)
        if made:
            self.calls.append("compute again")

    def expect(self, request: RequestId, payload: bytes, tokens: int) -> bool:
        self.calls.append("expect")
        return self.room

    def receive(self, request: RequestId, first: int, host: list[int]) -> bool:
        self.calls.append(f"receive {first}: {host}")
        return self.room

    def received(self, request: RequestId) -> bool:
        if not self.sound:
            self.sound = True
            raise EngineError("the copy failed")
        return True

    def adopt(self, request: RequestId, departure: Departure) -> None:
        self.calls.append("adopt")
        self.requests[request] = len(departure.made)

    def abort(self, requests: list[RequestId]) -> None:
        self.calls.append("abort")
        super().abort(requests)


class MovableBuilder(Builder):
    def __call__(self, spec: EngineSpec) -> Scripted:
        engine = self.engines[spec.key] = Movable(self._made)
        self.change(engine)
        return engine


class Target(Node):
    """A device with model `a`, and what it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[pipe.ToNode] = []
        self.device._build = self.build = MovableBuilder(self.made)
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
        return pipe.Coming("m", self.start().run, 2)

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
    assert not any(isinstance(answer, pipe.Answered) and answer.refusal for answer in target.answers)


def test_without_room_it_is_computed_again() -> None:
    target = Target()
    target.build.change = lambda engine: setattr(engine, "room", False)
    taken_over(target)
    assert target.calls()[-1] == "compute again" and "adopt" not in target.calls()


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
