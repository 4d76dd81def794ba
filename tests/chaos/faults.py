"""The cost of faults to a platform under eight streams: time until the platform serves again, and flaws of the bill.

    python -m tests.chaos.faults [FAULT ...]

starts platforms on loopback, hurts the platforms fault by fault and prints the table of README.md. The data folder lies
on a small file system in memory. Without the right to mount a file system, the fault of the full disk is left out, and
the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import httpx

from store.db.database import now_us
from store.db.usage import period_of
from tests.chaos import workload
from tests.chaos.checker import billed, flaws
from tests.chaos.history import Ask, End, Seen, ask
from tests.chaos.nemesis import VICTIMS, Kill, Lock, Nemesis, Pause, kill
from tests.conftest import free_port
from tests.e2e.conftest import Platform

STREAMS = 8
TOKENS = 120
RUNTIMES = 2  # fewer have no scheduler
DISK_MIB = 160
SERVED_S, BOOKED_S = 15.0, 60.0  # bounds that a good outcome keeps
GIVEN_UP_S = 180.0
NOTICED_S = 60.0  # a full disk is noticed by the next request; a stream, which a client reads first, takes seconds
BEFORE_S = 3.0  # streams run for BEFORE_S until the fault
PAUSE_S = 0.3  # a client waits after a refusal or a failed connection
OPEN_FILES = 256
SETTINGS = {"STACCATO_DRAIN_S": "1", "STACCATO_HANG_S": "4", "STACCATO_DISK_RESERVE": "16MiB"}

Hurt = Callable[["Hurting"], Awaitable[None]]


class NoMount(Exception):
    """The caller can't mount a file system on the machine."""


@contextlib.contextmanager
def small_disk(folder: Path, mib: int = DISK_MIB) -> Iterator[Path]:
    """Mount a file system of `mib` MiB in memory at `folder`, for as long as the context lasts. Raises NoMount."""
    folder.mkdir(parents=True)
    options = ("-t", "tmpfs", "-o", f"size={mib}m", "tmpfs")
    try:
        mounted = subprocess.run(["mount", *options, folder], capture_output=True)
    except FileNotFoundError as error:
        raise NoMount("there is no mount command here") from error
    if mounted.returncode:
        raise NoMount(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


# ── one platform under load ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Hurting:
    """A platform, the eight clients and the history seen by clients, for faults in a row."""

    platform: Platform
    nemesis: Nemesis
    past: list[Seen] = field(default_factory=list)  # of earlier faults, with rows on the bill, too
    history: list[Seen] = field(default_factory=list)
    gateways_killed: int = 0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _done_at: list[tuple[float, float]] = field(default_factory=list)  # begin and end of complete answers

    async def clients(self) -> None:
        """Run the clients until `end` is called, and until the last answer under way is read."""
        self._ended.clear()
        self.past, self.history, self._done_at = [*self.past, *self.history], [], []
        await asyncio.gather(*(self._client(number) for number in range(STREAMS)))

    def end(self) -> None:
        self._ended.set()

    async def _client(self, number: int) -> None:
        while not self._ended.is_set():
            began_s = time.monotonic()
            seen = await ask("127.0.0.1", self.platform.port, self._asked(number))
            if seen.end is not End.UNREACHED:
                self.history.append(seen)
            if seen.end is End.DONE:
                self._done_at.append((began_s, time.monotonic()))
            else:
                await asyncio.sleep(PAUSE_S)

    def _asked(self, number: int) -> Ask:
        """The request of client `number`. The last client belongs to a tenant with limits."""
        tenant = "initech" if number == STREAMS - 1 else workload.TENANTS[number % 2]
        model = workload.NAMES[number % 3]
        body = {"model": model, "prompt": [9, *range(6, 30)], "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
        return Ask(number, tenant, "/v1/completions", body, self.platform.keys[tenant], (25,), TOKENS)

    def refused_for_room(self) -> list[Seen]:
        """Requests of the history that were refused because the disk is full."""
        return [seen for seen in self.history if "disk_full" in seen.error]

    async def served_again(self, since_s: float) -> float | None:
        """Seconds from `since_s` (monotonic) to the first complete answer to a request made after `since_s`.

        None if no answer came within GIVEN_UP_S."""
        while time.monotonic() - since_s < GIVEN_UP_S:
            if ends := [ended for began, ended in list(self._done_at) if began >= since_s]:
                return min(ends) - since_s
            await asyncio.sleep(0.05)
        return None

    # ── the bill ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def flaws(self) -> list[str]:
        """Sentences on rows of the bill that disagree with the history of the clients."""
        rows: list[dict[str, object]] = []
        for period in sorted({period_of(now_us() - 3600 * 1_000_000), period_of(now_us())}):
            path = f"/api/v1/billing/export?period={period}&format=jsonl&detail=rows"
            rows += map(json.loads, self.platform.get(path).raise_for_status().text.splitlines())
        return list(flaws([*self.past, *self.history], billed(rows), self.gateways_killed))

    async def booked(self) -> tuple[float, list[str]]:
        """Seconds until the bill is complete and right, and the flaws left after GIVEN_UP_S."""
        began_s, found = time.monotonic(), ["never asked"]
        while found and time.monotonic() - began_s < GIVEN_UP_S:
            with contextlib.suppress(httpx.HTTPError):
                found = await asyncio.to_thread(self.flaws)
            if found:
                await asyncio.sleep(1)
        return time.monotonic() - began_s, found

    def is_well(self) -> bool:
        """Whether the gateway is ready, no process is dying, and every runtime hosts every model."""
        ready = self.platform.get("/readyz")
        if ready.status_code != 200 or ready.json()["dying"]:
            return False
        gpus = self.platform.get("/api/v1/gpus").json()["data"]
        return len(gpus) == RUNTIMES and all(len(gpu["models"]) == len(workload.NAMES) for gpu in gpus)


@contextlib.asynccontextmanager
async def platform_on(folder: Path, open_files: int | None = None) -> AsyncIterator[Platform]:
    """Run a platform with tenants, models and deployments; every process may have `open_files` files open."""
    folder.mkdir(exist_ok=True)
    limited = () if open_files is None else ("prlimit", f"--nofile={open_files}:{open_files}")
    platform = Platform(folder / "data", free_port(), dict(SETTINGS), limited=limited)
    try:
        await asyncio.to_thread(platform.start, "--runtimes", str(RUNTIMES), "--device-memory", "128MiB")
        await asyncio.to_thread(workload.prepare, platform)
        yield platform
    finally:
        if platform.process is not None:
            await asyncio.to_thread(platform.stop)


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def full_disk(seconds: float) -> Hurt:
    """Fill the disk to the last byte, and keep the disk full for `seconds` and until a request was refused.

    The fault ends NOTICED_S later at the latest. Streams begun before the fault may last all the `seconds`, and the
    clients ask for nothing new until then."""

    async def hurt(hurting: Hurting) -> None:
        ballast = hurting.platform.data / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                await fill(file)
                full_s = time.monotonic()
                while (lasted_s := time.monotonic() - full_s) < seconds or (
                    lasted_s < seconds + NOTICED_S and not hurting.refused_for_room()
                ):
                    await asyncio.sleep(0.05)
                    await fill(file)
        finally:
            ballast.unlink()

    async def fill(file: FileIO) -> None:
        with contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                await asyncio.sleep(0)

    return hurt


async def lose_jetstream(hurting: Hurting) -> None:
    """Delete JetStream's folder and kill nats-server: the server comes back without streams and buckets."""
    server = await hurting.nemesis.victim("nats")
    shutil.rmtree(hurting.platform.data / "nats")
    kill(server)


def locked(seconds: float) -> Hurt:
    """Lock the database for `seconds`."""

    async def hurt(hurting: Hurting) -> None:
        await Lock(seconds)(hurting.nemesis)

    return hurt


def killed(victim: str) -> Hurt:
    """Kill the process in the role `victim`."""

    async def hurt(hurting: Hurting) -> None:
        hurting.gateways_killed += victim == "gateway"
        await Kill(victim)(hurting.nemesis)

    return hurt


def stopped(victim: str, seconds: float) -> Hurt:
    """Stop the process in the role `victim` by a signal for `seconds`."""

    async def hurt(hurting: Hurting) -> None:
        await Pause(victim, seconds)(hurting.nemesis)

    return hurt


def flooded(connections: int, seconds: float) -> Hurt:
    """Hold `connections` idle connections to the gateway open for `seconds`: more than the gateway may have files."""

    async def hurt(hurting: Hurting) -> None:
        opened: list[socket.socket] = []
        until_s = time.monotonic() + seconds
        try:
            while time.monotonic() < until_s:
                while len(opened) < connections:
                    opened.append(socket.socket())
                    opened[-1].setblocking(False)
                    opened[-1].connect_ex(("127.0.0.1", hurting.platform.port))
                await asyncio.sleep(0.1)
        finally:
            for each in opened:
                each.close()

    return hurt


@dataclass(frozen=True)
class Fault:
    hurt: Hurt
    open_files: int | None = None
    needs_small_disk: bool = False


def all_faults(scale: float = 1.0) -> dict[str, Fault]:
    """Faults by name. `scale` multiplies the seconds that faults last."""
    found = {
        "disk full": Fault(full_disk(10 * scale), needs_small_disk=True),
        "JetStream's folder deleted": Fault(lose_jetstream),
        "SQLite locked": Fault(locked(20 * scale)),
    }
    found |= {f"SIGKILL {victim}": Fault(killed(victim)) for victim in VICTIMS}
    found |= {f"SIGSTOP {victim}": Fault(stopped(victim, 5 * scale)) for victim in VICTIMS}
    found["ulimit -n 256"] = Fault(flooded(300, 10 * scale), open_files=OPEN_FILES)
    return found


# ── outcome ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    """The effect of a fault on streams and bill."""

    fault: str
    history: list[Seen]
    served_s: float | None  # end of the fault to a complete answer; None: not within GIVEN_UP_S
    booked_s: float
    flaws: list[str]

    @property
    def good(self) -> bool:
        return self.served_s is not None and self.served_s <= SERVED_S and not self.flaws and self.booked_s <= BOOKED_S

    def row(self) -> str:
        ends = Counter(str(seen.end) for seen in self.history)
        streams = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        served = "never" if self.served_s is None else f"{self.served_s:.1f} s"
        rows = f"{len(self.flaws)} wrong: {self.flaws[0]}" if self.flaws else "all right"
        return f"| {self.fault} | {streams} | {served} | {self.booked_s:.0f} s | {rows} |"


HEAD = "| fault | streams | serving again after its end | bill complete after | rows |\n|---|---|---|---|---|"


async def outcome(hurting: Hurting, name: str, fault: Fault) -> Outcome:
    """Apply a fault under eight streams, and return the effect.

    If the platform serves again, the platform is well on return."""
    clients = asyncio.create_task(hurting.clients())
    try:
        await asyncio.sleep(BEFORE_S)
        await fault.hurt(hurting)
        ended_s = time.monotonic()
        served_s = await hurting.served_again(ended_s)
        await asyncio.sleep(BEFORE_S)
    finally:
        hurting.end()
        await clients
    booked_s, found = await hurting.booked()
    if served_s is not None:
        await asyncio.to_thread(hurting.platform.until, hurting.is_well, GIVEN_UP_S)
    return Outcome(name, hurting.history, served_s, booked_s, found)


async def outcomes(folder: Path, chosen: dict[str, Fault]) -> AsyncIterator[Outcome | str]:
    """Try the chosen faults in turn: yields an outcome, or a sentence for a fault that the machine can't try."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(folder / "disk"))
        except NoMount as refused:
            for name in [name for name, fault in chosen.items() if fault.needs_small_disk]:
                yield f"{name}: {refused}"
            chosen = {name: fault for name, fault in chosen.items() if not fault.needs_small_disk}
            disk = folder
        for open_files in sorted({fault.open_files for fault in chosen.values()}, key=lambda most: most or 0):
            async with platform_on(disk / f"files-{open_files}", open_files) as platform:
                hurting = Hurting(platform, Nemesis(platform, random.Random(0)))
                for name, fault in chosen.items():
                    if fault.open_files == open_files:
                        yield await outcome(hurting, name, fault)


async def table(folder: Path, names: list[str]) -> bool:
    """Print the table; returns True if every outcome is good."""
    faults = all_faults()
    good = True
    print(HEAD)
    async for found in outcomes(folder, {name: faults[name] for name in names or faults}):
        print(found if isinstance(found, str) else found.row(), flush=True)
        good &= isinstance(found, Outcome) and found.good
    load = os.getloadavg()[0]
    said = f"{os.cpu_count()} cores, load {load:.1f} at the end"
    print(f"\n{said}; to reach: {SERVED_S:g} s, and {BOOKED_S:g} s for the bill.")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", nargs="*", help=f"of {', '.join(all_faults())}; all by default")
    names = parser.parse_args().fault
    with tempfile.TemporaryDirectory() as folder:
        return 0 if asyncio.run(table(Path(folder), names)) else 1


if __name__ == "__main__":
    sys.exit(main())
