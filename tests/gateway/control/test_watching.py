"""A runtime's time and pages are shown as the runtime said them, with names, and to the operator alone."""

from __future__ import annotations

from typing import Any

import httpx

from gateway.control import watching
from store.contract import views, wire
from store.contract.views import Content, PageRun, Span, Stage, Use, Why
from store.db import deployments
from store.db.database import now_us
from tests.gateway.plane import Plane, made, until

US = 1_800_000_000_000_000  # 2027-01-15T08:00:00Z


async def answer(plane: Plane, subject: str, message: wire.Message) -> list[bytes]:
    """Stand for a runtime that answers `message` on `subject`. Returns the list of requests heard."""
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
    named = {"model": key, "name": "fetch", "deployments": ["acme/faq@1"]}
    assert shown["stages"] == [{"at_us": US - 5, "us": 30, **named}]


async def test_a_cold_start_is_named_by_the_deployment_of_that_time(plane: Plane) -> None:
    """A case from practice: a canary's model was built, the canary given up, and then a new deployment made of the
    model."""
    acme = await plane.tenant("acme")
    for name in ("faq", "poet"):
        await plane.model(name)
    made(await acme.post("/deployments", json={"name": "faq", "model": "faq"}))
    change = {"model": "poet", "canary": {"weight": 20}}
    key = made(await acme.patch("/deployments/faq", json=change), 200)["target"]["engine"]
    built_us = now_us()
    made(await acme.post("/deployments/faq:rollback"), 200)
    await until(lambda: elapsed(built_us, watching.SKEW_US))
    poet = made(await acme.post("/deployments", json={"name": "poet", "model": "poet"}))
    assert poet["engine"] == key
    await plane.report({})
    later_us = now_us()
    spans = [Span(built_us, later_us - built_us, Use.PLATFORM, key)]
    stages = [Stage(built_us, 1000, key, "build"), Stage(later_us, 1000, key, "fetch")]
    said = views.Timeline(from_us=built_us, to_us=later_us, spans=spans, stages=stages)
    await answer(plane, views.timeline_subject("r1"), said)
    shown = (await plane.admin.get("/gpus/r1/timeline")).json()
    assert [stage["deployments"] for stage in shown["stages"]] == [["acme/faq@2"], ["acme/poet@1"]]
    assert shown["models"] == {key: ["acme/poet@1"]}
    assert (await acme.delete("/deployments/poet")).status_code == 204  # the past is not forgotten
    again = (await plane.admin.get("/gpus/r1/timeline")).json()
    assert [stage["deployments"] for stage in again["stages"]] == [["acme/faq@2"], ["acme/poet@1"]]


async def elapsed(since_us: int, us: int) -> bool:
    return now_us() > since_us + us


async def test_names_of_a_replaced_revision_end_where_the_next_one_began(plane: Plane) -> None:
    acme = await plane.tenant("acme")
    await plane.model("m")
    first = made(await acme.post("/deployments", json={"name": "faq", "model": "m"}))
    second = made(await acme.patch("/deployments/faq", json={"dtype": "float32"}), 200)["target"]
    made(await acme.patch("/deployments/faq", json={"dtype": "float16"}), 200)  # the second never had the traffic
    async with plane.database.read() as connection:
        uses = await deployments.engine_uses(connection, {first["engine"], second["engine"]})
    one, two = uses
    assert (one.name, one.live, one.until_us) == ("acme/faq@1", True, None)
    assert (two.name, two.live) == ("acme/faq@2", False) and two.until_us is not None
    assert watching.names_at([two], two.until_us - 1) == ["acme/faq@2"]
    assert watching.names_at([two], two.until_us) == []


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
        "scopes": ["everything"],
    }
    me = (await acme.get("/me")).json()
    assert (me["admin"], me["tenant"]) == (False, "acme") and me["key_id"]
    assert (await plane.client("sk-st-wrong").get("/me")).status_code == 401
