"""What is shown of a runtime's time and pages: as it said it, with names, to the operator alone."""

from __future__ import annotations

from typing import Any

import httpx

from store import views, wire
from store.views import Content, PageRun, Span, Stage, Use, Why
from tests.gateway.plane import Plane

US = 1_800_000_000_000_000  # 2027-01-15T08:00:00Z


async def answer(plane: Plane, subject: str, message: wire.Message) -> list[bytes]:
    """A runtime that says this, and what it was asked."""
    asked: list[bytes] = []

    async def respond(data: bytes) -> wire.Message:
        asked.append(data)
        return message

    await plane.bus.respond(subject, respond)
    return asked


async def deployed(plane: Plane) -> tuple[httpx.AsyncClient, Any]:
    acme = await plane.tenant("acme")
    await plane.model("m")
    deployment = (await acme.post("/deployments", json={"name": "faq", "model": "m", "dtype": "float32"})).json()
    await plane.report({})
    return acme, deployment["engine"]


async def test_spans_come_with_the_names_of_whom_they_served(plane: Plane) -> None:
    _, key = await deployed(plane)
    said = views.Timeline(
        from_us=US,
        to_us=US + 100,
        spans=[
            Span(US, 40, Use.SWITCH, key, 0, 2, Why(2, 1, -5)),
            Span(US + 40, 50, Use.STEPS, key, 3, 2),
            Span(US + 90, 10, Use.IDLE),
        ],
        stages=[Stage(US - 5, 30, key, "fetch")],
    )
    asked = await answer(plane, views.timeline_subject("r1"), said)
    query = "?from=2027-01-15T08:00:00Z&to=2027-01-15T08:00:00.000100Z"
    shown = (await plane.admin.get("/gpus/r1/timeline" + query)).json()
    assert wire.decode(views.ShowTimeline, asked[0]) == views.ShowTimeline(from_us=US, to_us=US + 100, most=2000)
    assert shown["models"] == {key: ["acme/faq@1"]} and (shown["gpu"], shown["bucket_us"]) == ("r1", 0)
    assert shown["spans"] == [
        {"at_us": US, "us": 40, "use": "switch", "model": key, "requests": 2}
        | {"why": {"requests": 2, "firsts": 1, "due_ms": -5}},
        {"at_us": US + 40, "us": 50, "use": "steps", "model": key, "steps": 3, "requests": 2},
        {"at_us": US + 90, "us": 10, "use": "idle"},
    ]
    assert shown["stages"] == [{"at_us": US - 5, "us": 30, "model": key, "name": "fetch"}]


async def test_the_map_of_the_pool_is_shown_in_runs(plane: Plane) -> None:
    _, key = await deployed(plane)
    runs = [PageRun(3, Content.WEIGHTS, key), PageRun(1, Content.KV, key), PageRun(4, Content.FREE)]
    await answer(plane, views.pages_subject("r1"), views.PageMap(page_bytes=4096, runs=runs))
    shown = (await plane.admin.get("/gpus/r1/pages")).json()
    assert (shown["pages"], shown["page_bytes"], shown["models"]) == (8, 4096, {key: ["acme/faq@1"]})
    assert [(run["pages"], run["content"], run["model"]) for run in shown["runs"]] == [
        (3, "weights", key),
        (1, "kv", key),
        (4, "free", ""),
    ]


async def test_a_device_that_can_not_say_is_told_with_a_time_to_come_again(plane: Plane) -> None:
    await plane.report({})
    await answer(plane, views.pages_subject("r1"), views.PageMap(missing="it builds an engine"))
    refused = await plane.admin.get("/gpus/r1/pages")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert "it builds an engine" in refused.json()["detail"]


async def test_only_the_operator_looks_at_devices(plane: Plane) -> None:
    acme, _ = await deployed(plane)
    for path in ("/gpus/r1/timeline", "/gpus/r1/pages"):
        assert (await acme.get(path)).status_code == 403
    assert (await plane.admin.get("/gpus/nowhere/timeline")).status_code == 404


async def test_times_that_make_no_sense_are_refused(plane: Plane) -> None:
    await plane.report({})
    for query in ("?from=yesterday", "?from=2027-01-15&to=2027-01-14", "?since=2027-01-15"):
        assert (await plane.admin.get("/gpus/r1/timeline" + query)).status_code == 422


async def test_a_key_learns_whose_it_is(plane: Plane) -> None:
    acme = await plane.tenant("acme")
    assert (await plane.admin.get("/me")).json() == {
        "admin": True,
        "tenant": None,
        "key_id": None,
        "scopes": ["inference", "control"],
    }
    me = (await acme.get("/me")).json()
    assert (me["admin"], me["tenant"]) == (False, "acme") and me["key_id"]
    assert (await plane.client("sk-st-wrong").get("/me")).status_code == 401
