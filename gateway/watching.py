"""What there is to look at of the runtimes: who had a device when, and what is in its pages. For the operator alone."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import Response

from gateway.api import Call, Operation, Query, Shown, answered, moment
from gateway.errors import Problem, invalid
from gateway.fleet import Fleet
from gateway.runtimes import ask, runtime_of, users
from store import views, wire
from store.db import now_us

SPANS_MOST = 2000  # of one answer: as many as a screen has columns
WINDOW_US = 60_000_000  # unless it is said


class ShownWhy(Shown, frozen=True, kw_only=True):
    """Who a model was brought to its turn for; `due_ms` until the first of their next tokens was due."""

    requests: int
    firsts: int
    due_ms: int


class ShownSpan(Shown, frozen=True, kw_only=True, omit_defaults=True):
    """`use` is one of steps, switch, idle, platform, open (not known yet), away (no device process)."""

    at_us: int
    us: int
    use: str
    model: str = ""
    steps: int = 0
    requests: int = 0
    why: ShownWhy | None = None


class ShownStage(Shown, frozen=True, kw_only=True):
    """A part of a model's way to the device: build, fetch or check."""

    at_us: int
    us: int
    model: str
    name: str


class ShownTimeline(Shown, frozen=True, kw_only=True):
    """`us` of all spans make up to_us - from_us. With `bucket_us` they are shares of buckets, else turns one by one."""

    gpu: str
    from_us: int
    to_us: int
    bucket_us: int
    spans: list[ShownSpan]
    stages: list[ShownStage]
    models: dict[str, list[str]]  # whose deployments are known: their names


class ShownRun(Shown, frozen=True, kw_only=True):
    """Neighbours that are alike; `content` is one of free, weights, kv, cache, leaving, loading."""

    pages: int
    content: str
    model: str


class ShownPages(Shown, frozen=True, kw_only=True):
    """Every page of the pool, from page 0 on."""

    gpu: str
    pages: int
    page_bytes: int
    runs: list[ShownRun]
    models: dict[str, list[str]]


@Operation(
    ShownTimeline,
    query=(
        Query("from", str, "The first moment, as 2026-11-21T12:00:00Z; else a minute before the end."),
        Query("to", str, "The moment that it ends before; else now."),
    ),
)
async def timeline(call: Call, fleet: Fleet) -> Response:
    """Show who had a device when, in the finest detail that fits. It may begin later than asked: see `from_us`."""
    id, now = runtime_of(call, fleet), now_us()
    to_us = moment(call, "to", now)
    from_us = moment(call, "from", to_us - WINDOW_US)
    if from_us > to_us:
        raise invalid("?from", "it is after ?to")
    asked = views.ShowTimeline(from_us=from_us, to_us=to_us, most=SPANS_MOST)
    found = wire.decode(views.Timeline, await ask(fleet, views.timeline_subject(id), asked))
    named = {span.model for span in found.spans} | {stage.model for stage in found.stages}
    shown = ShownTimeline(
        gpu=id,
        from_us=found.from_us,
        to_us=found.to_us,
        bucket_us=found.bucket_us,
        spans=[_span(span) for span in found.spans],
        stages=[ShownStage(at_us=each.at_us, us=each.us, model=each.model, name=each.name) for each in found.stages],
        models=await _names(call, named),
    )
    return answered(shown)


@Operation(ShownPages)
async def pages(call: Call, fleet: Fleet) -> Response:
    """Show what is in each page of a device's pool, as its allocator has it."""
    id = runtime_of(call, fleet)
    found = wire.decode(views.PageMap, await ask(fleet, views.pages_subject(id), views.ShowPages()))
    if found.missing:
        raise Problem(503, "runtime_busy", f"{found.missing}: try again", headers={"retry-after": "2"})
    shown = ShownPages(
        gpu=id,
        pages=sum(run.pages for run in found.runs),
        page_bytes=found.page_bytes,
        runs=[ShownRun(pages=run.pages, content=run.content.name.lower(), model=run.model) for run in found.runs],
        models=await _names(call, {run.model for run in found.runs}),
    )
    return answered(shown)


def _span(span: views.Span) -> ShownSpan:
    why = None
    if span.why is not None:
        why = ShownWhy(requests=span.why.requests, firsts=span.why.firsts, due_ms=span.why.due_ms)
    return ShownSpan(
        at_us=span.at_us,
        us=span.us,
        use=span.use.name.lower(),
        model=span.model,
        steps=span.steps,
        requests=span.requests,
        why=why,
    )


async def _names(call: Call, keys: Iterable[str]) -> dict[str, list[str]]:
    served = await users(call)
    return {key: sorted(served[key]) for key in sorted(keys) if key in served}
