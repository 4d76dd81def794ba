"""A right bill is found right; any change of the rows is found, with row and numbers."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import insert, text, update

from store.db import bill, billing, tables, tenants, usage
from store.db.database import Database
from store.db.verify import FLAWS_SHOWN, Verification, verify
from tests.store.db.test_usage import DAY_US, NOVEMBER_US, message

NOW_US = NOVEMBER_US + 10 * DAY_US
CLOSED_US = NOVEMBER_US + 40 * DAY_US


async def _verified(database: Database, now_us: int = NOW_US) -> Verification:
    async with database.snapshot() as connection:
        return await verify(connection, "2026-11", now_us)


@pytest.fixture
async def billed(database: Database) -> Database:
    """A November with two prices, a retry, a late row of October and a correction."""
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        rates = {"prompt_pico": 2 * 10**6, "output_pico": 8 * 10**6, "gpu_s_pico": 10**9, "cache_gb_s_pico": 7}
        await billing.add_price(connection, None, None, "USD", rates, 1, 1)
        await billing.add_price(connection, tenant.id, None, "EUR", rates, NOVEMBER_US + DAY_US, 1)
        device = dict(gpu_us=700_000, switch_us=10, cache_byte_s=123_456_789_012, kv_byte_s=5)
        sent = [
            message("a", tenant_id=tenant.id, seq=2, prompt_tokens=9, cached_tokens=4, output_tokens=30, **device),
            message("b", tenant_id=tenant.id, final=False, output_tokens=3, started_us=NOVEMBER_US + DAY_US),
            message("b", 2, tenant_id=tenant.id, prompt_tokens=9, output_tokens=5, started_us=NOVEMBER_US + DAY_US),
            message("late", tenant_id=tenant.id, output_tokens=7, started_us=NOVEMBER_US - 3 * DAY_US),
        ]
        await usage.book(connection, sent, NOW_US)
        await bill.correct(connection, tenant.id, "2026-10", "USD", -1250, "an outage", NOW_US)
    return database


async def test_a_right_bill_has_no_flaw_and_says_what_is_to_be_paid(billed: Database) -> None:
    report = await _verified(billed)
    assert (report.flaws, report.rows, report.closed) == ([], 4, False)
    async with billed.read() as connection:
        lines = await bill.lines(connection, "2026-11", None)
    assert report.lines == len(lines) and report.amounts == {"EUR": "0.00", "USD": "-12.50"}


@pytest.mark.parametrize(
    ("request_id", "change", "check", "said"),
    [
        ("a", {"cached_tokens": 10}, "counters", "10 cached tokens of a prompt of 9"),
        ("a", {"output_tokens": -1}, "counters", "output_tokens is -1, less than nothing"),
        ("a", {"gpu_us": 3 * 10**9 + 1}, "times", "gpu_us is 3000000001 in a request of 2000000 us"),
        ("a", {"ended_us": NOVEMBER_US - 1_000_000}, "times", "it ended 1000000 us before it started"),
        ("a", {"price_id": None}, "price", "it has the price None, at its start "),
        ("a", {"started_us": NOVEMBER_US + 31 * DAY_US, "ended_us": 2 * NOVEMBER_US}, "period", "started in 2026-12"),
        ("b", {"prompt_tokens": 9}, "counters", "a prompt of 9 tokens is charged by a later attempt again"),
    ],
)
async def test_a_row_that_can_not_be_is_found(
    billed: Database, request_id: str, change: dict[str, object], check: str, said: str
) -> None:
    async with billed.write() as connection:
        await connection.execute(update(tables.usage).where(tables.usage.c.request == request_id).values(**change))
    report = await _verified(billed)
    (flaw,) = [flaw for flaw in report.flaws if said in flaw.said]
    assert flaw.check == check and flaw.where.startswith(f"request {request_id} attempt ")


async def test_a_request_may_take_more_of_devices_than_time_passed(billed: Database) -> None:
    """The request's two prompts were on two devices at once."""
    async with billed.write() as connection:
        first = tables.usage.c.request == "a"
        await connection.execute(update(tables.usage).where(first).values(gpu_us=3_900_000))
    assert (await _verified(billed)).flaws == []


async def test_a_row_that_is_there_twice_is_found(billed: Database, database_url: str) -> None:
    """As if the table had lost the primary key."""
    async with billed.write() as connection:
        await connection.execute(text("ALTER TABLE usage RENAME TO old"))
        await connection.execute(text("CREATE TABLE usage AS SELECT * FROM old UNION ALL SELECT * FROM old"))
    report = await _verified(billed)
    assert report.flawed["unique"] == 4 and "it is booked twice" in {flaw.said for flaw in report.flaws}


async def test_a_request_of_two_tenants_is_found(billed: Database) -> None:
    async with billed.write() as connection:
        second = (tables.usage.c.request == "b") & (tables.usage.c.attempt == 2)
        await connection.execute(update(tables.usage).where(second).values(tenant_id="thief"))
    report = await _verified(billed)
    assert [flaw.where for flaw in report.flaws if "its attempt before was of" in flaw.said] == ["request b attempt 2"]


async def test_a_row_that_a_closed_month_left_open_is_found(billed: Database) -> None:
    report = await _verified(billed, CLOSED_US)
    assert report.closed and [(flaw.check, flaw.where) for flaw in report.flaws] == [("open", "request b attempt 1")]


async def test_a_line_that_is_not_the_sum_of_its_rows_is_found(
    billed: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bill.lines

    async def forged(*args: object) -> list[bill.Line]:
        first, second, *lines = await made(*args)  # type: ignore[arg-type]
        dearer = msgspec.structs.replace(first, amount="7.00")
        return [dearer, *lines]

    monkeypatch.setattr(bill, "lines", forged)
    report = await _verified(billed)
    assert [flaw.check for flaw in report.flaws] == ["lines", "lines"]
    assert any("amount is 7.00 on the bill, 0.0 by its rows" in flaw.said for flaw in report.flaws)
    assert any("no line of the bill has the" in flaw.said for flaw in report.flaws)


async def test_a_correction_that_was_moved_to_another_bill_is_found(billed: Database) -> None:
    async with billed.write() as connection:
        await connection.execute(update(tables.corrections).values(created_us=NOVEMBER_US + 60 * DAY_US))
    report = await _verified(billed)
    assert [flaw.check for flaw in report.flaws] == ["corrections"]
    assert "it stands on the bill of 2026-11, open was 2026-12" in report.flaws[0].said


async def test_of_many_flaws_all_are_counted_and_the_first_are_told(database: Database) -> None:
    async with database.write() as connection:
        await usage.book(connection, [message(f"r{n:03}", output_tokens=1) for n in range(150)], NOVEMBER_US)
        price = dict.fromkeys(("prompt_pico", "cached_pico", "output_pico"), 1)
        row = price | {"id": "p", "currency": "USD", "valid_from_us": 1, "created_us": NOW_US}
        await connection.execute(insert(tables.prices).values(**row))
    report = await _verified(database)
    assert report.flawed == {"price": 150} and len(report.flaws) == FLAWS_SHOWN
