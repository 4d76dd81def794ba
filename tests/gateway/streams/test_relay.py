"""Streams over a real NATS server from a scripted runtime that loses frames on request: a gap is repaired or ends the
stream with an error, never silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.streams import relay as relay_module
from gateway.streams.relay import Relay, RuntimeRefused
from runtime.core.ledgers.replay_buffer import Ring
from store.bus import Bus, NoAnswer
from store.contract import wire
from store.contract.wire import Delta, Finish
from tests.conftest import NatsServer, soon


class ScriptedRuntime:
    """Speaks the runtime's side of the wire; `lose=True` numbers and keeps a frame and does not send it."""

    def __init__(self, bus: Bus, epoch: int = 1, id: str = "r1") -> None:
        self.bus, self.epoch, self.id = bus, epoch, id
        self.ring = Ring()
        self.runs: list[wire.Run] = []
        self.cancelled: list[int] = []
        self.refusal: wire.Refusal | None = None
        self.mute = False  # no heartbeats
        self.answers_after_s = 0.0
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.bus.respond(wire.run_subject(self.id), self._run)
        await self.bus.respond(wire.repair_subject(self.id), self._repair)
        await self.bus.subscribe(wire.cancel_subject(self.id), self._cancel)
        self._beating = asyncio.create_task(self._beat())

    def stop(self) -> None:
        assert self._beating is not None
        self._beating.cancel()

    async def make(
        self,
        stream: int,
        at: int,
        tokens: list[int],
        finish: Finish | None = None,
        lose: bool = False,
        moved: wire.Moved | None = None,
        gpu_us: int = 0,
    ) -> bytes:
        deltas = [Delta(stream, tokens, at, finish, moved=moved, spent=wire.Spent(gpu_us, gpu_us // 10))]
        frame = wire.encode(wire.Frame(runtime=self.id, epoch=self.epoch, seq=self.ring.last + 1, deltas=deltas))
        self.ring.keep(frame)
        if not lose:
            await self.send(frame)
        return frame

    async def send(self, frame: bytes) -> None:
        await self.bus.publish(wire.frame_subject("g1"), frame)

    async def _run(self, data: bytes) -> wire.Reply:
        if self.refusal is not None:
            return wire.Reply(refusal=self.refusal, reason="told to")
        self.runs.append(wire.decode(wire.Run, data))
        answer = wire.Reply(epoch=self.epoch, seq=self.ring.last)
        await asyncio.sleep(self.answers_after_s)
        return answer

    async def _repair(self, data: bytes) -> wire.Message:
        repair = wire.decode(wire.Repair, data)
        frames, complete = self.ring.since(repair.first, repair.last)
        return wire.Repaired(frames=frames, complete=complete)

    async def _cancel(self, data: bytes) -> None:
        self.cancelled += wire.decode(wire.Cancel, data).streams

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if not self.mute:
                await self.send(wire.encode(wire.Frame(runtime=self.id, epoch=self.epoch, seq=self.ring.last)))


class Heard:
    """A sink that remembers tokens and the end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: Delta | None = None
        self._ended = asyncio.Event()

    def deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert self.end is None, "something came after the end"
            self.tokens += delta.tokens
            if delta.finish is not None:
                self.end = delta
                self._ended.set()

    async def until_end(self) -> Delta:
        async with asyncio.timeout(30):
            await self._ended.wait()
        assert self.end is not None
        return self.end


def run(stream: int) -> wire.Run:
    return wire.Run(
        gateway="g1",
        stream=stream,
        model="m",
        request="q",
        attempt=1,
        prompt_tokens=1,
        max_tokens=9,
        payload=b"",
        engine="e",
    )


@contextlib.asynccontextmanager
async def joined(nats: NatsServer) -> AsyncIterator[tuple[Relay, ScriptedRuntime]]:
    async with Bus.connect(nats.url, "gateway") as gateway_bus, Bus.connect(nats.url, "runtime") as runtime_bus:
        relay, runtime = Relay(gateway_bus, "g1"), ScriptedRuntime(runtime_bus)
        await relay.start()
        await runtime.start()
        await asyncio.sleep(0.05)  # subscriptions reach the server
        yield relay, runtime
        runtime.stop()
        relay.stop()


async def test_tokens_come_in_order_and_end(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        await relay.run("r1", run(1), heard)
        await runtime.make(1, 0, [1, 2])
        await runtime.make(1, 2, [3], Finish.STOP)
        assert (await heard.until_end()).finish is Finish.STOP
        assert heard.tokens == [1, 2, 3] and relay.open_streams == 0


async def test_a_lost_frame_is_repaired_before_later_ones_are_delivered(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        await relay.run("r1", run(1), heard)
        await runtime.make(1, 0, [1])
        await runtime.make(1, 1, [2], lose=True)
        await runtime.make(1, 2, [3], lose=True)
        await runtime.make(1, 3, [4], Finish.STOP)
        await heard.until_end()
        assert heard.tokens == [1, 2, 3, 4]


async def test_a_lost_last_frame_is_noticed_by_the_heartbeat(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        await relay.run("r1", run(1), heard)
        await runtime.make(1, 0, [1])
        await runtime.make(1, 1, [2], Finish.LENGTH, lose=True)
        await heard.until_end()
        assert heard.tokens == [1, 2]


async def test_a_frame_sent_twice_is_delivered_once(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        await relay.run("r1", run(1), heard)
        frame = await runtime.make(1, 0, [1])
        await runtime.send(frame)
        await runtime.make(1, 1, [2], Finish.STOP)
        await heard.until_end()
        assert heard.tokens == [1, 2]


async def test_what_can_no_longer_be_repaired_is_lost_to_that_runtime(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        lost, later = Heard(), Heard()
        await relay.run("r1", run(1), lost)
        await runtime.make(1, 0, [1])
        await runtime.make(1, 1, [2], lose=True)
        runtime.ring.clear()
        await runtime.make(1, 2, [3])
        end = await lost.until_end()
        assert end.finish is Finish.LOST and "lost on the way" in end.error
        assert lost.tokens == [1]
        await soon(lambda: runtime.cancelled == [1])  # the runtime must not go on without a client
        await relay.run("r1", run(2), later)  # the runtime is as good as before
        await runtime.make(2, 0, [7], Finish.STOP)
        await later.until_end()
        assert later.tokens == [7]


async def test_a_silent_runtime_is_taken_for_dead_within_three_seconds(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        await relay.run("r1", run(1), heard)
        await runtime.make(1, 0, [1])
        runtime.mute = True
        started = asyncio.get_running_loop().time()
        end = await heard.until_end()
        assert end.finish is Finish.LOST and "silent" in end.error
        assert asyncio.get_running_loop().time() - started < 3.5


async def test_a_runtime_that_was_just_asked_has_its_time_to_answer_however_silent_it_was(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 0.3)
    async with joined(nats_server) as (relay, runtime):
        old, new = Heard(), Heard()
        await relay.run("r1", run(1), old)
        runtime.mute, runtime.answers_after_s = True, 1.5
        await relay.run("r1", run(2), new)
        assert old.end is not None and "silent" in old.end.error
        await runtime.make(2, 0, [5], Finish.STOP)
        assert (await new.until_end()).finish is Finish.STOP and new.tokens == [5]


async def test_what_was_said_of_a_stream_and_lost_before_its_answer_came_is_the_end_of_it(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(nats_server) as (relay, runtime):
        old, new = Heard(), Heard()
        await relay.run("r1", run(1), old)
        runtime.answers_after_s = 1.0
        asked = asyncio.create_task(relay.run("r1", run(2), new))
        await soon(lambda: len(runtime.runs) == 2)
        await runtime.make(2, 0, [5], Finish.STOP, lose=True)
        runtime.ring.clear()  # nothing can be repaired
        await old.until_end()
        await asked
        assert (await new.until_end()).finish is Finish.LOST
        later = Heard()
        runtime.answers_after_s = 0
        await relay.run("r1", run(3), later)
        await runtime.make(3, 0, [7], Finish.STOP)
        await later.until_end()
        assert later.tokens == [7]


class Broken(Heard):
    def deliver(self, deltas: list[Delta]) -> None:
        if deltas[0].tokens:
            raise KeyError("a fault of ours")
        super().deliver(deltas)


async def test_what_goes_wrong_with_one_stream_costs_no_other(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        broken = Broken()
        await relay.run("r1", run(1), broken)
        await relay.run("r1", run(2), heard)
        deltas = [Delta(1, [1], 0), Delta(2, [2], 0, Finish.STOP)]
        frame = wire.encode(wire.Frame(runtime="r1", epoch=1, seq=1, deltas=deltas))
        runtime.ring.keep(frame)
        await runtime.send(frame)
        await heard.until_end()
        assert heard.tokens == [2]
        assert (await broken.until_end()).finish is Finish.ERROR  # no gap instead
        await soon(lambda: runtime.cancelled == [1])
        last = Heard()
        await relay.run("r1", run(3), last)
        runtime.mute = True
        await last.until_end()  # the watch goes on, although telling the first sink failed


async def test_a_restarted_runtime_ends_its_old_streams_and_serves_new_ones(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        old, new = Heard(), Heard()
        await relay.run("r1", run(1), old)
        await runtime.make(1, 0, [1])
        runtime.epoch, runtime.ring = 2, Ring()
        await relay.run("r1", run(2), new)
        assert "restarted" in (await old.until_end()).error
        await runtime.make(2, 0, [5], Finish.STOP)
        await new.until_end()
        assert (old.tokens, new.tokens) == ([1], [5])


async def test_a_runtime_whose_clock_went_back_while_it_was_away_serves_on(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        for stream, epoch in ((1, 5), (2, 3)):
            runtime.epoch, runtime.ring = epoch, Ring()
            heard = Heard()
            await relay.run("r1", run(stream), heard)
            await runtime.make(stream, 0, [7, epoch], Finish.STOP)
            assert (await heard.until_end()).finish is Finish.STOP and heard.tokens == [7, epoch]
            await soon(lambda: not relay._sources)


async def test_cancel_reaches_the_runtime_and_nothing_more_is_delivered(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        await relay.run("r1", run(1), heard)
        await relay.cancel([1])
        await runtime.make(1, 0, [1])
        await soon(lambda: len(runtime.cancelled) == 2)  # for the cancel, and for the token made afterwards
        assert set(runtime.cancelled) == {1} and heard.tokens == [] and heard.end is None


async def test_a_refusal_says_why(nats_server: NatsServer) -> None:
    async with joined(nats_server) as (relay, runtime):
        runtime.refusal = wire.Refusal.DRAINING
        with pytest.raises(RuntimeRefused, match="told to") as caught:
            await relay.run("r1", run(1), Heard())
        assert caught.value.refusal is wire.Refusal.DRAINING and relay.open_streams == 0
        with pytest.raises(NoAnswer):
            await relay.run("nobody", run(2), Heard())


async def test_a_restart_of_nats_in_mid_stream_loses_nothing(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 4.0)
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        await relay.run("r1", run(1), heard)
        await runtime.make(1, 0, [1])
        nats_server.kill()
        await runtime.make(1, 1, [2], lose=True)  # as if the frame had been on the wire when the server died
        await asyncio.sleep(0.5)
        nats_server.start()
        await runtime.make(1, 2, [3], Finish.STOP)
        await heard.until_end()
        assert heard.tokens == [1, 2, 3]


async def test_a_bus_that_stays_away_ends_the_streams(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "BUS_GRACE_S", 1.0)
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        await relay.run("r1", run(1), heard)
        nats_server.kill()
        end = await heard.until_end()
        assert end.finish is Finish.ERROR and "bus is away" in end.error
        nats_server.start()


# ── streams that move ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def moving(nats: NatsServer) -> AsyncIterator[tuple[Relay, ScriptedRuntime, ScriptedRuntime, Heard]]:
    """A stream with two tokens from r1, and r2, which the relay does not know yet."""
    async with joined(nats) as (relay, one), Bus.connect(nats.url, "other") as bus:
        two = ScriptedRuntime(bus, epoch=7, id="r2")
        await two.start()
        heard = Heard()
        await relay.run("r1", run(1), heard)
        await one.make(1, 0, [1, 2])
        yield relay, one, two, heard
        two.stop()


async def test_a_stream_that_moves_goes_on_without_gap_or_repeat(nats_server: NatsServer) -> None:
    async with moving(nats_server) as (_, one, two, heard):
        await one.make(1, 2, [], moved=wire.Moved("r2", 7, two.ring.last))
        await two.make(1, 2, [3])
        await two.make(1, 3, [4], Finish.STOP)
        await heard.until_end()
        assert heard.tokens == [1, 2, 3, 4] and not one.cancelled and not two.cancelled


@pytest.mark.parametrize("known", [False, True])
async def test_what_comes_from_there_before_the_last_from_here_waits_for_it(
    nats_server: NatsServer, known: bool
) -> None:
    async with moving(nats_server) as (relay, one, two, heard):
        other = Heard()
        if known:
            await relay.run("r2", run(2), other)
            await two.make(2, 0, [9])
        began = two.ring.last
        await two.make(1, 3, [4])
        await two.make(1, 4, [5], Finish.LENGTH)
        await asyncio.sleep(0.2)
        assert heard.tokens == [1, 2]
        await one.make(1, 2, [3])
        await one.make(1, 3, [], moved=wire.Moved("r2", 7, began))
        await heard.until_end()
        assert heard.tokens == [1, 2, 3, 4, 5] and not two.cancelled
        assert other.tokens == [9] * known


async def test_a_stream_that_moves_on_before_its_first_move_is_known_loses_nothing(nats_server: NatsServer) -> None:
    async with moving(nats_server) as (relay, one, two, heard), Bus.connect(nats_server.url, "third") as bus:
        three = ScriptedRuntime(bus, epoch=9, id="r3")
        await three.start()
        for number, runtime in enumerate((two, three), 2):  # both are known to the relay
            await relay.run(runtime.id, run(number), Heard())
        began = two.ring.last
        await three.make(1, 4, [5])
        await three.make(1, 5, [6], Finish.STOP)
        await two.make(1, 3, [4])
        await two.make(1, 4, [], moved=wire.Moved("r3", 9, 0))
        await asyncio.sleep(0.2)
        await one.make(1, 2, [3])
        await one.make(1, 3, [], moved=wire.Moved("r2", 7, began))
        assert (await heard.until_end()).finish is Finish.STOP
        assert heard.tokens == [1, 2, 3, 4, 5, 6]
        three.stop()


async def test_a_move_to_a_runtime_that_was_restarted_since_is_lost_and_nothing_else(nats_server: NatsServer) -> None:
    async with moving(nats_server) as (relay, one, two, heard):
        other = Heard()
        two.epoch = 8
        await relay.run("r2", run(2), other)
        await one.make(1, 2, [], moved=wire.Moved("r2", 7, 0))
        end = await heard.until_end()
        assert end.finish is Finish.LOST and "restarted" in end.error
        await two.make(2, 0, [9], Finish.STOP)
        assert (await other.until_end()).finish is Finish.STOP and other.tokens == [9]


async def test_the_first_frames_from_there_can_be_repaired_too(nats_server: NatsServer) -> None:
    async with moving(nats_server) as (_, one, two, heard):
        began = two.ring.last
        await two.make(1, 2, [3], lose=True)
        await one.make(1, 2, [], moved=wire.Moved("r2", 7, began))
        await two.make(1, 3, [4], Finish.STOP)
        await heard.until_end()
        assert heard.tokens == [1, 2, 3, 4]


async def test_who_works_for_a_stream_that_nobody_has_is_told_so(nats_server: NatsServer) -> None:
    """The runtime took over a request from a runtime that died before announcing the move."""
    async with moving(nats_server) as (_, _, two, heard):
        await two.make(17, 0, [3])
        await soon(lambda: two.cancelled == [17])
        assert heard.tokens == [1, 2]


async def test_a_stream_whose_new_runtime_falls_silent_is_lost(nats_server: NatsServer) -> None:
    async with moving(nats_server) as (_, one, two, heard):
        two.mute = True
        await one.make(1, 2, [], moved=wire.Moved("r2", 7, two.ring.last))
        end = await heard.until_end()
        assert end.finish is Finish.LOST and "r2 has been silent" in end.error
        await soon(lambda: two.cancelled == [1])
