"""What a platform must survive: its processes and its database killed and paused, when and for how long is chance."""

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
    "ledger": ("store.ledger",),
    "scheduler": ("runtime.scheduler",),
    "nats": ("nats-server",),
}
FOUND_MOST_S = 30.0  # a victim that is being started again is waited for


class Hurt(Protocol):
    """One thing that is done to the platform; returns when it is over."""

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
    """A second ledger takes messages of the same stream, and is killed."""

    seconds: float

    async def __call__(self, nemesis: Nemesis) -> None:
        environment = (await nemesis.victim("ledger")).environ()
        process = subprocess.Popen([sys.executable, "-m", "store.ledger"], env=environment, stderr=subprocess.DEVNULL)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Lock:
    """Of an SQLite file: nobody else writes."""

    seconds: float

    async def __call__(self, nemesis: Nemesis) -> None:
        await asyncio.to_thread(self._hold, nemesis.platform.data / "staccato.db")

    def _hold(self, file: Path) -> None:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None, timeout=FOUND_MOST_S)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            time.sleep(self.seconds)


@dataclass(frozen=True)
class KillBackend:
    """The server takes the death of one of its processes for damage: it ends all of them and recovers."""

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
    """Without a goodbye; it is away for a while."""

    seconds: float

    async def __call__(self, nemesis: Nemesis) -> None:
        assert nemesis.server is not None
        async with nemesis.server_is_mine:
            await asyncio.to_thread(nemesis.server.kill)
            await asyncio.sleep(self.seconds)
            await asyncio.to_thread(nemesis.server.start)


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
        process.kill()


@contextlib.asynccontextmanager
async def paused(process: psutil.Process) -> AsyncIterator[None]:
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # somebody took it for dead, and ended it
            process.resume()


@dataclass
class Nemesis:
    """`server` None: the database is the SQLite file of the platform."""

    platform: Platform
    chance: random.Random
    server: Postgres | None = None
    done: Counter[Hurt] = field(default_factory=Counter)
    server_is_mine: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, hurts: list[tuple[int, Hurt]], past: Callable[[int], Awaitable[None]]) -> None:
        """Each when so many requests were answered, for which `past` waits, be the one before over or not."""
        async with asyncio.TaskGroup() as group:
            for at, hurt in hurts:
                await past(at)
                await asyncio.sleep(self.chance.uniform(0, 0.3))
                group.create_task(self._do(hurt))

    async def _do(self, hurt: Hurt) -> None:
        self.done[hurt] += 1
        await hurt(self)

    async def victim(self, name: str) -> psutil.Process:
        """One of those there are, by chance."""
        async with asyncio.timeout(FOUND_MOST_S):
            while not (found := self.platform.children(*VICTIMS[name])):
                await asyncio.sleep(0.1)
        return self.chance.choice(sorted(found, key=lambda process: process.pid))

    def backend(self) -> psutil.Process | None:
        """A process of the server that works for one of our connections."""
        assert self.server is not None
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.server.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if " staccato " in " ".join(child.cmdline()):
                        found.append(child)
        return self.chance.choice(found) if found else None


def plan(chance: random.Random, requests: int, times: int, on_postgres: bool) -> list[tuple[int, Hurt]]:
    """`times` of each kind, in an order of chance, between the first and the last of the requests."""

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
