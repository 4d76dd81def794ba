"""Receiving of a moving request's blocks at the target: see runtime/migration/transport.py for what the source says."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from runtime.migration import nixl, tls, transport
from runtime.migration.host_blocks import CARRYING, HostBlocks, HostBlocksError
from store.contract.wire import KvForm

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Arrival:
    """Blocks received of one move."""

    key: bytes
    form: KvForm
    blocks_most: int
    heard_at: float  # monotonic
    host: list[int] = field(default_factory=list)  # numbers of received blocks in the host cache, by index
    connection: socket.socket | None = None
    lent: bool = False  # the source lends the blocks: this node reads
    over: bool = False  # no more blocks are received

    def heard(self) -> None:
        self.heard_at = time.monotonic()

    def has(self, first: int, host: Sequence[int]) -> bool:
        """Whether the blocks from index `first` on were received, and lie at the numbers `host`."""
        return self.host[first : first + len(host)] == list(host)


class BlockReceiver:
    """Listening socket on which a node receives blocks of expected moves from other hosts.

    With `agents` the node can also read lent blocks. With `security` the node speaks only TLS."""

    def __init__(
        self, blocks: HostBlocks, agents: nixl.Agents | None = None, security: tls.Security | None = None
    ) -> None:
        self._blocks, self.agents, self.security = blocks, agents, security
        self._expected: dict[bytes, Arrival] = {}
        self._strangers = 0
        self._slots = asyncio.Semaphore(CARRYING)  # batches at a time: each batch needs a thread
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.address = ""  # host:port; empty while closed

    def open(self, bind: str, port: int = 0, advertise: str = "") -> None:
        """Listen on `bind` and `port` (0: any free port); peers are told the host `advertise`, or else `bind`.

        Raises ValueError with a sentence for the operator."""
        try:
            (family, *_, at), *_ = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)
            listener = socket.create_server(at[:2], family=family, backlog=transport.BACKLOG)
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
        """Stop receiving. Received blocks stay until `free`."""
        self.address = ""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # the accepting task closes the socket
            self._listener = None
        for arrival in list(self._expected.values()):
            self.end(arrival)
        if self._accepting is not None:
            await self._accepting
        await asyncio.gather(*self._serving)

    def expect(self, key: bytes, form: KvForm, tokens_most: int) -> Arrival:
        """Expect the blocks of a move of at most `tokens_most` tokens. Raises NotCarried if the offer is not valid."""
        if not self.address:
            raise transport.NotMoved("it receives nothing from other hosts")
        if len(key) != transport.KEY_BYTES or key in self._expected or form.tokens < 1 or form.bytes < 1:
            raise transport.NotMoved(
                f"a move needs a key of its own of {transport.KEY_BYTES} bytes, and blocks of {form} are none"
            )
        arrival = Arrival(key, form, form.groups * -(-tokens_most // form.tokens), time.monotonic())
        self._expected[key] = arrival
        return arrival

    def end(self, arrival: Arrival) -> None:
        """Receive no more blocks for a move."""
        self._expected.pop(arrival.key, None)
        arrival.over = True
        if arrival.connection is not None:
            transport.break_off(arrival.connection)

    async def free(self, arrival: Arrival) -> None:
        """Receive no more blocks and free the received blocks. May be called again. No process may read the blocks."""
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
                    await asyncio.sleep(transport.ACCEPT_PAUSE_S)
                    continue
                if self._strangers >= transport.STRANGERS_MOST:
                    connection.close()
                    continue
                self._strangers += 1
                task = asyncio.create_task(self._serve(connection))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            connection = accepted if self.security is None else self.security.accepted(accepted)
        except OSError:  # the peer is gone already
            self._strangers -= 1
            return accepted.close()
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
        """Read the key and return the connection's move; None if no such move is expected."""
        try:
            async with asyncio.timeout(transport.HELLO_S):
                await tls.handshake(connection)
                magic, key = transport.GREETING.unpack(await transport.exactly(connection, transport.GREETING.size))
        except ssl.SSLError as error:
            log.warning(
                "transport.not_secured", error=f"{error}: this runtime takes blocks by TLS of its authority alone"
            )
            return None
        except (OSError, EOFError):
            return None
        finally:
            self._strangers -= 1
        arrival = self._expected.get(key)
        if magic.startswith(tls.HELLO):
            log.warning("transport.not_secured", error=f"a peer speaks TLS, and this runtime lacks {tls.WANTED}")
        known = magic == transport.SENDS or (magic == transport.LENDS and self.agents is not None)
        if not known or arrival is None or arrival.connection is not None:
            return None
        arrival.lent = magic == transport.LENDS
        return arrival

    async def _batch(self, arrival: Arrival, connection: socket.socket) -> bool:
        """Receive the next batch; return False if there is no next batch, or the batch was refused."""
        header = await transport.exactly(connection, transport.BATCH.size, or_none=True)
        if not header:
            return False
        first, count = transport.BATCH.unpack(header)
        if first != len(arrival.host) or not 0 < count <= arrival.blocks_most - first:
            had, most = len(arrival.host), arrival.blocks_most
            await transport.say(
                connection, transport.No(f"{count} blocks from {first} on: it has {had}, and {most} are the most")
            )
            return False
        async with self._slots:
            return await self._take_in(arrival, connection, count)

    async def _take_in(self, arrival: Arrival, connection: socket.socket, count: int) -> bool:
        try:
            host = await self._blocks.take(count, arrival.form.bytes)
        except HostBlocksError as error:
            await transport.say(connection, transport.No(str(error)))
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
            await transport.say(connection, transport.Again([]))
        elif damaged:
            await transport.say(connection, transport.No(f"{damaged} parcels came damaged {transport.TRIES} times"))
        return kept

    async def _receive(self, arrival: Arrival, connection: socket.socket, host: list[int]) -> int:
        """Receive a batch into the blocks `host`. Return the number of parcels still damaged after TRIES tries."""
        await transport.say(connection, transport.Room(host))
        parcels = transport.split_parcels(host, arrival.form.bytes)
        wanted = list(range(len(parcels)))
        reader = await self._reader(arrival, connection, parcels) if arrival.lent else None
        for tries in range(1, transport.TRIES + 1):
            views = [await self._blocks.views(parcels[number], arrival.form.bytes) for number in wanted]
            if reader is None:
                job = partial(transport.receive_parcels, connection, views, arrival.heard)
            else:
                job = partial(reader.read, wanted, views, arrival.heard)
            receiving = self._blocks.receiving(job)
            wanted = [wanted[place] for place in await asyncio.wrap_future(receiving)]
            if not wanted:
                return 0
            log.warning("transport.damaged", parcels=len(wanted), of=len(parcels), tries=tries)
            if tries < transport.TRIES and reader is None:
                await transport.say(connection, transport.Again(wanted))
        return len(wanted)

    async def _reader(self, arrival: Arrival, connection: socket.socket, parcels: list[list[int]]) -> nixl.Reader:
        """Receive the description of the lent parcels and return the reader. Raises OSError, EOFError."""
        assert self.agents is not None
        async with asyncio.timeout(transport.PARCEL_S * (1 + len(parcels))):  # the source sums every parcel first
            (length,) = transport.LENGTH.unpack(await transport.exactly(connection, transport.LENGTH.size))
            if length > transport.LENT_BYTES * (1 + sum(map(len, parcels))):
                raise OSError(f"{len(parcels)} parcels are lent in {length} bytes")
            data = await transport.exactly(connection, length)
        try:
            lent = transport.lent_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OSError(f"what is lent is not to be understood: {error}") from error
        if len(lent.runs) != len(parcels) or len(lent.sums) != len(parcels):
            raise OSError(f"{len(lent.runs)} parcels are lent, with {len(lent.sums)} sums, of {len(parcels)}")
        return nixl.Reader(self.agents, lent, lambda: arrival.over, transport.PARCEL_S)
