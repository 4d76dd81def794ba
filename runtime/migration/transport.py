"""Transport of a moving request's blocks into the target's host cache.

Runtimes of a host share the host cache: the target's device reads where the source's device wrote. Between hosts blocks
are sent, from the memory of the source's cache into the memory of the target's cache:

    source's node                             target's node
      key ─────────────────────────────────▶  was this move offered? if not, the target reads and says no more
      first, count ────────────────────────▶  is there room?
                ◀─────────────────── Room ──  numbers of the blocks in the target's cache
      parcels: bytes, CRC-32 ──────────────▶
                ◀────────────────── Again ──  damaged parcels, to be sent again; []: every parcel arrived

With NIXL (runtime/migration/nixl.py) on both sides the source lends its memory instead, and the target reads:

      agent, addresses, sums ──────────────▶  reads the parcels, and damaged parcels again
                ◀────────────────── Again ──  []: every parcel arrived

The paths of the source are here; the target's half is in runtime/migration/receiver.py. A connection serves one move.
Any fault ends the connection, and the request stays with the source. The target frees received blocks when the target
forgets the offer. Threads send, receive and sum the bytes: tokens must not wait.

Between hosts the transport uses TLS (runtime/migration/tls.py): a node listens only to runtimes with a certificate.
Besides, the source makes a key of 16 random bytes for the move and tells the target the key over the bus. A peer
without the key can make a node read 24 bytes, for 2 s, on few connections at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import select
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import msgspec
import structlog

from runtime.migration import nixl, tls
from runtime.migration.host_blocks import HostBlocks, HostBlocksError

log = structlog.get_logger()

KEY_BYTES = 16
PARCEL_BYTES = 4 << 20  # about; a damaged parcel is sent again as a whole
PIECE_BYTES = 256 << 10  # sent or received at a time, and summed while still in the CPU's cache
TRIES = 3  # for a parcel to arrive undamaged
CONNECT_S = 2.0
HELLO_S = 2.0
ROOM_S = 15.0  # to get memory on the host, in the worst case
PARCEL_S = 5.0  # for each parcel, and for the target's answer at the end
LENT_BYTES = 4096  # the most bytes that describe each lent block, and the agent
STRANGERS_MOST = 32  # connections that have not said a key yet; further connections are closed at once
BACKLOG = 64
ACCEPT_PAUSE_S = 0.1  # after the machine refused a connection, for want of descriptors

GREETING = struct.Struct(f"<8s{KEY_BYTES}s")
SENDS, LENDS = b"stackv 1", b"stackl 1"  # first bytes of a source that sends, and of a source that lends
BATCH = struct.Struct("<II")  # index of the first block, number of blocks
SUM = struct.Struct("<I")  # CRC-32
LENGTH = struct.Struct("<I")


class Room(msgspec.Struct, frozen=True, tag="Room"):
    host: list[int]


class Again(msgspec.Struct, frozen=True, tag="Again"):
    parcels: list[int]


class No(msgspec.Struct, frozen=True, tag="No"):
    reason: str


Answer = Room | Again | No
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Answer)
lent_decoder = msgspec.msgpack.Decoder(nixl.Lent)

Job = Callable[[socket.socket, list[list[memoryview]]], None]  # work of a source on parcels, on a thread


class NotMoved(Exception):
    """Reason why a request stays at the source. `waits`: the request has not begun, so no block exists to copy."""

    def __init__(self, reason: str, waits: bool = False) -> None:
        super().__init__(reason)
        self.waits = waits


class Path(Protocol):
    """Path of blocks from a source to a target, for one move."""

    key: bytes  # key that the target must know beforehand; empty: the target needs no key

    async def carry(self, first: int, blocks: list[int]) -> list[int]:
        """Bring blocks of the request, from index `first` on, to the target. Return their numbers at the target.

        The caller brings each index once and in order. The blocks must not change during the call. Raises NotCarried:
        then the path is at its end."""

    def close(self) -> None:
        """End the path; may be called at any time."""


class Shared:
    """Path within a host: source and target share the host cache, so no block is carried."""

    key = b""

    async def carry(self, first: int, blocks: list[int]) -> list[int]:
        return blocks

    def close(self) -> None:
        pass


class Tcp:
    """Path to the node at `address`. Connects when the first blocks are carried."""

    _magic = SENDS

    def __init__(
        self, blocks: HostBlocks, address: str, block_bytes: int, security: tls.Security | None = None
    ) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._blocks, self._address, self._block_bytes, self._security = blocks, address, block_bytes, security
        self._connection: socket.socket | None = None
        self._sending: Future[None] | None = None

    async def carry(self, first: int, blocks: list[int]) -> list[int]:
        if not blocks:
            return []
        try:
            return await self._carry(first, blocks)
        except ssl.SSLError as error:
            raise self._not_secured(error) from error
        except TimeoutError as error:
            raise NotMoved(f"{self._address} takes too long to receive {len(blocks)} blocks") from error
        except (OSError, EOFError, msgspec.DecodeError, UnicodeDecodeError, HostBlocksError) as error:
            refused = self._security is None and isinstance(error, EOFError | ConnectionError)
            hint = f"; if it takes blocks by TLS, give this runtime {tls.WANTED}" if refused else ""
            raise NotMoved(f"{len(blocks)} blocks can't be sent to {self._address}: {error}{hint}") from error

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._sending is None or self._sending.done():
            connection.close()
        else:  # a thread uses the connection: the descriptor must not be reused yet
            self._sending.add_done_callback(lambda _: connection.close())
            break_off(connection)

    async def _carry(self, first: int, blocks: list[int]) -> list[int]:
        if self._connection is None:
            self._connection = await self._connected()
        async with asyncio.timeout(ROOM_S):
            await tls.send_all(self._connection, BATCH.pack(first, len(blocks)))
            room = await self._answer(len(blocks))
        if not isinstance(room, Room) or len(room.host) != len(blocks):
            raise NotMoved(f"{self._address} says nothing of where {len(blocks)} blocks may be")
        await self._deliver(split_parcels(blocks, self._block_bytes))
        return room.host

    async def _deliver(self, parcels: list[list[int]]) -> None:
        wanted = list(range(len(parcels)))
        for _ in range(TRIES):
            await self._apart(_send_parcels, [parcels[number] for number in wanted])
            wanted = await self._damaged(len(parcels))
            if not wanted:
                return
        raise NotMoved(f"{self._address} wants {len(wanted)} parcels more than {TRIES} times")

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
                if self._security is not None:
                    connection = self._security.connected(connection)
                    await self._shake_hands(connection)
                await tls.send_all(connection, GREETING.pack(self._magic, self.key))
            except BaseException:
                connection.close()
                raise
        return connection

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            await tls.handshake(connection)
        except OSError as error:
            raise self._not_secured(error) from error

    def _not_secured(self, error: OSError) -> NotMoved:
        both = f"both runtimes need {tls.WANTED}, of the same authority"
        return NotMoved(f"no TLS with {self._address} ({error}): {both}")

    async def _apart(self, job: Job, parcels: list[list[int]]) -> None:
        """Run a job on the parcels' memory, on a thread."""
        assert self._connection is not None
        views = [await self._blocks.views(blocks, self._block_bytes) for blocks in parcels]
        self._sending = self._blocks.sending(partial(job, self._connection, views))
        await asyncio.wrap_future(self._sending)

    async def _damaged(self, parcels: int) -> list[int]:
        async with asyncio.timeout(PARCEL_S):
            again = await self._answer(parcels)
        if not isinstance(again, Again) or not set(again.parcels) <= set(range(parcels)):
            raise NotMoved(f"{self._address} wants parcels that there are not")
        return sorted(set(again.parcels))

    async def _answer(self, numbers: int) -> Answer:
        """Return the target's answer, of at most so many numbers. Raises NotCarried if the answer is No."""
        assert self._connection is not None
        (length,) = LENGTH.unpack(await exactly(self._connection, LENGTH.size))
        if length > 1024 + 9 * numbers:
            raise NotMoved(f"{self._address} answers with {length} bytes")
        answer: Answer = _decoder.decode(await exactly(self._connection, length))
        if isinstance(answer, No):
            raise NotMoved(answer.reason)
        return answer


class Nixl(Tcp):
    """Path to the node at `address`, which reads the blocks out of the source's memory by NIXL."""

    _magic = LENDS

    def __init__(
        self,
        blocks: HostBlocks,
        address: str,
        block_bytes: int,
        agents: nixl.Agents,
        security: tls.Security | None = None,
    ) -> None:
        super().__init__(blocks, address, block_bytes, security)
        self._agents = agents

    async def _deliver(self, parcels: list[list[int]]) -> None:
        await self._apart(self._lend, parcels)
        if await self._damaged(len(parcels)):
            raise NotMoved(f"{self._address} wants parcels that it can read again itself")

    def _lend(self, connection: socket.socket, parcels: list[list[memoryview]]) -> None:
        """Lend the parcels until the target answers. Raises OSError."""
        with self._agents.one() as agent, nixl.lent(agent, parcels) as lent:
            data, deadline = _encoder.encode(lent), time.monotonic() + PARCEL_S * (1 + len(parcels))
            _send(connection, memoryview(LENGTH.pack(len(data)) + data), deadline)
            answered = select.poll()
            answered.register(connection, select.POLLIN)
            while not answered.poll(0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(parcels)} parcels take longer than {PARCEL_S:g} s each")
                nixl.go_on(agent)
                time.sleep(nixl.POLL_S)


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def split_parcels(blocks: list[int], block_bytes: int) -> list[list[int]]:
    """Split a batch into parcels. Source and target split a batch in the same way."""
    most = max(1, PARCEL_BYTES // block_bytes)
    return [blocks[first : first + most] for first in range(0, len(blocks), most)]


def _send_parcels(connection: socket.socket, parcels: Sequence[Sequence[memoryview]]) -> None:
    """Send the parcels, each with a CRC-32; blocks the calling thread. Raises OSError."""
    for views in parcels:
        sum, deadline = 0, time.monotonic() + PARCEL_S
        for piece in _pieces(views):
            sum = zlib.crc32(piece, sum)
            _send(connection, piece, deadline)
        _send(connection, memoryview(SUM.pack(sum)), deadline)


def receive_parcels(
    connection: socket.socket, parcels: Sequence[Sequence[memoryview]], heard: Callable[[], None]
) -> list[int]:
    """Receive the parcels, blocking the thread. Return the places of damaged parcels. Raises OSError, EOFError."""
    damaged = []
    for place, views in enumerate(parcels):
        sum, sent, deadline = 0, memoryview(bytearray(SUM.size)), time.monotonic() + PARCEL_S
        for piece in _pieces(views):
            _receive(connection, piece, deadline)
            sum = zlib.crc32(piece, sum)
        _receive(connection, sent, deadline)
        heard()
        if SUM.unpack(sent) != (sum,):
            damaged.append(place)
    return damaged


def _pieces(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for first in range(0, len(view), PIECE_BYTES):
            yield view[first : first + PIECE_BYTES]


def _send(connection: socket.socket, view: memoryview, deadline: float) -> None:
    while view:
        view = view[tls.send_some(connection, view, deadline) :]


def _receive(connection: socket.socket, view: memoryview, deadline: float) -> None:
    while view:
        got = tls.receive_some(connection, view, deadline)
        if not got:
            raise EOFError("the other side closed the connection in the middle of a parcel")
        view = view[got:]


def break_off(connection: socket.socket) -> None:
    """End the connection, so that waiting threads and tasks go on."""
    with contextlib.suppress(OSError):  # the peer may have ended the connection already
        tls.break_off(connection)


async def say(connection: socket.socket, answer: Answer) -> None:
    data = _encoder.encode(answer)
    async with asyncio.timeout(PARCEL_S):
        await tls.send_all(connection, LENGTH.pack(len(data)) + data)


async def exactly(connection: socket.socket, size: int, or_none: bool = False) -> bytes:
    """Receive exactly `size` bytes; with `or_none`, b"" if the peer closed before the first byte. Raises EOFError."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = await tls.receive(connection, view)
        if not got and or_none and len(view) == size:
            return b""
        if not got:
            raise EOFError("the other side closed the connection")
        view = view[got:]
    return bytes(data)


def split(address: str) -> tuple[str, int]:
    """Split host:port into host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    host, _ = split(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
