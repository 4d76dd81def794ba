"""Transport of blocks by NIXL: the target reads blocks out of the source's memory, over RDMA if the network has RDMA,
else over UCX's next best transport.

The library is optional. Agents of NIXL are kept for reuse. An agent serves a single thread at a time: therefore agents
need no locks, and no agent works on two moves. Agents run without progress threads, since progress threads would never
sleep: a thread waiting for NIXL drives the agent's progress.

The target reads. Whichever side fails, therefore, no side writes into blocks given to another request meanwhile. The
target reads a damaged parcel again without asking the source.
"""

from __future__ import annotations

import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import msgspec
import structlog

log = structlog.get_logger()

BACKEND, MEMORY = "UCX", "DRAM"
POLL_S = 2e-4
INSTALL = "pip install 'staccato[nixl]'"

Views = Sequence[memoryview]  # memory of a parcel's blocks, in order
Run = tuple[int, int]  # address, bytes


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """Description of the parcels that a source lends."""

    agent: bytes  # address of the agent, and the keys to the lent bytes
    runs: list[list[Run]]  # runs of each parcel
    sums: list[int]  # CRC-32 of each parcel


def installed() -> bool:
    return find_spec("nixl") is not None


class Agents:
    """Agents of NIXL in this process, kept for reuse."""

    def __init__(self) -> None:
        self._idle: list[Any] = []

    @contextmanager
    def one(self) -> Iterator[Any]:
        """Lend an agent to the calling thread; an error drops the agent. Raises NIXL's errors as OSError."""
        try:
            agent = self._taken() or _made()
            yield agent
        except (OSError, EOFError):
            raise
        except Exception as error:  # NIXL's errors have no common base but Exception
            raise OSError(f"NIXL: {str(error) or type(error).__name__}") from error
        self._idle.append(agent)

    def warm(self) -> None:
        """Load the library and make a first agent, so that the first move need not wait. Blocks the calling thread."""
        try:
            with self.one():
                pass
        except OSError as error:
            log.warning("transport.nixl_fails", error=str(error))

    def _taken(self) -> Any:
        with suppress(IndexError):  # a second thread may take the last agent first
            return self._idle.pop()


def _made() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    import nixl  # takes 0.2 s; making the first agent takes 0.5 s

    return nixl.nixl_agent(f"staccato-{uuid.uuid4().hex}", nixl.nixl_agent_config(False, backends=[BACKEND]))


@contextmanager
def lent(agent: Any, parcels: Sequence[Views]) -> Iterator[Lent]:
    """Lend parcels: inside the context, a peer that has the description may read the parcels' memory and no more.

    Computes the checksums, so blocks the calling thread."""
    runs = [_runs(views) for views in parcels]
    registered = agent.register_memory([(*run, 0, "") for parcel in runs for run in parcel], MEMORY)
    said = agent.get_partial_agent_metadata(registered, inc_conn_info=True, backends=[BACKEND])
    yield Lent(said, runs, [sum_of(views) for views in parcels])
    agent.deregister_memory(registered)


def go_on(agent: Any) -> None:
    """Send lent bytes that the target reads, on networks that cannot read memory without the CPU."""
    agent.get_new_notifs()


class Reader:
    """Reader of the parcels that a source lends, by this process's `agents`.

    `over` says whether the move has ended; `parcel_s` is the limit for a parcel, in seconds."""

    def __init__(self, agents: Agents, lent: Lent, over: Callable[[], bool], parcel_s: float) -> None:
        self._agents, self._lent, self._over, self._parcel_s = agents, lent, over, parcel_s

    def read(self, places: Sequence[int], parcels: Sequence[Views], heard: Callable[[], None]) -> list[int]:
        """Read the lent parcels at `places` into the memory of `parcels`; blocks the calling thread.

        Calls `heard` after each parcel. Returns the indices into `places` of damaged parcels. Raises OSError, EOFError;
        after an error no more bytes are written."""
        with self._agents.one() as agent:
            registered = agent.register_memory([(*run, 0, "") for views in parcels for run in _runs(views)], MEMORY)
            source = agent.add_remote_agent(self._lent.agent)
            damaged = []
            for index, (place, views) in enumerate(zip(places, parcels, strict=True)):
                self._read(agent, source, self._lent.runs[place], views)
                heard()
                if sum_of(views) != self._lent.sums[place]:
                    damaged.append(index)
            agent.remove_remote_agent(source)
            agent.deregister_memory(registered)
            return damaged

    def _read(self, agent: Any, source: str, runs: Sequence[Run], views: Views) -> None:
        here, there = [], []
        for address, from_address, length in _pairs(_runs(views), runs):
            here.append((address, length, 0))
            there.append((from_address, length, 0))
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(here, MEMORY), agent.get_xfer_descs(there, MEMORY), source
        )
        try:
            self._wait(agent, handle)
            agent.release_xfer_handle(handle)
        except BaseException:
            with suppress(Exception):  # any error of NIXL
                agent.release_xfer_handle(handle)
            agent.remove_remote_agent(source)  # breaks off transfers under way
            raise

    def _wait(self, agent: Any, handle: Any) -> None:
        deadline = time.monotonic() + self._parcel_s
        state = agent.transfer(handle)
        while state == "PROC":
            if self._over():
                raise EOFError("the move is over")
            if time.monotonic() > deadline:
                raise TimeoutError(f"a parcel takes longer than {self._parcel_s:g} s")
            time.sleep(POLL_S)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError(f"NIXL could not read a parcel: {state}")


def sum_of(views: Views) -> int:
    sum = 0
    for view in views:
        sum = zlib.crc32(view, sum)
    return sum


def _runs(views: Views) -> list[Run]:
    import numpy as np  # NIXL imports numpy as well; a node without NIXL does not need numpy

    return [(np.frombuffer(view, np.uint8).ctypes.data, len(view)) for view in views]


def _pairs(here: Sequence[Run], there: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """Yield (address here, address there, bytes) of pieces contiguous on both sides.

    Raises OSError if the sides differ in length."""
    if sum([length for _, length in here]) != sum([length for _, length in there]):
        raise OSError("what is lent is longer or shorter than what was asked for")
    others = iter(there)
    address, left = 0, 0
    for start, length in here:
        while length:
            if not left:
                address, left = next(others)
                continue
            taken = min(length, left)
            yield start, address, taken
            start, length = start + taken, length - taken
            address, left = address + taken, left - taken
