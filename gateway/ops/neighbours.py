"""Metrics of all gateways of a host, at whichever of the gateways a scrape arrives.

The gateways share a port, so Prometheus can't choose a gateway. Each gateway tells its own series to the others through
a socket in the data folder, which only the platform's user can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import structlog

from gateway.config import Settings

log = structlog.get_logger()

TOLD_S_MOST = 1.0  # a neighbour that takes longer is left out of a scrape
TOLD_BYTES_MOST = 64 << 20
SUFFIX = ".metrics"


class GatewayNeighbours:
    """The other gateways of this host."""

    def __init__(self, settings: Settings) -> None:
        self._folder, self.number = settings.data, settings.gateway_number

    def known(self) -> list[int]:
        """Return the numbers of the other gateways, also of gateways that were killed."""
        names = [path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"gateway-*{SUFFIX}")]
        return sorted(int(name[len("gateway-") :]) for name in names if name != f"gateway-{self.number}")

    async def told(self) -> dict[int, bytes]:
        """Return the series of each other gateway that answers, as text, by the gateway's number."""
        numbers = self.known()
        texts = await asyncio.gather(*map(self._ask, numbers))
        return {number: text for number, text in zip(numbers, texts, strict=True) if text is not None}

    async def _ask(self, number: int) -> bytes | None:
        try:
            async with asyncio.timeout(TOLD_S_MOST):
                with _short(self._path(number)) as path:
                    reader, writer = await asyncio.open_unix_connection(path)
                with contextlib.closing(writer):
                    return await _read(reader)
        except (OSError, TimeoutError, ValueError) as error:  # the neighbour is dead, or busy
            log.warning("neighbours.silent", gateway=number, error=type(error).__name__)
            return None

    @contextlib.asynccontextmanager
    async def telling(self, own: Callable[[], bytes]) -> AsyncIterator[None]:
        """Tell the other gateways the text of `own` when a gateway asks. Raises OSError."""

        async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(OSError):
                writer.write(own())
                await writer.drain()

        path = self._path(self.number)
        path.unlink(missing_ok=True)  # of a gateway that was killed
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(path) as short:
            listening.bind(short)
        path.chmod(0o600)
        server = await asyncio.start_unix_server(tell, sock=listening)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"gateway-{number}{SUFFIX}"


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return the text up to the end. Raises ValueError if the text is longer than TOLD_BYTES_MOST."""
    text = bytearray()
    while chunk := await reader.read(1 << 20):
        text += chunk
        if len(text) > TOLD_BYTES_MOST:
            raise ValueError("too long")
    return bytes(text)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short path of the same file: the address of a socket has at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
