"""Metrics of all gateways of a host, for a scrape that arrives at any gateway.

The gateways share a port, so Prometheus can't choose a gateway. A gateway tells the series of its own work to the
gateway that is scraped, through a socket in the data folder. Only the platform's user can open the socket. The series
of a gateway's own work get the label `gateway`: a sum over the gateways would fall when a gateway restarts, and
Prometheus would take the fall for a restart of all gateways. Series that all gateways show alike come once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gateway.config import Settings
from store.contract.series import OF_GATEWAY

log = structlog.get_logger()

TOLD_S_MOST = 1.0  # a neighbour that takes longer is left out of a scrape
TOLD_BYTES_MOST = 64 << 20
SUFFIX = ".metrics"
GATEWAY = "gateway"  # the label


class GatewayNeighbours:
    """The neighbours of a gateway: the rest of the gateways on the host."""

    def __init__(self, settings: Settings) -> None:
        self._folder, self.number = settings.data, settings.gateway_number

    def known(self) -> list[int]:
        """Return the numbers of the neighbours, also of gateways that were killed."""
        names = [path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"gateway-*{SUFFIX}")]
        return sorted(int(name[len("gateway-") :]) for name in names if name != f"gateway-{self.number}")

    async def shown(self, registry: CollectorRegistry) -> bytes:
        """Return the metrics of this gateway, which has `registry`, and of its neighbours."""
        told = await self.told()
        return await asyncio.to_thread(gathered, registry, self.number, told)

    async def told(self) -> dict[int, bytes]:
        """Return the series of the neighbours that answer, as text, by the number of the gateway."""
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
    async def telling(self, registry: CollectorRegistry) -> AsyncIterator[None]:
        """Tell the series of this gateway's work to neighbours that ask. Raises OSError."""

        async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(OSError):
                writer.write(own_series(registry))
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


# ── the text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def own_series(registry: CollectorRegistry) -> bytes:
    """Return the series of the gateway of `registry`, without the series that every gateway shows alike."""
    return generate_latest(_Shown([metric for metric in registry.collect() if metric.name in OF_GATEWAY]))


def gathered(registry: CollectorRegistry, number: int, told: Mapping[int, bytes]) -> bytes:
    """Return the metrics of gateway `number` and of its neighbours.

    `told`: text of `own_series` by the number of a neighbour."""
    shown = {metric.name: metric for metric in registry.collect()}
    for metric in shown.values():
        if metric.name in OF_GATEWAY:
            metric.samples = list(_named(metric, number))
    for neighbour, text in told.items():
        for metric in text_string_to_metric_families(text.decode()):
            samples = _named(metric, neighbour)
            if metric.name in shown:
                shown[metric.name].samples.extend(samples)
            elif metric.name in OF_GATEWAY:  # a series that a gateway makes with its first request
                metric.samples = list(samples)
                shown[metric.name] = metric
    return generate_latest(_Shown(list(shown.values())))


def _named(metric: Metric, number: int) -> Iterator[Sample]:
    for sample in metric.samples:
        yield sample._replace(labels={**sample.labels, GATEWAY: str(number)})


class _Shown(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
