"""Requests that come to a device from a second runtime, when the expecting engine is full, closed or was never there;
and a request that leaves a device whose engine begins steps ahead. The engines are scripted by the tests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from runtime import ipc
from runtime.core.device.request import RequestId
from runtime.core.engine import EngineError, Output, Told
from store.contract.wire import AbortMove, Commit, Copy, Departure, EngineSpec, KvForm, Prepare, Release, Residency
from tests.runtime.device.test_device import TOKENS, Builder, Node, Scripted
from tests.runtime.world import spec

OWNER = 7  # the source's device process
LEFT = Departure([1], 1, [4, 5], b"")


class Movable(Scripted):
    """An engine with room for expected requests, unless a test says no. Copies are over at once."""

    room, sound = True, True
    full = False  # True: room only for requests admitted by the machine

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = (), grammar: bytes = b"") -> None:
        super().add(request, payload, made)
        self.requests[request] = len(made)
        if made:
            self.calls.append("compute again")

    def prepare(
        self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False, grammar: bytes = b""
    ) -> bool:
        self.calls.append("prepare")
        return self.room

    def copy(
        self, request: RequestId, first: int, host: list[int] | None = None, admitted: bool = False
    ) -> list[int] | None:
        self.calls.append(f"copy {first}: {host}")
        return host if self.room and (admitted or not self.full) else None

    def copied(self, request: RequestId) -> bool:
        if not self.sound:
            self.sound = True
            raise EngineError("the copy failed")
        return True

    def commit(self, request: RequestId, departure: Departure | None = None) -> Departure | None:
        assert departure is not None, "no request leaves"
        self.calls.append("commit")
        if not departure.host:
            raise EngineError("it needs blocks that were not handed over")
        self.requests[request] = len(departure.made)
        return None

    def abort(self, requests: list[RequestId]) -> None:
        self.calls.append("abort")
        super().abort(requests)


class Holding:
    """A hold on blocks of a second runtime."""

    def __init__(self) -> None:
        self.released = False

    def release(self) -> None:
        self.released = True


class MovableBuilder(Builder):
    alive = True  # the source, which wrote the blocks

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
    """A device with model `a`, and the device's answers."""

    builder = MovableBuilder
    build: MovableBuilder

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[ipc.ToNode] = []
        self.send(ipc.Place(spec("a")))

    def _note(self, message: ipc.ToNode) -> None:
        if isinstance(message, ipc.MoveAnswer | Release):
            self.answers.append(message)
        super()._note(message)

    def resident(self) -> bool:
        return self.model("a").residency is Residency.RESIDENT

    def answered(self, count: int) -> bool:
        return len(self.answers) >= count

    def landed(self) -> bool:
        return any(isinstance(answer, Release) for answer in self.answers)

    def coming(self, form: KvForm = Movable.kv_form) -> ipc.PrepareMove:
        run = self.start().run
        return ipc.PrepareMove(Prepare(move="m", source="r2", host_cache="", form=form, run=run, tokens=2, owner=OWNER))

    def calls(self) -> list[str]:
        wanted = ("prepare", "copy", "commit", "abort", "compute")
        return [call for call in self.build.engines["a"].calls if call.startswith(wanted)]


def taken_over(target: Target) -> None:
    """Take a request over by the whole handshake, to the last token."""
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), Copy(move="m", first=0, host=[4]))
    target.when(lambda: target.answered(2), Commit(move="m", departure=LEFT))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])


def test_a_request_that_is_expected_goes_on_with_what_it_brings() -> None:
    target = Target()
    taken_over(target)
    assert target.calls() == ["prepare", "copy 0: [4]", "copy 1: [5]", "commit"]
    assert target.build.holds and all(hold.released for hold in target.build.holds)
    assert not any(isinstance(answer, ipc.MoveAnswer) and answer.refusal for answer in target.answers)


def test_without_room_it_is_computed_again() -> None:
    target = Target()
    target.build.change = lambda engine: setattr(engine, "room", False)
    taken_over(target)
    assert target.calls()[-1] == "compute again" and "commit" not in target.calls()


def test_what_the_machine_made_room_for_is_received_though_it_is_the_last() -> None:
    target = Target()
    target.build.change = lambda engine: setattr(engine, "full", True)
    taken_over(target)
    assert target.calls() == ["prepare", "copy 0: [4]", "copy 0: [4, 5]", "commit"]


def test_after_a_copy_that_failed_all_is_copied_again() -> None:
    target = Target()
    target.build.change = lambda engine: setattr(engine, "sound", False)
    taken_over(target)
    assert target.calls() == ["prepare", "copy 0: [4]", "abort", "prepare", "copy 0: [4, 5]", "commit"]


def test_a_model_that_is_withdrawn_takes_its_guests_with_it_and_nobody_else() -> None:
    target = Target()
    target.when(target.resident, target.coming(), ipc.Place(spec("b")))
    target.when(lambda: target.model("b").residency is Residency.RESIDENT, ipc.Withdraw("a"))
    target.when(lambda: "a" not in target.states[-1].models, Copy(move="m", first=0, host=[4]))
    target.when(lambda: target.answered(2), AbortMove(move="m"), target.start(model="b"))
    target.run(until=lambda: len(target.tokens) == TOKENS)
    assert not target.lost, "the device lives"


def test_one_whose_engine_was_closed_while_it_waited_is_for_the_next_engine() -> None:
    target = Target()
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), ipc.Withdraw("a"))
    target.when(lambda: "a" not in target.states[-1].models, ipc.Place(spec("a")))
    target.when(target.resident, Commit(move="m", departure=LEFT))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])
    assert target.calls() == ["prepare", "copy 0: [4, 5]", "commit"]


def test_what_is_not_expected_is_refused() -> None:
    target = Target()
    target.when(
        target.resident, Copy(move="x", first=0, host=[4]), Commit(move="x", departure=LEFT), AbortMove(move="x")
    )
    target.run(until=lambda: target.answered(2))
    refusals = [answer.refusal for answer in target.answers if isinstance(answer, ipc.MoveAnswer)]
    assert refusals == ["it is not expected here"] * 2


def test_what_a_runtime_wrote_that_died_is_not_read() -> None:
    target = Target()
    target.when(target.resident, target.coming())

    def die() -> bool:
        target.build.alive = False
        return True

    target.when(lambda: target.answered(1) and die(), Copy(move="m", first=0, host=[4]))
    target.run(until=lambda: target.answered(2))
    assert target.answers[-1] == ipc.MoveAnswer("m", "who wrote its blocks is gone, and they with it")
    assert target.calls() == ["prepare"]


def test_one_whose_source_dies_after_the_commit_is_computed_again() -> None:
    target = Target()

    def die() -> bool:
        target.build.alive = False
        return True

    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), Copy(move="m", first=0, host=[4]))
    target.when(lambda: target.answered(2) and die(), Commit(move="m", departure=LEFT))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])
    assert target.calls()[-2:] == ["abort", "compute again"] and "copy 1: [5]" not in target.calls()
    assert all(hold.released for hold in target.build.holds)


OTHER = KvForm(16, 4096, "another")


def test_blocks_of_another_form_are_refused_by_name() -> None:
    target = Target()
    target.when(target.resident, target.coming(OTHER))
    target.run(until=lambda: target.answered(1))
    here = "here they are 1 tokens in 2097152 bytes, scripted"
    assert target.answers == [ipc.MoveAnswer("m", f"its blocks are 16 tokens in 4096 bytes, another, {here}")]
    assert target.calls() == []


def test_an_engine_that_was_built_later_and_has_another_form_computes_again() -> None:
    target = Target()
    forms = iter([Movable.kv_form, OTHER])
    target.build.change = lambda engine: setattr(engine, "kv_form", next(forms))
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), ipc.Withdraw("a"))
    target.when(lambda: "a" not in target.states[-1].models, ipc.Place(spec("a")))
    target.when(target.resident, Commit(move="m", departure=LEFT))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])
    assert target.calls() == ["abort", "compute again"]


def test_who_does_not_come_lands_when_nothing_of_it_is_read_any_more() -> None:
    target = Target()
    target.when(target.resident, target.coming())
    target.when(
        lambda: target.answered(1), Copy(move="m", first=0, host=[4]), AbortMove(move="m"), AbortMove(move="unknown")
    )
    target.run(until=lambda: sum(isinstance(answer, Release) for answer in target.answers) == 2)
    assert target.calls() == ["prepare", "copy 0: [4]", "abort"]


def test_who_is_ours_already_lands_once() -> None:
    target = Target()
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), Commit(move="m", departure=LEFT), AbortMove(move="m"))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])
    assert [type(answer) for answer in target.answers].count(Release) == 1


class AheadEngine(Scripted):
    """An engine that begins the next step ahead whenever allowed. Requests never end; a request leaves at once."""

    def __init__(self, made: list[list[int]]) -> None:
        super().__init__(made)
        self.steps_ahead = 0

    def step(self, ahead: bool = False) -> list[Output]:
        time.sleep(1e-3)
        for id in self.requests:
            self.requests[id] += 1
        self.ahead, self.steps_ahead = ahead, self.steps_ahead + ahead
        return [Output(id, [made]) for id, made in self.requests.items()]

    def copy(
        self, request: RequestId, first: int, host: list[int] | None = None, admitted: bool = False
    ) -> list[int] | None:
        return None

    def commit(self, request: RequestId, departure: Departure | None = None) -> Departure | None:
        assert not self.ahead, "a request leaves between two steps"
        self.calls.append("commit")
        if request in self.requests:
            self.made = self.requests.pop(request)
            return None
        return Departure(list(range(1, self.made + 1)), self.made, [4], b"")


class AheadBuilder(MovableBuilder):
    def __call__(self, spec: EngineSpec, told: Told, /) -> Scripted:
        engine = self.engines[spec.key] = AheadEngine(self._made)
        return engine


class Source(Target):
    """A device with model `a`, whose engine begins steps ahead."""

    builder = AheadBuilder

    def _note(self, message: ipc.ToNode) -> None:
        if isinstance(message, Commit):
            self.answers.append(message)
        super()._note(message)


def test_a_request_leaves_once_the_step_under_way_has_ended_and_no_token_is_lost() -> None:
    source = Source()
    start = source.start()
    prepare = Prepare(move="m", source="r1", host_cache="", form=Scripted.kv_form, run=start.run, tokens=2, owner=OWNER)
    source.when(source.resident, start)
    source.when(lambda: len(source.tokens) > 20, ipc.PrepareMove(prepare, source=True))
    source.run(until=lambda: source.answered(1))
    (committed,) = source.answers
    engine = source.build.engines["a"]
    assert isinstance(committed, Commit) and isinstance(engine, AheadEngine)
    assert engine.steps_ahead > 10 and engine.calls.count("commit") == 2
    assert [token for made in source.tokens for token in made] == committed.departure.made
