"""A gateway in a separate process with an open stream; on order the gateway holds the interpreter for some seconds."""

from __future__ import annotations

import asyncio
import sys
import time

from gateway.streams.pulse import Pulse
from gateway.streams.relay import Relay
from store.bus import Bus
from store.contract import wire
from store.contract.wire import Delta

GATEWAY, RUNTIME = "g1", "r1"
PROBE = 5_000_000


class Ignoring:
    def deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish is not None:
                print(f"ended {delta.finish.name}", flush=True)


def held(seconds: float) -> None:
    """Hold the interpreter for at least `seconds`: no second thread of the process has the interpreter for long.

    A sum over a range is a single call in C, so the interpreter does not switch threads."""
    began = time.monotonic()
    sum(range(PROBE))
    probe_s = time.monotonic() - began
    while (left_s := seconds - (time.monotonic() - began)) > 0:
        sum(range(int(PROBE * left_s / probe_s) + 1))


async def main(url: str) -> None:
    asked = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(asked), sys.stdin)
    pulse = Pulse(url, GATEWAY)
    async with Bus.connect(url, GATEWAY) as bus, pulse.running():
        relay = Relay(bus, GATEWAY, pulse)
        await relay.start()
        run = wire.Run(
            gateway=GATEWAY,
            stream=relay.number(),
            model="m",
            request="q",
            attempt=1,
            prompt_tokens=1,
            max_tokens=9,
            payload=b"",
            engine="e",
        )
        await relay.run(RUNTIME, run, Ignoring())
        while pulse.process is None:
            await asyncio.sleep(0.01)
        print(f"pulse {pulse.process.pid}", flush=True)
        while line := await asked.readline():
            held(float(line))
            print("free", flush=True)
        relay.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
