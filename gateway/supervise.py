"""Keeps child processes alive: started in order, started again when they die, stopped in the reverse order.

Nothing here polls: an idle supervisor sleeps in the event loop until a child dies, writes or a signal comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

HEALTHY_S = 10.0  # a child that lived this long was well
PAUSE_S_FIRST, PAUSE_S_MOST = 0.1, 5.0
DEATHS_MOST = 5
LOG_BYTES_MOST = 16 << 20  # then NAME.log becomes NAME.log.1
TAIL_LINES = 5
COPY_S_MOST = 1.0  # for the last output of a dead child: what left its group may hold the pipe open
PR_SET_PDEATHSIG = 1

Say = Callable[[str], None]


class GaveUp(Exception):
    """A child that never became well: names it, how it ended and its last words."""


@dataclass(frozen=True)
class Child:
    """A process to be kept alive."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_s: float = 10.0  # from SIGTERM to SIGKILL
    fds: tuple[int, ...] = ()  # files it gets under the same numbers


@dataclass(frozen=True)
class Restarts:
    """What a child's deaths say: how long to wait before the next start, and when it is hopeless."""

    deaths: int = 0  # in a row, since it last was well
    was_well: bool = False  # at any time

    def died(self, lived_s: float) -> Restarts:
        well = lived_s >= HEALTHY_S
        return replace(self, deaths=1 if well else self.deaths + 1, was_well=self.was_well or well)

    @property
    def pause_s(self) -> float:
        return min(PAUSE_S_MOST, PAUSE_S_FIRST * (1 << min(10, self.deaths - 1)))

    @property
    def hopeless(self) -> bool:
        """A child that was well once is started again for ever: what it needs may come back."""
        return self.deaths >= DEATHS_MOST and not self.was_well


class Tree:
    """The children of one supervisor. What is started first is stopped last."""

    def __init__(self, logs: Path, say: Say, echo: Say | None = None) -> None:
        """`say` hears of deaths and restarts; `echo`, when given, hears every line the children write. What either
        raises ends the tree: `unfailing` wraps functions that may fail to write."""
        self._logs, self._say, self._echo = logs, say, echo
        self._tiers: list[list[_Kept]] = []
        self._hurry = asyncio.Event()
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, *children: Child) -> None:
        """One tier: its children start together and stop together."""
        self._tiers.append([_Kept(child, Log(self._logs, child.name, self._echo), self._say) for child in children])

    async def watch(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set; raises GaveUp when a child is hopeless."""
        stopped = asyncio.create_task(stop.wait())
        tasks = [kept.task for tier in self._tiers for kept in tier]
        try:
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        for task in done - {stopped}:
            task.result()

    async def stop(self) -> None:
        """Tier after tier, the youngest first: SIGTERM, then SIGKILL after the child's `stop_s`."""
        for tier in reversed(self._tiers):
            await asyncio.gather(*(kept.stop(self._hurry) for kept in tier))

    def kill(self) -> None:
        """Every child at once. A `stop` under way does not wait any longer."""
        self._hurry.set()

    @property
    def killed(self) -> bool:
        return self._hurry.is_set()


def unfailing(say: Say) -> Say:
    """`say`, but a sentence that can't be written, to a full disk or into a closed pipe, is lost without an error."""

    def tried(sentence: str) -> None:
        with contextlib.suppress(OSError):
            say(sentence)

    return tried


class _Kept:
    """One child, its present process and its log."""

    def __init__(self, child: Child, log: Log, say: Say) -> None:
        self._child, self._log, self._say = child, log, say
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        restarts = Restarts()
        while not self._stopping.is_set():
            started_s = time.monotonic()
            ended = _ended(await self._live())
            if self._stopping.is_set():
                return
            restarts = restarts.died(time.monotonic() - started_s)
            if restarts.hopeless:
                raise GaveUp(f"{self._child.name} {ended} {restarts.deaths} times in a row{self._last_words()}")
            self._say(f"{self._child.name} {ended}, starting it again in {restarts.pause_s:g} s; see {self._log.path}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(restarts.pause_s):
                    await self._stopping.wait()

    async def _live(self) -> int:
        """From start to exit of one process; its exit code. What it leaves behind in its group is killed."""
        reading, writing = os.pipe()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._child.command,
                env=self._child.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                process_group=0,  # Ctrl-C reaches the supervisor alone, which stops the children in order
                preexec_fn=_die_with(os.getpid()),
                pass_fds=self._child.fds,
            )
        except OSError as error:
            os.close(reading)
            raise GaveUp(f"{self._child.name} does not start: {self._child.command[0]}: {error.strerror}") from error
        finally:
            os.close(writing)
        copying = asyncio.create_task(self._log.copy(reading))
        if self._stopping.is_set():
            process.terminate()
        code = await process.wait()
        _kill_group(process.pid)
        await asyncio.wait([copying], timeout=COPY_S_MOST)
        copying.cancel()
        return code

    async def stop(self, hurry: asyncio.Event) -> None:
        self._stopping.set()
        if self._process and self._process.returncode is None:
            self._process.terminate()
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait([self.task, hurried], timeout=self._child.stop_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if self._process and not self.task.done():
            _kill_group(self._process.pid)
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.exception()  # a child given up was reported by `watch`

    def _last_words(self) -> str:
        lines = self._log.tail()
        return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _die_with(supervisor: int) -> Callable[[], None]:
    """To run in a new child: the kernel kills it when the supervisor dies, by whatever cause."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def arrange() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the kernel was told
            os._exit(1)

    return arrange


class Log:
    """What a child writes, in FOLDER/NAME.log; the file before it is kept as NAME.log.1."""

    def __init__(self, folder: Path, name: str, echo: Say | None) -> None:
        self.path, self._name, self._echo = folder / f"{name}.log", name, echo
        self._rotate()

    def _rotate(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".log.1"))
        self.path.touch(mode=0o600)

    async def copy(self, descriptor: int) -> None:
        """Until the child and everything that inherited its output has closed it."""
        reader = asyncio.StreamReader()
        with open(descriptor, "rb", buffering=0) as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            with contextlib.closing(transport):
                partial = b""
                while chunk := await reader.read(1 << 16):
                    with contextlib.suppress(OSError):  # a full disk costs log lines, not the platform
                        self._write(chunk)
                    if self._echo:
                        *lines, partial = (partial + chunk).split(b"\n")
                        for line in lines:
                            self._echo(f"{self._name:8} {line.decode(errors='replace')}")

    def _write(self, chunk: bytes) -> None:
        if self.path.stat().st_size > LOG_BYTES_MOST:
            self._rotate()
        with self.path.open("ab") as file:
            file.write(chunk)

    def tail(self) -> list[str]:
        """The last lines written."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-TAIL_LINES:]
