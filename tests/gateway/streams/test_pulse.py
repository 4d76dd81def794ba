"""A computing gateway is not taken for dead, a dead or stopped gateway is: real processes, a real node."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import psutil
import pytest
from pydantic import ByteSize
from structlog.testing import capture_logs
from structlog.typing import EventDict

from gateway.streams.pulse import LATE_S, LOOP_S_MOST, Loop, stopped
from runtime.config import RuntimeSettings
from runtime.node.gateways import SILENCE_S
from runtime.node.runtime import Node
from store.bus import Bus
from store.contract import wire
from store.tasks import ended
from tests.conftest import ROOT, NatsServer, soon
from tests.gateway.talker import GATEWAY, RUNTIME

HELD_S = 5.0


@dataclass
class Talk:
    """A gateway's process with a stream at a node, and the log of the node."""

    node: Node
    process: asyncio.subprocess.Process
    pulse: psutil.Process
    logs: list[EventDict] = field(default_factory=list)

    @property
    def streams(self) -> int:
        return len(self.node._gateways[GATEWAY].streams)

    @property
    def events(self) -> list[str]:
        return [line["event"] for line in self.logs if line["event"].startswith("node.gateway")]

    async def said(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            return (await self.process.stdout.readline()).decode().strip()


@pytest.fixture
async def talk(nats_server: NatsServer) -> AsyncIterator[Talk]:
    async with Bus.connect(nats_server.url, RUNTIME) as bus:
        node = Node(bus, RuntimeSettings(runtime_id=RUNTIME, host_cache=ByteSize(1 << 20)))

        async def take(data: bytes) -> wire.Reply:
            return wire.Reply(epoch=node.epoch, seq=node.take_over(wire.decode(wire.Run, data), 0))

        await bus.respond(wire.run_subject(RUNTIME), take)
        await bus.subscribe(wire.GATEWAY_ALIVE, node._streams.gateway_alive)
        await bus.subscribe(wire.cancel_subject(RUNTIME), node._cancel)
        beating = asyncio.create_task(node._keep_heartbeat())
        command = (sys.executable, "-m", "tests.gateway.talker", nats_server.url)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            name, pid = (await process.stdout.readline()).split()
        assert name == b"pulse"
        with capture_logs() as logs:
            yield Talk(node, process, psutil.Process(int(pid)), logs)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
        await ended(beating)


def connections(nats_server: NatsServer) -> int:
    """Number of connections between clients and the server."""
    listed = psutil.net_connections("tcp")
    port = nats_server.port
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in listed)


async def test_a_gateway_that_holds_its_interpreter_for_five_seconds_loses_no_stream(
    talk: Talk, nats_server: NatsServer
) -> None:
    await soon(lambda: connections(nats_server) >= 3)  # node, gateway and pulse
    assert talk.process.stdin is not None
    await asyncio.sleep(1.0)  # the loop tells the pulse of the stream
    began = time.monotonic()
    talk.process.stdin.write(f"{HELD_S}\n".encode())
    assert await talk.said() == "free"
    assert time.monotonic() - began >= HELD_S
    assert (talk.streams, talk.events) == (1, [])


async def test_a_gateway_that_is_killed_is_noticed_and_its_pulse_ends_with_it(talk: Talk) -> None:
    talk.process.kill()
    began = time.monotonic()
    await soon(lambda: talk.streams == 0)
    assert time.monotonic() - began > SILENCE_S / 2
    assert talk.events == ["node.gateway_lost"]
    await soon(lambda: not talk.pulse.is_running() or talk.pulse.status() == psutil.STATUS_ZOMBIE)


async def test_a_gateway_that_is_stopped_is_noticed_and_when_it_goes_on_it_is_a_false_loss(talk: Talk) -> None:
    talk.process.send_signal(signal.SIGSTOP)
    await soon(lambda: talk.streams == 0)
    assert talk.events == ["node.gateway_lost"] and talk.node._lease.lease().false_losses == 0
    talk.process.send_signal(signal.SIGCONT)
    assert await talk.said() == "ended LOST"
    # A gateway without streams is silent: the next stream's sign of life is the proof.
    await talk.node._streams.gateway_alive(wire.encode(wire.GatewayAlive(gateway=GATEWAY)))
    assert talk.events == ["node.gateway_lost", "node.gateway_lives"] and talk.node._lease.lease().false_losses == 1
    assert talk.node._gateways[GATEWAY].silence.limit_s(time.monotonic()) == pytest.approx(2 * SILENCE_S, rel=0.1)


async def test_a_pulse_that_is_killed_is_started_anew(talk: Talk) -> None:
    talk.pulse.kill()
    gateway = psutil.Process(talk.process.pid)

    def another() -> bool:
        return any(child.pid != talk.pulse.pid for child in gateway.children())

    await soon(another)
    assert talk.streams == 1 and talk.events == []


def test_the_child_speaks_for_a_loop_that_is_late_with_streams_open_and_not_for_one_that_hangs() -> None:
    loop = Loop(0.0)
    assert not loop.lacks_voice(2.0), "no stream is known to be open"
    loop.turned(b"-+", 10.0)
    assert not loop.lacks_voice(10.0 + LATE_S / 2), "the loop speaks for itself"
    assert loop.lacks_voice(12.0) and loop.lacks_voice(10.0 + LOOP_S_MOST - 0.1)
    assert not loop.lacks_voice(10.1 + LOOP_S_MOST)
    loop.turned(b"+-", 50.0)
    assert not loop.lacks_voice(52.0)


async def test_a_stopped_process_and_one_that_is_gone_are_told_from_one_that_runs() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    assert not stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    await soon(lambda: stopped(process.pid))
    process.kill()
    await process.wait()
    assert stopped(process.pid)
