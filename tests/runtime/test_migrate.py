"""The handshake of a move, on a real bus, with a fault at every step: the request is one side's in the end, nobody
waits for ever, and what lies in the host cache is given back once. The devices are played."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from runtime import migrate as migrate_module
from runtime import pipe
from runtime.migrate import Migrations, NotMoved, Stream
from store import wire
from store.bus import Bus
from tests.conftest import NatsServer, soon

MADE = [1, 2, 3]
HOST_BLOCKS = [7, 8, 9]
RUN = wire.Run(
    gateway="g",
    stream=5,
    model="m",
    request="q",
    attempt=1,
    prompt_tokens=4,
    max_tokens=99,
    payload=b"p",
    engine="e",
    ttft_s=10,
)


class PlayedDevice:
    """A device process that does what it is told, but for the message named in `fault`, on which it does as that says:
    `silent`, `refuses` or `dies`."""

    def __init__(self) -> None:
        self.heard: list[pipe.ToDevice] = []
        self.migrations: Migrations | None = None
        self.fault: tuple[type, str] | None = None
        self._stages = 0

    def send(self, message: pipe.ToDevice) -> None:
        self.heard.append(message)
        asyncio.get_running_loop().call_soon(asyncio.ensure_future, self._answer(message))

    def got(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.heard)

    async def _answer(self, message: pipe.ToDevice) -> None:
        assert self.migrations is not None
        refuses = False
        if self.fault is not None and isinstance(message, self.fault[0]):
            if self.fault[1] == "silent":
                return
            if self.fault[1] == "dies":
                self.migrations.device_lost()
                return
            refuses = True
        match message:
            case pipe.MoveOut(move) | pipe.Next(move) if refuses:
                self.migrations.heard(pipe.NotMoving(move, "it ended"))
            case pipe.MoveOut(move):
                self.migrations.heard(pipe.Staged(move, 0, HOST_BLOCKS[:1]))
            case pipe.Next(move):
                self._stages += 1
                if self._stages == 1:
                    self.migrations.heard(pipe.Staged(move, 1, HOST_BLOCKS[1:2]))
                else:
                    self.migrations.heard(pipe.Left(move, wire.Departure(MADE, 6, HOST_BLOCKS, b"")))
            case pipe.Coming(move) | pipe.Take(move):
                self.migrations.heard(pipe.Answered(move, "there is no room" if refuses else ""))
            case pipe.Adopt(move):
                self.migrations.heard(pipe.Answered(move, "it is not expected here" if refuses else ""))
                if not refuses:
                    await self.migrations.landed_here(move)


class PlayedNode:
    """A host of migrations."""

    epoch = 3
    host_cache_id = "cache"

    def __init__(self, bus: Bus, id: str) -> None:
        self.id, self.played = id, PlayedDevice()
        self.streams: dict[tuple[str, int], Stream] = {}
        self.moved: list[wire.Moved] = []
        self.given_back: list[wire.Run] = []
        self.refuses: wire.Reply | None = None
        self.cancelled: list[int] = []
        self.migrations = self.played.migrations = Migrations(bus, self)
        self._bus = bus

    async def start(self) -> None:
        await self.migrations.start()
        await self._bus.subscribe(wire.cancel_subject(self.id), self._cancel)

    async def _cancel(self, data: bytes) -> None:
        self.cancelled += wire.decode(wire.Cancel, data).streams

    def device(self) -> pipe.NodeEnd | None:
        return self.played  # type: ignore[return-value]

    def refusal(self, run: wire.Run) -> wire.Reply | None:
        return self.refuses

    def stream(self, gateway: str, number: int) -> Stream | None:
        return self.streams.get((gateway, number))

    def take_over(self, run: wire.Run, at: int) -> int:
        self.streams[run.gateway, run.stream] = Stream(run, 0.0, at)
        return 41

    def give_back(self, run: wire.Run) -> None:
        self.given_back.append(run)
        self.streams.pop((run.gateway, run.stream), None)

    async def hand_over(self, gateway: str, number: int, moved: wire.Moved) -> None:
        del self.streams[gateway, number]
        self.moved.append(moved)


Nodes = tuple[PlayedNode, PlayedNode]


@pytest.fixture
async def nodes(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    """r1 has a stream; r2 could take it."""
    for name, seconds in {"ANSWER_S": 1.0, "REPLY_S": 2.0, "LANDED_S": 2.0}.items():
        monkeypatch.setattr(migrate_module, name, seconds)
    async with contextlib.AsyncExitStack() as stack:
        buses = [await stack.enter_async_context(Bus.connect(nats_server.url, f"r{n}")) for n in (1, 2)]
        one, two = (PlayedNode(bus, f"r{n}") for n, bus in enumerate(buses, 1))
        await one.start()
        await two.start()
        await asyncio.sleep(0.05)
        one.streams["g", 5] = Stream(RUN, 0.0, len(MADE))
        yield one, two


async def test_a_move_ends_with_one_owner_who_knows_all(nodes: Nodes) -> None:
    one, two = nodes
    await one.migrations.move("g", 5, "r2")
    assert not one.streams and one.moved == [wire.Moved("r2", 3, 41)]
    assert two.streams["g", 5].at == len(MADE)
    taken = [message for message in two.played.heard if isinstance(message, pipe.Take)]
    assert [(take.first, take.host) for take in taken] == [(0, [7]), (1, [8])]
    (adopted,) = (message for message in two.played.heard if isinstance(message, pipe.Adopt))
    assert adopted.departure == wire.Departure(MADE, 6, HOST_BLOCKS, b"")
    await soon(lambda: one.played.got(pipe.Gone) == 1)
    assert one.played.got(pipe.Stay) == 0


FAULTS = [
    ("source", pipe.MoveOut, "silent"),
    ("source", pipe.MoveOut, "refuses"),
    ("source", pipe.MoveOut, "dies"),
    ("source", pipe.Next, "silent"),
    ("source", pipe.Next, "refuses"),
    ("source", pipe.Next, "dies"),
    ("target", pipe.Coming, "silent"),
    ("target", pipe.Coming, "refuses"),
    ("target", pipe.Take, "silent"),
    ("target", pipe.Take, "refuses"),
    ("target", pipe.Take, "dies"),
    ("target", pipe.Adopt, "silent"),
    ("target", pipe.Adopt, "refuses"),
    ("target", pipe.Adopt, "dies"),
]


@pytest.mark.parametrize(("side", "step", "how"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
async def test_a_fault_at_any_step_leaves_it_where_it_was(nodes: Nodes, side: str, step: type, how: str) -> None:
    one, two = nodes
    (one if side == "source" else two).played.fault = (step, how)
    with pytest.raises(NotMoved):
        async with asyncio.timeout(20):
            await one.migrations.move("g", 5, "r2")
    if how != "dies":
        await soon(lambda: two.played.got(pipe.NotComing) == two.played.got(pipe.Coming))
    assert list(one.streams) == [("g", 5)] and not two.streams and not one.moved
    assert not one.streams["g", 5].moving
    assert one.played.got(pipe.Gone) == 0
    began, ended_itself = one.played.got(pipe.MoveOut), side == "source" and how in ("refuses", "dies")
    assert one.played.got(pipe.Stay) == (1 if began and not ended_itself else 0)


async def test_a_commit_whose_answer_is_lost_is_asked_again_and_done_once(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes
    ask, lost = one.migrations._ask, []

    async def forgetful(subject: str, message: wire.Message) -> wire.Reply:
        reply = await ask(subject, message)
        if isinstance(message, wire.Commit) and not lost:
            lost.append(reply)
            raise NotMoved("no answer") from migrate_module.BusError("no answer")
        return reply

    monkeypatch.setattr(one.migrations, "_ask", forgetful)
    landed = two.migrations.landed_here

    async def later(move: str) -> None:
        await asyncio.sleep(0.3)
        await landed(move)

    monkeypatch.setattr(two.migrations, "landed_here", later)
    await one.migrations.move("g", 5, "r2")
    assert lost and two.played.got(pipe.Adopt) == 1 and list(two.streams) == [("g", 5)] and not one.streams


async def test_what_never_lands_is_given_up(nodes: Nodes) -> None:
    one, two = nodes
    two.migrations.landed_here = _nothing  # type: ignore[method-assign]
    await one.migrations.move("g", 5, "r2")
    assert one.played.got(pipe.Gone) == 0
    await soon(lambda: one.played.got(pipe.Gone) == 1)


async def _nothing(move: str) -> None:
    pass


async def test_a_runtime_of_another_host_or_that_refuses_is_no_target(nodes: Nodes) -> None:
    one, two = nodes
    two.host_cache_id = "another"  # type: ignore[misc]
    with pytest.raises(NotMoved, match="on another host than r1"):
        await one.migrations.move("g", 5, "r2")
    two.host_cache_id = "cache"  # type: ignore[misc]
    two.refuses = wire.Reply(refusal=wire.Refusal.DRAINING, reason="it leaves")
    with pytest.raises(NotMoved, match="it leaves"):
        await one.migrations.move("g", 5, "r2")
    with pytest.raises(NotMoved, match="no answer"):
        await one.migrations.move("g", 5, "r9")
    assert one.played.got(pipe.MoveOut) == 0


async def test_who_was_cancelled_in_the_last_moment_is_cancelled_there(nodes: Nodes) -> None:
    one, two = nodes
    take_over = two.take_over

    def cancelled_meanwhile(run: wire.Run, at: int) -> int:
        del one.streams["g", 5]
        return take_over(run, at)

    two.take_over = cancelled_meanwhile  # type: ignore[method-assign]
    await one.migrations.move("g", 5, "r2")
    await soon(lambda: two.cancelled == [5])
    assert not one.moved


async def test_a_cancel_that_comes_to_the_old_place_is_passed_on(nodes: Nodes) -> None:
    one, two = nodes
    await one.migrations.move("g", 5, "r2")
    await one.migrations.forward(wire.Cancel(gateway="g", streams=[4, 5]))
    await soon(lambda: two.cancelled == [5])


async def test_an_offer_of_a_runtime_that_died_is_forgotten(nodes: Nodes) -> None:
    one, two = nodes
    offer = wire.Offer(move="m", source="r1", host_cache="cache", run=RUN, tokens=7)
    assert wire.decode(wire.Reply, await one._bus.request(wire.offer_subject("r2"), offer)).refusal is None
    two.migrations.sweep(time.monotonic())
    assert two.played.got(pipe.NotComing) == 0
    two.migrations.sweep(time.monotonic() + migrate_module.COMING_S + 1)
    assert two.played.got(pipe.NotComing) == 1
    commit = wire.Commit(move="m", departure=wire.Departure(MADE, 6, HOST_BLOCKS, b""))
    late = wire.decode(wire.Reply, await one._bus.request(wire.commit_subject("r2"), commit))
    assert "not known here" in late.reason and not two.streams


async def test_a_move_that_is_broken_off_is_called_off(nodes: Nodes) -> None:
    one, two = nodes
    one.played.fault = (pipe.MoveOut, "silent")
    moving = asyncio.create_task(one.migrations.move("g", 5, "r2"))
    await soon(lambda: two.played.got(pipe.Coming) == 1 and one.played.got(pipe.MoveOut) == 1)
    moving.cancel()
    await soon(lambda: two.played.got(pipe.NotComing) == 1)
    assert list(one.streams) == [("g", 5)] and not one.streams["g", 5].moving


async def test_one_request_moves_once_at_a_time(nodes: Nodes) -> None:
    one, _ = nodes
    moves = await asyncio.gather(*(one.migrations.move("g", 5, "r2") for _ in range(3)), return_exceptions=True)
    assert [type(move) for move in moves].count(NotMoved) == 2 and len(one.moved) == 1
