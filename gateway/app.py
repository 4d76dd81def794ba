"""The gateway process: control plane, tenants' endpoints, health. Put together here, served by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog
import uuid_utils
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import dashboard, organization
from gateway.auth import Auth
from gateway.config import Settings, admin_key, load, pepper
from gateway.control import Control, Engines
from gateway.fleet import Fleet
from gateway.front import Deps, Fronts, reasoning_parsers, supported_architectures, tool_parsers
from gateway.inference import Bounds, Inference
from gateway.limits import Limits, protocol, raise_open_files
from gateway.meter import Meter
from gateway.metrics import Metrics
from gateway.quotas import Quotas
from gateway.recent import Recent
from gateway.relay import Relay
from gateway.sources import Sources
from store import grants, observe, signs
from store.bus import Bus, BusError, ended
from store.db import Database, DatabaseError
from store.settings import SettingsError
from store.tracing import Traces, TracesError, configured

log = structlog.get_logger()

DRAIN_S = 30.0  # longest wait for open streams after SIGTERM


@dataclass
class Gateway:
    """The ASGI app: tenants' endpoints first, they are the hot path; everything else is Starlette's."""

    inference: Inference
    rest: Starlette
    end_streams: Callable[[], None]  # those that have no end of their own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith(("/v1/", "/t/")) and scope["type"] == "http" and not path.endswith(organization.PATH):
            await self.inference(scope, receive, send)
        else:
            await self.rest(scope, receive, send)


@contextlib.asynccontextmanager
async def assembled(settings: Settings, traces: Traces | None = None) -> AsyncIterator[Gateway]:
    """Everything connected and running. Raises BusError, DatabaseError."""
    gateway_id = f"g-{uuid_utils.uuid7().hex}"
    url = settings.nats_url or "nats://127.0.0.1:4222"
    connecting = Bus.connect(url, gateway_id, grants.GATEWAY, settings.nats_credentials)
    async with Database.open(settings.database_url) as database, connecting as bus:
        await database.check()
        secret = pepper(settings)
        auth = Auth(database, secret, admin_key(settings))
        fleet, relay, meter = Fleet(bus), Relay(bus, gateway_id), Meter(bus, settings.data / "gateway.journal")
        engines = Engines(supported_architectures(), tool_parsers(), reasoning_parsers())
        metrics, recent = Metrics(fleet, meter), Recent()
        control = Control(database, auth, fleet, engines, Sources.of(settings), metrics, recent)
        quotas = Quotas(bus, database, gateway_id)
        bounds = Bounds(
            settings.body_limit_bytes, settings.body_deadline_s, settings.hold_deadline_s, settings.extent()
        )
        fronts = Fronts(Deps(relay, fleet, gateway_id, settings.resume_deadline_s))
        inference = Inference(auth, fleet, fronts, meter, quotas, bounds, metrics, secret, recent, traces)
        await fleet.start()
        await relay.start()
        await meter.start()
        await quotas.start()
        try:
            async with control.running():
                health = Health(database, bus, fleet, settings.runtimes)
                rest = Starlette(routes=[*control.routes(), *health.routes(), *dashboard.routes()])
                yield Gateway(inference, rest, control.feed.end)
        finally:
            relay.stop()
            await quotas.stop()
            await meter.stop()


@dataclass
class Health:
    """What probes and scrapers ask."""

    database: Database
    bus: Bus
    fleet: Fleet
    runtimes: int

    def routes(self) -> list[Route]:
        return [
            Route("/healthz", self.alive),
            Route("/readyz", self.ready),
            Route("/metrics", self.metrics),
        ]

    async def alive(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """200 when a request could be served: the database and the bus answer, and a runtime can take models."""
        missing = []
        if not self.bus.connected:
            missing.append("the bus is away")
        if self.runtimes and not any(lease.engine for lease in self.fleet.leases.values()):
            missing.append("no runtime is up")
        try:
            await self.database.revision()  # newer than ours in the middle of an upgrade: migrations only add
        except DatabaseError as error:
            log.warning("health.database", error=str(error))
            missing.append("the database does not answer")
        return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


async def serve(settings: Settings, traces: Traces | None) -> None:
    async with assembled(settings, traces) as app:
        gc.collect()
        gc.freeze()  # vLLM's modules are hundreds of thousands of objects: no later collection needs to walk them
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=protocol(
                    Limits(settings.header_deadline_s, settings.read_deadline_s, settings.connections_per_address)
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
        serving = asyncio.create_task(server.serve())

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
    except SystemExit as error:  # uvicorn's way to say that it could not bind
        print(f"gateway: cannot listen on {settings.host} port {settings.port}", file=sys.stderr)
        return int(error.code or 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
