"""The bill as a file: equal bytes at each export, equal figures in five formats, and refused exports."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import AsyncIterator
from datetime import datetime
from decimal import Decimal

import httpx
import pyarrow.parquet as arrow_parquet
import pytest
from sqlalchemy import update

from gateway.billing import export
from gateway.billing.formats import FORMATS
from store.contract import wire
from store.db import bill, billing, tables, tenants, usage
from store.db.database import Database
from tests.gateway.plane import Plane, made
from tests.store.db.test_usage import DAY_US, NOVEMBER_US, message

OCTOBER_US = NOVEMBER_US - 20 * DAY_US
EVERY = [(name, detail) for name, format in FORMATS.items() for detail in format.details]


async def fill(database: Database) -> None:
    """Fill a closed October: two tenants, the second deleted, every kind of record, no price at first, a correction."""
    async with database.write() as connection:
        acme, globex = [await tenants.create(connection, name, 1) for name in ("acme", "globex")]
        rates = {name: 10**n for n, name in enumerate(billing.RATES, 8)}
        await billing.add_price(connection, None, None, "USD", rates, OCTOBER_US + 5, 1)
        device = dict(gpu_us=7, switch_us=8, cache_byte_s=9, kv_byte_s=10**12)
        sent = [
            message(f"r{n}", tenant_id=tenant.id, prompt_tokens=9, cached_tokens=4, output_tokens=n, **device)
            for n, tenant in enumerate((acme, globex) * 4)
        ]
        early = [message_at(one, OCTOBER_US + n) for n, one in enumerate(sent)]
        await usage.book(connection, early, OCTOBER_US)
        await bill.correct(connection, acme.id, "2026-09", "USD", -1250, 'a "bad" day, really', OCTOBER_US)
        await bill.correct(connection, globex.id, None, "JPY", 300, "=SUM(A1)", OCTOBER_US)
        await tenants.delete(connection, globex, 1)


def message_at(one: wire.Usage, us: int) -> wire.Usage:
    return wire.replace(one, started_at=us / 1e6, ended_at=us / 1e6 + 1)


@pytest.fixture
async def october(plane_on_both: Plane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plane]:
    """A plane with a filled October, seen from the middle of November."""
    monkeypatch.setattr(export, "now_us", lambda: NOVEMBER_US + 15 * DAY_US)
    await fill(plane_on_both.database)
    yield plane_on_both


async def fetched(client: httpx.AsyncClient, format: str, detail: str = "", period: str = "2026-10") -> httpx.Response:
    answer = await client.get(f"/billing/export?period={period}&format={format}" + (detail and f"&detail={detail}"))
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(("format", "detail"), EVERY)
async def test_an_export_again_is_the_same_bytes_while_other_months_get_rows(
    october: Plane, format: str, detail: str
) -> None:
    first = await fetched(october.admin, format, detail)
    async with october.database.write() as connection:
        later = [message(f"later{n}", output_tokens=5) for n in range(5)]
        late = [message_at(message(f"late{n}", output_tokens=5), OCTOBER_US) for n in range(5)]
        await usage.book(connection, later + late, NOVEMBER_US + 15 * DAY_US)
    again = await fetched(october.admin, format, detail)
    assert again.content == first.content and len(first.content) > 500
    assert first.headers["x-staccato-period"] == "closed"
    assert first.headers["x-staccato-sha256"] == hashlib.sha256(first.content).hexdigest()
    assert first.headers["content-length"] == str(len(first.content))


async def test_every_format_has_the_same_figures(october: Plane) -> None:
    for detail in ("lines", "rows"):
        text = (await fetched(october.admin, "csv", detail)).text
        rows = list(csv.DictReader(io.StringIO(text)))
        lines = [json.loads(line) for line in (await fetched(october.admin, "jsonl", detail)).text.splitlines()]
        assert [{name: str(value) for name, value in line.items()} for line in lines] == rows
        parquet = arrow_parquet.read_table(io.BytesIO((await fetched(october.admin, "parquet", detail)).content))
        assert [{name: plain(value) for name, value in row.items()} for row in parquet.to_pylist()] == [
            {name: plain(value) for name, value in row.items()} for row in lines
        ]
        assert str(parquet.schema.field("amount").type) == "decimal128(38, 21)"


def plain(value: object) -> object:
    """A value in a form to compare: numbers normalized, as decimals in Parquet carry every decimal place."""
    is_number = isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?", value)
    return Decimal(value).normalize() if is_number or isinstance(value, Decimal) else value  # type: ignore[arg-type]


async def test_an_event_is_a_row_as_cloudevents_wants_it(october: Plane) -> None:
    events = [json.loads(line) for line in (await fetched(october.admin, "cloudevents")).text.splitlines()]
    rows = [json.loads(line) for line in (await fetched(october.admin, "jsonl", "rows")).text.splitlines()]
    assert [event["data"] for event in events] == rows and len({event["id"] for event in events}) == 8
    for event in events:
        # The attributes that CloudEvents 1.0 requires, none of them empty, and a time of RFC 3339.
        assert event["specversion"] == "1.0" and event["id"] and event["source"] and event["type"]
        assert datetime.fromisoformat(event["time"]).tzinfo
        assert event["subject"] == event["data"]["tenant_id"]


async def test_a_tenant_exports_what_is_its_own(october: Plane) -> None:
    client = october.client(made(await october.admin.post("/tenants/acme/keys", json={}))["key"])
    for format, detail in (("jsonl", "lines"), ("jsonl", "rows")):
        own = [json.loads(line) for line in (await fetched(client, format, detail)).text.splitlines()]
        every = [json.loads(line) for line in (await fetched(october.admin, format, detail)).text.splitlines()]
        assert own == [line for line in every if line["tenant"] == "acme"] and own != every


# ── a closed month ────────────────────────────────────────────────────────────────────────────────────────────────────


async def tamper(database: Database) -> None:
    async with database.write() as connection:
        first = tables.usage.c.request == "r0"
        await connection.execute(update(tables.usage).where(first).values(prompt_tokens=1000))


async def test_a_closed_bill_that_became_another_is_not_given_out_but_told(october: Plane) -> None:
    await fetched(october.admin, "csv")
    assert (await october.admin.get("/usage:verify?period=2026-10")).json()["ok"]
    await tamper(october.database)
    refused = made(await october.admin.get("/billing/export?period=2026-10"), 409)
    assert refused["code"] == "bill_changed" and "staccato usage verify --period 2026-10" in refused["detail"]
    report = (await october.admin.get("/usage:verify?period=2026-10")).json()
    assert (report["ok"], report["exports"], report["flawed"]) == (False, 1, {"export": 1})
    assert "the first export's was" in report["flaws"][0]["said"]


async def test_an_open_bill_is_recorded_nowhere(october: Plane) -> None:
    assert (await fetched(october.admin, "csv", period="2026-11")).headers["x-staccato-period"] == "open"
    async with october.database.read() as connection:
        assert await bill.exported(connection, "2026-11") == {}


async def test_what_another_version_wrote_is_no_flaw(october: Plane) -> None:
    await fetched(october.admin, "parquet")
    async with october.database.write() as connection:
        await connection.execute(update(tables.exports).values(version="0", sha256="other"))
    assert (await october.admin.get("/usage:verify?period=2026-10")).json()["flaws"] == []


async def test_who_asks_for_one_more_than_can_be_made_is_told_to_come_again(
    october: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "AT_ONCE_MOST", 0)
    refused = await october.admin.get("/billing/export?period=2026-10")
    assert made(refused, 503)["code"] == "exports_busy" and refused.headers["retry-after"] == "5"
    monkeypatch.setattr(export, "AT_ONCE_MOST", 1)
    for _ in range(3):  # in turn
        await fetched(october.admin, "csv")


# ── FOCUS ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

MANDATORY = """BilledCost BillingAccountId BillingAccountName BillingCurrency BillingPeriodEnd BillingPeriodStart
ChargeCategory ChargeClass ChargeDescription ChargePeriodEnd ChargePeriodStart ContractedCost EffectiveCost
InvoiceIssuerName ListCost PricingQuantity PricingUnit ProviderName PublisherName ServiceCategory ServiceName""".split()
NULLABLE = {"ChargeClass", "PricingQuantity", "PricingUnit", "ConsumedQuantity", "ConsumedUnit", "PricingCategory"}


async def test_a_focus_file_has_what_version_1_2_demands(october: Plane) -> None:
    rows = list(csv.DictReader(io.StringIO((await fetched(october.admin, "focus")).text)))
    lines = [json.loads(line) for line in (await fetched(october.admin, "jsonl")).text.splitlines()]
    assert set(MANDATORY) <= set(rows[0]) and len(rows) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        assert all(row[name] for name in MANDATORY if name not in NULLABLE), row
        assert row["ChargeCategory"] in ("Usage", "Credit", "Adjustment")
        assert row["BilledCost"] == row["EffectiveCost"] == line["amount"]
        assert re.fullmatch(r"[A-Z]{3}", row["BillingCurrency"])
        for name in ("BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd"):
            assert re.fullmatch(r"\d{4}-\d\d-01T00:00:00Z", row[name])
        assert (row["PricingQuantity"] == "") == (row["PricingUnit"] == "")
        if row["ChargeCategory"] == "Usage":
            assert row["SkuId"] and row["SkuPriceId"] and row["PricingCategory"] == "Standard"
            product = Decimal(row["ListUnitPrice"]) * Decimal(row["PricingQuantity"])
            assert product == Decimal(row["ListCost"]) == Decimal(row["ContractedCost"])


async def test_a_correction_of_an_earlier_bill_says_so_in_focus(october: Plane) -> None:
    rows = list(csv.DictReader(io.StringIO((await fetched(october.admin, "focus")).text)))
    corrections = [row for row in rows if row["ChargeCategory"] != "Usage"]
    said = [(row["ChargeCategory"], row["ChargeClass"], row["BilledCost"], row["SkuId"]) for row in corrections]
    assert said == [("Credit", "Correction", "-12.50", ""), ("Adjustment", "", "300", "")]
    assert corrections[0]["ChargePeriodStart"] == "2026-09-01T00:00:00Z"
    assert {row["InvoiceId"][:7] for row in rows} == {"2026-10"}
