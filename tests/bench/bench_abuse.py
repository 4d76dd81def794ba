"""Does a client who behaves badly a thousand times harm another tenant?

`staccato up` with two tenants. One streams tokens all the time; the other misbehaves from another address, in windows
that alternate with quiet ones. For each kind of abuse: how many connections the gateway answered with which status, how
many it cut, how long the longest lived, what the gateway grew by; and the other tenant's p95 between two tokens, in the
window over the quiet one before it. Abuser, other tenant and platform share the machine's cores.

`python tests/bench/bench_abuse.py [--connections 1000] [--pairs 3] [KIND ...]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import select
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from deploy.demo.random_weights import write_random  # noqa: E402
from gateway.limits import raise_open_files  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import Platform  # noqa: E402

ABUSER = "127.0.0.2"  # its address: limits are of addresses too
WINDOW_S, PATIENCE_S = 12.0, 30.0
MIB = 1 << 20


@dataclass
class Gaps:
    """Between two tokens of the tenant who does nothing wrong; ends when it is told to."""

    platform: Platform
    times: list[float] = field(default_factory=list)

    async def run(self) -> None:
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        headers = {"authorization": f"Bearer {self.platform.keys['globex']}"}
        async with httpx.AsyncClient(timeout=120) as client:
            while True:
                post = client.stream("POST", f"{self.platform.url}/v1/completions", json=body, headers=headers)
                async with post as response:
                    assert response.status_code == 200, await response.aread()
                    last = None
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            if last is not None:
                                self.times.append(now - last)
                            last = now

    async def p95_ms(self, window: Awaitable[object]) -> float:
        self.times.clear()
        await window
        return statistics.quantiles(self.times, n=20)[-1] * 1e3


# ── kinds: what one connection says, piece by piece ───────────────────────────────────────────────────────────────────

Says = Callable[[str], AsyncIterator[bytes]]


def head(key: str, *fields: str, path: str = "/v1/completions") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: gateway", f"authorization: Bearer {key}", *fields)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def silence(key: str) -> AsyncIterator[bytes]:
    return
    yield b""


async def slow_headers(key: str) -> AsyncIterator[bytes]:
    yield b"POST /v1/completions HTTP/1.1\r\n"
    while True:
        await asyncio.sleep(1)
        yield b"x-a: 1\r\n"


async def slow_body(key: str) -> AsyncIterator[bytes]:
    yield head(key, "content-length: 100000")
    while True:
        await asyncio.sleep(1)
        yield b" "


async def unread(key: str) -> AsyncIterator[bytes]:
    yield b"GET /openapi.json HTTP/1.1\r\nhost: gateway\r\n\r\n"


async def unread_stream(key: str) -> AsyncIterator[bytes]:
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 5}
    text = json.dumps(body).encode()
    yield head(key, f"content-length: {len(text)}") + text


async def gigabyte(key: str) -> AsyncIterator[bytes]:
    yield head(key, "content-length: 1000000000")
    for _ in range(16_000):
        yield b" " * 65_536


async def gigabyte_chunked(key: str) -> AsyncIterator[bytes]:
    yield head(key, "transfer-encoding: chunked")
    for _ in range(16_000):
        yield b"10000\r\n" + b" " * 65_536 + b"\r\n"


async def deep_json(key: str) -> AsyncIterator[bytes]:
    text = b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield head(key, f"content-length: {len(text)}", "connection: close") + text


async def huge_header(key: str) -> AsyncIterator[bytes]:
    yield b"GET / HTTP/1.1\r\nx-a: "
    for _ in range(1000):
        yield b"a" * 65_536


async def pipelining(key: str) -> AsyncIterator[bytes]:
    while True:
        yield b"GET /healthz HTTP/1.1\r\n\r\n" * 2000


KINDS: dict[str, Says] = {
    kind.__name__: kind
    for kind in (
        silence,
        slow_headers,
        slow_body,
        unread,
        unread_stream,
        gigabyte,
        gigabyte_chunked,
        deep_json,
        huge_header,
        pipelining,
    )
}


# ── one window ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Seen:
    """What became of the abuser's connections."""

    ends: Counter[str] = field(default_factory=Counter)  # the first status, or cut
    lived_s: list[float] = field(default_factory=list)


async def abuse(platform: Platform, says: Says, connections: int) -> Seen:
    seen, key = Seen(), platform.keys["acme"]
    reads = not says.__name__.startswith("unread")
    began = time.monotonic()
    await asyncio.gather(*(one(platform.port, says(key), reads, seen) for _ in range(connections)))
    await asyncio.sleep(max(0.0, WINDOW_S - (time.monotonic() - began)))
    return seen


async def one(port: int, says: AsyncIterator[bytes], reads: bool, seen: Seen) -> None:
    began = time.monotonic()
    said = bytearray()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ABUSER, 0), limit=4096)
    except OSError:
        seen.ends["not accepted"] += 1
        return
    if not reads:
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def speak() -> None:
        with contextlib.suppress(OSError):
            async for piece in says:
                writer.write(piece)
                await writer.drain()

    async def until_cut() -> None:
        """Who does not read is not told: the system is asked."""
        hung_up = select.poll()
        hung_up.register(writer.get_extra_info("socket").fileno(), 0)
        while not hung_up.poll(0):
            await asyncio.sleep(0.1)

    async def listen() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                del said[64:]
                said.extend(data[:64])

    speaking, listening = asyncio.create_task(speak()), asyncio.create_task(listen() if reads else until_cut())
    done, _ = await asyncio.wait([listening], timeout=PATIENCE_S)
    seen.lived_s.append(time.monotonic() - began)
    seen.ends[(said.split(b" ")[1].decode() if said else "cut") if done else "still there"] += 1
    for task in (speaking, listening):
        task.cancel()
    writer.transport.abort()


async def measure(platform: Platform, name: str, connections: int, pairs: int) -> dict[str, object]:
    gateway = platform.child("gateway.app")
    gaps = Gaps(platform)
    streaming = asyncio.create_task(gaps.run())
    await asyncio.sleep(2)
    grown, quiet, loud = 0, [], []
    ends: Counter[str] = Counter()
    lived: list[float] = []
    for _ in range(pairs):
        quiet.append(await gaps.p95_ms(asyncio.sleep(WINDOW_S)))
        before = gateway.memory_info().rss
        window = asyncio.create_task(abuse(platform, KINDS[name], connections))
        watching = asyncio.create_task(most_rss(gateway, window))
        loud.append(await gaps.p95_ms(window))
        grown = max(grown, await watching - before)
        seen = window.result()
        ends += seen.ends
        lived += seen.lived_s
    assert not streaming.done(), "the other tenant's stream ended"
    streaming.cancel()
    ratio = spread((a / b for a, b in zip(loud, quiet, strict=True)), 2)
    said = {"ends": dict(ends), "lived_s_most": round(max(lived, default=0), 1), "grown_mib": round(grown / MIB)}
    p95 = {"p95_ms": spread(loud, 1), "quiet_ms": spread(quiet, 1), "ratio": ratio}
    return {"kind": name, "connections": connections, **said, **p95, "load": load()}


async def most_rss(process: psutil.Process, window: asyncio.Task[Seen]) -> int:
    most = 0
    while not window.done():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.2)
    return most


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    chosen = parser.parse_args()
    raise_open_files()
    with tempfile.TemporaryDirectory() as name:
        platform = Platform(Path(name) / "data", free_port())
        try:
            platform.start("--device-memory", "512MiB")
            platform.model("m", write_random(Path(name) / "m", "llama", hidden=128, layers=2))
            for tenant in ("acme", "globex"):
                platform.tenant(tenant)
                platform.deploy(tenant, "m")
            for kind in chosen.kinds or KINDS:
                print(json.dumps(await measure(platform, kind, chosen.connections, chosen.pairs)), flush=True)
        finally:
            platform.stop()


if __name__ == "__main__":
    asyncio.run(main())
