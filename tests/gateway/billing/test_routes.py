"""Prices, usage and the bill over REST."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from store.db import tables, usage
from store.db.database import now_us
from tests.gateway.plane import Plane, made
from tests.store.db.test_usage import message

PERIOD = f"{datetime.now(UTC):%Y-%m}"


async def booked(plane: Plane, tenant: str, request: str, output_tokens: int, **others: int) -> None:
    tenant_id = (await plane.admin.get(f"/tenants/{tenant}")).json()["id"]
    others = {"started_us": now_us(), "prompt_tokens": 4} | others
    async with plane.database.write() as connection:
        sent = message(request, tenant_id=tenant_id, output_tokens=output_tokens, **others)
        await usage.book(connection, [sent], now_us())


async def test_usage_has_its_price_in_the_sums_and_on_the_bill(plane_on_both: Plane) -> None:
    plane = plane_on_both
    client = await plane.tenant("acme")
    price = {"prompt_pico": 2_000_000, "output_pico": 8_000_000, "gpu_s_pico": 10**9, "currency": "EUR"}
    shown = made(await plane.admin.post("/prices", json=price))
    assert (shown["cached_pico"], shown["gpu_s_pico"], shown["kv_gb_s_pico"]) == (2_000_000, 10**9, 0)
    await booked(plane, "acme", "r1", 10, gpu_us=1500, cache_byte_s=2 * 10**9)
    (row,) = (await client.get("/usage?group_by=deployment")).json()["data"]
    assert row == {
        "deployment": "chat",
        "requests": 1,
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "output_tokens": 10,
        "gpu_ms": 1.5,
        "switch_ms": 0.0,
        "cache_gb_s": 2.0,
        "kv_gb_s": 0.0,
        "amount": "0.000089500000",
        "currency": "EUR",
    }
    answer = await client.get(f"/billing/export?period={PERIOD}")
    assert answer.headers["content-type"].startswith("text/csv") and answer.headers["x-staccato-period"] == "open"
    lines = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(line["sku"], line["quantity"], line["unrounded"][:12], line["amount"]) for line in lines] == [
        ("prompt", "4", "0.0000080000", "0.00"),
        ("output", "10", "0.0000800000", "0.00"),
        ("gpu", "0.001500", "0.0000015000", "0.00"),
        ("cache", "2.000000000", "0.0000000000", "0.00"),
    ]


async def test_the_same_bill_is_byte_for_byte_the_same_in_any_order_of_booking(plane_on_both: Plane) -> None:
    plane = plane_on_both
    for name in ("b", "a", "c"):
        await plane.tenant(name)
        await booked(plane, name, f"r-{name}", 3)
    texts = [(await plane.admin.get(f"/billing/export?period={PERIOD}")).content for _ in range(2)]
    assert texts[0] == texts[1]
    assert [line["tenant"] for line in csv.DictReader(io.StringIO(texts[0].decode()))] == ["a", "a", "b", "b", "c", "c"]


async def test_the_operator_asks_for_one_tenant_or_all(plane: Plane) -> None:
    for name in ("a", "b"):
        await plane.tenant(name)
        await booked(plane, name, f"r-{name}", 3)
    every = (await plane.admin.get("/usage?group_by=tenant")).json()["data"]
    assert [row["tenant"] for row in every] == ["a", "b"]
    one = (await plane.admin.get("/usage?group_by=tenant&tenant=b")).json()["data"]
    assert [row["tenant"] for row in one] == ["b"]


async def test_usage_is_of_the_time_that_was_asked_for(plane: Plane) -> None:
    client = await plane.tenant("acme")
    await booked(plane, "acme", "r1", 10)
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    for query, count in (("", 1), (f"from={tomorrow:%Y-%m-%d}", 0), (f"to={PERIOD}-01T00:00:00+00:00", 0)):
        data = (await client.get(f"/usage?{query}&group_by=key")).json()["data"]
        assert len(data) == count, query


@pytest.mark.parametrize(
    "path",
    [
        "/usage?group_by=prompt",
        "/usage?from=yesterday",
        "/billing/export",
        "/billing/export?period=2026-13",
        "/billing/export?period=2026-11&format=pdf",
        "/billing/export?period=2026-11&detail=words",
        "/billing/export?period=2026-11&format=focus&detail=rows",
        "/billing/export?period=2026-11&format=cloudevents&detail=lines",
        "/usage:verify",
        "/usage:verify?period=November",
    ],
)
async def test_what_can_not_be_asked_for_says_what_can(plane: Plane, path: str) -> None:
    assert made(await plane.admin.get(path), 422)["errors"][0]["pointer"].startswith("?")


@pytest.mark.parametrize(
    ("price", "pointer"),
    [
        ({"prompt_pico": 1}, "/output_pico"),
        ({"prompt_pico": -1, "output_pico": 1}, "/prompt_pico"),
        ({"prompt_pico": 1.5, "output_pico": 1}, "/prompt_pico"),
        ({"prompt_pico": 1, "output_pico": 1, "valid_from": "2020-01-01T00:00:00Z"}, "/valid_from"),
        ({"prompt_pico": 1, "output_pico": 1, "valid_from": "2030-01-01T00:00:00"}, "/valid_from"),
        ({"prompt_pico": 1, "output_pico": 1, "tenant": "none"}, "/tenant"),
        ({"prompt_pico": 1, "output_pico": 1, "model": "none"}, "/model"),
        ({"prompt_pico": 1, "output_pico": 1, "currency": "euro"}, "/currency"),
        ({"prompt_pico": 1, "output_pico": 1, "gpu_s_pico": -1}, "/gpu_s_pico"),
        ({"prompt_pico": 1, "output_pico": 1, "gpu_us_pico": 1}, "/gpu_us_pico"),
    ],
)
async def test_a_price_that_can_not_be_is_refused(plane: Plane, price: dict[str, object], pointer: str) -> None:
    assert made(await plane.admin.post("/prices", json=price), 422)["errors"][0]["pointer"] == pointer


async def test_prices_are_listed_and_never_changed(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.model("llama")
    body = {"prompt_pico": 1, "output_pico": 2, "tenant": "acme", "model": "llama"}
    price = made(await plane.admin.post("/prices", json=body))
    assert (await plane.admin.get("/prices")).json()["data"] == [price]
    assert (await plane.admin.patch(f"/prices/{price['id']}", json={})).status_code == 404


# ── corrections ───────────────────────────────────────────────────────────────────────────────────────────────────────

CREDIT = {"tenant": "acme", "amount_minor": -1250, "reason": "the outage of the 5th", "corrects": "2026-10"}
ONCE = {"idempotency-key": "credit-1"}


async def test_a_correction_is_made_once_and_stands_on_the_bill_and_in_the_audit_log(plane_on_both: Plane) -> None:
    plane = plane_on_both
    client, other = await plane.tenant("acme"), await plane.tenant("other")
    answers = [made(await plane.admin.post("/billing/corrections", json=CREDIT, headers=ONCE)) for _ in range(2)]
    assert answers[0] == answers[1]
    assert (answers[0]["amount_minor"], answers[0]["amount"]) == (-1250, "-12.50")
    assert (await client.get("/billing/corrections")).json()["data"] == [answers[0]]
    assert (await other.get("/billing/corrections")).json()["data"] == []
    text = (await client.get(f"/billing/export?period={answers[0]['period']}")).text
    (line,) = csv.DictReader(io.StringIO(text))
    said = (line["sku"], line["month"], line["amount"], line["currency"], line["reason"])
    assert said == ("correction", "2026-10", "-12.50", "USD", CREDIT["reason"])
    async with plane.database.read() as connection:
        kind = tables.audit.c.kind == "billing.corrected"
        (row,) = await connection.execute(select(tables.audit).where(kind))
    assert (row.by, row.subject_id, json.loads(row.new)) == ("admin", answers[0]["id"], answers[0])


async def test_a_correction_that_could_be_made_twice_by_mistake_is_refused(plane: Plane) -> None:
    await plane.tenant("acme")
    refused = made(await plane.admin.post("/billing/corrections", json=CREDIT), 400)
    assert refused["code"] == "idempotency_key_missing"
    assert (await plane.admin.get("/billing/corrections")).json()["data"] == []


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"amount_minor": 0}, "/amount_minor"),
        ({"amount_minor": 1.5}, "/amount_minor"),
        ({"reason": ""}, "/reason"),
        ({"tenant": "nobody"}, "/tenant"),
        ({"corrects": "2026-13"}, "/corrects"),
        ({"corrects": "2999-01"}, "/corrects"),
        ({"currency": "dollars"}, "/currency"),
    ],
)
async def test_a_correction_that_can_not_be_is_refused(plane: Plane, change: dict[str, object], pointer: str) -> None:
    await plane.tenant("acme")
    answer = await plane.admin.post("/billing/corrections", json=CREDIT | change, headers=ONCE)
    assert made(answer, 422)["errors"][0]["pointer"] == pointer


async def test_tenants_neither_correct_nor_verify_bills(plane: Plane) -> None:
    client = await plane.tenant("acme")
    assert (await client.post("/billing/corrections", json=CREDIT, headers=ONCE)).status_code == 403
    assert (await client.get(f"/usage:verify?period={PERIOD}")).status_code == 403


# ── what is open too long ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_requests_past_their_lease_are_in_the_metrics(plane: Plane) -> None:
    await plane.tenant("acme")
    assert "staccato_usage_unreconciled 0.0" in (await plane.admin.get("/metrics")).text
    before = now_us() - usage.LEASE_US - 5_000_000
    await booked(plane, "acme", "r1", 10, final=False, started_us=before)
    assert "staccato_usage_unreconciled 1.0" in (await plane.admin.get("/metrics")).text
