"""Blocks that another host reads out of the memory of this one, by NIXL: over RDMA where there is a network for it,
else over the next best that UCX has.

The library is optional. Its agents are kept, and each is in the hands of one
thread at a time: so none is locked, and none is at work on two moves. They have no threads of their own, for these
would never sleep: whoever waits for NIXL lets it go on.

It is the target that reads. So nobody writes into blocks that were given to others meanwhile, whoever fails; and what
was damaged on its way is read again without a word to the source.
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

Views = Sequence[memoryview]  # of a parcel's blocks, in order
Run = tuple[int, int]  # address, bytes


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """What a source tells of the parcels that it lends."""

    agent: bytes  # how to reach it, and the keys to these bytes
    runs: list[list[Run]]  # of each parcel
    sums: list[int]  # CRC-32


def installed() -> bool:
    return find_spec("nixl") is not None


class Agents:
    """NIXL's, of this process."""

    def __init__(self) -> None:
        self._idle: list[Any] = []

    @contextmanager
    def one(self) -> Iterator[Any]:
        """For the thread that asks. After any error it is used no more; NIXL's are raised as OSError."""
        try:
            agent = self._taken() or _made()
            yield agent
        except (OSError, EOFError):
            raise
        except Exception as error:  # of many classes, which have no other base
            raise OSError(f"NIXL: {str(error) or type(error).__name__}") from error
        self._idle.append(agent)

    def warm(self) -> None:
        """On a thread, so that the first request that moves need not wait for the library."""
        try:
            with self.one():
                pass
        except OSError as error:
            log.warning("transport.nixl_fails", error=str(error))

    def _taken(self) -> Any:
        with suppress(IndexError):  # another thread may be faster
            return self._idle.pop()


def _made() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    import nixl  # takes 0.2 s, and the first agent 0.5 s

    return nixl.nixl_agent(f"staccato-{uuid.uuid4().hex}", nixl.nixl_agent_config(False, backends=[BACKEND]))


@contextmanager
def lent(agent: Any, parcels: Sequence[Views]) -> Iterator[Lent]:
    """As long as it lasts, who is told may read these, and nothing else. On a thread: they are summed."""
    runs = [_runs(views) for views in parcels]
    registered = agent.register_memory([(*run, 0, "") for parcel in runs for run in parcel], MEMORY)
    said = agent.get_partial_agent_metadata(registered, inc_conn_info=True, backends=[BACKEND])
    yield Lent(said, runs, [sum_of(views) for views in parcels])
    agent.deregister_memory(registered)


def go_on(agent: Any) -> None:
    """What others read is sent by whoever calls this, where the network can't do it alone."""
    agent.get_new_notifs()


class Reader:
    """Of what one source lends, by this process's `agents`; `over` says whether nobody waits for it any more."""

    def __init__(self, agents: Agents, lent: Lent, over: Callable[[], bool], parcel_s: float) -> None:
        self._agents, self._lent, self._over, self._parcel_s = agents, lent, over, parcel_s

    def read(self, places: Sequence[int], parcels: Sequence[Views], heard: Callable[[], None]) -> list[int]:
        """On a thread: the parcels at these places in what is lent, into these. Which of `places`, as indices, came
        damaged. Raises OSError, EOFError; then nothing more is written either."""
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
            with suppress(Exception):  # NIXL's
                agent.release_xfer_handle(handle)
            agent.remove_remote_agent(source)  # what is under way is broken off
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
    import numpy as np  # as NIXL does; a node without it has no use for it

    return [(np.frombuffer(view, np.uint8).ctypes.data, len(view)) for view in views]


def _pairs(here: Sequence[Run], there: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """(address here, address there, bytes) of pieces in which both lie in one. Raises OSError if one has more."""
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
