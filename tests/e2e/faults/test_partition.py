"""A runtime on a separate host (here a network namespace) whose network is cut. The runtime's streams go on at another
runtime, later frames of the cut runtime are dropped, and after the repair the runtime serves as before."""

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
import pytest

from gateway.ops import bus_users
from gateway.ops.bus_servers import BusServer, config
from store.contract import grants
from tests.conftest import ROOT
from tests.e2e.fleet import EACH, TOKENS, Fleet

HERE, THERE = "10.213.97.1", "10.213.97.2"
CUT_S = 6.0  # longer than the time after which a runtime is given up
BACK_S = 90.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Host:
    """A second host, and the cable to the host."""

    cable: str
    pid: int  # a process on the host

    @classmethod
    @contextlib.contextmanager
    def plugged_in(cls) -> Iterator[Host]:
        cable = f"st{os.getpid() % 10**6}"
        with subprocess.Popen(["unshare", "--net", "sleep", "3600"]) as there:
            try:
                while Path(f"/proc/{there.pid}/comm").read_text() != "sleep\n":
                    assert there.poll() is None
                ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", f"{there.pid}")
                ip("address", "add", f"{HERE}/30", "dev", cable)
                ip("link", "set", cable, "up")
                host = cls(cable, there.pid)
                for words in ("address add", f"{THERE}/30 dev eth0"), ("link set", "eth0 up"), ("link set", "lo up"):
                    host.run("ip", *" ".join(words).split()).check_returncode()
                yield host
            finally:
                subprocess.run(["ip", "link", "delete", cable], capture_output=True)  # if the cable was made
                there.kill()

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(self.command(*words), capture_output=True)

    def cut(self) -> None:
        """Cut the cable: nothing comes through, and neither side is told."""
        ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        ip("link", "set", self.cable, "up")


def namespaces() -> str:
    """Why network namespaces can't be made, or ""."""
    try:
        with Host.plugged_in():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces need root and iproute2: {error}"


@contextlib.asynccontextmanager
async def passed_on(port: int) -> AsyncIterator[None]:
    """Pass connections from the second host to the bus at `port`, as the bus listens on loopback alone."""

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
    server = await asyncio.start_server(connected, HERE, port)
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


async def begun_without(fleet: Fleet, other: str) -> asyncio.Task[dict[tuple[str, int], list[int]]]:
    """Begin streams while the runtime `other` is drained, then let the runtime take streams again."""
    await fleet.drain(other, True)
    before = fleet.tokens
    streams = asyncio.create_task(fleet.streams(EACH))
    assert await fleet.past(before + TOKENS // 2, streams)
    await fleet.drain(other, False)
    assert not streams.done()
    return streams


async def test_a_runtime_that_is_cut_off_costs_no_stream_and_comes_back(tmp_path: Path) -> None:
    if reason := namespaces():
        pytest.skip(reason)
    with Fleet.running(tmp_path, 2, runtimes=1) as fleet, Host.plugged_in() as host:
        port = int((fleet.platform.data / "nats.port").read_text())
        async with passed_on(port):
            with runtime_on(host, fleet, port, tmp_path / "r2.log") as runtime:
                await seen(fleet, "r1", "r2")
                await fleet.ready(2)
                undisturbed = await fleet.streams(EACH)

                streams = await begun_without(fleet, "r1")
                host.cut()
                await seen(fleet, "r1")
                await asyncio.sleep(CUT_S)
                assert runtime.is_running(), "it lives, and does not know that nobody hears it"
                host.mend()
                assert await streams == undisturbed

                await seen(fleet, "r1", "r2")
                await fleet.ready(2)
                streams = await begun_without(fleet, "r1")
                host.cut()
                await asyncio.sleep(0.5)  # too short for a loss: frames of the meantime still arrive
                host.mend()
                assert await streams == undisturbed
            await fleet.booked(fleet.tokens)
