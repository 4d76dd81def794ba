"""A request whose runtime is lost goes on at a second runtime, once, from the last token that the client has. The test
plays the runtimes, on a real bus."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from gateway.inference.timing import Timing
from gateway.streams import dispatch
from gateway.streams.dispatch import Dispatcher, Unserved
from gateway.streams.relay import Relay
from store.bus import Bus
from store.contract import wire
from store.contract.wire import Delta, Finish, ModelState, Refusal, Residency
from tests.conftest import NatsServer
from tests.gateway.plane import Plane, until
from tests.gateway.streams.test_relay import ScriptedRuntime, run


class Taken:
    """A taker that remembers tokens, ends and errors."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Finish] = {}
        self.errors: dict[str, str] = {}
        self.spent: list[tuple[int, int]] = []

    def made(self, deltas: list[tuple[str, Delta]]) -> None:
        for id, delta in deltas:
            assert id not in self.ended and id not in self.errors, "something came after the end"
            assert delta.at == len(self.tokens.setdefault(id, []))
            self.tokens[id] += delta.tokens
            self.spent.append((delta.spent.gpu_us, delta.spent.switch_us))
            if delta.finish is not None:
                self.ended[id] = delta.finish

    def failed(self, request: str, error: str, refused: bool = False) -> None:
        assert request not in self.errors and request not in self.ended
        self.errors[request] = error


class Runtimes:
    """Two scripted runtimes with the model, and a dispatcher in front of them."""

    def __init__(self, plane: Plane, relay: Relay, buses: list[Bus]) -> None:
        self.plane, self.taken = plane, Taken()
        self.timings: dict[str, Timing] = {}
        self.dispatcher = Dispatcher(relay, plane.fleet, self.taken, 60.0)
        self.all = {id: ScriptedRuntime(bus, epoch=1, id=id) for id, bus in zip(("r1", "r2"), buses, strict=True)}

    async def say(self, **running: int) -> None:
        """Put leases: `running` has the number of requests by runtime. A runtime not named knows no model."""
        self._running = running
        for id in self.all:
            here = ModelState(residency=Residency.RESIDENT, running=running[id]) if id in running else None
            await self.plane.report({"m": here} if here else {}, id)

    async def keep_saying(self) -> None:
        """Keep renewing the leases, as runtimes do."""
        while True:
            await asyncio.sleep(1)
            await self.say(**self._running)

    async def submit(self, id: str = "a", deadline_s: float = 5.0) -> None:
        now = time.monotonic()
        timing = self.timings[id] = Timing(now, self.plane.metrics.tally("t", "d"))
        await self.dispatcher.submit(id, run(0), now + 10, now + deadline_s, timing)

    async def taken_by(self, id: str, runs: int = 1) -> wire.Run:
        """Wait until the runtime was asked for `runs` requests. Returns the last request."""
        runtime = self.all[id]

        async def asked() -> bool:
            return len(runtime.runs) >= runs

        await until(asked)
        assert len(runtime.runs) == runs
        return runtime.runs[-1]

    async def lose(self, id: str, asked: wire.Run, at: int, suspect: bool = False) -> None:
        runtime = self.all[id]
        lost = Delta(asked.stream, [], at, Finish.LOST, error="it died", suspect=suspect)
        seq = runtime.ring.last + 1
        frame = wire.encode(wire.Frame(runtime=id, epoch=1, seq=seq, deltas=[lost]))
        runtime.ring.keep(frame)
        await runtime.send(frame)


@pytest.fixture
async def two(plane: Plane, nats_server: NatsServer) -> AsyncIterator[Runtimes]:
    async with contextlib.AsyncExitStack() as stack:
        buses = [await stack.enter_async_context(Bus.connect(nats_server.url, f"r{n}")) for n in (1, 2)]
        relay = Relay(plane.bus, "g1")
        await relay.start()
        runtimes = Runtimes(plane, relay, buses)
        for runtime in runtimes.all.values():
            await runtime.start()
        await runtimes.say(r1=1, r2=0)  # a request of the model is at r1: the next request follows
        saying = asyncio.create_task(runtimes.keep_saying())
        yield runtimes
        saying.cancel()
        for runtime in runtimes.all.values():
            runtime.stop()
        relay.stop()


def open_requests(two: Runtimes) -> dict[str, int]:
    """Number of the gateway's open requests at each runtime that has some, by the gateway's books."""
    books = {id: sum(seen.own.values()) for id, seen in two.plane.fleet._seen.runtimes.items()}
    return {id: count for id, count in books.items() if count}


async def ended(two: Runtimes, id: str = "a") -> None:
    async def is_over() -> bool:
        return id in two.taken.ended or id in two.taken.errors

    await until(is_over)


async def test_a_lost_request_goes_on_elsewhere_with_the_tokens_that_its_client_has(two: Runtimes) -> None:
    await two.submit()
    first = await two.taken_by("r1")
    await two.all["r1"].make(first.stream, 0, [5, 6])
    await two.lose("r1", first, 2)
    second = await two.taken_by("r2")
    assert (second.made, second.attempt, second.first_late) == ([5, 6], first.attempt + 1, False)
    assert second.stream != first.stream and second.payload == first.payload and second.ttft_s < first.ttft_s
    await two.all["r1"].make(first.stream, 2, [9, 9])  # from the abandoned attempt: dropped
    await two.all["r2"].make(second.stream, 2, [7], Finish.STOP)
    await ended(two)
    assert two.taken.tokens == {"a": [5, 6, 7]} and two.taken.ended == {"a": Finish.STOP}


async def test_what_a_request_costs_is_the_sum_over_its_runtimes_and_never_falls(two: Runtimes) -> None:
    await two.submit()
    first = await two.taken_by("r1")
    await two.all["r1"].make(first.stream, 0, [5], gpu_us=100)
    await two.all["r1"].make(first.stream, 1, [6], gpu_us=200)
    await two.lose("r1", first, 2)
    second = await two.taken_by("r2")
    await two.all["r2"].make(second.stream, 2, [7], gpu_us=50)
    moved = wire.Moved("r1", 1, two.all["r1"].ring.last)
    await two.all["r2"].make(second.stream, 3, [], moved=moved)
    await two.all["r1"].make(second.stream, 3, [8], Finish.STOP, gpu_us=30)
    await ended(two)
    assert two.taken.spent == [(100, 10), (200, 20), (250, 25), (280, 28)]


async def test_a_runtime_that_falls_silent_loses_its_requests_to_another(two: Runtimes) -> None:
    await two.submit()
    first = await two.taken_by("r1")
    await two.all["r1"].make(first.stream, 0, [5])
    two.all["r1"].mute = True
    second = await two.taken_by("r2")
    assert second.made == [5]
    assert two.all["r1"].cancelled == [first.stream]  # in case r1 is alive after all


async def test_who_is_lost_before_it_is_known_to_be_taken_goes_on_once(two: Runtimes) -> None:
    first, second = two.all["r1"], two.all["r2"]
    await two.submit("before")  # frames of r1 are in order from now on
    first.answers_after_s = 2.5  # too late
    submitted = asyncio.create_task(two.submit())
    await two.lose("r1", await two.taken_by("r1", 2), 0)
    again = await two.taken_by("r2")
    await second.make(again.stream, 0, [1])
    await submitted
    await second.make(again.stream, 1, [2], Finish.STOP)
    await ended(two)
    assert two.taken.tokens == {"a": [1, 2]} and not two.taken.errors
    assert (len(first.runs), len(second.runs)) == (2, 1)
    assert open_requests(two) == {"r1": 1}


async def test_who_leaves_while_it_is_both_lost_and_not_known_to_be_taken_is_gone(two: Runtimes) -> None:
    first, second = two.all["r1"], two.all["r2"]
    await two.submit("before")
    first.answers_after_s = 60.0
    submitted = asyncio.create_task(two.submit())
    await two.lose("r1", await two.taken_by("r1", 2), 0)
    again = await two.taken_by("r2")
    submitted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitted

    async def told() -> bool:
        return again.stream in second.cancelled

    await until(told)
    assert open_requests(two) == {"r1": 1}


async def test_without_another_runtime_it_waits_for_the_same_one(two: Runtimes) -> None:
    await two.say(r1=0)
    await two.submit()
    first = await two.taken_by("r1")
    await two.all["r1"].make(first.stream, 0, [5])
    await two.lose("r1", first, 1)
    again = await two.taken_by("r1", runs=2)
    assert again.made == [5]


async def test_who_was_twice_at_the_same_token_in_a_step_that_killed_is_not_tried_again(two: Runtimes) -> None:
    await two.submit()
    first = await two.taken_by("r1")
    await two.all["r1"].make(first.stream, 0, [5])
    await two.lose("r1", first, 1, suspect=True)
    second = await two.taken_by("r2")
    await two.lose("r2", second, 1, suspect=True)
    await ended(two)
    assert "after token 1 of this request its runtime failed twice (it died)" in two.taken.errors["a"]
    await asyncio.sleep(0.3)
    assert len(two.all["r1"].runs) == 1


async def test_who_made_a_token_in_between_is_no_suspect(two: Runtimes) -> None:
    await two.submit()
    first = await two.taken_by("r1")
    await two.lose("r1", first, 0, suspect=True)
    second = await two.taken_by("r2")
    await two.all["r2"].make(second.stream, 0, [5])
    await two.lose("r2", second, 1, suspect=True)
    assert (await two.taken_by("r1", runs=2)).made == [5]


async def test_who_is_cancelled_while_it_waits_for_another_runtime_is_gone(two: Runtimes) -> None:
    await two.say(r1=0)
    await two.submit()
    first = await two.taken_by("r1")
    two.all["r1"].refusal = Refusal.DRAINING
    await two.lose("r1", first, 0)
    await asyncio.sleep(0.2)
    await two.dispatcher.cancel(["a"])
    two.all["r1"].refusal = None
    await asyncio.sleep(0.8)
    assert len(two.all["r1"].runs) == 1 and not two.taken.errors and not two.taken.ended


async def test_who_finds_no_other_runtime_in_its_time_ends_with_the_reason(two: Runtimes) -> None:
    two.dispatcher._resume_s = 0.7
    await two.say(r1=0)
    await two.submit()
    first = await two.taken_by("r1")
    two.all["r1"].refusal = Refusal.DRAINING
    await two.lose("r1", first, 0)
    await ended(two)
    assert two.taken.errors["a"] == "the request waited its longest time: told to"


async def test_an_error_is_the_end(two: Runtimes) -> None:
    await two.submit()
    first = await two.taken_by("r1")
    await two.all["r1"].make(first.stream, 0, [], Finish.ERROR)
    await ended(two)
    assert two.taken.errors == {"a": "the engine ended the request with an error"} and not two.all["r2"].runs


async def test_who_ends_in_a_batch_in_which_another_goes_wrong_has_its_last_tokens(
    two: Runtimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("a", "b"):
        await two.submit(id)
    await two.taken_by("r1", runs=2)
    ends, goes_wrong = sorted(two.all["r1"].runs, key=lambda asked: asked.stream)
    came, wrong = Timing.came, [ZeroDivisionError()]

    def goes_wrong_once(timing: Timing, delta: Delta, now: float) -> None:
        if wrong and timing is two.timings["b"]:
            raise wrong.pop()
        came(timing, delta, now)

    monkeypatch.setattr(Timing, "came", goes_wrong_once)
    deltas = [Delta(ends.stream, [7], 0, Finish.STOP), Delta(goes_wrong.stream, [8], 0)]
    await two.all["r1"].send(wire.encode(wire.Frame(runtime="r1", epoch=1, seq=1, deltas=deltas)))

    async def over() -> bool:
        return "b" in two.taken.errors

    await until(over)
    assert two.taken.tokens == {"a": [7]} and two.taken.ended == {"a": Finish.STOP}


async def test_a_first_attempt_that_nobody_takes_says_why(two: Runtimes) -> None:
    for runtime in two.all.values():
        runtime.refusal = Refusal.BUSY
    with pytest.raises(Unserved, match="told to"):
        await two.submit(deadline_s=0.3)
    await two.say()
    with pytest.raises(Unserved, match="no runtime is up"):
        await two.submit("b", deadline_s=0.3)


async def test_of_a_request_that_its_client_left_all_is_heard_that_was_made_until_the_runtime_heard(
    two: Runtimes,
) -> None:
    await two.submit()
    asked = await two.taken_by("r1")
    runtime = two.all["r1"]
    await runtime.make(asked.stream, 0, [5])
    assert await two.dispatcher.leave(["a", "unknown"]) == {"a"}
    assert await two.dispatcher.leave(["a"]) == {"a"}, "asked again it is told again"
    await runtime.make(asked.stream, 1, [6, 7])
    await runtime.make(asked.stream, 3, [], Finish.ABORT, gpu_us=40)
    await ended(two)
    assert two.taken.tokens["a"] == [5, 6, 7] and two.taken.ended["a"] is Finish.ABORT
    assert two.taken.spent[-1] == (40, 4) and runtime.cancelled == [asked.stream]
    assert await two.dispatcher.leave(["a"]) == set()


async def test_a_request_that_its_client_left_is_not_computed_again_when_its_runtime_is_lost(two: Runtimes) -> None:
    await two.submit()
    asked = await two.taken_by("r1")
    await two.all["r1"].make(asked.stream, 0, [5])
    await two.dispatcher.leave(["a"])
    await two.lose("r1", asked, 1)
    await ended(two)
    assert two.taken.errors["a"] == "it died" and two.all["r2"].runs == []


async def test_a_runtime_that_does_not_say_how_far_a_request_came_is_not_waited_for_without_end(
    two: Runtimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "PARTING_S", 0.3)
    await two.submit()
    asked = await two.taken_by("r1")
    await two.all["r1"].make(asked.stream, 0, [5])
    assert await two.dispatcher.leave(["a"]) == {"a"}
    await ended(two)
    assert "within 0.3 s" in two.taken.errors["a"] and two.taken.tokens["a"] == [5]
