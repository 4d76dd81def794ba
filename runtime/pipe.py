"""The pipe between a runtime's two processes: length-prefixed messages over a socket pair.

The device process makes tokens and may not wait for the bus; the node process speaks to the bus and may not touch the
interpreter lock of the engine. So they are two processes, and this is all they share.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import AsyncIterator

import msgspec

from store import views, wire

_LENGTH = struct.Struct("<I")
MESSAGE_MOST = 256 << 20  # bytes
SEND_BUFFER = 4 << 20  # bytes the kernel holds while the other side is busy


class Began(msgspec.Struct, frozen=True):
    """What the device process is started with, as JSON in its command line. Descriptors are inherited."""

    pipe_fd: int
    policy: str
    pool_bytes: int
    host_bytes: int
    host_fd: int = -1  # the host cache; without one it is this process's own
    stepping_fd: int = -1  # see runtime/stepping.py
    journal: str = ""
    profile: str = ""  # of this machine's costs; without one they are guessed
    tensor_parallel: int = 1  # devices that each model is split over: see runtime/group.py
    load_helpers: tuple[int, ...] = ()  # other devices that help to load

    def arguments(self) -> list[str]:
        return [msgspec.json.encode(self).decode()]

    @staticmethod
    def of(argument: str) -> Began:
        return msgspec.json.decode(argument, type=Began)


class Place(msgspec.Struct, frozen=True, tag=True):
    spec: wire.EngineSpec


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    model: str


class Start(msgspec.Struct, frozen=True, tag=True):
    run: wire.Run


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Streams of one gateway nobody wants any more."""

    gateway: str
    streams: list[int]


class Order(msgspec.Struct, frozen=True, tag=True):
    model: str
    awake: bool


# A request moves: `move` names the attempt. See runtime/migrate.py for the order of these, and runtime/handover.py.


class MoveOut(msgspec.Struct, frozen=True, tag=True):
    """Begin to hand over a running request; answered by Staged or NotMoving."""

    move: str
    gateway: str
    stream: int


class Next(msgspec.Struct, frozen=True, tag=True):
    """What was staged is read: on with it. Answered by Staged, Left or NotMoving."""

    move: str


class Gone(msgspec.Struct, frozen=True, tag=True):
    """It is the other runtime's, which needs nothing of it any more."""

    move: str


class Stay(msgspec.Struct, frozen=True, tag=True):
    """It goes on here."""

    move: str


class Coming(msgspec.Struct, frozen=True, tag=True):
    """A request may come, with about so many tokens in such blocks; answered by Answered, like the next two."""

    move: str
    run: wire.Run
    tokens: int
    form: wire.KvForm
    owner: int = 0  # whose they are in the host cache; 0: they are received from another host


class Take(msgspec.Struct, frozen=True, tag=True):
    """These of its blocks, from index `first` on, are in the host cache."""

    move: str
    first: int
    host: list[int]


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """It is ours; followed by LandedHere when the host cache is no longer needed for it."""

    move: str
    departure: wire.Departure


class NotComing(msgspec.Struct, frozen=True, tag=True):
    """Followed by LandedHere too; at once, but where it is ours already."""

    move: str


class ShowPages(msgspec.Struct, frozen=True, tag=True):
    """Answered by Mapped, between two steps."""


class Quit(msgspec.Struct, frozen=True, tag=True):
    """End the process after the step that is under way."""


ToDevice = (
    Place
    | Withdraw
    | Start
    | Stop
    | Order
    | MoveOut
    | Next
    | Gone
    | Stay
    | Coming
    | Take
    | Adopt
    | NotComing
    | ShowPages
    | Quit
)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The device process can take commands."""

    engine: str
    life: int  # of the device process: see runtime/memory/images.py


class Formed(msgspec.Struct, frozen=True, tag=True):
    """The model's engine was built; sent before anything that it makes."""

    model: str
    form: wire.KvForm


class Made(msgspec.Struct, frozen=True, tag=True):
    """What one step, or one event, made for each gateway."""

    deltas: dict[str, list[wire.Delta]]


class State(msgspec.Struct, frozen=True, tag=True):
    """All models as they are now; sent soon after one moved, when the device comes to rest, and every second."""

    holder: str = ""
    switches: int = 0
    models: dict[str, wire.ModelState] = {}
    page_bytes: int = 0
    pages_total: int = 0
    pages_used: int = 0
    attainment: dict[str, wire.Attained] = {}  # by label
    accounts: wire.Accounts = wire.Accounts()
    wakes: dict[str, wire.Spread] = {}
    switch_times: wire.Spread = wire.Spread()


class Passed(msgspec.Struct, frozen=True, tag=True):
    """Where the device's time went since the last of these, which goes ahead of each State. Times are microseconds on
    the device's clock."""

    spans: list[views.Span]
    stages: list[views.Stage]
    now: views.Use  # what the time since goes to, as far as is known


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The map of the pool."""

    runs: list[views.PageRun]


class Staged(msgspec.Struct, frozen=True, tag=True):
    """These of its blocks, from index `first` on, are in the host cache; it goes on meanwhile."""

    move: str
    first: int
    host: list[int]


class Left(msgspec.Struct, frozen=True, tag=True):
    """It makes no more tokens here; those that it made were sent before this."""

    move: str
    departure: wire.Departure


class NotMoving(msgspec.Struct, frozen=True, tag=True):
    """It ended, or can't be handed over, and goes on here. `waits`: nothing was done for it yet."""

    move: str
    reason: str
    waits: bool = False


class Answered(msgspec.Struct, frozen=True, tag=True):
    move: str
    refusal: str = ""


class LandedHere(msgspec.Struct, frozen=True, tag=True):
    """Nothing is read from the host cache for it any more."""

    move: str


ToNode = Ready | Formed | Made | State | Passed | Mapped | Staged | Left | NotMoving | Answered | LandedHere

_encoder = msgspec.msgpack.Encoder()
_to_device = msgspec.msgpack.Decoder(ToDevice)
_to_node = msgspec.msgpack.Decoder(ToNode)


def _framed(message: ToDevice | ToNode) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def pair() -> tuple[socket.socket, socket.socket]:
    """(node's end, device's end)."""
    node, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (node, device):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return node, device


class DeviceEnd:
    """The device's end: never blocks but in `wait`. What the kernel does not take at once is kept and sent later."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._in = bytearray()
        self._out = bytearray()
        self.closed = False

    @property
    def backlog(self) -> int:
        """Bytes not taken by the kernel yet."""
        return len(self._out)

    def send(self, message: ToNode) -> None:
        self._out += _framed(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self.closed = True

    def receive(self) -> list[ToDevice]:
        """What has arrived, without waiting."""
        try:
            while data := self._socket.recv(1 << 20):
                self._in += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        return self._messages()

    def _messages(self) -> list[ToDevice]:
        messages: list[ToDevice] = []
        start = 0
        while len(self._in) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in, start)
            end = start + _LENGTH.size + length
            if len(self._in) < end:
                break
            messages.append(_to_device.decode(memoryview(self._in)[start + _LENGTH.size : end].tobytes()))
            start = end
        if start:
            del self._in[:start]
        return messages

    def wait(self, timeout_s: float | None) -> None:
        """Until there is something to receive, the backlog can move, or the time is up.

        By `select`: `poll` counts whole milliseconds, and a transfer may be over sooner."""
        readers, writers = [self._socket], [self._socket] if self._out else []
        select.select(readers, writers, [], None if timeout_s is None else max(0.0, timeout_s))
        if self._out:
            self.flush()


class NodeEnd:
    """The node's end, for asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> NodeEnd:
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=MESSAGE_MOST)
        return cls(reader, writer)

    def send(self, message: ToDevice) -> None:
        self._writer.write(_framed(message))

    async def messages(self) -> AsyncIterator[ToNode]:
        """Ends when the device process is gone."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield _to_node.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()
