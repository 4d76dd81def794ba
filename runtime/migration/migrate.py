"""Migration of running requests between runtimes: the handshake between the nodes of source and target.

    source                                   target
      Prepare ─────────────────────────────▶  can the runtime serve the request, is there room?
      PrepareMove to the device
      device: Copy; carry ────── Copy ─────▶  copied in, now or later
      MoveAnswer to the device, and again while many blocks are new
      device: Commit; carry ─── Commit ────▶  the request is the target's; the answer says where frames stand
      the stream's last delta names the target
                ◀──────────────── Release ──  blocks in the host cache are not needed any more
      Release to the device

The device of each side hears and says the same messages over its pipe (runtime/ipc.py).

Until the answer to Commit the request belongs to the source: after any failure the request stays at the source. If the
answer is lost, the request stays at the source as well. The target then works for a stream that the gateway does not
expect from the target, and the gateway tells the target to stop.

runtime/migration/transport.py carries the blocks; within a host no block needs carrying. Blocks received from another
host belong to the target's node. The node frees the blocks once the target's device has said that the device no longer
reads the blocks, or once the device is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from runtime import ipc
from runtime.core.compile_orders import NotCompiled
from runtime.migration.host import Host, OpenStream
from runtime.migration.receiver import Arrival
from runtime.migration.transport import Nixl, NotMoved, Path, Shared, Tcp
from store.bus import Bus, BusError
from store.contract import wire
from store.contract.wire import Refusal

log = structlog.get_logger()

ANSWER_S = 5.0  # for each answer of the device
REPLY_S = 8.0  # for each answer of the other runtime
COMMIT_TRIES = 3
AT_ONCE = 8  # moves from a runtime at a time
RELEASE_S = 60.0  # without Release for so long, blocks in the host cache are given up: the target is gone
OFFER_S = 30.0  # without news of an uncommitted offer for so long, the offer is forgotten
FORWARD_S = 30.0  # a gateway may cancel a moved stream at the source, before the gateway hears of the move

FromDevice = wire.Copy | wire.Commit | ipc.MoveAnswer


@dataclass(slots=True)
class OfferedRequest:
    """Request that a source has offered to this runtime."""

    offer: wire.Prepare
    heard_at: float  # monotonic
    arrival: Arrival | None  # blocks received from another host; None: the host cache is shared
    answers: asyncio.Queue[ipc.MoveAnswer] = field(default_factory=asyncio.Queue)
    committed: wire.Reply | None = None

    def has(self, first: int, host: list[int]) -> bool:
        """Whether this runtime's device may read the blocks. For blocks in a shared cache, the source's word counts."""
        return self.arrival is None or self.arrival.has(first, host)


class Migrations:
    """Migrations that one node takes part in, as source and as target."""

    def __init__(self, bus: Bus, host: Host) -> None:
        self._bus, self._host = bus, host
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._numbers = itertools.count(1)
        self._sources: dict[str, asyncio.Queue[FromDevice]] = {}
        self._releasing: dict[str, asyncio.Event] = {}
        self._offered: dict[str, OfferedRequest] = {}
        self._arrivals: dict[str, Arrival] = {}  # outlive forgotten offers: the device may still read blocks
        self._forwards: dict[tuple[str, int], tuple[str, float]] = {}  # moved stream → target, time of the move
        self._tasks: set[asyncio.Task[Any]] = set()
        self.moved = 0

    async def start(self) -> None:
        id = self._host.id
        await self._bus.respond(wire.prepare_subject(id), self._prepare)
        await self._bus.respond(wire.copy_subject(id), self._copy)
        await self._bus.respond(wire.commit_subject(id), self._commit)
        await self._bus.subscribe(wire.abort_move_subject(id), self._abort)
        await self._bus.subscribe(wire.release_subject(id), self._release)

    def spawn(self, job: Coroutine[None, None, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def releasing(self) -> int:
        """Number of moved requests with blocks in this runtime's part of a host cache that a target may still read."""
        return len(self._releasing)

    # ── source ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def move(self, gateway: str, number: int, target: str) -> None:
        """Move a request to the runtime `target`, at most AT_ONCE requests at a time.

        Raises NotMoved: then the request goes on here."""
        async with self._slots:
            await self._move(gateway, number, target)

    async def _move(self, gateway: str, number: int, target: str) -> None:
        if target == self._host.id:
            raise NotMoved("it is here already")
        stream, device = self._host.stream(gateway, number), self._host.device()
        if stream is None or stream.moving or device is None:
            raise NotMoved("it is not here, or moves already")
        if stream.taken_up(gateway, number):
            raise NotMoved("its gateway took it up: it stays, for the device knows it by its first name")
        if stream.compiling is not None:
            raise NotMoved("its grammar is not compiled yet", waits=True)
        if (form := self._host.form(stream.run.model)) is None:
            raise NotMoved("its engine is not built yet", waits=True)
        move = f"{self._host.id}-{self._host.epoch}-{next(self._numbers)}"
        queue, path = asyncio.Queue[FromDevice](), self._path(target, form)
        self._sources[move], stream.moving = queue, True
        try:
            prepare = self._prepared(move, stream, form, path)
            await self._ask(wire.prepare_subject(target), prepare)
            there = wire.replace(prepare, run=wire.replace(prepare.run, payload=b""))  # the source has the payload
            device.send(ipc.PrepareMove(there, source=True))
            departure = await self._copied(move, target, queue, device, path)
            if self._host.stream(gateway, number) is not stream or not queue.empty():
                device.send(wire.AbortMove(move=move))
                raise NotMoved("it ended while its last blocks were carried: they may be another's")
            reply = await self._committed(move, target, departure, device)
        except BaseException as error:  # a drain out of time may cancel the move
            log.info("migrate.stayed", move=move, target=target, reason=str(error) or type(error).__name__)
            await self._publish(wire.abort_move_subject(target), wire.AbortMove(move=move))
            raise
        finally:
            path.close()
            stream.moving = False
            del self._sources[move]
        await self._left(move, gateway, number, wire.Moved(target, reply.epoch, reply.seq), device)

    def _path(self, target: str, form: wire.KvForm) -> Path:
        lease = self._host.lease(target)
        if lease is None or lease.host_cache == self._host.host_cache_id:
            return Shared()
        if not lease.receives_at:
            raise NotMoved(f"runtime {target} is on another host, and receives nothing from others")
        door = self._host.door
        if lease.reads and door.agents is not None:
            return Nixl(self._host.blocks, lease.receives_at, form.bytes, door.agents, door.security)
        return Tcp(self._host.blocks, lease.receives_at, form.bytes, door.security)

    def _prepared(self, move: str, stream: OpenStream, form: wire.KvForm, path: Path) -> wire.Prepare:
        waited_s = time.monotonic() - stream.began_at
        run = wire.replace(stream.run, ttft_s=stream.run.ttft_s - waited_s)
        return wire.Prepare(
            move=move,
            source=self._host.id,
            host_cache=self._host.host_cache_id,
            form=form,
            run=run,
            tokens=run.prompt_tokens + stream.at,
            key=path.key,
            owner=0 if path.key else self._host.life,
        )

    async def _copied(
        self, move: str, target: str, queue: asyncio.Queue[FromDevice], device: ipc.NodeEnd, path: Path
    ) -> wire.Departure:
        """Carry blocks to the target until the request has left the source and the target has every block.

        Raises NotMoved."""
        there: list[int] = []
        while True:
            said = await _within(ANSWER_S, queue)
            match said:
                case None:
                    device.send(wire.AbortMove(move=move))
                    raise NotMoved(f"the device said nothing for {ANSWER_S:g} s")
                case ipc.MoveAnswer(_, refusal, waits):
                    raise NotMoved(refusal, waits)
                case wire.Commit(departure=departure):
                    there += await self._carried(move, path, len(there), departure.host[len(there) :], device)
                    return msgspec.structs.replace(departure, host=there)
                case wire.Copy(first=first, host=host):
                    there += await self._carried(move, path, first, host, device)
                    try:
                        copy = wire.Copy(move=move, first=first, host=there[first:])
                        await self._ask(wire.copy_subject(target), copy)
                    except NotMoved:
                        device.send(wire.AbortMove(move=move))
                        raise
                    device.send(ipc.MoveAnswer(move))

    async def _carried(self, move: str, path: Path, first: int, blocks: list[int], device: ipc.NodeEnd) -> list[int]:
        try:
            return await path.carry(first, blocks)
        except NotMoved:
            device.send(wire.AbortMove(move=move))
            raise

    async def _committed(self, move: str, target: str, departure: wire.Departure, device: ipc.NodeEnd) -> wire.Reply:
        for attempt in range(COMMIT_TRIES):
            try:
                self._releasing.setdefault(move, asyncio.Event())  # Release may come before the answer
                return await self._ask(wire.commit_subject(target), wire.Commit(move=move, departure=departure))
            except NotMoved as error:
                unanswered = isinstance(error.__cause__, BusError)
                if not unanswered or attempt == COMMIT_TRIES - 1:
                    self._releasing.pop(move, None)
                    device.send(wire.AbortMove(move=move))
                    raise
        raise AssertionError

    async def _left(self, move: str, gateway: str, number: int, moved: wire.Moved, device: ipc.NodeEnd) -> None:
        """Tell the gateway that the request is the target's, and free the blocks after the target's Release."""
        self.moved += 1
        now = time.monotonic()
        self._forwards = {key: to for key, to in self._forwards.items() if now - to[1] < FORWARD_S}
        self._forwards[gateway, number] = moved.runtime, now
        if self._host.stream(gateway, number) is None:
            await self.forward(wire.Cancel(gateway=gateway, streams=[number]))  # cancelled at the last moment
        else:
            await self._host.hand_over(gateway, number, moved)
        self.spawn(self._clear(move, device))

    async def _clear(self, move: str, device: ipc.NodeEnd) -> None:
        released = self._releasing[move]
        try:
            async with asyncio.timeout(RELEASE_S):
                await released.wait()
        except TimeoutError:
            log.warning("migrate.not_released", move=move, after_s=RELEASE_S)
        finally:
            del self._releasing[move]
            device.send(wire.Release(move=move))

    async def forward(self, cancel: wire.Cancel) -> None:
        """Forward a gateway's cancellation of moved streams to the runtimes that have the streams now."""
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

    async def _release(self, data: bytes) -> None:
        if released := self._releasing.get(wire.decode(wire.Release, data).move):
            released.set()

    # ── target ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _prepare(self, data: bytes) -> wire.Reply:
        offer = wire.decode(wire.Prepare, data)
        if refusal := self._host.refusal(offer.run):
            return refusal
        try:
            async with asyncio.timeout(ANSWER_S):
                grammar = await self._host.grammar(offer.run)
        except (TimeoutError, NotCompiled) as error:
            reason = f"its grammar is not compiled here: {str(error) or f'{ANSWER_S:g} s were too short'}"
            return wire.Reply(refusal=Refusal.BUSY, reason=reason)
        if refusal := self._host.refusal(offer.run):  # second look: compiling the grammar took time
            return refusal
        device = self._host.device()
        assert device is not None, "a runtime without a device process refuses"
        try:
            offered = self._offered[offer.move] = OfferedRequest(offer, time.monotonic(), self._arrival(offer))
        except NotMoved as error:
            return wire.Reply(refusal=Refusal.BUSY, reason=f"runtime {self._host.id} refuses: {error}")
        reply = await self._answer(offered, lambda: device.send(ipc.PrepareMove(offer, grammar=grammar)))
        if reply.refusal is not None:
            self._forget(offer.move)  # the device may only have been slow to accept
        return reply

    def _arrival(self, offer: wire.Prepare) -> Arrival | None:
        if offer.key:
            most = self._host.tokens_most(offer.run.model)
            arrival = self._arrivals[offer.move] = self._host.door.expect(offer.key, offer.form, most)
            return arrival
        if offer.host_cache != self._host.host_cache_id:
            raise NotMoved(f"it is on another host than {offer.source}")
        return None

    def sweep(self, now: float) -> None:
        """Forget uncommitted offers without news for OFFER_S seconds: the source is gone."""
        for move, offered in list(self._offered.items()):
            heard_at = max(offered.heard_at, offered.arrival.heard_at if offered.arrival else 0.0)
            if offered.committed is None and now - heard_at > OFFER_S:
                self._forget(move)

    def _forget(self, move: str) -> None:
        """Forget an offer. Received blocks are freed when the device says Release."""
        offered, device = self._offered.pop(move, None), self._host.device()
        if offered is None:  # called off, or the device was lost, before the device answered
            return
        if offered.arrival is not None:
            self._host.door.end(offered.arrival)
        if device is not None:
            device.send(wire.AbortMove(move=move))

    async def _copy(self, data: bytes) -> wire.Reply:
        copy, device = wire.decode(wire.Copy, data), self._host.device()
        offered = self._offered.get(copy.move)
        if offered is None or device is None:
            return _unknown(copy.move)
        if not offered.has(copy.first, copy.host):
            return _not_received(copy.move)
        offered.heard_at = time.monotonic()
        return await self._answer(offered, lambda: device.send(copy))

    async def _commit(self, data: bytes) -> wire.Reply:
        commit, device = wire.decode(wire.Commit, data), self._host.device()
        offered = self._offered.get(commit.move)
        if offered is None or device is None:
            return _unknown(commit.move)
        if not offered.has(0, commit.departure.host):
            return _not_received(commit.move)
        if offered.committed is None:
            made = commit.departure.made
            seq = self._host.take_over(offered.offer.run, len(made), made)
            reply = await self._answer(offered, lambda: device.send(commit))
            if reply.refusal is not None:
                self._host.give_back(offered.offer.run)
                return reply
            offered.committed = wire.Reply(epoch=self._host.epoch, seq=seq)
        return offered.committed

    async def _answer(self, offered: OfferedRequest, ask: Callable[[], None]) -> wire.Reply:
        ask()
        answered = await _within(ANSWER_S, offered.answers)
        if answered is None:
            return wire.Reply(refusal=Refusal.BUSY, reason=f"the target's device said nothing for {ANSWER_S:g} s")
        if answered.refusal:
            return wire.Reply(refusal=Refusal.BUSY, reason=answered.refusal)
        return wire.Reply()

    async def _abort(self, data: bytes) -> None:
        move = wire.decode(wire.AbortMove, data).move
        offered = self._offered.get(move)
        if offered is not None and offered.committed is None:
            self._forget(move)

    # ── what the device says ──────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, message: FromDevice) -> None:
        """Pass a message of the device to the side of the migration, source or target, that this runtime is."""
        if queue := self._sources.get(message.move):
            queue.put_nowait(message)
        elif (offered := self._offered.get(message.move)) and isinstance(message, ipc.MoveAnswer):
            offered.answers.put_nowait(message)

    async def released(self, move: str) -> None:
        if arrival := self._arrivals.pop(move, None):
            await self._host.door.free(arrival)
        if offered := self._offered.pop(move, None):
            await self._publish(wire.release_subject(offered.offer.source), wire.Release(move=move))

    def device_lost(self) -> None:
        """Fail all migrations and free received blocks: a dead device process uses no block of the host cache."""
        lost = "the runtime lost its device process"
        for move, queue in self._sources.items():
            queue.put_nowait(ipc.MoveAnswer(move, lost))
        for move, offered in self._offered.items():
            offered.answers.put_nowait(ipc.MoveAnswer(move, lost))
        self._offered.clear()
        for arrival in self._arrivals.values():
            self.spawn(self._host.door.free(arrival))
        self._arrivals.clear()


def _unknown(move: str) -> wire.Reply:
    return wire.Reply(refusal=Refusal.BUSY, reason=f"move {move} is not known here, or not any more")


def _not_received(move: str) -> wire.Reply:
    return wire.Reply(refusal=Refusal.BUSY, reason=f"of move {move} these blocks were not received")


async def _within(seconds: float, queue: asyncio.Queue[Any]) -> Any:
    """Return the next item of the queue; None when the time is up."""
    try:
        async with asyncio.timeout(seconds):
            return await queue.get()
    except TimeoutError:
        return None
