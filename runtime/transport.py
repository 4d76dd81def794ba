"""How the blocks of a request that moves come to lie in the target's host cache.

Runtimes of one host share it: what the source's device wrote there is where the target's device reads. Between hosts
blocks are sent, from the memory of one cache into the memory of the other:

    source's node                             target's node
      key ─────────────────────────────────▶  was this move offered? if not, nothing more is read or said
      first, count ────────────────────────▶  is there room?
                ◀─────────────────── Room ──  the numbers that they will have there
      parcels: bytes, CRC-32 ──────────────▶
                ◀────────────────── Again ──  parcels that came damaged; none: all are there

With NIXL (runtime/nixl.py) on both sides the source says what it lends instead, and the target reads it:

      agent, addresses, sums ──────────────▶  reads, and again what came damaged
                ◀────────────────── Again ──  none: all are there

A connection serves one move. Whatever goes wrong ends it, the request stays with the source, and the target frees what
it received when it forgets the offer. Bytes are sent, received and summed on threads: tokens must not wait for them.

Who does not know a key, 16 random bytes that the source made for this move and told the target over the bus, can make a
node read 24 bytes, for 2 s, on few connections at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
import structlog

from runtime import nixl
from runtime.memory.hostblocks import CARRYING, HostBlocks, HostBlocksError
from store.wire import KvForm

log = structlog.get_logger()

KEY_BYTES = 16
PARCEL_BYTES = 4 << 20  # about; what is sent again at a time
PIECE_BYTES = 256 << 10  # sent or received at a time, and summed while it is warm
TRIES = 3  # for a parcel to come as it was sent
CONNECT_S = 2.0
HELLO_S = 2.0
ROOM_S = 15.0  # to get memory on the host, in the worst case
PARCEL_S = 5.0  # for each, and for what the target says of them in the end
LENT_BYTES = 4096  # at most, of what is said of each block that is lent, and of the agent
STRANGERS_MOST = 32  # connections that have not said their key; more are closed at once
BACKLOG = 64
ACCEPT_PAUSE_S = 0.1  # when the machine refuses a connection, for want of descriptors

_HELLO = struct.Struct(f"<8s{KEY_BYTES}s")
_MAGIC, _LENDS = b"stackv 1", b"stackl 1"  # who sends, and who lends
_BATCH = struct.Struct("<II")  # index of the first block, how many
_SUM = struct.Struct("<I")  # CRC-32
_LENGTH = struct.Struct("<I")


class Room(msgspec.Struct, frozen=True, tag=True):
    host: list[int]


class Again(msgspec.Struct, frozen=True, tag=True):
    parcels: list[int]


class No(msgspec.Struct, frozen=True, tag=True):
    reason: str


Answer = Room | Again | No
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Answer)
_lent_decoder = msgspec.msgpack.Decoder(nixl.Lent)

Job = Callable[[socket.socket, list[list[memoryview]]], None]  # what a source does with parcels on a thread


class NotCarried(Exception):
    """The blocks are not there; says why."""


class Path(Protocol):
    """From a source to one target, for one move."""

    key: bytes  # what the target must know of it beforehand; empty where that is nothing

    async def carry(self, first: int, blocks: list[int]) -> list[int]:
        """Bring these of the request's blocks, from index `first` on, each index once and in order, to where the target
        reads; the numbers that they have there. They must not change meanwhile. Raises NotCarried: then it is over."""

    def close(self) -> None:
        """At any time."""


class Shared:
    """Within a host: they are there."""

    key = b""

    async def carry(self, first: int, blocks: list[int]) -> list[int]:
        return blocks

    def close(self) -> None:
        pass


class Tcp:
    """To the node at `address`, connected when there is something to carry."""

    _magic = _MAGIC

    def __init__(self, blocks: HostBlocks, address: str, block_bytes: int) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._blocks, self._address, self._block_bytes = blocks, address, block_bytes
        self._connection: socket.socket | None = None
        self._sending: Future[None] | None = None

    async def carry(self, first: int, blocks: list[int]) -> list[int]:
        if not blocks:
            return []
        try:
            return await self._carry(first, blocks)
        except TimeoutError as error:
            raise NotCarried(f"{self._address} takes too long to receive {len(blocks)} blocks") from error
        except (OSError, EOFError, msgspec.DecodeError, UnicodeDecodeError, HostBlocksError) as error:
            raise NotCarried(f"{len(blocks)} blocks can't be sent to {self._address}: {error}") from error

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._sending is None or self._sending.done():
            connection.close()
        else:  # a thread has it: its number may not become another's meanwhile
            self._sending.add_done_callback(lambda _: connection.close())
            _break_off(connection)

    async def _carry(self, first: int, blocks: list[int]) -> list[int]:
        if self._connection is None:
            self._connection = await self._connected()
        async with asyncio.timeout(ROOM_S):
            await asyncio.get_running_loop().sock_sendall(self._connection, _BATCH.pack(first, len(blocks)))
            room = await self._answer(len(blocks))
        if not isinstance(room, Room) or len(room.host) != len(blocks):
            raise NotCarried(f"{self._address} says nothing of where {len(blocks)} blocks may be")
        await self._deliver(_parcels(blocks, self._block_bytes))
        return room.host

    async def _deliver(self, parcels: list[list[int]]) -> None:
        wanted = list(range(len(parcels)))
        for _ in range(TRIES):
            await self._apart(_send_parcels, [parcels[number] for number in wanted])
            wanted = await self._damaged(len(parcels))
            if not wanted:
                return
        raise NotCarried(f"{self._address} wants {len(wanted)} parcels more than {TRIES} times")

    async def _connected(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        host, port = split(self._address)
        async with asyncio.timeout(CONNECT_S):
            (family, *_, at), *_ = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(connection, at)
                await loop.sock_sendall(connection, _HELLO.pack(self._magic, self.key))
            except BaseException:
                connection.close()
                raise
        return connection

    async def _apart(self, job: Job, parcels: list[list[int]]) -> None:
        """On a thread."""
        assert self._connection is not None
        views = [await self._blocks.views(blocks, self._block_bytes) for blocks in parcels]
        self._sending = self._blocks.sending(partial(job, self._connection, views))
        await asyncio.wrap_future(self._sending)

    async def _damaged(self, parcels: int) -> list[int]:
        async with asyncio.timeout(PARCEL_S):
            again = await self._answer(parcels)
        if not isinstance(again, Again) or not set(again.parcels) <= set(range(parcels)):
            raise NotCarried(f"{self._address} wants parcels that there are not")
        return sorted(set(again.parcels))

    async def _answer(self, numbers: int) -> Answer:
        """Which has so many numbers at most. Raises NotCarried if it is No."""
        assert self._connection is not None
        (length,) = _LENGTH.unpack(await _exactly(self._connection, _LENGTH.size))
        if length > 1024 + 9 * numbers:
            raise NotCarried(f"{self._address} answers with {length} bytes")
        answer: Answer = _decoder.decode(await _exactly(self._connection, length))
        if isinstance(answer, No):
            raise NotCarried(answer.reason)
        return answer


class Nixl(Tcp):
    """The same, but that the target reads the blocks."""

    _magic = _LENDS

    def __init__(self, blocks: HostBlocks, address: str, block_bytes: int, agents: nixl.Agents) -> None:
        super().__init__(blocks, address, block_bytes)
        self._agents = agents

    async def _deliver(self, parcels: list[list[int]]) -> None:
        await self._apart(self._lend, parcels)
        if await self._damaged(len(parcels)):
            raise NotCarried(f"{self._address} wants parcels that it can read again itself")

    def _lend(self, connection: socket.socket, parcels: list[list[memoryview]]) -> None:
        """Until there is an answer. Raises OSError."""
        with self._agents.one() as agent, nixl.lent(agent, parcels) as lent:
            data, deadline = _encoder.encode(lent), time.monotonic() + PARCEL_S * (1 + len(parcels))
            _send(connection, memoryview(_LENGTH.pack(len(data)) + data), deadline)
            answered = select.poll()
            answered.register(connection, select.POLLIN)
            while not answered.poll(0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(parcels)} parcels take longer than {PARCEL_S:g} s each")
                nixl.go_on(agent)
                time.sleep(nixl.POLL_S)


@dataclass(slots=True, eq=False)
class Arrival:
    """What is received of one move."""

    key: bytes
    form: KvForm
    blocks_most: int
    heard_at: float  # monotonic
    host: list[int] = field(default_factory=list)  # where its blocks are, by index
    connection: socket.socket | None = None
    lent: bool = False  # it is to be read, not received
    over: bool = False  # nothing more is received

    def heard(self) -> None:
        self.heard_at = time.monotonic()

    def has(self, first: int, host: Sequence[int]) -> bool:
        """Whether the blocks from index `first` on were received, and are there."""
        return self.host[first : first + len(host)] == list(host)


class Door:
    """Where a node receives blocks from other hosts, those of the moves it was told to expect; with `agents` it reads
    them, if they are lent."""

    def __init__(self, blocks: HostBlocks, agents: nixl.Agents | None = None) -> None:
        self._blocks, self.agents = blocks, agents
        self._expected: dict[bytes, Arrival] = {}
        self._strangers = 0
        self._slots = asyncio.Semaphore(CARRYING)  # a thread for each batch that is told to come
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.address = ""  # host:port, while it is open

    def open(self, bind: str, port: int = 0, advertise: str = "") -> None:
        """Raises ValueError with one sentence."""
        try:
            (family, *_, at), *_ = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)
            listener = socket.create_server(at[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            raise ValueError(
                f"STACCATO_TRANSPORT_BIND={bind}, port {port}: {error.strerror}: name an address of this host and a "
                "port that is free, or STACCATO_TRANSPORT_PORT=0 for any"
            ) from error
        listener.setblocking(False)
        self._listener = listener
        host = advertise or bind
        self.address = f"[{host}]:{listener.getsockname()[1]}" if ":" in host else f"{host}:{listener.getsockname()[1]}"
        self._accepting = asyncio.create_task(self._accept(listener))
        if self.agents is not None:
            self._blocks.receiving(self.agents.warm)

    async def close(self) -> None:
        """Nothing is received any more; what was stays until it is freed."""
        self.address = ""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # its task closes it
            self._listener = None
        for arrival in list(self._expected.values()):
            self.end(arrival)
        if self._accepting is not None:
            await self._accepting
        await asyncio.gather(*self._serving)

    def expect(self, key: bytes, form: KvForm, tokens_most: int) -> Arrival:
        """Raises NotCarried for what can't be an offer."""
        if not self.address:
            raise NotCarried("it receives nothing from other hosts")
        if len(key) != KEY_BYTES or key in self._expected or form.tokens < 1 or form.bytes < 1:
            raise NotCarried(f"a move needs a key of its own of {KEY_BYTES} bytes, and blocks of {form} are none")
        arrival = Arrival(key, form, -(-tokens_most // form.tokens), time.monotonic())
        self._expected[key] = arrival
        return arrival

    def end(self, arrival: Arrival) -> None:
        """Nothing more is received for it."""
        self._expected.pop(arrival.key, None)
        arrival.over = True
        if arrival.connection is not None:
            _break_off(arrival.connection)

    async def free(self, arrival: Arrival) -> None:
        """It is over, and nobody reads what was received; again does no harm."""
        self.end(arrival)
        blocks, arrival.host = arrival.host, []
        await self._blocks.free(blocks, arrival.form.bytes)

    # ── connections ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while self.address:
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError as error:
                    if not self.address:
                        return
                    log.warning("transport.not_accepted", error=str(error))
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                if self._strangers >= STRANGERS_MOST:
                    connection.close()
                    continue
                self._strangers += 1
                task = asyncio.create_task(self._serve(connection))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            arrival = await self._greet(connection)
            if arrival is None:
                return
            arrival.connection = connection
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while await self._batch(arrival, connection):
                    pass
            except (OSError, EOFError, HostBlocksError) as error:
                log.info("transport.broken_off", blocks=len(arrival.host), error=str(error) or type(error).__name__)
            finally:
                arrival.connection = None

    async def _greet(self, connection: socket.socket) -> Arrival | None:
        """The move that this connection is for, if it is for one."""
        try:
            async with asyncio.timeout(HELLO_S):
                magic, key = _HELLO.unpack(await _exactly(connection, _HELLO.size))
        except (OSError, EOFError):
            return None
        finally:
            self._strangers -= 1
        arrival = self._expected.get(key)
        known = magic == _MAGIC or (magic == _LENDS and self.agents is not None)
        if not known or arrival is None or arrival.connection is not None:
            return None
        arrival.lent = magic == _LENDS
        return arrival

    async def _batch(self, arrival: Arrival, connection: socket.socket) -> bool:
        """Receive the next; False when there is none, or it is refused."""
        header = await _exactly(connection, _BATCH.size, or_none=True)
        if not header:
            return False
        first, count = _BATCH.unpack(header)
        if first != len(arrival.host) or not 0 < count <= arrival.blocks_most - first:
            had, most = len(arrival.host), arrival.blocks_most
            await _say(connection, No(f"{count} blocks from {first} on: it has {had}, and {most} are the most"))
            return False
        async with self._slots:
            return await self._take_in(arrival, connection, count)

    async def _take_in(self, arrival: Arrival, connection: socket.socket, count: int) -> bool:
        try:
            host = await self._blocks.take(count, arrival.form.bytes)
        except HostBlocksError as error:
            await _say(connection, No(str(error)))
            return False
        damaged, kept = 0, False
        try:
            damaged = await self._receive(arrival, connection, host)
            kept = not damaged and not arrival.over
        finally:
            if not kept:
                await self._blocks.free(host, arrival.form.bytes)
        if kept:
            arrival.host += host
            await _say(connection, Again([]))
        elif damaged:
            await _say(connection, No(f"{damaged} parcels came damaged {TRIES} times"))
        return kept

    async def _receive(self, arrival: Arrival, connection: socket.socket, host: list[int]) -> int:
        """A batch into these blocks; how many of its parcels came damaged however often they were sent."""
        await _say(connection, Room(host))
        parcels = _parcels(host, arrival.form.bytes)
        wanted = list(range(len(parcels)))
        reader = await self._reader(arrival, connection, parcels) if arrival.lent else None
        for tries in range(1, TRIES + 1):
            views = [await self._blocks.views(parcels[number], arrival.form.bytes) for number in wanted]
            if reader is None:
                job = partial(_receive_parcels, connection, views, arrival.heard)
            else:
                job = partial(reader.read, wanted, views, arrival.heard)
            receiving = self._blocks.receiving(job)
            wanted = [wanted[place] for place in await asyncio.wrap_future(receiving)]
            if not wanted:
                return 0
            log.warning("transport.damaged", parcels=len(wanted), of=len(parcels), tries=tries)
            if tries < TRIES and reader is None:
                await _say(connection, Again(wanted))
        return len(wanted)

    async def _reader(self, arrival: Arrival, connection: socket.socket, parcels: list[list[int]]) -> nixl.Reader:
        """Of what the source says next that it lends. Raises OSError, EOFError."""
        assert self.agents is not None
        async with asyncio.timeout(PARCEL_S * (1 + len(parcels))):  # the source sums all of it first
            (length,) = _LENGTH.unpack(await _exactly(connection, _LENGTH.size))
            if length > LENT_BYTES * (1 + sum(map(len, parcels))):
                raise OSError(f"{len(parcels)} parcels are lent in {length} bytes")
            data = await _exactly(connection, length)
        try:
            lent = _lent_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OSError(f"what is lent is not to be understood: {error}") from error
        if len(lent.runs) != len(parcels) or len(lent.sums) != len(parcels):
            raise OSError(f"{len(lent.runs)} parcels are lent, with {len(lent.sums)} sums, of {len(parcels)}")
        return nixl.Reader(self.agents, lent, lambda: arrival.over, PARCEL_S)


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _parcels(blocks: list[int], block_bytes: int) -> list[list[int]]:
    """Both sides part a batch like this."""
    most = max(1, PARCEL_BYTES // block_bytes)
    return [blocks[first : first + most] for first in range(0, len(blocks), most)]


def _send_parcels(connection: socket.socket, parcels: Sequence[Sequence[memoryview]]) -> None:
    """On a thread. Raises OSError."""
    for views in parcels:
        sum, deadline = 0, time.monotonic() + PARCEL_S
        for piece in _pieces(views):
            sum = zlib.crc32(piece, sum)
            _send(connection, piece, deadline)
        _send(connection, memoryview(_SUM.pack(sum)), deadline)


def _receive_parcels(
    connection: socket.socket, parcels: Sequence[Sequence[memoryview]], heard: Callable[[], None]
) -> list[int]:
    """On a thread; the places of those that came damaged. Raises OSError, EOFError."""
    damaged = []
    for place, views in enumerate(parcels):
        sum, sent, deadline = 0, memoryview(bytearray(_SUM.size)), time.monotonic() + PARCEL_S
        for piece in _pieces(views):
            _receive(connection, piece, deadline)
            sum = zlib.crc32(piece, sum)
        _receive(connection, sent, deadline)
        heard()
        if _SUM.unpack(sent) != (sum,):
            damaged.append(place)
    return damaged


def _pieces(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for first in range(0, len(view), PIECE_BYTES):
            yield view[first : first + PIECE_BYTES]


def _send(connection: socket.socket, view: memoryview, deadline: float) -> None:
    while view:
        try:
            view = view[connection.send(view) :]
        except BlockingIOError:
            _wait(connection, select.POLLOUT, deadline)


def _receive(connection: socket.socket, view: memoryview, deadline: float) -> None:
    while view:
        try:
            got = connection.recv_into(view)
        except BlockingIOError:
            _wait(connection, select.POLLIN, deadline)
            continue
        if not got:
            raise EOFError("the other side closed the connection in the middle of a parcel")
        view = view[got:]


def _wait(connection: socket.socket, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(connection, event)
    if not poll.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
        raise TimeoutError(f"a parcel takes longer than {PARCEL_S:g} s")


def _break_off(connection: socket.socket) -> None:
    """Whoever waits for it goes on."""
    with contextlib.suppress(OSError):  # the other side may have been faster
        connection.shutdown(socket.SHUT_RDWR)


async def _say(connection: socket.socket, answer: Answer) -> None:
    data = _encoder.encode(answer)
    async with asyncio.timeout(PARCEL_S):
        await asyncio.get_running_loop().sock_sendall(connection, _LENGTH.pack(len(data)) + data)


async def _exactly(connection: socket.socket, size: int, or_none: bool = False) -> bytes:
    """So many bytes; if wanted, none where the connection was closed before the first. Raises EOFError."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = await asyncio.get_running_loop().sock_recv_into(connection, view)
        if not got and or_none and len(view) == size:
            return b""
        if not got:
            raise EOFError("the other side closed the connection")
        view = view[got:]
    return bytes(data)


def split(address: str) -> tuple[str, int]:
    """Host and port of host:port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    host, _ = split(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
