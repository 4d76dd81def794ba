"""Views of the runtimes: the timeline of a device and the content of its pages. For the operator alone."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import Response

from gateway.control.runtimes import ask, runtime_of, users
from gateway.http.api import Call, Operation, Query, Shown, answered, moment
from gateway.http.errors import Problem, invalid
from gateway.streams.runtimes import RuntimesView
from store.contract import views, wire
from store.contract.deployments import EngineUse
from store.db import deployments
from store.db.database import now_us

SPANS_MOST = 2000  # spans of one answer: as many as a screen has columns
WINDOW_US = 60_000_000  # if ?from is not given
SKEW_US = 2_000_000  # largest difference between the clocks of a runtime and of the gateway


class ShownWhy(Shown, frozen=True, kw_only=True):
    """Requests for which a model got its turn. `due_ms`: time until the first token of these requests was due."""

    requests: int
    firsts: int
    due_ms: int


class ShownSpan(Shown, frozen=True, kw_only=True, omit_defaults=True):
    """Span of device time. `use`: steps, switch, idle, platform, open (not yet known), away (no device process)."""

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
    deployments: list[str]  # deployments for which the model was brought in: the engine could serve them then


class ShownTimeline(Shown, frozen=True, kw_only=True):
    """Spans of a device's time: the spans' `us` add up to to_us - from_us.

    With `bucket_us` the spans are shares of buckets, else single turns.
    """

    gpu: str
    from_us: int
    to_us: int
    bucket_us: int
    spans: list[ShownSpan]
    stages: list[ShownStage]
    models: dict[str, list[str]]  # names of the models' deployments at `to_us`, for models with known deployments


class ShownRun(Shown, frozen=True, kw_only=True):
    """Neighbouring pages with equal content. `content`: free, weights, kv, cache, leaving or loading."""

    pages: int
    content: str
    model: str


class ShownPages(Shown, frozen=True, kw_only=True):
    """Pages of the pool, from page 0 on."""

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
    operator=("fleet",),
)
async def timeline(call: Call, fleet: RuntimesView) -> Response:
    """Show who had a device when, in the finest detail that fits.

    The timeline may begin later than asked: see `from_us`.
    """
    id, now = runtime_of(call, fleet), now_us()
    to_us = moment(call, "to", now)
    from_us = moment(call, "from", to_us - WINDOW_US)
    if from_us > to_us:
        raise invalid("?from", "it is after ?to")
    asked = views.ShowTimeline(from_us=from_us, to_us=to_us, most=SPANS_MOST)
    found = wire.decode(views.Timeline, await ask(fleet, views.timeline_subject(id), asked))
    named = {span.model for span in found.spans if span.model} | {stage.model for stage in found.stages}
    uses = await _uses(call, named)
    shown = ShownTimeline(
        gpu=id,
        from_us=found.from_us,
        to_us=found.to_us,
        bucket_us=found.bucket_us,
        spans=[_span(span) for span in found.spans],
        stages=[_stage(stage, uses) for stage in found.stages],
        models={key: names for key in sorted(uses) if (names := names_at(uses[key], found.to_us))},
    )
    return answered(shown)


@Operation(ShownPages, operator=("fleet",))
async def pages(call: Call, fleet: RuntimesView) -> Response:
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


async def _uses(call: Call, keys: set[str]) -> dict[str, list[EngineUse]]:
    """Return the uses of each engine, by engine key, oldest first."""
    async with call.database.read() as connection:
        found = await deployments.engine_uses(connection, keys)
    return {key: [use for use in found if use.key == key] for key in keys}


def names_at(uses: list[EngineUse], at_us: int) -> list[str]:
    """Names of deployments that an engine could serve at `at_us`: the live deployments, else the last deployment."""
    there = [use for use in uses if use.since_us - SKEW_US <= at_us and (use.until_us is None or at_us < use.until_us)]
    if live := [use.name for use in there if use.live]:
        return sorted(live)
    return [there[-1].name] if there else []


def _stage(stage: views.Stage, uses: dict[str, list[EngineUse]]) -> ShownStage:
    names = names_at(uses.get(stage.model, []), stage.at_us)
    return ShownStage(at_us=stage.at_us, us=stage.us, model=stage.model, name=stage.name, deployments=names)


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
