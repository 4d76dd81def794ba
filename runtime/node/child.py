"""The device process from the node's side: start, watch for hangs, end, and the model to blame for an end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from runtime import ipc
from runtime.config import RuntimeSettings
from runtime.core.fleet.crash_backoff import Quarantine
from runtime.device.stepping import Stepping, Watchdog
from store.contract.wire import ModelState
from store.fork.client import ForkedProcess, ForkServer, NotForked

log = structlog.get_logger()

PAUSE_S_FIRST, PAUSE_S_MOST = 0.2, 5.0
START_S_MOST = 300.0  # gigabytes of libraries may come from a slow disk
DEVICE = (sys.executable, "-P", "-m", "runtime.device")


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
        environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads), "PYTHONUNBUFFERED": "1"}
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
            pinned_bytes=int(settings.cache_pinned),
            numa_node=settings.numa_node,
        )
        fds = [fd, self._host_cache, self._stepping_fd]
        if self._forks is not None:
            try:
                files = {number: number for number in (0, 1, 2, *fds)}
                return await self._forks.fork(self._command[-1], began.arguments(), environment, files)
            except NotForked as error:
                log.warning("node.device_not_forked", reason=str(error))
        return await asyncio.create_subprocess_exec(
            *(*self._command, *began.arguments()), env=environment, pass_fds=fds
        )

    async def end(self) -> None:
        """Kill the process if the process still runs; return when the process is gone."""
        process = self._process
        assert process is not None, "it was started"
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        self.failed_starts = self.failed_starts + 1 if self._starts_since is not None else 0

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
            self._load_failed(build[0], self._hangs or "while its engine was built")
        elif step and not (step[0] in models and models[step[0]].was_resident):
            self._load_failed(step[0], self._hangs or "in its first steps")
        self.stepping.clear()
        self._hangs = ""
        return step[0] if step else None

    def _load_failed(self, model: str, why: str) -> None:
        now = time.monotonic()
        self.quarantine.ended(model, why, now)
        if reason := self.quarantine.reason(model, now):
            log.error("node.model_stays_away", model=model, reason=reason)
