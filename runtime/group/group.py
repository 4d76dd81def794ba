"""A runtime on several devices: every model is split over all devices (tensor parallelism).

Each device has a process, a rank, and every rank has an engine for each model. The first rank is the runtime's device
process. The Instance of the first rank decides for the group, and every call of an engine is sent to the followers
first. The followers make equal calls in equal order. Observations that could differ between ranks are agreed upon by
all ranks (`runtime/engine/ranks.py`). Only outputs of the first rank are reported. An engine has equally many pages on
every device; a page of the group stands for a page on each device.

No rank continues alone: if a rank ends, or diverges from the first rank, every rank ends, and the streams go on
elsewhere, like streams of any dead device process. A request of a group does not move while running, for the blocks lie
in several host caches: elsewhere the tokens are computed again.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import msgspec
import structlog

from runtime.core.device.request import RequestId
from runtime.core.engine import Engine, EngineBuilder, EngineError, Hold, Output, Told
from runtime.ipc import Began
from store.contract.device_bytes import DeviceBytes
from store.contract.views import PageRun
from store.contract.wire import Departure, EngineSpec

log = structlog.get_logger()

T = TypeVar("T")
SHARED_MEMORY = Path("/dev/shm")  # where vLLM's ranks on a host share buffers

# Methods of an engine called on all ranks: calls that change the engine, or need the ranks' agreement. The first rank
# answers the remaining methods alone.
TOGETHER = (
    *("add", "read", "abort", "step", "check", "fetch", "arrived", "park", "parked"),
    *("grow", "shrink", "evict", "forget_prefixes", "close"),
)


class EngineCall(NamedTuple):
    """A call of an engine's method on all ranks; an empty `method` builds the engine of the spec in `arguments`."""

    model: str
    method: str
    arguments: tuple[Any, ...]
    said: int = 0  # digest of all tokens made by the engine before, on the first rank


class Failed(NamedTuple):
    """The first rank's last call raised an error of type `kind`."""

    kind: str


class Rank(msgspec.Struct, frozen=True):
    """Arguments of a follower's process, as JSON in the command line."""

    rank: int
    folder: str  # folder where the ranks meet
    calls_fd: int
    first: Began  # arguments of the first rank's process


# ── the first rank ────────────────────────────────────────────────────────────────────────────────────────────────────


class Others:
    """The followers' processes, started and called by the first rank."""

    def __init__(self, began: Began) -> None:
        """Start the followers. Call before torch is imported."""
        self.size = began.tensor_parallel
        self._folder = tempfile.mkdtemp(prefix="staccato-group-")
        self._calls: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            started = Rank(rank, self._folder, theirs.fileno(), began)
            command = [sys.executable, "-P", "-m", "runtime.group.follower", msgspec.json.encode(started).decode()]
            descriptors = [fd for fd in (theirs.fileno(), began.host_fd) if fd >= 0]
            self._processes.append(subprocess.Popen(command, pass_fds=descriptors))
            self._calls.append(Connection(ours.detach()))
            theirs.close()
        for process in self._processes:
            threading.Thread(target=self._ends_with, args=(process,), daemon=True).start()
        see_one_device(0, self.size)

    def meet(self) -> None:
        """Wait until all ranks have joined the group."""
        from runtime.engine import ranks

        ranks.join(0, self.size, self._folder)

    def met(self) -> None:
        """Remove the meeting folder and the shared memory's names, so that neither outlives the processes.

        Call once vLLM's groups have met as well."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for shared in SHARED_MEMORY.glob(f"{os.path.basename(self._folder)}-*"):
            shared.unlink(missing_ok=True)

    def with_them(self, call: EngineCall, act: Callable[[], T]) -> T:
        """Send `call` to the followers and carry out `act`, the first rank's part. Returns or raises as `act` does.

        If `act` raises, the followers are told: the followers' calls must raise an error of equal type."""
        self._tell(call)
        try:
            return act()
        except Exception as error:
            self._tell(Failed(type(error).__name__))
            raise

    def _tell(self, message: EngineCall | Failed) -> None:
        for calls in self._calls:
            try:
                calls.send(message)
            except OSError:
                log.error("group.rank_gone")
                end()

    def _ends_with(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self.met()
        log.error("group.rank_ended", detail=f"process {process.pid} ended with {process.returncode}")
        end()


class GroupBuild:
    """Builds engines on all ranks: a `EngineBuilder`."""

    def __init__(self, build: EngineBuilder, others: Others) -> None:
        """Call after the self-check of `build`: then vLLM has made every group of processes."""
        others.met()
        self._build, self._others = build, others
        self.version, self.life, self.block_tokens = build.version, build.life, build.block_tokens
        self.pages_total, self.page_bytes = build.pages_total, build.page_bytes * others.size

    def __call__(self, spec: EngineSpec, told: Told, /) -> Engine:
        engine = self._others.with_them(EngineCall(spec.key, "", (spec,)), partial(self._build, spec, told))
        return cast(Engine, GroupEngine(spec.key, engine, self._others))

    def on_disk(self, spec: EngineSpec, /) -> bool:
        return self._build.on_disk(spec)

    def proved(self, spec: EngineSpec, /) -> bool:
        return self._build.proved(spec)

    def note_proof(self, spec: EngineSpec, /) -> bool:
        return self._build.note_proof(spec)

    def drop_proof(self, spec: EngineSpec, /) -> None:
        self._build.drop_proof(spec)

    def spare_room(self, spec: EngineSpec, later: Sequence[EngineSpec], /) -> int | None:
        return None  # each rank has an image of its own: a group stages no model by history

    def hold(self, blocks: list[int], block_bytes: int, life: int) -> Hold | None:
        return None  # a group receives no blocks from other runtimes

    def pages_used(self) -> int:
        return self._build.pages_used()

    def device_bytes(self) -> DeviceBytes:
        return self._build.device_bytes()

    def page_map(self, models: Mapping[int, str], caches: Mapping[int, str]) -> list[PageRun]:
        return self._build.page_map(models, caches)


class GroupEngine:
    """The engine of one model on all ranks: an `Engine`."""

    def __init__(self, model: str, engine: Engine, others: Others) -> None:
        self._model, self._engine, self._others = model, engine, others
        self._said = 0
        for method in TOGETHER:
            setattr(self, method, partial(self._together, method))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _together(self, method: str, *arguments: Any) -> Any:
        act = partial(getattr(self._engine, method), *arguments)
        made = self._others.with_them(EngineCall(self._model, method, arguments, self._said), act)
        if method == "step":
            self._said = digest(self._said, made)
        return made

    def prepare(
        self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False, grammar: bytes = b""
    ) -> bool:
        return False

    def copy(
        self, request: RequestId, first: int, host: list[int] | None = None, admitted: bool = False
    ) -> list[int] | None:
        return None

    def commit(self, request: RequestId, departure: Departure | None = None) -> Departure | None:
        raise EngineError(f"request {request} is of a model on {self._others.size} devices, and does not move")


def digest(said: int, outputs: list[Output]) -> int:
    """Digest of an engine's tokens: `said`, the digest before a step, and the step's outputs. Equal in all processes.

    Tokens are integers, and Python's hashes of integers have no random seed."""
    return hash((said, *[token for output in outputs for token in output.tokens]))


def see_one_device(rank: int, size: int) -> None:
    """Let this process use only the rank's device, and the rank's share of threads. Call before torch is imported."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    os.environ["OMP_NUM_THREADS"] = str(max(1, int(os.environ.get("OMP_NUM_THREADS", size)) // size))


def end() -> NoReturn:
    """End this process: the ranks can't go on together. The end of a rank ends every rank."""
    os._exit(1)
