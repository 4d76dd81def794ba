"""Moves running requests to another runtime, and takes them from there: the handshake, as nodes see it.

    source                                   target
      Offer  ──────────────────────────────▶  can it be served, is there room?
      MoveOut to its device
      Staged by it, carried  ── Blocks ────▶  copied in, or later
      Next, and again while much is new
      Left by it, carried  ──── Commit ────▶  it is the target's; answered with where its frames stand
      the stream's last delta says where it goes on
                ◀───────────────── Landed ──  nothing of it in the host cache is needed any more
      Gone to its device

Until the answer to Commit the request is the source's: if anything fails it stays there. If that answer is lost it
stays too, and the target works for a stream whose gateway never hears that it moved: the gateway tells it to stop.

Blocks are carried as runtime/transport.py says: within a host they are there already. What a target receives from
another host is its node's, which frees it when its device says that it reads nothing of it any more, or is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import structlog

from runtime import pipe
from runtime.memory.hostblocks import HostBlocks
from runtime.transport import Arrival, Door, Nixl, NotCarried, Path, Shared, Tcp
from store import wire
from store.bus import Bus, BusError
from store.wire import Refusal

log = structlog.get_logger()

ANSWER_S = 5.0  # for everything that the device is asked
REPLY_S = 8.0  # for everything that the other side is asked
COMMIT_TRIES = 3
AT_ONCE = 8  # moves from one runtime
LANDED_S = 60.0  # then what lies in the host cache is given up: the target is no more
COMING_S = 30.0  # an offer of which nothing is heard for so long, and that is not committed, is forgotten
FORWARD_S = 30.0  # a gateway may cancel a stream here that it does not know has moved

FromDevice = pipe.Staged | pipe.Left | pipe.NotMoving


@dataclass(slots=True)
class Stream:
    """One that is open here."""

    run: wire.Run
    began_at: float  # monotonic
    at: int  # index of its next token
    moving: bool = False
    tried_at: float = 0.0  # to hand it on


class Host(Protocol):
    """What a node lets its migrations use."""

    id: str
    epoch: int
    host_cache_id: str
    blocks: HostBlocks
    door: Door
    life: int  # of its device process

    def device(self) -> pipe.NodeEnd | None: ...

    def lease(self, runtime: str) -> wire.Lease | None:
        """The last of that runtime."""

    def form(self, model: str) -> wire.KvForm | None:
        """Of its blocks here, if its engine was built."""

    def tokens_most(self, model: str) -> int:
        """Of a request of a model that this runtime was given."""

    def refusal(self, run: wire.Run) -> wire.Reply | None:
        """Why this runtime would not take it now."""

    def stream(self, gateway: str, number: int) -> Stream | None: ...

    def take_over(self, run: wire.Run, at: int) -> int:
        """The stream is open here from now on; the number of the last frame to its gateway."""

    def give_back(self, run: wire.Run) -> None:
        """It is not open here after all."""

    async def hand_over(self, gateway: str, number: int, moved: wire.Moved) -> None:
        """The stream is no longer open here; its gateway is told where it is."""


class NotMoved(Exception):
    """The request stays where it was; says why. `waits`: nothing was done for it yet, there is nothing to move."""

    def __init__(self, reason: str, waits: bool = False) -> None:
        super().__init__(reason)
        self.waits = waits


@dataclass(slots=True)
class Guest:
    """A request that was offered."""

    offer: wire.Offer
    heard_at: float
    arrival: Arrival | None  # from another host
    answers: asyncio.Queue[pipe.Answered] = field(default_factory=asyncio.Queue)
    committed: wire.Reply | None = None

    def has(self, first: int, host: list[int]) -> bool:
        """Whether its device may read there; what is shared is the source's to know."""
        return self.arrival is None or self.arrival.has(first, host)


class Migrations:
    """Of one node."""

    def __init__(self, bus: Bus, host: Host) -> None:
        self._bus, self._host = bus, host
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._numbers = itertools.count(1)
        self._going: dict[str, asyncio.Queue[FromDevice]] = {}
        self._landing: dict[str, asyncio.Event] = {}
        self._guests: dict[str, Guest] = {}
        self._arrivals: dict[str, Arrival] = {}  # outlive guests that do not come: the device may read still
        self._forwards: dict[tuple[str, int], tuple[str, float]] = {}  # streams that moved: to whom, and when
        self._tasks: set[asyncio.Task[Any]] = set()
        self.moved = 0

    async def start(self) -> None:
        id = self._host.id
        await self._bus.respond(wire.offer_subject(id), self._offered)
        await self._bus.respond(wire.blocks_subject(id), self._blocks)
        await self._bus.respond(wire.commit_subject(id), self._commit)
        await self._bus.subscribe(wire.call_off_subject(id), self._called_off)
        await self._bus.subscribe(wire.landed_subject(id), self._landed)

    def spawn(self, job: Coroutine[None, None, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def landing(self) -> int:
        """Requests that left, of which a target may still read what is in this runtime's part of a host cache."""
        return len(self._landing)

    # ── going ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def move(self, gateway: str, number: int, target: str) -> None:
        """When its turn comes, of AT_ONCE at a time. Raises NotMoved: then it goes on here."""
        async with self._slots:
            await self._move(gateway, number, target)

    async def _move(self, gateway: str, number: int, target: str) -> None:
        stream, device = self._host.stream(gateway, number), self._host.device()
        if stream is None or stream.moving or device is None:
            raise NotMoved("it is not here, or moves already")
        if (form := self._host.form(stream.run.model)) is None:
            raise NotMoved("its engine is not built yet", waits=True)
        move = f"{self._host.id}-{self._host.epoch}-{next(self._numbers)}"
        queue, path = asyncio.Queue[FromDevice](), self._path(target, form)
        self._going[move], stream.moving = queue, True
        try:
            await self._offer(move, stream, target, form, path)
            device.send(pipe.MoveOut(move, gateway, number))
            departure = await self._stage(move, target, queue, device, path)
            if self._host.stream(gateway, number) is not stream or not queue.empty():
                device.send(pipe.Stay(move))
                raise NotMoved("it ended while its last blocks were carried: they may be another's")
            reply = await self._committed(move, target, departure, device)
        except BaseException as error:  # it may be called off by a drain whose time is up
            log.info("migrate.stayed", move=move, target=target, reason=str(error) or type(error).__name__)
            await self._publish(wire.call_off_subject(target), wire.CallOff(move=move))
            raise
        finally:
            path.close()
            stream.moving = False
            del self._going[move]
        await self._left(move, gateway, number, wire.Moved(target, reply.epoch, reply.seq), device)

    def _path(self, target: str, form: wire.KvForm) -> Path:
        lease = self._host.lease(target)
        if lease is None or lease.host_cache == self._host.host_cache_id:
            return Shared()
        if not lease.receives_at:
            raise NotMoved(f"runtime {target} is on another host, and receives nothing from others")
        if lease.reads and self._host.door.agents is not None:
            return Nixl(self._host.blocks, lease.receives_at, form.bytes, self._host.door.agents)
        return Tcp(self._host.blocks, lease.receives_at, form.bytes)

    async def _offer(self, move: str, stream: Stream, target: str, form: wire.KvForm, path: Path) -> None:
        waited_s = time.monotonic() - stream.began_at
        run = wire.replace(stream.run, ttft_s=stream.run.ttft_s - waited_s)
        offer = wire.Offer(
            move=move,
            source=self._host.id,
            host_cache=self._host.host_cache_id,
            form=form,
            run=run,
            tokens=run.prompt_tokens + stream.at,
            key=path.key,
            owner=0 if path.key else self._host.life,
        )
        await self._ask(wire.offer_subject(target), offer)

    async def _stage(
        self, move: str, target: str, queue: asyncio.Queue[FromDevice], device: pipe.NodeEnd, path: Path
    ) -> wire.Departure:
        """Until it has left, and all its blocks are where the target reads."""
        there: list[int] = []
        while True:
            said = await _within(ANSWER_S, queue)
            match said:
                case None:
                    device.send(pipe.Stay(move))
                    raise NotMoved(f"the device said nothing for {ANSWER_S:g} s")
                case pipe.NotMoving(_, reason, waits):
                    raise NotMoved(reason, waits)
                case pipe.Left(_, departure):
                    there += await self._carried(move, path, len(there), departure.host[len(there) :], device)
                    return msgspec.structs.replace(departure, host=there)
                case pipe.Staged(_, first, host):
                    there += await self._carried(move, path, first, host, device)
                    try:
                        blocks = wire.Blocks(move=move, first=first, host=there[first:])
                        await self._ask(wire.blocks_subject(target), blocks)
                    except NotMoved:
                        device.send(pipe.Stay(move))
                        raise
                    device.send(pipe.Next(move))

    async def _carried(self, move: str, path: Path, first: int, blocks: list[int], device: pipe.NodeEnd) -> list[int]:
        try:
            return await path.carry(first, blocks)
        except NotCarried as error:
            device.send(pipe.Stay(move))
            raise NotMoved(str(error)) from error

    async def _committed(self, move: str, target: str, departure: wire.Departure, device: pipe.NodeEnd) -> wire.Reply:
        for attempt in range(COMMIT_TRIES):
            try:
                self._landing.setdefault(move, asyncio.Event())  # it may land before it is answered
                return await self._ask(wire.commit_subject(target), wire.Commit(move=move, departure=departure))
            except NotMoved as error:
                unanswered = isinstance(error.__cause__, BusError)
                if not unanswered or attempt == COMMIT_TRIES - 1:
                    self._landing.pop(move, None)
                    device.send(pipe.Stay(move))
                    raise
        raise AssertionError

    async def _left(self, move: str, gateway: str, number: int, moved: wire.Moved, device: pipe.NodeEnd) -> None:
        """It is the target's."""
        self.moved += 1
        now = time.monotonic()
        self._forwards = {key: to for key, to in self._forwards.items() if now - to[1] < FORWARD_S}
        self._forwards[gateway, number] = moved.runtime, now
        if self._host.stream(gateway, number) is None:
            await self.forward(wire.Cancel(gateway=gateway, streams=[number]))  # cancelled in the last moment
        else:
            await self._host.hand_over(gateway, number, moved)
        self.spawn(self._clear(move, device))

    async def _clear(self, move: str, device: pipe.NodeEnd) -> None:
        landed = self._landing[move]
        try:
            async with asyncio.timeout(LANDED_S):
                await landed.wait()
        except TimeoutError:
            log.warning("migrate.not_landed", move=move, after_s=LANDED_S)
        finally:
            del self._landing[move]
            device.send(pipe.Gone(move))

    async def forward(self, cancel: wire.Cancel) -> None:
        """To where those of the streams are that moved."""
        for number in cancel.streams:
            if to := self._forwards.pop((cancel.gateway, number), None):
                forwarded = wire.Cancel(gateway=cancel.gateway, streams=[number])
                await self._publish(wire.cancel_subject(to[0]), forwarded)

    async def _ask(self, subject: str, message: wire.Message) -> wire.Reply:
        try:
            reply = wire.decode(wire.Reply, await self._bus.request(subject, message, REPLY_S))
        except BusError as error:
            raise NotMoved(str(error)) from error
        if reply.refusal is not None:
            raise NotMoved(reply.reason)
        return reply

    async def _publish(self, subject: str, message: wire.Message) -> None:
        try:
            await self._bus.publish(subject, wire.encode(message))
        except BusError as error:
            log.warning("migrate.not_sent", subject=subject, error=str(error))

    async def _landed(self, data: bytes) -> None:
        if landed := self._landing.get(wire.decode(wire.Landed, data).move):
            landed.set()

    # ── coming ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _offered(self, data: bytes) -> wire.Reply:
        offer, device = wire.decode(wire.Offer, data), self._host.device()
        if refusal := self._host.refusal(offer.run):
            return refusal
        assert device is not None
        try:
            guest = self._guests[offer.move] = Guest(offer, time.monotonic(), self._arrival(offer))
        except NotCarried as error:
            return wire.Reply(refusal=Refusal.BUSY, reason=f"runtime {self._host.id} refuses: {error}")
        coming = pipe.Coming(offer.move, offer.run, offer.tokens, offer.form, offer.owner)
        reply = await self._answer(guest, lambda: device.send(coming))
        if reply.refusal is not None:
            self._forget(offer.move)  # the device may only have been slow to say yes
        return reply

    def _arrival(self, offer: wire.Offer) -> Arrival | None:
        if offer.key:
            most = self._host.tokens_most(offer.run.model)
            arrival = self._arrivals[offer.move] = self._host.door.expect(offer.key, offer.form, most)
            return arrival
        if offer.host_cache != self._host.host_cache_id:
            raise NotCarried(f"it is on another host than {offer.source}")
        return None

    def sweep(self, now: float) -> None:
        """Those of which nothing was heard for long do not come any more: who offered them is gone."""
        for move, guest in list(self._guests.items()):
            heard_at = max(guest.heard_at, guest.arrival.heard_at if guest.arrival else 0.0)
            if guest.committed is None and now - heard_at > COMING_S:
                self._forget(move)

    def _forget(self, move: str) -> None:
        """It does not come. What was received of it is freed when the device says that it has landed."""
        guest, device = self._guests.pop(move, None), self._host.device()
        if guest is None:  # called off, or the device was lost, while it was asked
            return
        if guest.arrival is not None:
            self._host.door.end(guest.arrival)
        if device is not None:
            device.send(pipe.NotComing(move))

    async def _blocks(self, data: bytes) -> wire.Reply:
        blocks, device = wire.decode(wire.Blocks, data), self._host.device()
        guest = self._guests.get(blocks.move)
        if guest is None or device is None:
            return _unknown(blocks.move)
        if not guest.has(blocks.first, blocks.host):
            return _not_received(blocks.move)
        guest.heard_at = time.monotonic()
        take = pipe.Take(blocks.move, blocks.first, blocks.host)
        return await self._answer(guest, lambda: device.send(take))

    async def _commit(self, data: bytes) -> wire.Reply:
        commit, device = wire.decode(wire.Commit, data), self._host.device()
        guest = self._guests.get(commit.move)
        if guest is None or device is None:
            return _unknown(commit.move)
        if not guest.has(0, commit.departure.host):
            return _not_received(commit.move)
        if guest.committed is None:
            seq = self._host.take_over(guest.offer.run, len(commit.departure.made))
            reply = await self._answer(guest, lambda: device.send(pipe.Adopt(commit.move, commit.departure)))
            if reply.refusal is not None:
                self._host.give_back(guest.offer.run)
                return reply
            guest.committed = wire.Reply(epoch=self._host.epoch, seq=seq)
        return guest.committed

    async def _answer(self, guest: Guest, ask: Callable[[], None]) -> wire.Reply:
        ask()
        answered = await _within(ANSWER_S, guest.answers)
        if answered is None:
            return wire.Reply(refusal=Refusal.BUSY, reason=f"the target's device said nothing for {ANSWER_S:g} s")
        if answered.refusal:
            return wire.Reply(refusal=Refusal.BUSY, reason=answered.refusal)
        return wire.Reply()

    async def _called_off(self, data: bytes) -> None:
        move = wire.decode(wire.CallOff, data).move
        guest = self._guests.get(move)
        if guest is not None and guest.committed is None:
            self._forget(move)

    # ── what the device says ──────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, message: FromDevice | pipe.Answered) -> None:
        if isinstance(message, pipe.Answered):
            if guest := self._guests.get(message.move):
                guest.answers.put_nowait(message)
        elif queue := self._going.get(message.move):
            queue.put_nowait(message)

    async def landed_here(self, move: str) -> None:
        if arrival := self._arrivals.pop(move, None):
            await self._host.door.free(arrival)
        if guest := self._guests.pop(move, None):
            await self._publish(wire.landed_subject(guest.offer.source), wire.Landed(move=move))

    def device_lost(self) -> None:
        """The process is over: nothing reads or writes the host cache any more."""
        lost = "the runtime lost its device process"
        for move, queue in self._going.items():
            queue.put_nowait(pipe.NotMoving(move, lost))
        for move, guest in self._guests.items():
            guest.answers.put_nowait(pipe.Answered(move, lost))
        self._guests.clear()
        for arrival in self._arrivals.values():
            self.spawn(self._host.door.free(arrival))
        self._arrivals.clear()


def _unknown(move: str) -> wire.Reply:
    return wire.Reply(refusal=Refusal.BUSY, reason=f"move {move} is not known here, or not any more")


def _not_received(move: str) -> wire.Reply:
    return wire.Reply(refusal=Refusal.BUSY, reason=f"of move {move} these blocks were not received")


async def _within(seconds: float, queue: asyncio.Queue[Any]) -> Any:
    """The next; None when the time is up."""
    try:
        async with asyncio.timeout(seconds):
            return await queue.get()
    except TimeoutError:
        return None
