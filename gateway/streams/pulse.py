"""A child of the gateway that says "the gateway lives" on the bus while the gateway's own loop has no time to.

A request can hold the gateway's loop, or all of its interpreter, for seconds. Runtimes would take the gateway for dead
and lose the streams of every tenant. The child is a process of its own, so that nothing in the gateway delays the
child, and lives exactly as long as the gateway: the gateway holds the write end of the pipe that the child reads as
standard input. Each turn of the gateway's loop writes a byte into the pipe. The child speaks for a loop with a late
turn, but neither after LOOP_S_MOST without a turn, nor for a gateway stopped by a signal: a stopped gateway serves no
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from store.bus import Bus, BusError
from store.contract import grants, wire
from store.telemetry import observe

log = structlog.get_logger()

PERIOD_S = 0.5
LATE_S = 0.75  # since the loop turned: then the child speaks
LOOP_S_MOST = 30.0  # since the loop turned: then the gateway counts as dead
AGAIN_S = 1.0  # from the end of a child to the start of the next
END_S = 2.0  # from the end of the pipe to SIGKILL
NEEDED, IDLE = b"+", b"-"  # written at a turn of the loop: with streams open, without
PASSED = (
    "PATH",
    "LANG",
    "LD_LIBRARY_PATH",
    "PYTHON",
    "SSL_CERT",
    "STACCATO_NATS",
    "STACCATO_LOG",
)  # variables whose names begin so


# ── the gateway's side ────────────────────────────────────────────────────────────────────────────────────────────────


class Pulse:
    """Keeps the child running for a gateway."""

    def __init__(self, url: str, gateway: str, credentials: Path | None = None, authority: Path | None = None) -> None:
        told = {"url": url, "gateway": gateway, "credentials": str(credentials or ""), "parent": os.getpid()}
        told["authority"] = str(authority or "")
        self._told = json.dumps(told).encode() + b"\n"
        self._pipe: int | None = None
        self.process: asyncio.subprocess.Process | None = None

    def turned(self, needed: bool) -> None:
        """The gateway's loop turned just now. `needed`: runtimes wait for signs of life. Never waits."""
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._pipe, NEEDED if needed else IDLE)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps a child running until the context ends; the child ends with the context."""
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            try:
                ours = await self._start()
            except OSError as error:
                log.warning("pulse.not_started", error=str(error), retry_in_s=AGAIN_S)
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                assert self.process is not None
                code = await self.process.wait()
                log.warning("pulse.ended", error=f"exit code {code}", retry_in_s=AGAIN_S)
            finally:
                self._pipe = None
                os.close(ours)
                await self._end()
            await asyncio.sleep(AGAIN_S)

    async def _start(self) -> int:
        """The gateway's end of the new child's pipe."""
        theirs, ours = os.pipe()
        try:
            environment = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
            os.write(ours, self._told)
            os.set_blocking(ours, False)
            command = (sys.executable, "-P", "-m", "gateway.streams.pulse")
            self.process = await asyncio.create_subprocess_exec(*command, stdin=theirs, env=environment)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._pipe = ours
        return ours

    async def _end(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# ── the child ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Loop:
    """The gateway's loop as seen by the child. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._turned_at, self._needed = now, False

    def turned(self, said: bytes, now: float) -> None:
        """The gateway wrote `said` into the pipe."""
        self._turned_at, self._needed = now, said.endswith(NEEDED)

    def lacks_voice(self, now: float) -> bool:
        """Whether the child is to speak: streams are open, and the loop is late, but not for too long."""
        return self._needed and LATE_S < now - self._turned_at < LOOP_S_MOST


def stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal, or has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("T", "t", "Z", "X")


async def stand_in(
    url: str, gateway: str, credentials: Path | None, parent: int, authority: Path | None = None
) -> None:
    """Speak for the gateway while the gateway's loop is late, until the pipe is closed. Raises BusError."""
    loop = Loop(time.monotonic())
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def listen() -> None:
        while said := await reader.read(4096):
            loop.turned(said, time.monotonic())

    user = dataclasses.replace(grants.GATEWAY, reads=(), meters=False)  # uses no bucket and no stream
    alive = wire.encode(wire.GatewayAlive(gateway=gateway))
    listening = asyncio.create_task(listen())
    async with Bus.connect(url, f"{gateway}-pulse", user, credentials, authority) as bus:
        while not listening.done():
            await asyncio.wait([listening], timeout=PERIOD_S)
            if loop.lacks_voice(time.monotonic()) and not stopped(parent):
                with contextlib.suppress(BusError):  # the bus is away: runtimes wait for as long
                    await bus.publish(wire.GATEWAY_ALIVE, alive)


def main() -> int:
    observe.configure_logs("pulse")
    for number in (signal.SIGINT, signal.SIGTERM):  # the gateway's end is the child's
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(os.read(0, 1 << 16).partition(b"\n")[0])
    credentials = Path(told["credentials"]) if told["credentials"] else None
    try:
        authority = Path(told["authority"]) if told["authority"] else None
        asyncio.run(stand_in(told["url"], told["gateway"], credentials, told["parent"], authority))
    except BusError as error:
        log.warning("pulse.no_bus", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
