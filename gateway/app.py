"""The gateway process: control plane, tenants' endpoints and health, assembled here and served by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog
import uuid_utils
import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from gateway import dashboard
from gateway.billing import organization
from gateway.config import Settings, admin_key, load, metrics_key, pepper
from gateway.control.routes import ControlPlane, Engines
from gateway.http.auth import Auth
from gateway.http.limits import ConnectionLimits, protocol, raise_open_files
from gateway.http.reserve import Reserve
from gateway.imports.sources import Sources
from gateway.inference.admission import Quotas
from gateway.inference.asking import Asking, Bounds
from gateway.inference.endpoint import Inference
from gateway.inference.meter import Meter
from gateway.inference.metrics import Metrics
from gateway.inference.recent import Recent
from gateway.inference.serving import RequestServing
from gateway.ops import listening
from gateway.ops.health import Health
from gateway.ops.neighbours import GatewayNeighbours
from gateway.streams.pulse import Pulse
from gateway.streams.relay import Relay
from gateway.streams.resuming import RequestFinder
from gateway.streams.runtimes import RuntimesView
from gateway.vllm.bus_core import Deps
from gateway.vllm.front import Fronts, known, reasoning_parsers, tool_parsers
from store.bus import Bus, BusError
from store.contract import grants
from store.db.database import Database, DatabaseError
from store.files.records import recorder
from store.garbage import rarely_collected
from store.settings import SettingsError
from store.tasks import ended
from store.telemetry import observe, signs
from store.telemetry.tracing import Traces, TracesError, configured

log = structlog.get_logger()

DRAIN_S = 30.0  # longest wait for open streams after SIGTERM


@dataclass
class Gateway:
    """The ASGI app. Tenants' endpoints are the hot path and come first; Starlette serves all further requests."""

    inference: Inference
    rest: Starlette
    end_streams: Callable[[], None]  # ends the streams without an end of their own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith(("/v1/", "/t/")) and scope["type"] == "http" and not path.endswith(organization.PATH):
            await self.inference(scope, receive, send)
        else:
            await self.rest(scope, receive, send)


@contextlib.asynccontextmanager
async def assembled(settings: Settings, traces: Traces | None = None) -> AsyncIterator[Gateway]:
    """Yield the gateway with every part connected and running. Raises BusError, DatabaseError."""
    gateway_id = f"g-{uuid_utils.uuid7().hex}"
    url = settings.nats_url or "nats://127.0.0.1:4222"
    identity = (grants.GATEWAY, settings.nats_credentials, settings.nats_ca, settings.nats_replicas)
    connecting = Bus.connect(url, gateway_id, *identity)
    async with Database.open(settings.database_url) as database, connecting as bus:
        await database.check()
        secret = pepper(settings)
        kept_s = settings.database_away_s
        auth = Auth(database, secret, admin_key(settings), metrics_key=metrics_key(settings), kept_s=kept_s)
        pulse = Pulse(url, gateway_id, settings.nats_credentials, settings.nats_ca)
        fleet, relay, meter = (
            RuntimesView(bus, _record_of(settings, gateway_id)),
            Relay(bus, gateway_id, pulse),
            Meter(bus, settings.usage_journal(settings.gateway_number), settings.left_journals),
        )
        engines = Engines(known(), tool_parsers(), reasoning_parsers())
        metrics, recent = Metrics(fleet, meter, lambda: relay.false_losses), Recent()
        metrics.neighbours = neighbours = GatewayNeighbours(settings)
        control = ControlPlane(database, auth, fleet, engines, Sources.of(settings), metrics, recent)
        quotas = Quotas(bus, database, gateway_id, kept_s=kept_s)
        bounds = Bounds(
            settings.body_limit_bytes,
            settings.body_deadline_s,
            settings.hold_deadline_s,
            settings.extent(),
            settings.fast_way,
            settings.resumable_s,
        )
        fronts = Fronts(Deps(relay, fleet, gateway_id, settings.resume_deadline_s))
        reserve = Reserve(settings.kept_in, settings.disk_reserve)
        serving = RequestServing(
            fleet,
            fronts,
            meter,
            quotas,
            metrics,
            secret,
            recent,
            traces,
            reserve,
            settings.runtimes > 0,
            RequestFinder(bus, fleet, gateway_id),
        )
        inference = Inference(auth, Asking(auth, fleet, metrics, bounds), serving, metrics, traces)
        await fleet.start()
        await relay.start()
        await meter.start()
        await quotas.start()
        try:
            async with control.running(), pulse.running(), neighbours.telling(metrics.registry):
                health = Health(database, bus, fleet, settings.runtimes, auth, reserve, settings.data)
                rest = Starlette(routes=[*control.routes(), *health.routes(), *dashboard.routes()])
                yield Gateway(inference, rest, control.feed.end)
        finally:
            relay.stop()
            await quotas.stop()
            await meter.stop()


def _record_of(settings: Settings, gateway_id: str) -> Callable[[bytes], None] | None:
    """Return a function that records the gateway's decisions; None where no journal is wanted. Raises SettingsError."""
    try:
        return recorder(settings.journal, gateway_id)
    except OSError as error:
        raise SettingsError(f"STACCATO_JOURNAL={settings.journal} is no folder to write into ({error})") from error


async def serve(settings: Settings, traces: Traces | None) -> None:
    async with assembled(settings, traces) as app, rarely_collected():
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=protocol(
                    ConnectionLimits(
                        settings.header_deadline_s, settings.read_deadline_s, settings.connections_per_address
                    )
                ),
                ws="none",
                loop="uvloop",
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=int(DRAIN_S),
            )
        )
        loop = asyncio.get_running_loop()
        sockets = listening.inherited(settings.listen_fds, os.environ)
        serving = asyncio.create_task(server.serve(sockets or None))

        def end() -> None:
            server.should_exit = True
            app.end_streams()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        giving = asyncio.create_task(signs.give(lambda: server.started))
        await serving
        await ended(giving)


def main() -> int:
    observe.configure_logs("gateway")
    try:
        settings = load()
        raise_open_files()
        runs = asyncio.Runner(loop_factory=uvicorn.Config("", loop="uvloop").get_loop_factory())
        with configured("gateway") as traces, runs as runner:
            runner.run(serve(settings, traces))
    except (SettingsError, TracesError, BusError, DatabaseError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    except SystemExit as error:  # uvicorn exits if it can't bind
        print(f"gateway: cannot listen on {settings.host} port {settings.port}", file=sys.stderr)
        return int(error.code or 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
