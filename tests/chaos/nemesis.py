"""Faults that a platform must survive: processes and the database are killed and paused at random, for random times."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from tests.databases import Postgres
from tests.e2e.conftest import Platform

VICTIMS = {
    "gateway": ("gateway.app",),
    "node": ("runtime.node",),
    "device": ("runtime.device",),
    "ledger": ("store.db.ledger",),
    "scheduler": ("runtime.scheduler",),
    "nats": ("nats-server",),
}
FOUND_MOST_S = 30.0  # longest wait for a victim that is being started again


class Hurt(Protocol):
    """A fault done to the platform. The call returns when the fault is over."""

    async def __call__(self, nemesis: Nemesis) -> None: ...


@dataclass(frozen=True)
class Kill:
    victim: str

    async def __call__(self, nemesis: Nemesis) -> None:
        kill(await nemesis.victim(self.victim))


@dataclass(frozen=True)
class Pause:
    victim: str
    seconds: float

    async def __call__(self, nemesis: Nemesis) -> None:
        async with paused(await nemesis.victim(self.victim)):
            await asyncio.sleep(self.seconds)


@dataclass(frozen=True)
class Rival:
    """A second ledger takes messages of the ledger's stream, and is killed."""

    seconds: float

    async def __call__(self, nemesis: Nemesis) -> None:
        environment = (await nemesis.victim("ledger")).environ()
        process = subprocess.Popen(
            [sys.executable, "-m", "store.db.ledger"], env=environment, stderr=subprocess.DEVNULL
        )
        try:
            await asyncio.sleep(self.seconds)
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Lock:
    """A lock on the SQLite file: no process of the platform can write."""

    seconds: float

    async def __call__(self, nemesis: Nemesis) -> None:
        await asyncio.to_thread(self._hold, nemesis.platform.data / "staccato.db")

    def _hold(self, file: Path) -> None:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None, timeout=FOUND_MOST_S)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            time.sleep(self.seconds)


@dataclass(frozen=True)
class KillBackend:
    """Kill a process of the PostgreSQL server. The server takes the death for damage, ends every process and
    recovers."""

    async def __call__(self, nemesis: Nemesis) -> None:
        if backend := nemesis.backend():
            kill(backend)


@dataclass(frozen=True)
class PauseBackend:
    seconds: float

    async def __call__(self, nemesis: Nemesis) -> None:
        if backend := nemesis.backend():
            async with paused(backend):
                await asyncio.sleep(self.seconds)


@dataclass(frozen=True)
class RestartServer:
    """Kill the PostgreSQL server without a goodbye, and start the server again after `seconds`."""

    seconds: float

    async def __call__(self, nemesis: Nemesis) -> None:
        assert nemesis.server is not None
        async with nemesis.server_is_mine:
            await asyncio.to_thread(nemesis.server.kill)
            await asyncio.sleep(self.seconds)
            await asyncio.to_thread(nemesis.server.start)


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # the process ended just now
        process.kill()


@contextlib.asynccontextmanager
async def paused(process: psutil.Process) -> AsyncIterator[None]:
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # the platform took the process for dead, and ended the process
            process.resume()


@dataclass
class Nemesis:
    """Hurts a platform. `server` None: the database is the SQLite file of the platform."""

    platform: Platform
    chance: random.Random
    server: Postgres | None = None
    done: Counter[Hurt] = field(default_factory=Counter)
    server_is_mine: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, hurts: list[tuple[int, Hurt]], past: Callable[[int], Awaitable[None]]) -> None:
        """Begin each fault when the given number of requests was answered (`past` waits). Faults may overlap."""
        async with asyncio.TaskGroup() as group:
            for at, hurt in hurts:
                await past(at)
                await asyncio.sleep(self.chance.uniform(0, 0.3))
                group.create_task(self._do(hurt))

    async def _do(self, hurt: Hurt) -> None:
        self.done[hurt] += 1
        await hurt(self)

    async def victim(self, name: str) -> psutil.Process:
        """A random running process with the victim's name."""
        async with asyncio.timeout(FOUND_MOST_S):
            while not (found := self.platform.children(*VICTIMS[name])):
                await asyncio.sleep(0.1)
        return self.chance.choice(sorted(found, key=lambda process: process.pid))

    def backend(self) -> psutil.Process | None:
        """A random process of the PostgreSQL server that works for a connection of the platform; None without such a
        process."""
        assert self.server is not None
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.server.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if " staccato " in " ".join(child.cmdline()):
                        found.append(child)
        return self.chance.choice(found) if found else None


def plan(chance: random.Random, requests: int, times: int, on_postgres: bool) -> list[tuple[int, Hurt]]:
    """Plan `times` faults of each kind, in random order, at random numbers of answered requests: between 5 % and 90 %
    of `requests`."""

    def seconds(least: float, most: float) -> float:
        return round(chance.uniform(least, most), 2)

    hurts: list[Hurt] = []
    for _ in range(times):
        hurts += [Kill(name) for name in VICTIMS]
        hurts += [Pause(name, seconds(0.2, 5)) for name in VICTIMS]
        hurts += [Rival(seconds(2, 6))]
        if on_postgres:
            hurts += [KillBackend(), PauseBackend(seconds(0.5, 5)), RestartServer(seconds(0.2, 4))]
        else:
            hurts += [Lock(seconds(0.5, 8))]
    chance.shuffle(hurts)
    moments = sorted(chance.randrange(requests // 20, requests * 9 // 10) for _ in hurts)
    return list(zip(moments, hurts, strict=True))
