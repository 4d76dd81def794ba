"""Booking usage: any order and any repetition of messages gives the same rows and the same bill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, select

from store.contract.wire import Usage
from store.db import bill, billing, tables, usage
from store.db.billing import Counts
from store.db.database import Database

DAY_US = 24 * 3600 * 1_000_000
NOVEMBER_US = round(datetime(2026, 11, 1, tzinfo=UTC).timestamp() * 1e6)


def message(
    request: str,
    attempt: int = 1,
    seq: int = 1,
    final: bool = True,
    tenant_id: str = "t",
    deployment_id: str = "d",
    prompt_tokens: int = 0,
    cached_tokens: int = 0,
    output_tokens: int = 0,
    started_us: int = NOVEMBER_US,
    **others: int,
) -> Usage:
    """A usage message. `others`: counts of the device."""
    return Usage(
        request=request,
        attempt=attempt,
        seq=seq,
        final=final,
        tenant_id=tenant_id,
        key_id="k",
        deployment_id=deployment_id,
        deployment="chat",
        revision=1,
        model="engine-1",
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        started_at=started_us / 1e6,
        ended_at=started_us / 1e6 + seq,
        finish="stop" if final else "open",
        **others,
    )


@dataclass(frozen=True)
class History:
    """Usage messages of an attempt, closed or not. The last message need not know every count: a gateway that continues
    for a killed gateway knows only the tokens."""

    request: str
    attempt: int
    said: tuple[Counts, ...]
    closed: bool

    def messages(self) -> list[Usage]:
        last = len(self.said) - 1
        return [
            message(self.request, self.attempt, n + 1, self.closed and n == last, **vars(counts))
            for n, counts in enumerate(self.said)
        ]

    @property
    def counted(self) -> Counts:
        """The counts to be charged."""
        said = [replace(c, cached_tokens=min(c.cached_tokens, c.prompt_tokens)) for c in self.said]
        most = Counts(*(max(getattr(c, field.name) for c in said) for field in fields(Counts)))
        return most if self.attempt == 1 else replace(most, prompt_tokens=0, cached_tokens=0)


_count = st.integers(0, 100) | st.integers(2**40, 2**50)
_history = st.builds(
    History,
    request=st.sampled_from(["r1", "r2", "r3", "r4"]),
    attempt=st.integers(1, 3),
    said=st.lists(st.builds(Counts, *([_count] * len(fields(Counts)))), min_size=1, max_size=4).map(tuple),
    closed=st.booleans(),
)


@st.composite
def _deliveries(draw: st.DrawFn) -> tuple[list[History], list[list[Usage]]]:
    """Histories, and their messages in any order, some twice, cut into batches. Every message comes at least once."""
    histories = draw(st.lists(_history, max_size=6, unique_by=lambda h: (h.request, h.attempt)))
    sent = [m for history in histories for m in history.messages()]
    again = draw(st.lists(st.sampled_from(sent), max_size=8)) if sent else []
    order = draw(st.permutations(sent + again))
    size = draw(st.integers(1, 5))
    return histories, [order[start : start + size] for start in range(0, len(order), size)]


async def _deliver(database: Database, batches: Iterable[list[Usage]]) -> list[tuple[object, ...]]:
    async with database.write() as connection:
        await connection.execute(delete(tables.usage))
    for batch in batches:
        async with database.write() as connection:
            await usage.book(connection, batch, NOVEMBER_US)
    async with database.read() as connection:
        order = (tables.usage.c.request, tables.usage.c.attempt)
        return [tuple(row) for row in await connection.execute(select(tables.usage).order_by(*order))]


@given(_deliveries())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_order_and_repetition_books_the_same_rows(
    database: Database, sent: tuple[list[History], list[list[Usage]]]
) -> None:
    histories, batches = sent
    rows = await _deliver(database, batches)
    assert rows == await _deliver(database, [[m for h in histories for m in h.messages()]])
    assert [row[:4] for row in rows] == sorted((h.request, h.attempt, len(h.said), h.closed) for h in histories)
    async with database.read() as connection:
        (total,) = await usage.totals(connection, None, 0, 1 << 60, ()) or [None]
    if total:
        assert total.counts == sum((h.counted for h in histories), Counts())
        assert total.requests == len({h.request for h in histories})


async def test_a_closed_row_is_never_opened_again(database: Database) -> None:
    batches = [[message("r", seq=3, output_tokens=8)], [message("r", seq=9, final=False, output_tokens=99)]]
    for order in (batches, batches[::-1], [batches[0] + batches[1]]):
        (row,) = await _deliver(database, order)
        assert row[2:4] == (3, True)


async def test_more_cached_than_prompt_tokens_never_make_a_negative_line(database: Database) -> None:
    async with database.write() as connection:
        await usage.book(connection, [message("r", prompt_tokens=3, cached_tokens=9)], NOVEMBER_US)
    async with database.read() as connection:
        assert [line.quantity for line in await bill.lines(connection, "2026-11", None)] == ["3"]


async def test_two_ledgers_at_once_book_each_row_once(database_url: str) -> None:
    sent = [message(f"r{n:02}", seq=seq, output_tokens=n * seq) for n in range(40) for seq in (1, 2)]
    async with Database.open(database_url) as one, Database.open(database_url) as other:

        async def book(database: Database, order: list[Usage]) -> None:
            for start in range(0, len(order), 10):
                async with database.write() as connection:
                    await usage.book(connection, order[start : start + 10], NOVEMBER_US)

        await asyncio.gather(book(one, sent), book(other, sent[::-1]))
        async with one.read() as connection:
            (total,) = await usage.totals(connection, None, 0, 1 << 60, ())
    assert (total.requests, total.counts.output_tokens) == (40, sum(2 * n for n in range(40)))


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        ((), [({}, 3)]),
        (("deployment",), [({"deployment": "chat"}, 3)]),
        (("hour",), [({"hour": "2026-11-01T00:00:00Z"}, 2), ({"hour": "2026-11-01T01:00:00Z"}, 1)]),
        (("day", "key"), [({"day": "2026-11-01", "key": "k"}, 3)]),
        (("tenant", "model"), [({"tenant": "t", "model": "engine-1"}, 3)]),
    ],
)
async def test_sums_are_by_what_was_asked_for(
    database: Database, group_by: tuple[str, ...], expected: list[tuple[dict[str, str], int]]
) -> None:
    starts = (NOVEMBER_US, NOVEMBER_US + 3599 * 10**6, NOVEMBER_US + 3600 * 10**6, NOVEMBER_US + DAY_US)
    async with database.write() as connection:
        sent = [message(f"r{n}", output_tokens=1, started_us=us) for n, us in enumerate(starts)]
        await usage.book(connection, sent, NOVEMBER_US + DAY_US)
    async with database.read() as connection:
        found = await usage.totals(connection, None, NOVEMBER_US, NOVEMBER_US + DAY_US, group_by)
    assert [(total.group, total.counts.output_tokens) for total in found] == expected


async def test_amounts_of_two_currencies_are_never_added(database: Database) -> None:
    async with database.write() as connection:
        await billing.add_price(connection, None, None, "USD", {"output_pico": 5}, NOVEMBER_US, 1)
        await billing.add_price(connection, None, None, "EUR", {"output_pico": 7}, NOVEMBER_US + 2, 1)
        await billing.add_price(connection, None, None, "USD", {"output_pico": 11}, NOVEMBER_US + 4, 1)
        sent = [message(f"r{n}", output_tokens=1, started_us=NOVEMBER_US + n) for n in range(6)]
        await usage.book(connection, sent, NOVEMBER_US)
    async with database.read() as connection:
        found = await usage.totals(connection, None, 0, 1 << 60, ())
    assert [(total.currency, total.requests, total.amount_pico) for total in found] == [
        ("EUR", 2, 14),
        ("USD", 4, 2 * 5 + 2 * 11),
    ]


async def test_a_months_byte_seconds_are_summed_though_they_do_not_fit_64_bits(database: Database) -> None:
    most = 2**62
    async with database.write() as connection:
        sent = [message(f"r{n}", kv_byte_s=most - n, started_us=NOVEMBER_US) for n in range(5)]
        await usage.book(connection, sent, NOVEMBER_US)
    async with database.read() as connection:
        (total,) = await usage.totals(connection, None, 0, 1 << 60, ())
        (line,) = await bill.lines(connection, "2026-11", None)
    assert total.counts.kv_byte_s == 5 * most - 10
    assert (line.sku, line.quantity) == ("kv", billing.decimal(5 * most - 10, 9))


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 5 * 10**9), st.integers(0, 10**12)),
        max_size=12,
    )
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_sums_by_anything_make_the_whole(database: Database, used: list[tuple[str, str, int, int]]) -> None:
    async with database.write() as connection:
        await connection.execute(delete(tables.usage))
        await connection.execute(delete(tables.prices))
        await billing.add_price(connection, None, None, "USD", {"output_pico": 3, "gpu_s_pico": 7}, 1, 1)
        sent = [
            message(f"r{n}", tenant_id=name, deployment_id=on, output_tokens=count, gpu_us=count, started_us=us)
            for n, (name, on, count, us) in enumerate(used)
        ]
        await usage.book(connection, sent, NOVEMBER_US)
    async with database.read() as connection:
        for group_by in [(), ("tenant",), ("deployment", "model"), ("key", "day"), ("hour",), tuple(usage.GROUPS)]:
            totals = await usage.totals(connection, None, 0, 1 << 60, group_by)
            assert sum((total.counts for total in totals), Counts()) == Counts(
                output_tokens=sum(count for _, _, count, _ in used), gpu_us=sum(count for _, _, count, _ in used)
            )
            priced = sum(count for _, _, count, us in used if us >= 1)
            assert sum(total.amount for total in totals) == priced * (3 * 10**9 + 7 * 10**3)


# ── requests that nobody speaks of any more ───────────────────────────────────────────────────────────────────────────


async def _states(database: Database) -> dict[str, tuple[bool, str, int]]:
    table = tables.usage.c
    async with database.read() as connection:
        found = await connection.execute(select(table.request, table.final, table.finish, table.output_tokens))
        return {row[0]: (row[1], row[2], row[3]) for row in found}


async def test_a_request_that_was_silent_past_its_lease_is_closed_with_what_is_booked(database: Database) -> None:
    now = NOVEMBER_US + usage.LEASE_US
    async with database.write() as connection:
        sent = [
            message("silent", final=False, output_tokens=5, started_us=NOVEMBER_US - 2_000_000),
            message("young", final=False, output_tokens=6),
            message("closed", output_tokens=7, started_us=NOVEMBER_US - 2_000_000),
        ]
        await usage.book(connection, sent, now)
        assert await usage.unreconciled(connection, now) == 1
        assert await usage.close_lost(connection, now) == 1
        assert await usage.close_lost(connection, now) == await usage.unreconciled(connection, now) == 0
    assert await _states(database) == {
        "silent": (True, "lost", 5),
        "young": (False, "open", 6),
        "closed": (True, "stop", 7),
    }


async def test_the_last_word_of_a_gateway_that_comes_back_still_counts(database: Database) -> None:
    later = NOVEMBER_US + 2 * usage.LEASE_US
    async with database.write() as connection:
        await usage.book(connection, [message("r", seq=3, final=False, output_tokens=5)], NOVEMBER_US)
        await usage.close_lost(connection, later)
        again = message("r", seq=3, final=False, output_tokens=5)
        await usage.book(connection, [again], later)
    assert await _states(database) == {"r": (True, "lost", 5)}
    async with database.write() as connection:
        await usage.book(connection, [message("r", seq=4, output_tokens=9)], later)
    assert await _states(database) == {"r": (True, "stop", 9)}


async def test_rows_of_a_closed_period_stay_as_they_are_open_or_not(database: Database) -> None:
    closed = NOVEMBER_US + 40 * DAY_US
    async with database.write() as connection:
        await usage.book(connection, [message("r", final=False, output_tokens=5)], NOVEMBER_US)
        assert await usage.close_lost(connection, closed) == await usage.unreconciled(connection, closed) == 0
    assert await _states(database) == {"r": (False, "open", 5)}
