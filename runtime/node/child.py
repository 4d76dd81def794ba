"""The node's processes with vLLM: the device process, and processes that make images.

A process is started, watched for hangs and ended here; for a device process that ended, a model to blame is found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence

import msgspec
import structlog

from runtime import ipc
from runtime.config import RuntimeSettings
from runtime.core.fleet.crash_backoff import Quarantine
from runtime.device.stepping import Stepping, Watchdog
from runtime.imaging import PACKET_MOST, ImageBegan, ImageSaid
from store.contract.wire import EngineSpec, ModelState
from store.fork.client import ForkedProcess, ForkServer, NotForked
from store.tasks import ended

log = structlog.get_logger()

PAUSE_S_FIRST, PAUSE_S_MOST = 0.2, 5.0
IMAGING_IDLE_S = 60.0
ENDING_S = 0.2  # for a process that was hung up on, before the process is killed
START_S_MOST = 300.0  # gigabytes of libraries may come from a slow disk
DEVICE = (sys.executable, "-P", "-m", "runtime.device")
IMAGING = (sys.executable, "-P", "-m", "runtime.imaging")


class DeviceChild:
    """The device process of a node, started anew after each end; quarantine and counts outlive the processes.

    `command` is the program of the device process, which takes one more argument: see runtime/ipc.Began."""

    def __init__(self, settings: RuntimeSettings, host_cache: int, command: Sequence[str] = DEVICE) -> None:
        self._settings, self._host_cache, self._command = settings, host_cache, command
        self._stepping_fd = Stepping.create()
        self.stepping = Stepping(self._stepping_fd)
        self._watchdog = Watchdog(self.stepping, settings.hang_s, settings.build_hang_s)
        self.quarantine = Quarantine()
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None  # the last process started
        # The ranks of a group choose their devices before torch is imported, so a group's processes are executed.
        forkable = command is DEVICE and settings.tensor_parallel == 1
        self._forks = ForkServer.at(settings.fork_server_fd) if forkable else None
        self.images = ImageMaker(settings, host_cache, self._forks) if forkable else None
        self._hangs = ""  # why the process was killed; empty: not killed for a hang
        self._starts_since: float | None = None  # None: the process has sent a message
        self.failed_starts = 0  # processes in a row that ended before the first message

    async def start(self) -> ipc.NodeEnd:
        """Start a device process. Returns the node's end of the pipe to the process."""
        ours, theirs = ipc.pair()
        self._starts_since = time.monotonic()
        with theirs:
            self._process = await self._started(theirs.fileno())
        return await ipc.NodeEnd.open(ours)

    async def _started(self, fd: int) -> asyncio.subprocess.Process | ForkedProcess:
        settings = self._settings
        began = ipc.Began(
            pipe_fd=fd,
            policy=settings.policy,
            pool_bytes=settings.pool[0],
            pool_percent=settings.pool[1],
            host_bytes=int(settings.host_cache),
            host_fd=self._host_cache,
            stepping_fd=self._stepping_fd,
            journal=str(settings.journal / f"{settings.runtime_id}.journal") if settings.journal else "",
            profile=str(settings.profile or ""),
            tensor_parallel=settings.tensor_parallel,
            load_helpers=settings.load_helpers,
            images_beside=self.images is not None,
            pinned_bytes=int(settings.cache_pinned),
            disk_folder=disk_folder(settings),
            disk_bytes=int(settings.disk_cache),
            numa_node=settings.numa_node,
            prefixes=settings.prefixes,
            cuda_graphs=settings.cuda_graphs,
            compiled=settings.compiled,
            async_scheduling=settings.async_scheduling,
        )
        fds = [fd, self._host_cache, self._stepping_fd]
        return await _started(self._command, began.arguments(), settings, fds, self._forks)

    async def end(self) -> None:
        """Kill the process if the process still runs; return when the process is gone."""
        process = self._process
        assert process is not None, "it was started"
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        self.failed_starts = self.failed_starts + 1 if self._starts_since is not None else 0

    def shown(self, models: Mapping[str, ModelState], leaving: Container[str]) -> dict[str, ModelState]:
        """States of models to show: see `Stepping.shown_in`."""
        return self.stepping.shown_in(models, leaving, self.images.stepping if self.images else None)

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start: twice as long after each failed start, at most PAUSE_S_MOST."""
        return min(PAUSE_S_MOST, PAUSE_S_FIRST * (1 << min(10, self.failed_starts)))

    def heard(self) -> None:
        """Note a message of the process."""
        self._starts_since = None
        self._watchdog.heard()

    async def watch(self, waited_for: Callable[[], bool]) -> None:
        """Look again and again, forever. `waited_for`: whether streams wait for the device."""
        while True:
            await asyncio.sleep(self._watchdog.period_s)
            self.look(waited_for(), time.monotonic())

    def look(self, waited_for: bool, now: float) -> None:
        """Kill the process if the process hangs, or sent no message within START_S_MOST seconds of the start."""
        reason, process = self._watchdog.look(waited_for, now), self._process
        if self._starts_since is not None and now - self._starts_since > START_S_MOST:
            reason = f"it has not begun to work within {START_S_MOST:g} s"
        if reason and process and process.returncode is None:
            log.error("node.device_hangs", reason=reason)
            self._hangs = reason
            process.kill()

    def autopsy(self, models: Mapping[str, ModelState]) -> str | None:
        """Find the model to blame after the process has ended.

        A model that ended the process in a build or in the model's first steps is counted in the quarantine. `models`:
        the last states heard. Returns the model in a step when the process ended, or None."""
        step, build = self.stepping.under_way(), self.stepping.building
        if build:
            self._load_failed(build[0], self._hangs or "while its engine was built", built=False)
        elif step and not (step[0] in models and models[step[0]].was_resident):
            self._load_failed(step[0], self._hangs or "in its first steps", built=True)
        self.stepping.clear()
        self._hangs = ""
        return step[0] if step else None

    def _load_failed(self, model: str, why: str, built: bool) -> None:
        now = time.monotonic()
        self.quarantine.ended(model, why, now, built)
        if reason := self.quarantine.reason(model, now):
            log.error("node.model_stays_away", model=model, reason=reason)


class ImageMaker:
    """Makes images in the host cache, one at a time, in a process that stays for IMAGING_IDLE_S after the last image.

    `forks`: the fork server; None: the process is executed, and imports vLLM first."""

    def __init__(self, settings: RuntimeSettings, host_cache: int, forks: ForkServer | None) -> None:
        self._settings, self._host_cache, self._forks = settings, host_cache, forks
        self._stepping_fd = Stepping.create()
        self.stepping = Stepping(self._stepping_fd)
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._socket: socket.socket | None = None  # to the process
        self._making: tuple[str, asyncio.Task[None]] | None = None
        self._idle: asyncio.TimerHandle | None = None

    def make(self, spec: EngineSpec, device: ipc.NodeEnd) -> None:
        """Begin to make a model's image. The device process hears of the end."""
        self._making = spec.key, asyncio.create_task(self._make(spec, device))

    async def stop(self, model: str, device: ipc.NodeEnd) -> None:
        """End the process if the process makes the image of `model`, and let the device process hear of the end."""
        if self._making is not None and self._making[0] == model and not self._making[1].done():
            await ended(self._making[1])
        else:
            device.send(ipc.ImageMade(model))

    async def end(self) -> None:
        """End the process, if any; return when the process is gone."""
        if self._making is not None:
            await ended(self._making[1])
        await self._end_process()

    async def _make(self, spec: EngineSpec, device: ipc.NodeEnd) -> None:
        said, over = ImageSaid(), False
        try:
            said = await self.made(spec)
            over = True
        except OSError as failed:
            said = ImageSaid(f"no process could be started: {failed.strerror}")
        finally:
            if not over:  # cancelled, or no process
                await self._end_process()
            device.send(ipc.ImageMade(spec.key, said.error, said.lacks_bytes))

    async def made(self, spec: EngineSpec) -> ImageSaid:
        """Have the process make an image. Returns how the making ended. Raises OSError if no process can be started."""
        if self._idle is not None:
            self._idle.cancel()
        orders = self._socket if self._socket is not None and self._runs() else await self._start()
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch())
        try:
            orders.send(msgspec.json.encode(spec))
            packet = await loop.sock_recv(orders, PACKET_MOST)
        except ConnectionError:
            packet = b""
        finally:
            hangs = watching.result() if watching.done() else ""
            await ended(watching)
        if packet:
            self._idle = loop.call_later(IMAGING_IDLE_S, self._hang_up)
            return msgspec.json.decode(packet, type=ImageSaid)
        code = await self._end_process()
        return ImageSaid(hangs or f"the process that made its image ended with {_ending(code)}")

    def _runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def _start(self) -> socket.socket:
        await self._end_process()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        settings = self._settings
        with theirs:
            fds = (self._host_cache, self._stepping_fd, theirs.fileno())
            disk = disk_folder(settings), int(settings.disk_cache)
            began = ImageBegan(*settings.pool, int(settings.host_cache), *fds, *disk)
            self._socket = ours
            self._process = await _started(IMAGING, began.arguments(), settings, fds, self._forks)
        return ours

    async def _watch(self) -> str:
        """Watch the process, and kill the process if the process hangs. Returns the reason then, and never before."""
        watchdog = Watchdog(self.stepping, self._settings.hang_s, self._settings.build_hang_s)
        while (hangs := watchdog.look(False, time.monotonic())) is None:
            await asyncio.sleep(watchdog.period_s)
        if self._process is not None and self._runs():
            self._process.kill()
        return hangs

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()  # the process ends by itself
        self._socket = None

    async def _end_process(self) -> int | None:
        """End the process, if any. Returns the exit code once the process is gone."""
        process, self._process = self._process, None
        if self._idle is not None:
            self._idle.cancel()
        if process is None:
            return None
        self._hang_up()
        if process.returncode is None:
            with contextlib.suppress(TimeoutError):  # a process that crashed says how
                await asyncio.wait_for(asyncio.shield(process.wait()), ENDING_S)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        self.stepping.clear()
        return await process.wait()


def disk_folder(settings: RuntimeSettings) -> str:
    """The folder of images on disk; empty if no images are kept on disk."""
    return str(settings.disk_folder) if settings.disk_folder and settings.disk_cache else ""


async def _started(
    command: Sequence[str],
    arguments: Sequence[str],
    settings: RuntimeSettings,
    fds: Sequence[int],
    forks: ForkServer | None,
) -> asyncio.subprocess.Process | ForkedProcess:
    """Start a process with vLLM that inherits the files `fds`: forked if a fork server can fork, else executed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads), "PYTHONUNBUFFERED": "1"}
    if forks is not None:
        try:
            files = {number: number for number in (0, 1, 2, *fds)}
            return await forks.fork(command[-1], arguments, environment, files)
        except NotForked as error:
            log.warning("node.not_forked", name=command[-1], reason=str(error))
    return await asyncio.create_subprocess_exec(*command, *arguments, env=environment, pass_fds=fds)


def _ending(code: int | None) -> str:
    """The end of a process in words, by the exit code."""
    if code is not None and code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return f"code {code}"
