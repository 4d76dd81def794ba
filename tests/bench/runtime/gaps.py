"""Reads streams of completions over raw sockets, in a process of its own, and prints the gaps between tokens.

`python tests/bench/runtime/gaps.py PORT KEY MODEL STREAMS` runs until the process is ended. A line is the time at which
a gap ended, in seconds of the monotonic clock shared by processes, and the gap in seconds. The process imports no large
library: a collection of such a heap would stop every stream, and be measured as a gap of the platform.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

EVENT, LAST = b"data: {", b"0\r\n\r\n"
MOST = 1000  # tokens of a request


async def read(port: int, key: str, model: str, number: int) -> None:
    """Read one stream after another on one connection. Raises RuntimeError if a request is refused."""
    prompt = {"model": model, "prompt": [5, 6, 7 + number], "max_tokens": MOST, "ignore_eos": True, "stream": True}
    body = json.dumps(prompt).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        writer.write(head.encode() + body)
        last, data = 0.0, b""
        while not data.endswith(LAST):
            data = await reader.read(1 << 16)
            if not data or (not last and not data.startswith(b"HTTP/1.1 200")):
                raise RuntimeError(f"stream {number} was not served: {data[:500]!r}")
            now = time.monotonic()
            if last and EVENT in data:
                print(now, now - last, flush=True)
            if EVENT in data or not last:
                last = now


async def main(port: str, key: str, model: str, streams: str) -> None:
    await asyncio.gather(*(read(int(port), key, model, number) for number in range(int(streams))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
