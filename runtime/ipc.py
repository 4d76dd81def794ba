"""Pipe between the two processes of a runtime: length-prefixed messages over a socket pair.

The device process makes tokens and must not wait for the bus. The node process speaks to the bus and must not touch the
interpreter lock of the engine. A runtime is therefore two processes, connected by this pipe.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from msgspec import structs

from store.contract import views, wire
from store.contract.device_bytes import DeviceBytes

_LENGTH = struct.Struct("<I")
MESSAGE_MOST = 256 << 20  # bytes
SEND_BUFFER = 4 << 20  # bytes held by the kernel while the receiver is busy


class Began(msgspec.Struct, frozen=True):
    """Settings of a new device process, passed as JSON in the command line. File descriptors are inherited."""

    pipe_fd: int
    policy: str
    pool_bytes: int
    host_bytes: int
    host_fd: int = -1  # file of the host cache; -1: the process has a private cache
    stepping_fd: int = -1  # see runtime/device/stepping.py
    journal: str = ""
    profile: str = ""  # file of this machine's costs; empty: costs are guessed
    tensor_parallel: int = 1  # devices over which each model is split: see runtime/group/group.py
    load_helpers: tuple[int, ...] = ()  # further devices that help to load
    images_beside: bool = False  # the node has images made: see runtime/imaging.py
    pinned_bytes: int = 0  # most bytes of the host cache registered with a GPU's driver at a time; 0: no limit
    disk_folder: str = ""  # images on disk; empty: there are none
    disk_bytes: int = 0  # bound on the images on disk
    pool_percent: int = 0  # of the device's memory for the pool, in place of `pool_bytes`; 0: `pool_bytes` says it
    numa_node: int = -1  # node of the host next to the GPU; -1: any
    prefixes: tuple[int, float] = (0, 0.0)  # bound on blocks of ended requests in the host cache, seconds they last
    cuda_graphs: int = 0  # most requests of a decode step that a GPU replays from a CUDA graph; 0: every step is eager
    compiled: bool = False  # on a GPU: models are compiled by torch
    async_scheduling: bool | None = None  # begin a step before the last step's tokens are known; None: on GPUs alone

    def arguments(self) -> list[str]:
        return [msgspec.json.encode(self).decode()]

    @property
    def builder(self) -> dict[str, Any]:
        """Arguments of the builder, runtime/engine/builder.py."""
        return dict(
            pool_bytes=self.pool_bytes,
            host_bytes=self.host_bytes,
            host_fd=self.host_fd,
            helpers=self.load_helpers,
            numa_node=self.numa_node,
            pinned_bytes=self.pinned_bytes,
            pool_percent=self.pool_percent,
            disk=(self.disk_folder, self.disk_bytes),
            prefixes=self.prefixes,
            graphs=self.cuda_graphs,
            compiled=self.compiled,
            async_scheduling=self.async_scheduling,
        )

    @staticmethod
    def of(argument: str) -> Began:
        return msgspec.json.decode(argument, type=Began)


class Place(msgspec.Struct, frozen=True, tag="Place"):
    spec: wire.EngineSpec
    returns: bool = False  # the node hosted the model when the device process began: a proof on the disk suffices


class Withdraw(msgspec.Struct, frozen=True, tag="Withdraw"):
    model: str


class Start(msgspec.Struct, frozen=True, tag="Start"):
    run: wire.Run
    grammar: bytes = b""  # compiled, as runtime/engine/compiling.py makes grammars; empty: the run has no grammar


class Stop(msgspec.Struct, frozen=True, tag="Stop"):
    """End streams of a gateway that no client wants any more."""

    gateway: str
    streams: list[int]


class Order(msgspec.Struct, frozen=True, tag="Order"):
    model: str
    awake: bool


class Warm(msgspec.Struct, frozen=True, tag="Warm"):
    """Keep the image of a model in the host cache from now on, or (`warm` false) no longer."""

    model: str
    warm: bool


# Migration of a request: `move` names the attempt. Copy, Commit, AbortMove and Release of store/contract/wire.py cross
# the pipe as well. runtime/migration (migrate.py, handover.py) shows the order of the messages.


class PrepareMove(msgspec.Struct, frozen=True, tag="PrepareMove"):
    """Begin a migration, at its source or at its target.

    The source begins to copy the running request out: Copy or a refusal follows. The target gets ready for the request,
    and says MoveAnswer."""

    prepare: wire.Prepare  # for the source without the payload
    source: bool = False
    grammar: bytes = b""  # for the target: compiled, as in Start

    @property
    def move(self) -> str:
        return self.prepare.move

    @property
    def run(self) -> wire.Run:
        return self.prepare.run


class MoveAnswer(msgspec.Struct, frozen=True, tag="MoveAnswer"):
    """Answer to a step of a migration. An empty `refusal` says that the step is done.

    The target's device answers PrepareMove, Copy and Commit. The source's node answers Copy once the target has read
    the blocks: the source's device then says Copy again, or Commit, or refuses, so that the request stays."""

    move: str
    refusal: str = ""
    waits: bool = False  # with a refusal of the source: the request has not begun yet


class ImageMade(msgspec.Struct, frozen=True, tag="ImageMade"):
    """The end of a MakeImage. Without an error, the host cache has the image, or StopImage came before."""

    model: str
    error: str = ""
    lacks_bytes: int = 0  # room that the host cache lacked for the image


class Forget(msgspec.Struct, frozen=True, tag="Forget"):
    """Forget the prefixes that ended requests under a cache salt have left."""

    model: str  # empty: every model
    salt: str


class ShowDevicePages(msgspec.Struct, frozen=True, tag="ShowPages"):
    """Ask for the map of the pool; answered by Mapped, between two steps."""


class Quit(msgspec.Struct, frozen=True, tag="Quit"):
    """End the process after the step under way."""


ToDevice = (
    Place
    | Withdraw
    | Start
    | Stop
    | Order
    | Warm
    | PrepareMove
    | MoveAnswer
    | wire.Copy
    | wire.Commit
    | wire.AbortMove
    | wire.Release
    | ImageMade
    | Forget
    | ShowDevicePages
    | Quit
)


class DeviceReady(msgspec.Struct, frozen=True, tag="Ready"):
    """The device process can take commands."""

    engine: str
    life: int  # number of the device process's life: see runtime/memory/images.py


class MakeImage(msgspec.Struct, frozen=True, tag="MakeImage"):
    """Make the image of a model in the host cache; answered by ImageMade. One image is asked for at a time."""

    spec: wire.EngineSpec


class StopImage(msgspec.Struct, frozen=True, tag="StopImage"):
    """The image of a model is no longer wanted; answered by ImageMade once no process makes the image any more."""

    model: str


class Formed(msgspec.Struct, frozen=True, tag="Formed"):
    """The engine of a model was built; sent before any output of the engine."""

    model: str
    form: wire.KvForm


class Made(msgspec.Struct, frozen=True, tag="Made"):
    """Deltas made by a step or an event, by gateway."""

    deltas: dict[str, list[wire.Delta]]


class State(msgspec.Struct, frozen=True, tag="State"):
    """State of the device and its models; sent soon after a model moved, when the device comes to rest, and every
    second."""

    holder: str = ""
    switches: int = 0
    models: dict[str, wire.ModelState] = {}
    page_bytes: int = 0
    pages_total: int = 0
    pages_used: int = 0
    device_bytes: DeviceBytes = DeviceBytes()
    block_tokens: int = 0  # tokens of a block of attention; 0: not known
    attainment: dict[str, wire.Attained] = {}  # by label
    accounts: wire.Accounts = wire.Accounts()
    wakes: dict[str, wire.Spread] = {}
    switch_times: wire.Spread = wire.Spread()


class StateChange(msgspec.Struct, frozen=True, tag="StateChange"):
    """A State on its way through the pipe: of a thousand models, few change from one state to the next."""

    state: State  # the models that are new or have changed since the last state; and everything else of the state
    gone: list[str] = []  # models of the last state that are there no longer

    @classmethod
    def between(cls, last: Mapping[str, wire.ModelState], state: State) -> StateChange:
        """Return the change that leads from the models of the last state, `last`, to `state`."""
        changed = {key: model for key, model in state.models.items() if last.get(key) != model}
        return cls(structs.replace(state, models=changed), [key for key in last if key not in state.models])

    def after(self, last: Mapping[str, wire.ModelState]) -> State:
        """Return the whole state. Models that have not changed are the same objects as in `last`."""
        models = {**last, **self.state.models}
        for key in self.gone:
            del models[key]
        return structs.replace(self.state, models=models)


class Passed(msgspec.Struct, frozen=True, tag="Passed"):
    """Uses of the device's time since the last Passed; sent ahead of each State.

    Times are microseconds on the device's clock."""

    spans: list[views.Span]
    stages: list[views.Stage]
    now: views.Use  # use of the time since the last span, as far as known


class Mapped(msgspec.Struct, frozen=True, tag="Mapped"):
    """Map of the device pool; answers ShowPages."""

    runs: list[views.PageRun]


ToNode = (
    DeviceReady
    | MakeImage
    | StopImage
    | Formed
    | Made
    | State
    | Passed
    | Mapped
    | MoveAnswer
    | wire.Copy
    | wire.Commit
    | wire.Release
)

_encoder = msgspec.msgpack.Encoder()
_to_device = msgspec.msgpack.Decoder(ToDevice)
_to_node = msgspec.msgpack.Decoder(ToNode | StateChange)


def _framed(message: ToDevice | ToNode | StateChange) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def pair() -> tuple[socket.socket, socket.socket]:
    """Makes a connected socket pair: (node's end, device's end)."""
    node, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (node, device):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return node, device


class DeviceEnd:
    """Device's end of the pipe. Blocks only in `wait`; bytes that the kernel does not take at once are sent later."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._in = bytearray()
        self._out = bytearray()
        self._models: dict[str, wire.ModelState] = {}  # of the last state sent
        self.closed = False

    @property
    def backlog(self) -> int:
        """Bytes of sent messages not taken by the kernel yet."""
        return len(self._out)

    def send(self, message: ToNode) -> None:
        if isinstance(message, State):
            last, self._models = self._models, message.models
            self._out += _framed(StateChange.between(last, message))
        else:
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
        """Messages that have arrived whole, without waiting. Sets `closed` if the node is gone."""
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
            with memoryview(self._in) as whole, whole[start + _LENGTH.size : end] as message:
                messages.append(_to_device.decode(message))
            start = end
        if start:
            del self._in[:start]
        return messages

    def wait(self, timeout_s: float | None) -> None:
        """Waits until bytes have arrived, the backlog can move, or the time is up.

        Uses `select`: `poll` counts whole milliseconds, and a transfer may be over sooner."""
        readers, writers = [self._socket], [self._socket] if self._out else []
        select.select(readers, writers, [], None if timeout_s is None else max(0.0, timeout_s))
        if self._out:
            self.flush()


class NodeEnd:
    """Node's end of the pipe, for asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._models: dict[str, wire.ModelState] = {}  # of the last state received

    @classmethod
    async def open(cls, end: socket.socket) -> NodeEnd:
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=MESSAGE_MOST)
        return cls(reader, writer)

    def send(self, message: ToDevice) -> None:
        self._writer.write(_framed(message))

    async def messages(self) -> AsyncIterator[ToNode]:
        """Messages from the device, in order; ends when the device process is gone."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                message = _to_node.decode(await self._reader.readexactly(length))
                if isinstance(message, StateChange):
                    message = message.after(self._models)
                    self._models = message.models
                yield message
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()
