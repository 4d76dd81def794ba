"""Keeps child processes alive: starts children in order, restarts dead children, stops children in reverse order.

The supervisor never polls: an idle supervisor sleeps in the event loop until a child dies, a child writes or a signal
comes.
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

from gateway.ops.troubles import Troubles
from store.fork.client import ForkedProcess, ForkServer, NotForked

HEALTHY_S = 10.0  # a child that lived so long counts as well
PAUSE_S_FIRST, PAUSE_S_MOST = 0.1, 5.0
DEATHS_MOST = 5
LOG_BYTES_MOST = 16 << 20  # a larger NAME.log becomes NAME.log.1
TAIL_LINES = 5
LINE_BYTES_MOST = 64 << 10  # a longer line is heard in pieces
RESTART_S = 2.0  # from SIGTERM to SIGKILL of a child that is restarted
# Wait for the last output of a dead child: a process outside the child's group may hold the pipe open.
COPY_S_MOST = 1.0
PR_SET_PDEATHSIG = 1

Say = Callable[[str], None]
Hear = Callable[[str, str], None]  # called with a child's name and a line written by the child
Lost = Callable[[str, BaseException], None]  # called with a child's name and why the child is not started again


class GaveUp(Exception):
    """A child that never became well. The message has the child's name, its exit and its last words."""


@dataclass(frozen=True)
class Child:
    """A process to keep alive."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_s: float = 10.0  # from SIGTERM to SIGKILL
    fds: tuple[int, ...] = ()  # files that the process gets under unchanged numbers
    needed: bool = True  # once well, the child is started again however often the child dies
    forked: bool = False  # `command` is PYTHON -P -m MODULE..., and a fork server has what the module imports


@dataclass(frozen=True)
class Restarts:
    """Record of a child's deaths: tells the pause before the next start, and when to give the child up."""

    deaths: int = 0  # deaths in a row, since the child was last well
    was_well: bool = False  # the child was well at any time
    needed: bool = True  # see Child

    def died(self, lived_s: float) -> Restarts:
        well = lived_s >= HEALTHY_S
        return replace(self, deaths=1 if well else self.deaths + 1, was_well=self.was_well or well)

    @property
    def pause_s(self) -> float:
        return min(PAUSE_S_MOST, PAUSE_S_FIRST * (1 << min(10, self.deaths - 1)))

    @property
    def hopeless(self) -> bool:
        """Whether to give the child up; never a needed child that was once well: needed services may come back."""
        return self.deaths >= DEATHS_MOST and not (self.needed and self.was_well)


class Tree:
    """The children of a supervisor. The child started first is stopped last."""

    def __init__(
        self,
        logs: Path,
        say: Say,
        hear: Hear | None = None,
        troubles: Troubles | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """`logs` is the folder of the children's logs.

        Args:
            forks: the server that forks children; None: every child is executed.
            say: called with a sentence for each death and restart.
            hear: called with each line written by a child.
            troubles: notes children that keep dying.

        An exception of `say` or `hear` ends the tree: `unfailing` wraps functions that may fail to write.
        """
        self._logs, self._say, self._hear, self._troubles, self._forks = logs, say, hear, troubles, forks
        self._tiers: list[Tier] = []
        self._hurry = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None  # why the tree ends, with `_failed`
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, *children: Child) -> Tier:
        """Start a tier of children: a tier starts together and stops together. A hopeless child ends the watch."""
        tier = Tier(self._keep, self._troubles, self._hurry)
        self._tiers.append(tier)
        for child in children:
            tier.start(child, self._fail)
        return tier

    def _keep(self, child: Child, say: Say | None) -> _Kept:
        log = Log(self._logs, child.name, self._hear)
        return _Kept(child, log, say or self._say, self._troubles, self._forks if child.forked else None)

    def _fail(self, name: str, error: BaseException) -> None:
        self._failure = self._failure or error
        self._failed.set()

    def restart(self, name: str) -> None:
        """End the child named `name`; the supervisor starts it again at once."""
        for tier in self._tiers:
            tier.restart(name)

    async def watch(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set. Raises GaveUp if a child of the first start is hopeless."""
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._failure:
            raise self._failure

    async def stop(self) -> None:
        """Stop tier after tier, the youngest first: SIGTERM, then SIGKILL after the child's `stop_s`."""
        for tier in reversed(self._tiers):
            await tier.stop()

    def kill(self) -> None:
        """Kill every child at once. A `stop` under way does not wait any longer."""
        self._hurry.set()

    @property
    def killed(self) -> bool:
        return self._hurry.is_set()


class Tier:
    """Children that stop together. A child may come after the others, and a child may go before the others."""

    def __init__(
        self, keep: Callable[[Child, Say | None], _Kept], troubles: Troubles | None, hurry: asyncio.Event
    ) -> None:
        self._keep, self._troubles, self._hurry = keep, troubles, hurry
        self._kept: dict[str, _Kept] = {}  # by name
        self._ending: dict[str, asyncio.Task[None]] = {}  # by name

    @property
    def names(self) -> frozenset[str]:
        """Names of the children, children about to end included."""
        return frozenset(self._kept)

    @property
    def ending(self) -> frozenset[str]:
        """Names of the children that were told to end."""
        return frozenset(self._ending)

    def start(self, child: Child, lost: Lost, say: Say | None = None) -> None:
        """Start a child. Raises OSError if the child's log can't be written.

        Args:
            lost: called when the child is not started again though no part of the platform ended the child.
            say: called with a sentence for each death and restart; None: the `say` of the tree."""
        kept = self._kept[child.name] = self._keep(child, say)
        kept.task.add_done_callback(lambda task: self._over(child.name, task, lost))

    def _over(self, name: str, task: asyncio.Task[None], lost: Lost) -> None:
        del self._kept[name]
        if not task.cancelled() and (error := task.exception()):
            lost(name, error)

    def end(self, name: str) -> None:
        """End the child named `name` for good, in the background: SIGTERM, then SIGKILL after the child's `stop_s`."""
        if name in self._kept and name not in self._ending:
            self._ending[name] = asyncio.create_task(self._end(name, self._kept[name]))

    async def _end(self, name: str, kept: _Kept) -> None:
        try:
            await kept.stop(self._hurry)
        finally:
            del self._ending[name]
        self.forget(name)

    def forget(self, name: str) -> None:
        """Forget the troubles of a child that ended and is not missed."""
        if self._troubles:
            self._troubles.forget(name)

    def restart(self, name: str) -> None:
        if name in self._kept:
            self._kept[name].restart()

    def lived_s(self, name: str) -> float:
        """Return the seconds since the last start of the child named `name`; 0 if the child is not kept."""
        return time.monotonic() - self._kept[name].started_s if name in self._kept else 0.0

    async def stop(self) -> None:
        await asyncio.gather(*(kept.stop(self._hurry) for kept in self._kept.values()))


def unfailing(say: Say) -> Say:
    """Return a `say` that loses a sentence without an error if the disk is full or the pipe closed."""

    def tried(sentence: str) -> None:
        with contextlib.suppress(OSError):
            say(sentence)

    return tried


class _Kept:
    """A child with its present process and its log."""

    def __init__(self, child: Child, log: Log, say: Say, troubles: Troubles | None, forks: ForkServer | None) -> None:
        self._child, self._log, self._say, self._troubles, self._forks = child, log, say, troubles, forks
        self.name = child.name
        self._restarting = False
        self.started_s = time.monotonic()  # moment of the last start
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._stopping = asyncio.Event()
        self.task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        restarts = Restarts(needed=self._child.needed)
        while not self._stopping.is_set():
            self.started_s = time.monotonic()
            ended = _ended(await self._live())
            if self._stopping.is_set():
                return
            if self._restarting:
                self._restarting = False
                continue
            lived_s = time.monotonic() - self.started_s
            restarts = restarts.died(lived_s)
            if restarts.hopeless:
                raise GaveUp(f"{self.name} {ended} {restarts.deaths} times in a row{self._last_words()}")
            said = "" if ended.startswith("was killed") else self._log.last_line
            self._say(f"{self.name} {ended}{self._again(restarts)}{': ' + said if said else ''}; see {self._log.path}")
            if self._troubles and lived_s < HEALTHY_S:
                self._troubles.died(self.name, ended, restarts.deaths, said)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(restarts.pause_s):
                    await self._stopping.wait()

    def _again(self, restarts: Restarts) -> str:
        times = f" {restarts.deaths} times in a row" if restarts.deaths > 1 else ""
        return f"{times}, starting it again in {restarts.pause_s:g} s"

    def restart(self) -> None:
        """End the child by SIGTERM, or by SIGKILL after RESTART_S, so that the supervisor starts it again."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._restarting = True
        process.terminate()
        asyncio.get_running_loop().call_later(RESTART_S, _kill_if_alive, process)

    async def _live(self) -> int:
        """Run one process from start to exit and return its exit code. The rest of the process's group is killed."""
        reading, writing = os.pipe()
        try:
            self._process = process = await self._started(writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        if process is None:
            os.close(reading)
            return 0
        copying = asyncio.create_task(self._log.copy(reading))
        if self._stopping.is_set():
            process.terminate()
        well = asyncio.get_running_loop().call_later(HEALTHY_S, self._is_well)
        code = await process.wait()
        well.cancel()
        _kill_group(process.pid)
        await asyncio.wait([copying], timeout=COPY_S_MOST)
        copying.cancel()
        return code

    async def _started(self, writing: int) -> asyncio.subprocess.Process | ForkedProcess | None:
        """Start a process that writes into `writing`; None: the child was to stop before. Raises GaveUp."""
        if self._forks is not None:
            forking = asyncio.create_task(self._forked(self._forks, writing))
            stopping = asyncio.create_task(self._stopping.wait())
            await asyncio.wait([forking, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not forking.done():
                forking.cancel()
                return None
            try:
                return forking.result()
            except NotForked as error:
                self._say(f"{self.name} is started without the fork server: {error}")
        child = self._child
        try:
            return await asyncio.create_subprocess_exec(
                *child.command,
                env=child.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                process_group=0,  # Ctrl-C reaches only the supervisor, which stops the children in order
                preexec_fn=_die_with(os.getpid()),
                pass_fds=child.fds,
            )
        except OSError as error:
            raise GaveUp(f"{self.name} does not start: {child.command[0]}: {error.strerror}") from error

    async def _forked(self, forks: ForkServer, writing: int) -> ForkedProcess:
        module, *arguments = self._child.command[3:]
        with open(os.devnull) as nothing:
            fds = {number: number for number in self._child.fds} | {0: nothing.fileno(), 1: writing, 2: writing}
            return await forks.fork(module, arguments, self._child.environment, fds, group=True)

    def _is_well(self) -> None:
        if self._troubles:
            self._troubles.well(self.name)

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
            self.task.exception()  # `watch` has already reported a child given up

    def _last_words(self) -> str:
        lines = self._log.tail()
        return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _kill_if_alive(process: asyncio.subprocess.Process | ForkedProcess) -> None:
    if process.returncode is None:
        _kill_group(process.pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _die_with(supervisor: int) -> Callable[[], None]:
    """Return a function for a new child's process: the kernel kills the process when the supervisor dies."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def arrange() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # the supervisor died before prctl
            os._exit(1)

    return arrange


class Log:
    """Output of a child in FOLDER/NAME.log; the file before is kept as NAME.log.1."""

    def __init__(self, folder: Path, name: str, hear: Hear | None) -> None:
        self.path, self._name, self._hear = folder / f"{name}.log", name, hear
        self.last_line = ""  # last line with text
        self._rotate()

    def _rotate(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".log.1"))
        self.path.touch(mode=0o600)

    async def copy(self, descriptor: int) -> None:
        """Copy output until the child and every process that inherited the pipe has closed it."""
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
                    *lines, partial = (partial + chunk).split(b"\n")
                    if len(partial) > LINE_BYTES_MOST:
                        lines, partial = [*lines, partial], b""
                    for line in lines:
                        self._heard(line.decode(errors="replace"))

    def _heard(self, line: str) -> None:
        self.last_line = line.strip() or self.last_line
        if self._hear:
            self._hear(self._name, line)

    def _write(self, chunk: bytes) -> None:
        if self.path.stat().st_size > LOG_BYTES_MOST:
            self._rotate()
        with self.path.open("ab") as file:
            file.write(chunk)

    def tail(self) -> list[str]:
        """Return the last TAIL_LINES lines with text."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-TAIL_LINES:]
