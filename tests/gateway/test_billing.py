"""Prices, usage and the bill over REST."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta

import pytest

from store import usage
from store.db import now_us
from tests.gateway.plane import Plane, made
from tests.store.test_usage import message

PERIOD = f"{datetime.now(UTC):%Y-%m}"


async def booked(plane: Plane, tenant: str, request: str, output_tokens: int) -> None:
    tenant_id = (await plane.admin.get(f"/tenants/{tenant}")).json()["id"]
    async with plane.database.write() as connection:
        sent = message(request, tenant_id=tenant_id, prompt_tokens=4, output_tokens=output_tokens, started_us=now_us())
        await usage.book(connection, [sent], now_us())


async def test_usage_has_its_price_in_the_sums_and_on_the_bill(plane_on_both: Plane) -> None:
    plane = plane_on_both
    client = await plane.tenant("acme")
    price = {"prompt_pico": 2_000_000, "output_pico": 8_000_000, "currency": "EUR"}
    assert made(await plane.admin.post("/prices", json=price))["cached_pico"] == 2_000_000
    await booked(plane, "acme", "r1", 10)
    (row,) = (await client.get("/usage?group_by=deployment")).json()["data"]
    assert row == {
        "deployment": "chat",
        "requests": 1,
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "output_tokens": 10,
        "amount": "0.000088000000",
        "currency": "EUR",
    }
    answer = await client.get(f"/billing/export?period={PERIOD}")
    assert answer.headers["content-type"].startswith("text/csv") and answer.headers["x-staccato-period"] == "open"
    lines = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(line["sku"], line["quantity"], line["amount"]) for line in lines] == [
        ("prompt", "4", "0.000008"),
        ("output", "10", "0.000080"),
    ]
    same = await client.get(f"/billing/export?period={PERIOD}&format=jsonl")
    assert [{k: str(v) for k, v in json.loads(line).items()} for line in same.text.splitlines()] == lines


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
