"""The device process as its node sees it: how it is started, whether it hangs, and which model it ended with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping

import structlog

from runtime import pipe
from runtime.config import RuntimeSettings
from runtime.quarantine import Quarantine
from runtime.stepping import Stepping, Watchdog
from store.wire import ModelState

log = structlog.get_logger()

START_S_MOST = 300.0  # libraries of gigabytes may have to be read from a slow disk


class Child:
    """One process after the other; what is known of them outlives them."""

    def __init__(self, settings: RuntimeSettings, host_cache: int) -> None:
        self._settings, self._host_cache = settings, host_cache
        self._stepping_fd = Stepping.create()
        self.stepping = Stepping(self._stepping_fd)
        self._watchdog = Watchdog(self.stepping, settings.hang_s, settings.build_hang_s)
        self.quarantine = Quarantine()
        self._process: asyncio.subprocess.Process | None = None  # the last that was started
        self._hangs = ""  # why it was ended
        self._starts_since: float | None = None  # None: it has said something

    async def start(self) -> pipe.NodeEnd:
        """The node's end of a new process's pipe."""
        ours, theirs = pipe.pair()
        self._starts_since = time.monotonic()
        with theirs:
            self._process = await self._started(theirs.fileno())
        return await pipe.NodeEnd.open(ours)

    async def _started(self, fd: int) -> asyncio.subprocess.Process:
        settings = self._settings
        environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads), "PYTHONUNBUFFERED": "1"}
        began = pipe.Began(
            pipe_fd=fd,
            policy=settings.policy,
            pool_bytes=int(settings.device_memory),
            host_bytes=int(settings.host_cache),
            host_fd=self._host_cache,
            stepping_fd=self._stepping_fd,
            journal=str(settings.journal / f"{settings.runtime_id}.journal") if settings.journal else "",
            profile=str(settings.profile or ""),
            tensor_parallel=settings.tensor_parallel,
            load_helpers=settings.load_helpers,
        )
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "runtime.device", *began.arguments()),
            env=environment,
            pass_fds=[fd, self._host_cache, self._stepping_fd],
        )

    async def end(self) -> None:
        """Returns when it is gone."""
        process = self._process
        assert process is not None, "it was started"
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()

    def heard(self) -> None:
        """Something of it."""
        self._starts_since = None
        self._watchdog.heard()

    async def watch(self, waited_for: Callable[[], bool]) -> None:
        """Ends one that hangs."""
        while True:
            await asyncio.sleep(self._watchdog.period_s)
            self.look(waited_for(), time.monotonic())

    def look(self, waited_for: bool, now: float) -> None:
        """Ends it if it hangs."""
        reason, process = self._watchdog.look(waited_for, now), self._process
        if self._starts_since is not None and now - self._starts_since > START_S_MOST:
            reason = f"it has not begun to work within {START_S_MOST:g} s"
        if reason and process and process.returncode is None:
            log.error("node.device_hangs", reason=reason)
            self._hangs = reason
            process.kill()

    def autopsy(self, models: Mapping[str, ModelState]) -> str | None:
        """Of a process that is gone, and of which these states were heard last: the model in whose step it ended."""
        step, build = self.stepping.under_way(), self.stepping.building
        if build:
            self._load_failed(build[0], self._hangs or "while its engine was built")
        elif step and not (step[0] in models and models[step[0]].load_ms):
            self._load_failed(step[0], self._hangs or "in its first steps")
        self.stepping.clear()
        self._hangs = ""
        return step[0] if step else None

    def _load_failed(self, model: str, why: str) -> None:
        now = time.monotonic()
        self.quarantine.ended(model, why, now)
        if reason := self.quarantine.reason(model, now):
            log.error("node.model_stays_away", model=model, reason=reason)
