"""The handshake of a move, on a real bus, within a host and between two hosts, with a fault at every step. In the end
exactly one side has the request, no side waits for ever, and blocks in the host caches are given back once. The devices
are played, the bytes are real."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from runtime import ipc
from runtime.migration import migrate as migrate_module
from runtime.migration import transport
from runtime.migration.host import OpenStream
from runtime.migration.migrate import Migrations
from runtime.migration.receiver import BlockReceiver
from runtime.migration.transport import NotMoved
from store.bus import Bus
from store.contract import wire
from tests.conftest import NatsServer, soon
from tests.runtime.hosts import Fault, HostCache, Network, host_caches

MADE = [1, 2, 3]
FORM = wire.KvForm(2, 70_000, "any")
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
    """A device process that obeys, except for the message type in `fault`: then the process is `silent`, `refuses` or
    `dies`."""

    def __init__(self, cache: HostCache) -> None:
        self.heard: list[ipc.ToDevice] = []
        self.migrations: Migrations | None = None
        self.fault: tuple[type, str] | None = None
        self.blocks: list[int] = []  # blocks of the leaving request
        self.read: list[bytes] = []  # blocks of the arriving request
        self._copies, self._cache = 0, cache

    def send(self, message: ipc.ToDevice) -> None:
        self.heard.append(message)
        asyncio.get_running_loop().call_soon(asyncio.ensure_future, self._answer(message))

    def got(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.heard)

    async def _answer(self, message: ipc.ToDevice) -> None:
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
            case ipc.PrepareMove(source=True) | ipc.MoveAnswer() if refuses:
                self.migrations.heard(ipc.MoveAnswer(message.move, "it ended"))
            case ipc.PrepareMove(source=True):
                self.migrations.heard(wire.Copy(move=message.move, first=0, host=self.blocks[:1]))
            case ipc.MoveAnswer(move):
                self._copies += 1
                if self._copies == 1:
                    self.migrations.heard(wire.Copy(move=move, first=1, host=self.blocks[1:2]))
                else:
                    departure = wire.Departure(MADE, 6, self.blocks, b"")
                    self.migrations.heard(wire.Commit(move=move, departure=departure))
            case wire.Copy(move=move, first=first, host=host) if not refuses:
                assert first == len(self.read)
                self.read += self._cache.bytes_of(host, FORM.bytes)
                self.migrations.heard(ipc.MoveAnswer(move))
            case ipc.PrepareMove() | wire.Copy():
                self.migrations.heard(ipc.MoveAnswer(message.move, "there is no room" if refuses else ""))
            case wire.Commit(move=move, departure=departure):
                self.migrations.heard(ipc.MoveAnswer(move, "it is not expected here" if refuses else ""))
                if not refuses:
                    self.read += self._cache.bytes_of(departure.host[len(self.read) :], FORM.bytes)
                    await self.migrations.released(move)
            case wire.AbortMove(move=move):
                await self.migrations.released(move)


class PlayedNode:
    """A node for `Migrations`, with a played device."""

    epoch = 3

    def __init__(self, bus: Bus, id: str, cache: HostCache) -> None:
        self.id, self.played, self.cache = id, PlayedDevice(cache), cache
        self.host_cache_id = f"cache {cache.fd}"
        self.blocks, self.door = cache.blocks, BlockReceiver(cache.blocks)
        self.life = 1
        self.leases: dict[str, wire.Lease] = {}
        self.streams: dict[tuple[str, int], OpenStream] = {}
        self.moved: list[wire.Moved] = []
        self.given_back: list[wire.Run] = []
        self.refuses: wire.Reply | None = None
        self.cancelled: list[int] = []
        self.migrations = self.played.migrations = Migrations(bus, self)
        self._bus = bus

    async def start(self) -> None:
        self.door.open("127.0.0.1")
        await self.migrations.start()
        await self._bus.subscribe(wire.cancel_subject(self.id), self._cancel)

    async def _cancel(self, data: bytes) -> None:
        self.cancelled += wire.decode(wire.Cancel, data).streams

    def device(self) -> ipc.NodeEnd | None:
        return self.played  # type: ignore[return-value]

    def lease(self, runtime: str) -> wire.Lease | None:
        return self.leases.get(runtime)

    def own_lease(self) -> wire.Lease:
        address = self.door.address
        return wire.Lease(runtime=self.id, epoch=3, engine="e", host_cache=self.host_cache_id, receives_at=address)

    def form(self, model: str) -> wire.KvForm | None:
        return FORM

    def tokens_most(self, model: str) -> int:
        return 100

    async def grammar(self, run: wire.Run) -> bytes:
        return b""

    def refusal(self, run: wire.Run) -> wire.Reply | None:
        return self.refuses

    def stream(self, gateway: str, number: int) -> OpenStream | None:
        return self.streams.get((gateway, number))

    def take_over(self, run: wire.Run, at: int, made: Sequence[int] = ()) -> int:
        self.streams[run.gateway, run.stream] = OpenStream(run, 0.0, at)
        return 41

    def give_back(self, run: wire.Run) -> None:
        self.given_back.append(run)
        self.streams.pop((run.gateway, run.stream), None)

    async def hand_over(self, gateway: str, number: int, moved: wire.Moved) -> None:
        del self.streams[gateway, number]
        self.moved.append(moved)


Nodes = tuple[PlayedNode, PlayedNode]


@pytest.fixture(params=["one host", "two hosts"])
async def nodes(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Nodes]:
    """r1 has a stream, and r2 could take the stream. In the end the target's host cache holds nothing of the stream."""
    for name, seconds in {"ANSWER_S": 2.0, "REPLY_S": 3.0, "RELEASE_S": 4.0}.items():
        monkeypatch.setattr(migrate_module, name, seconds)
    monkeypatch.setattr(transport, "PARCEL_S", 0.3)
    with host_caches(1 if request.param == "one host" else 2) as caches:
        async with contextlib.AsyncExitStack() as stack:
            buses = [await stack.enter_async_context(Bus.connect(nats_server.url, f"r{n}")) for n in (1, 2)]
            one, two = (PlayedNode(bus, f"r{n}", caches[-n % len(caches)]) for n, bus in enumerate(buses, 1))
            await one.start()
            await two.start()
            one.leases = {lease.runtime: lease for lease in (one.own_lease(), two.own_lease())}
            await asyncio.sleep(0.05)
            one.streams["g", 5] = OpenStream(RUN, 0.0, len(MADE))
            one.played.blocks = one.cache.put(3, FORM.bytes, random.Random(1))
            yield one, two
            two.migrations.device_lost()
            await soon(lambda: two.blocks.taken_bytes == 0 and not two.door._serving)
            assert not two.door._expected
        for node in (one, two):
            await node.door.close()
        one.cache.drop(one.played.blocks, FORM.bytes)


between_hosts = pytest.mark.parametrize("nodes", ["two hosts"], indirect=True)


def nothing_left(two: PlayedNode) -> bool:
    """Whether the target's node holds nothing of the move."""
    return not (two.blocks.taken_bytes or two.door._expected or two.door._serving or two.migrations._arrivals)


async def test_a_move_ends_with_one_owner_who_knows_all(nodes: Nodes) -> None:
    one, two = nodes
    await one.migrations.move("g", 5, "r2")
    assert not one.streams and one.moved == [wire.Moved("r2", 3, 41)]
    assert two.streams["g", 5].at == len(MADE)
    taken = [message for message in two.played.heard if isinstance(message, wire.Copy)]
    assert [(take.first, len(take.host)) for take in taken] == [(0, 1), (1, 1)]
    (adopted,) = (message for message in two.played.heard if isinstance(message, wire.Commit))
    departure = adopted.departure
    assert departure == wire.Departure(MADE, 6, departure.host, b"")
    assert (departure.host == one.played.blocks) is (one.cache is two.cache)
    assert two.played.read == one.cache.bytes_of(one.played.blocks, FORM.bytes)
    await soon(lambda: one.played.got(wire.Release) == 1)
    await soon(lambda: nothing_left(two))
    assert one.played.got(wire.AbortMove) == 0


FAULTS = [
    ("source", ipc.PrepareMove, "silent"),
    ("source", ipc.PrepareMove, "refuses"),
    ("source", ipc.PrepareMove, "dies"),
    ("source", ipc.MoveAnswer, "silent"),
    ("source", ipc.MoveAnswer, "refuses"),
    ("source", ipc.MoveAnswer, "dies"),
    ("target", ipc.PrepareMove, "silent"),
    ("target", ipc.PrepareMove, "refuses"),
    ("target", wire.Copy, "silent"),
    ("target", wire.Copy, "refuses"),
    ("target", wire.Copy, "dies"),
    ("target", wire.Commit, "silent"),
    ("target", wire.Commit, "refuses"),
    ("target", wire.Commit, "dies"),
]


@pytest.mark.parametrize(("side", "step", "how"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
async def test_a_fault_at_any_step_leaves_it_where_it_was(nodes: Nodes, side: str, step: type, how: str) -> None:
    one, two = nodes
    (one if side == "source" else two).played.fault = (step, how)
    with pytest.raises(NotMoved):
        async with asyncio.timeout(20):
            await one.migrations.move("g", 5, "r2")
    if how != "dies":
        await soon(lambda: two.played.got(wire.AbortMove) == two.played.got(ipc.PrepareMove))
    await soon(lambda: nothing_left(two))
    assert list(one.streams) == [("g", 5)] and not two.streams and not one.moved
    assert not one.streams["g", 5].moving
    assert one.played.got(wire.Release) == 0
    began, ended_itself = one.played.got(ipc.PrepareMove), side == "source" and how in ("refuses", "dies")
    assert one.played.got(wire.AbortMove) == (1 if began and not ended_itself else 0)


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
    landed = two.migrations.released

    async def later(move: str) -> None:
        await asyncio.sleep(0.3)
        await landed(move)

    monkeypatch.setattr(two.migrations, "released", later)
    await one.migrations.move("g", 5, "r2")
    assert lost and two.played.got(wire.Commit) == 1 and list(two.streams) == [("g", 5)] and not one.streams


async def test_what_never_lands_is_given_up(nodes: Nodes) -> None:
    one, two = nodes
    two.migrations.released = _nothing  # type: ignore[method-assign]
    await one.migrations.move("g", 5, "r2")
    assert one.played.got(wire.Release) == 0
    await soon(lambda: one.played.got(wire.Release) == 1)


async def _nothing(move: str) -> None:
    pass


async def test_a_runtime_that_refuses_or_is_not_there_is_no_target(nodes: Nodes) -> None:
    one, two = nodes
    two.refuses = wire.Reply(refusal=wire.Refusal.DRAINING, reason="it leaves")
    with pytest.raises(NotMoved, match="it leaves"):
        await one.migrations.move("g", 5, "r2")
    with pytest.raises(NotMoved, match="no answer"):
        await one.migrations.move("g", 5, "r9")
    assert one.played.got(ipc.PrepareMove) == 0


async def test_who_was_cancelled_in_the_last_moment_is_cancelled_there(nodes: Nodes) -> None:
    one, two = nodes
    take_over = two.take_over

    def cancelled_meanwhile(run: wire.Run, at: int, made: Sequence[int] = ()) -> int:
        del one.streams["g", 5]
        return take_over(run, at, made)

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
    key = b"" if one.cache is two.cache else bytes(16)
    offer = wire.Prepare(move="m", source="r1", host_cache=one.host_cache_id, form=FORM, run=RUN, tokens=7, key=key)
    assert wire.decode(wire.Reply, await one._bus.request(wire.prepare_subject("r2"), offer)).refusal is None
    two.migrations.sweep(time.monotonic())
    assert two.played.got(wire.AbortMove) == 0
    two.migrations.sweep(time.monotonic() + migrate_module.OFFER_S + 1)
    assert two.played.got(wire.AbortMove) == 1
    commit = wire.Commit(move="m", departure=wire.Departure(MADE, 6, one.played.blocks, b""))
    late = wire.decode(wire.Reply, await one._bus.request(wire.commit_subject("r2"), commit))
    assert "not known here" in late.reason and not two.streams


@pytest.mark.parametrize("step", [ipc.PrepareMove, wire.Copy, wire.Commit])
async def test_a_target_whose_device_dies_says_so_at_once(nodes: Nodes, step: type) -> None:
    one, two = nodes
    two.played.fault = (step, "dies")
    began = time.monotonic()
    with pytest.raises(NotMoved, match="the runtime lost its device process"):
        await one.migrations.move("g", 5, "r2")
    assert time.monotonic() - began < migrate_module.ANSWER_S


async def test_an_offer_that_is_called_off_before_it_is_answered_is_refused(nodes: Nodes) -> None:
    one, two = nodes
    two.played.fault = (ipc.PrepareMove, "silent")
    offer = wire.Prepare(move="m", source="r1", host_cache=two.host_cache_id, form=FORM, run=RUN, tokens=7)
    answer = asyncio.create_task(two.migrations._prepare(wire.encode(offer)))
    await soon(lambda: two.played.got(ipc.PrepareMove) == 1)
    await one._bus.publish(wire.abort_move_subject("r2"), wire.encode(wire.AbortMove(move="m")))
    assert (await answer).refusal is wire.Refusal.BUSY and two.played.got(wire.AbortMove) == 1


async def test_a_move_that_is_broken_off_is_called_off(nodes: Nodes) -> None:
    one, two = nodes
    one.played.fault = (ipc.PrepareMove, "silent")
    moving = asyncio.create_task(one.migrations.move("g", 5, "r2"))
    await soon(lambda: two.played.got(ipc.PrepareMove) == 1 and one.played.got(ipc.PrepareMove) == 1)
    moving.cancel()
    await soon(lambda: two.played.got(wire.AbortMove) == 1)
    assert list(one.streams) == [("g", 5)] and not one.streams["g", 5].moving


async def test_one_request_moves_once_at_a_time(nodes: Nodes) -> None:
    one, _ = nodes
    moves = await asyncio.gather(*(one.migrations.move("g", 5, "r2") for _ in range(3)), return_exceptions=True)
    assert [type(move) for move in moves].count(NotMoved) == 2 and len(one.moved) == 1


async def test_who_ends_while_its_last_blocks_are_carried_is_not_handed_over(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks read by then may have had a new owner already."""
    one, two = nodes
    carried = one.migrations._carried

    async def cancelled_meanwhile(*arguments: object) -> list[int]:
        there = await carried(*arguments)  # type: ignore[arg-type]
        if arguments[2]:
            one.streams.pop(("g", 5), None)
        return there

    monkeypatch.setattr(one.migrations, "_carried", cancelled_meanwhile)
    with pytest.raises(NotMoved, match="it ended while"):
        await one.migrations.move("g", 5, "r2")
    assert not two.streams and two.played.got(wire.Commit) == 0 and one.played.got(wire.AbortMove) == 1
    await soon(lambda: nothing_left(two))


# ── between hosts ─────────────────────────────────────────────────────────────────────────────────────────────────────

HELLO, BLOCK = 24, 8 + FORM.bytes + 4  # bytes of a connection's head, of a batch of one block
ROOM = len(transport._encoder.encode(transport.Room([1]))) + 4


@between_hosts
@pytest.mark.parametrize("kind", ["cut", "stall", "flip"])
@pytest.mark.parametrize(
    ("back", "at"),
    [(False, HELLO + batch * BLOCK + at) for batch in range(3) for at in (-3, 3, 12, 5000)] + [(True, 2), (True, ROOM)],
)
async def test_whatever_the_network_does_it_is_one_sides_and_nothing_is_left(
    nodes: Nodes, kind: str, back: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes
    for name in ("HELLO_S", "ROOM_S"):
        monkeypatch.setattr(transport, name, 0.3)
    async with Network(two.door.address, Fault(kind, back, at)) as address:
        one.leases["r2"] = wire.replace(two.own_lease(), receives_at=address)
        with contextlib.suppress(NotMoved):
            async with asyncio.timeout(20):
                await one.migrations.move("g", 5, "r2")
        moved = bool(one.moved)
        await soon(lambda: nothing_left(two))
    assert len(one.streams) + len(two.streams) == 1 and bool(two.streams) is moved
    assert (one.played.got(wire.AbortMove), two.played.got(wire.Commit)) == ((0, 1) if moved else (1, 0))
    if moved:
        assert kind == "flip", "a byte that is turned is sent again"
        assert two.played.read == one.cache.bytes_of(one.played.blocks, FORM.bytes)


@between_hosts
async def test_without_room_for_its_blocks_it_stays(nodes: Nodes) -> None:
    one, two = nodes
    taken = await two.blocks.take(16, 1 << 20)
    with pytest.raises(NotMoved, match="1 blocks of 70000 bytes find no room in a host cache"):
        await one.migrations.move("g", 5, "r2")
    await two.blocks.free(taken, 1 << 20)
    assert list(one.streams) == [("g", 5)] and one.played.got(wire.AbortMove) == 1
    await one.migrations.move("g", 5, "r2")


@between_hosts
async def test_where_nothing_is_received_nothing_is_sent(nodes: Nodes) -> None:
    one, two = nodes
    one.leases["r2"] = wire.replace(two.own_lease(), receives_at="")
    with pytest.raises(NotMoved, match="r2 is on another host, and receives nothing"):
        await one.migrations.move("g", 5, "r2")
    del one.leases["r2"]  # without a lease, r2 is taken for a runtime of the host
    with pytest.raises(NotMoved, match="r2 refuses: it is on another host than r1"):
        await one.migrations.move("g", 5, "r2")
    await two.door.close()
    one.leases["r2"] = wire.replace(two.own_lease(), receives_at="127.0.0.1:9")
    with pytest.raises(NotMoved, match="r2 refuses: it receives nothing"):
        await one.migrations.move("g", 5, "r2")
    assert one.played.got(ipc.PrepareMove) == 0


@between_hosts
async def test_a_target_reads_only_where_it_has_received(nodes: Nodes) -> None:
    one, two = nodes

    async def told(subject: Callable[[str], str], message: wire.Message) -> wire.Reply:
        return wire.decode(wire.Reply, await one._bus.request(subject("r2"), message))

    offer = wire.Prepare(
        move="m", source="r1", host_cache=one.host_cache_id, form=FORM, run=RUN, tokens=7, key=bytes(16)
    )
    assert (await told(wire.prepare_subject, offer)).refusal is None
    for blocks in (wire.Copy(move="m", first=0, host=[31]), wire.Copy(move="m", first=1, host=[31])):
        assert "were not received" in (await told(wire.copy_subject, blocks)).reason
    commit = wire.Commit(move="m", departure=wire.Departure(MADE, 6, [31], b""))
    assert "were not received" in (await told(wire.commit_subject, commit)).reason
    assert two.played.got(wire.Copy) == two.played.got(wire.Commit) == 0
    two.migrations._forget("m")


@between_hosts
@pytest.mark.parametrize("dies", ["device", "node"])
async def test_a_target_that_dies_after_each_step_keeps_nothing(
    nodes: Nodes, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes
    for step in range(1, 5):  # a batch and its blocks, twice
        steps = 0

        async def counted(job: object, *arguments: object, last: int = step) -> object:
            nonlocal steps
            result = await job(*arguments)  # type: ignore[operator]
            steps += 1
            if steps == last:
                two.migrations.device_lost()
                if dies == "node":
                    await two.door.close()
            return result

        ask, carried = one.migrations._ask, one.migrations._carried
        monkeypatch.setattr(one.migrations, "_ask", lambda *to, ask=ask: counted(ask, *to))
        monkeypatch.setattr(one.migrations, "_carried", lambda *to, carried=carried: counted(carried, *to))
        with pytest.raises(NotMoved):
            await one.migrations.move("g", 5, "r2")
        monkeypatch.setattr(one.migrations, "_ask", ask)
        monkeypatch.setattr(one.migrations, "_carried", carried)
        await soon(lambda: nothing_left(two))
        assert list(one.streams) == [("g", 5)] and not two.streams
        one.played._copies, two.played.read = 0, []
        if dies == "node":
            two.door.open("127.0.0.1")
            one.leases["r2"] = two.own_lease()
