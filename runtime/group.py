"""A runtime on several devices, over all of which each of its models is split (tensor parallelism).

Each device has a process, a rank, with the same engines. The first one is the runtime's device process: its Instance
decides for all, and what it asks of an engine it tells the other ranks first. They do the same, in the same order;
what could differ between them they agree upon themselves (`runtime/engine/ranks.py`). Only the first one's outputs are
told. The pages of an engine are as many on every device; one page of the group is one on each of them.

No rank goes on without the others: where one ends, or does otherwise than the first, all end, and their streams go on
elsewhere as those of any device process that died. A request of a group does not move while it runs, for its blocks
lie in several host caches: elsewhere its tokens are computed again.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import msgspec
import structlog

from runtime.engine.base import Build, Engine, EngineError, Hold, Output, Told
from runtime.pipe import Began
from runtime.request import RequestId
from store.views import PageRun
from store.wire import EngineSpec

log = structlog.get_logger()

T = TypeVar("T")
SHARED_MEMORY = Path("/dev/shm")  # where vLLM's ranks on one host keep what they compute together

# What an engine is asked on all ranks: what changes it, or what ranks must agree on. The rest the first one knows.
TOGETHER = ("add", "abort", "step", "check", "fetch", "arrived", "park", "parked", "grow", "shrink", "evict", "close")


class Call(NamedTuple):
    """Of an engine's method, or with a spec as its only argument and no name of the engine's making."""

    model: str
    method: str
    arguments: tuple[Any, ...]
    said: int = 0  # a digest of all tokens that this engine made before, by the first rank


class Failed(NamedTuple):
    """The last call raised an error of this kind."""

    kind: str


class Rank(msgspec.Struct, frozen=True):
    """What another rank's process is started with, as JSON in its command line."""

    rank: int
    folder: str  # where the ranks meet
    calls_fd: int
    first: Began  # what the first rank was started with


# ── the first rank ────────────────────────────────────────────────────────────────────────────────────────────────────


class Others:
    """The other ranks' processes."""

    def __init__(self, began: Began) -> None:
        """Starts them; before torch is imported."""
        self.size = began.tensor_parallel
        self._folder = tempfile.mkdtemp(prefix="staccato-group-")
        self._calls: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            started = Rank(rank, self._folder, theirs.fileno(), began)
            command = [sys.executable, "-P", "-m", "runtime.follower", msgspec.json.encode(started).decode()]
            descriptors = [fd for fd in (theirs.fileno(), began.host_fd) if fd >= 0]
            self._processes.append(subprocess.Popen(command, pass_fds=descriptors))
            self._calls.append(Connection(ours.detach()))
            theirs.close()
        for process in self._processes:
            threading.Thread(target=self._ends_with, args=(process,), daemon=True).start()
        see_one_device(0, self.size)

    def meet(self) -> None:
        """Waits until all ranks are there."""
        from runtime.engine import ranks

        ranks.join(0, self.size, self._folder)

    def met(self) -> None:
        """vLLM's groups have met, too: what they met by goes, so that nothing of it outlives the processes."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for shared in SHARED_MEMORY.glob(f"{os.path.basename(self._folder)}-*"):
            shared.unlink(missing_ok=True)

    def with_them(self, call: Call, act: Callable[[], T]) -> T:
        """Do it, as they do."""
        self._tell(call)
        try:
            return act()
        except Exception as error:
            self._tell(Failed(type(error).__name__))
            raise

    def _tell(self, message: Call | Failed) -> None:
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
    """Makes engines on all ranks: a `Build`."""

    def __init__(self, build: Build, others: Others) -> None:
        """After its self-check: all groups of processes are made."""
        others.met()
        self._build, self._others = build, others
        self.version, self.life = build.version, build.life
        self.pages_total, self.page_bytes = build.pages_total, build.page_bytes * others.size

    def __call__(self, spec: EngineSpec, told: Told, /) -> Engine:
        engine = self._others.with_them(Call(spec.key, "", (spec,)), partial(self._build, spec, told))
        return cast(Engine, GroupEngine(spec.key, engine, self._others))

    def hold(self, blocks: list[int], block_bytes: int, life: int) -> Hold | None:
        return None  # of other runtimes nothing is received

    def pages_used(self) -> int:
        return self._build.pages_used()

    def page_map(self, models: Mapping[int, str], caches: Mapping[int, str]) -> list[PageRun]:
        return self._build.page_map(models, caches)


class GroupEngine:
    """One model on all ranks: an `Engine`."""

    def __init__(self, model: str, engine: Engine, others: Others) -> None:
        self._model, self._engine, self._others = model, engine, others
        self._said = 0
        for method in TOGETHER:
            setattr(self, method, partial(self._together, method))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _together(self, method: str, *arguments: Any) -> Any:
        act = partial(getattr(self._engine, method), *arguments)
        made = self._others.with_them(Call(self._model, method, arguments, self._said), act)
        if method == "step":
            self._said = digest(self._said, made)
        return made

    def stage(self, request: RequestId, first: int) -> list[int] | None:
        return None

    def leave(self, request: RequestId) -> None:
        raise EngineError(f"request {request} is of a model on {self._others.size} devices, and does not move")

    def expect(self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False) -> bool:
        return False


def digest(said: int, outputs: list[Output]) -> int:
    """The same in every process, of what was said before and is said now."""
    return hash((said, *[token for output in outputs for token in output.tokens]))


def see_one_device(rank: int, size: int) -> None:
    """Before torch is imported: this process sees one of the runtime's devices, and has its part of the threads."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    os.environ["OMP_NUM_THREADS"] = str(max(1, int(os.environ.get("OMP_NUM_THREADS", size)) // size))


def end() -> NoReturn:
    """This rank can't go on with the others."""
    os._exit(1)
