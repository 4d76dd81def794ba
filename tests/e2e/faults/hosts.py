"""A second host for runtimes, here a network namespace, with a cable that may be slow, lossy or cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from gateway.ops import bus_users
from gateway.ops.bus_servers import BusServer, config
from store.contract import grants
from tests.conftest import ROOT
from tests.e2e.faults import lossy
from tests.e2e.fleet import EACH, TOKENS, Fleet

# Both ends of the cable: addresses for this process alone, as several processes run tests at once.
HERE, THERE = (f"10.213.{os.getpid() >> 6 & 255}.{(os.getpid() & 63) * 4 + end}" for end in (1, 2))
BACK_S = 300.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Host:
    """A second host, and the cable to the host."""

    cable: str
    pid: int  # a process on the host
    carrier: subprocess.Popen[str] | None = None  # carries the packets of a slow cable

    @classmethod
    @contextlib.contextmanager
    def plugged_in(cls, delay_s: float = 0.0, loss: float = 0.0) -> Iterator[Host]:
        """Yield a host. Packets come `delay_s` later, and the share `loss` of packets is lost."""
        cable = f"st{os.getpid() % 10**6}"
        with contextlib.ExitStack() as stack:
            there = stack.enter_context(subprocess.Popen(["unshare", "--net", "sleep", "3600"]))
            stack.callback(there.kill)
            while Path(f"/proc/{there.pid}/comm").read_text() != "sleep\n":
                assert there.poll() is None
            carrier = None
            if delay_s or loss:
                ends = [lossy.tun(cable), lossy.tun(f"{cable}b")]
                for end in ends:
                    stack.callback(os.close, end)
                carrier = stack.enter_context(cls._carrier(ends, delay_s, loss))
                stack.callback(carrier.kill)
                ip("link", "set", f"{cable}b", "netns", f"{there.pid}", "name", "eth0")
            else:
                ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", f"{there.pid}")
                stack.callback(subprocess.run, ["ip", "link", "delete", cable], capture_output=True)
            ip("address", "add", f"{HERE}/30", "dev", cable)
            ip("link", "set", cable, "up")
            host = cls(cable, there.pid, carrier)
            for words in ("address add", f"{THERE}/30 dev eth0"), ("link set", "eth0 up"), ("link set", "lo up"):
                host.run("ip", *" ".join(words).split()).check_returncode()
            yield host

    @staticmethod
    def _carrier(ends: list[int], delay_s: float, loss: float) -> subprocess.Popen[str]:
        words = [*map(str, ends), f"{delay_s}", f"{loss}", "1"]
        command = [sys.executable, "-m", "tests.e2e.faults.lossy", *words]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True, pass_fds=ends)

    def cut_port(self, port: int) -> None:
        """Lose the packets of TCP connections to the port; 0: lose no more."""
        assert self.carrier is not None and self.carrier.stdin is not None
        self.carrier.stdin.write(f"{port or ''}\n")
        self.carrier.stdin.flush()

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(self.command(*words), capture_output=True)

    def cut(self) -> None:
        """Cut the cable: nothing comes through, and neither side is told."""
        ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        ip("link", "set", self.cable, "up")


def namespaces(delay_s: float = 0.0) -> str:
    """Why network namespaces with a cable of this delay can't be made, or ""."""
    try:
        with Host.plugged_in(delay_s):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces need root and iproute2, and a slow cable /dev/net/tun: {error}"


@contextlib.asynccontextmanager
async def passed_on(port: int, there: int | None = None) -> AsyncIterator[None]:
    """Pass connections from the second host to the bus at `port`, as the bus listens on loopback alone.

    The second host finds the bus at the port `there`; None: at the same port."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bus_reader, bus_writer = await asyncio.open_connection("127.0.0.1", port)
        for end, other in ((reader, bus_writer), (bus_reader, writer)):
            tasks.add(asyncio.create_task(copy(end, other)))

    tasks: set[asyncio.Task[None]] = set()
    server = await asyncio.start_server(connected, HERE, there or port)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def known_to_the_bus(fleet: Fleet, runtime: str) -> Path:
    """Make the runtime a user of the running NATS server. Returns the path of the user's seed."""
    data, folder = fleet.platform.data, fleet.platform.data / "nats-users"
    users = [grants.GATEWAY, grants.SCHEDULER, grants.LEDGER, *map(grants.runtime, ("r1", runtime))]
    server = BusServer("nats", int((data / "nats.port").read_text()), 0)
    (data / "nats.conf").write_text(config(data, server, [server], "") + bus_users.make(folder, users))
    fleet.platform.child("nats-server").send_signal(signal.SIGHUP)
    return bus_users.seed_file(folder, grants.runtime(runtime))


@contextlib.contextmanager
def runtime_on(host: Host, fleet: Fleet, port: int, log: Path) -> Iterator[psutil.Process]:
    """Run r2 on the host, with the settings that the supervisor gave r1."""
    first = fleet.platform.runtime("r1")
    assert first is not None
    told = {name: value for name, value in first.environ().items() if not name.endswith("_FD")}
    told |= {"STACCATO_RUNTIME_ID": "r2", "STACCATO_TRANSPORT_BIND": THERE, "STACCATO_TRANSPORT_PLAINTEXT": "true"}
    told["STACCATO_NATS_CREDENTIALS"] = str(known_to_the_bus(fleet, "r2"))
    told["STACCATO_NATS_URL"] = re.sub(r"127\.0\.0\.1:\d+", f"{HERE}:{port}", told["STACCATO_NATS_URL"])
    command = host.command(sys.executable, "-m", "runtime.node")
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=told, cwd=ROOT) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


async def seen(fleet: Fleet, *runtimes: str) -> None:
    async with asyncio.timeout(BACK_S):
        while {gpu["id"] for gpu in await fleet.gpus()} != set(runtimes):
            await asyncio.sleep(0.2)


async def begun_without(
    fleet: Fleet, other: str, tokens: int = TOKENS
) -> asyncio.Task[dict[tuple[str, int], list[int]]]:
    """Begin streams while the runtime `other` is drained, then let the runtime take streams again."""
    await fleet.drain(other, True)
    before = fleet.tokens
    streams = asyncio.create_task(fleet.streams(EACH, tokens=tokens))
    assert await fleet.past(before + TOKENS // 2, streams)
    await fleet.drain(other, False)
    assert not streams.done()
    return streams
