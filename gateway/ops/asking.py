"""Requests of the supervisor to its gateway. An HTTP client library would be the largest module of the supervisor."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.config import Settings

ANSWER_S = 5.0
ANSWER_BYTES_MOST = 1 << 20


async def get(settings: Settings, path: str, key: str | None = None) -> tuple[int, bytes]:
    """Return status and body of the gateway's answer. Raises OSError, also for an answer that is no HTTP or too long.

    `key`: sent as bearer token."""
    host = settings.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    async with asyncio.timeout(ANSWER_S):  # TimeoutError is an OSError
        reader, writer = await asyncio.open_connection(host, settings.port)
        with contextlib.closing(writer):
            writer.write("\r\n".join([*lines, "", ""]).encode())
            answer = b""
            while chunk := await reader.read(1 << 16):
                answer += chunk
                if len(answer) > ANSWER_BYTES_MOST:
                    raise OSError(f"the answer to GET {path} is longer than {ANSWER_BYTES_MOST} bytes")
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ")[1:2]
    if not head.startswith(b"HTTP/1.") or not status or not status[0].isdigit():
        raise OSError(f"the answer to GET {path} is no HTTP: is port {settings.port} the gateway's?")
    return int(status[0]), body
