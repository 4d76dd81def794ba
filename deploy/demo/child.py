"""`staccato up` as a child of the demo, and the `staccato` commands run beside the child."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_S_MOST = 180.0
ANSWER_S_MOST = 30.0
STOP_S_MOST = 60.0
POLL_S = 0.1


class DemoError(Exception):
    """The reason why the tour can't go on, in one sentence."""


@dataclass(frozen=True)
class Done:
    """A command that ended well."""

    line: str  # as typed by a user
    out: str
    notes: str  # the command's stderr, for the person at the terminal


@dataclass(frozen=True)
class Platform:
    """A running `staccato up`; `control` speaks to its control plane with the operator's key."""

    data: Path
    port: int
    process: asyncio.subprocess.Process
    control: httpx.AsyncClient

    @property
    def url(self) -> str:
        return str(self.control.base_url).rstrip("/")

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """The JSON answer of `/api/v1`. Raises DemoError if the control plane refuses."""
        response = await self.control.request(method, f"/api/v1{path}", json=body)
        if response.is_error:
            raise DemoError(f"{method} {path} was refused with {response.status_code}: {response.text}")
        return response.json()

    async def command(self, line: str) -> Done:
        """Run `staccato LINE`. Raises DemoError with the command's words if the command fails."""
        process = await asyncio.create_subprocess_exec(
            _staccato(),
            *line.split(),
            env=_environment(self.data, self.port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, notes = await process.communicate()
        done = Done(f"staccato {line}", out.decode().rstrip(), notes.decode().strip())
        if process.returncode:
            raise DemoError(f"`{done.line}` ended with {process.returncode}: {done.notes or done.out}")
        return done

    def device_bytes(self) -> int:
        """Resident memory of the runtime's device process, which holds the engines of every model."""
        tree = psutil.Process(self.process.pid).children(recursive=True)
        return sum(child.memory_info().rss for child in tree if "-m runtime.device" in " ".join(child.cmdline()))


@contextlib.asynccontextmanager
async def running(data: Path, *options: str) -> AsyncIterator[Platform]:
    """The platform on a free port, with `data` emptied first; at the end every started process is gone."""
    log = await asyncio.to_thread(_cleared, data)
    port = _free_port()
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            _staccato(), "up", *options, env=_environment(data, port), stdout=file, stderr=file,
            process_group=0,  # Ctrl-C reaches the tour alone, which then ends the platform in order
        )  # fmt: skip
    try:
        await _until_ready(process, log)
        async with _control(data, port) as control:
            yield Platform(data, port, process, control)
    finally:
        await _stop(process)


async def _until_ready(process: asyncio.subprocess.Process, log: Path) -> None:
    """Wait until `staccato up` is ready. Raises DemoError, with the last words of a process that ended."""
    try:
        async with asyncio.timeout(READY_S_MOST):
            while process.returncode is None:
                if "ready at" in log.read_text():
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DemoError(f"`staccato up` is not ready after {READY_S_MOST:g} s: see {log.parent / 'logs'}") from None
    raise DemoError(f"`staccato up` ended with {process.returncode}: {log.read_text().strip()}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Send SIGTERM to the supervisor, which ends its children; remaining processes are ended by pid."""
    if process.returncode is None:
        tree = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S_MOST)
        except TimeoutError:
            process.kill()
            await process.wait()
        for child in tree:  # psutil knows a process by pid and start time: no unrelated process is hit
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _cleared(data: Path) -> Path:
    """Empty the data folder of an earlier tour; returns the path for the log of `staccato up`. Raises DemoError if the
    folder is in use."""
    data.mkdir(parents=True, exist_ok=True)
    with (data / "up.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(f"another tour runs in {data}: let it end first") from None
        shutil.rmtree(data)
    data.mkdir(mode=0o700)
    return data / "up.log"


def _control(data: Path, port: int) -> httpx.AsyncClient:
    """A client of the control plane with the operator's key; proxies of the environment are ignored for localhost."""
    headers = {"authorization": f"Bearer {(data / 'admin.key').read_text().strip()}"}
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=ANSWER_S_MOST, trust_env=False
    )


def _staccato() -> str:
    return str(Path(sys.executable).with_name("staccato"))


def _environment(data: Path, port: int) -> dict[str, str]:
    """The inherited environment without the settings of a foreign platform; plain output on any terminal."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STACCATO_")}
    return inherited | {"STACCATO_DATA": str(data), "STACCATO_PORT": str(port), "STACCATO_LOG_LEVEL": "warning"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
