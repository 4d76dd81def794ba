"""Routes of the control plane for ended requests, read from this gateway's memory, else from the database."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from starlette.responses import Response

from gateway.http.api import OF_TENANT, PAGE_MOST, Call, Operation, Query, Shown, answered
from gateway.http.errors import invalid, not_found
from gateway.inference.recent import Recent, Seen
from gateway.inference.timing import Breakdown
from store.contract.elapsed import Elapsed
from store.db import requests
from store.db.requests import Past

LONGEST_MS = 86_400_000


class ShownRequests(Shown, frozen=True, kw_only=True):
    """Ended requests, newest first."""

    data: list[Seen]


@Operation(Seen, query=(OF_TENANT,), operator=("deployments",))
async def get(call: Call, recent: Recent) -> Response:
    """Show where the time of a request went, for as many days as the ledger keeps requests."""
    id, tenant_id = call.path("request"), await call.tenant_id()
    seen = recent.find(tenant_id, id)
    if seen is None:
        async with call.database.read() as connection:
            past = await requests.find(connection, tenant_id, id)
        if past is None:
            raise not_found("request", id)
        seen = show(past)
    return answered(seen)


@Operation(
    ShownRequests,
    query=(
        OF_TENANT,
        Query("deployment", str, "Of this deployment: its id."),
        Query("slower_than_ms", Annotated[int, Meta(ge=0, le=LONGEST_MS)], "That took so many milliseconds or more."),
        Query("limit", Annotated[int, Meta(ge=1, le=PAGE_MOST)], "How many; 50 unless it is said."),
    ),
    operator=("deployments",),
)
async def listed(call: Call) -> Response:
    """List the newest ended requests, with the parts of each request's time."""
    tenant_id = await call.tenant_id()
    slower_than = call.query("slower_than_ms", "0")
    if not (slower_than.isascii() and slower_than.isdigit() and int(slower_than[:10]) <= LONGEST_MS):
        raise invalid("?slower_than_ms", f"{slower_than[:20]!r} is not a number from 0 to {LONGEST_MS}")
    asked = (call.query("deployment"), int(slower_than) * 1000, call.limit)
    async with call.database.read() as connection:
        found = await requests.listed(connection, tenant_id, *asked)
    return answered(ShownRequests(data=[show(past) for past in found]))


def show(past: Past) -> Seen:
    return Seen(
        id=past.id,
        deployment_id=past.deployment_id,
        revision=past.revision,
        started_at=past.started_us / 1e6,
        cold=past.elapsed.cold,
        finish=past.finish,
        prompt_tokens=past.prompt_tokens,
        cached_tokens=past.cached_tokens,
        output_tokens=past.output_tokens,
        breakdown=_breakdown(past.elapsed),
    )


def _breakdown(elapsed: Elapsed) -> Breakdown:
    first_us = elapsed.first_token_us
    return Breakdown(
        total_ms=elapsed.total_us / 1e3,
        first_token_ms=None if first_us is None else first_us / 1e3,
        parts={part: us / 1e3 for part, us in elapsed.parts_us.items()},
    )
