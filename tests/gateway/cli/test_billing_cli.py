"""`staccato usage verify`, `staccato bill correct` and the formats of `staccato bill export`, against a real control
plane."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow.parquet as arrow_parquet
import pytest
from sqlalchemy import update

from gateway.cli.api import ERROR, USAGE
from gateway.config import Settings
from store.db import tables, usage
from store.db.database import Database
from tests.gateway.cli.test_cli import Staccato
from tests.gateway.cli.test_cli import hub as hub
from tests.gateway.cli.test_cli import settings as settings
from tests.gateway.cli.test_cli import staccato as staccato
from tests.store.db.test_usage import NOVEMBER_US, message

PERIOD = "2026-11"


@pytest.fixture
def booked(settings: Settings) -> None:
    async def book() -> None:
        async with Database.open(settings.database_url) as database, database.write() as connection:
            await usage.book(connection, [message("r1", output_tokens=5, gpu_us=10)], NOVEMBER_US)
            right = {"output_tokens": 5, "cached_tokens": 0}
            await connection.execute(update(tables.usage).values(**right))

    asyncio.run(book())


@pytest.mark.parametrize(
    ("format", "begin"),
    [
        ("csv", "period,month,"),
        ("jsonl", '{"period":"2026-11"'),
        ("focus", "BilledCost,"),
        ("cloudevents", '{"id":"r1:1:1"'),
    ],
)
def test_a_bill_is_written_in_every_format(booked: None, staccato: Staccato, format: str, begin: str) -> None:
    ran = staccato("bill", "export", "--period", PERIOD, "--format", format)
    assert ran.code == 0 and ran.out.startswith(begin), ran.err


def test_rows_and_parquet_are_written_to_a_file(booked: None, staccato: Staccato, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    asked = ("bill", "export", "--period", PERIOD, "--format", "parquet", "--detail", "rows", "--output", str(file))
    assert staccato(*asked).code == 0
    assert arrow_parquet.read_table(file).column("request").to_pylist() == ["r1"]
    wrong = staccato("bill", "export", "--period", PERIOD, "--format", "focus", "--detail", "rows")
    assert wrong.code == USAGE and "?detail" in wrong.err


def test_a_right_bill_is_verified(booked: None, staccato: Staccato) -> None:
    ran = staccato("usage", "verify", "--period", PERIOD)
    assert ran.code == 0 and ran.out.splitlines()[2].split() == ["rows", "1"], ran.out
    assert staccato("usage", "verify", "--period", PERIOD, "--json").json["ok"]


def test_a_wrong_bill_is_told_row_by_row_and_fails(booked: None, settings: Settings, staccato: Staccato) -> None:
    async def forge() -> None:
        async with Database.open(settings.database_url) as database, database.write() as connection:
            await connection.execute(update(tables.usage).values(cached_tokens=9))

    asyncio.run(forge())
    ran = staccato("usage", "verify", "--period", PERIOD)
    assert ran.code == ERROR and "9 cached tokens of a prompt of 0" in ran.out
    assert "the bill of 2026-11 is not right: 1 flaws" in ran.err
    report = json.loads(staccato("usage", "verify", "--period", PERIOD, "--json").out)
    assert report["flawed"] == {"counters": 1} and report["flaws"][0]["where"] == "request r1 attempt 1"


def test_a_correction_is_made_in_whole_units_and_once(staccato: Staccato) -> None:
    assert staccato("tenant", "create", "corrected").code == 0
    said = ("bill", "correct", "corrected", "--amount", "-12.50", "--reason", "the outage", "--once", "k1")
    first, again = staccato(*said, "--json"), staccato(*said, "--json")
    assert first.json == again.json and first.json["amount_minor"] == -1250, first.err
    yen = staccato("bill", "correct", "corrected", "--amount", "7", "--currency", "JPY", "--reason", "r", "--json")
    assert (yen.json["amount_minor"], yen.json["currency"]) == (7, "JPY")


@pytest.mark.parametrize("amount", ["1.234", "x", "nan", "1e-9"])
def test_an_amount_that_is_none_is_the_callers_mistake(staccato: Staccato, amount: str) -> None:
    ran = staccato("bill", "correct", "acme", "--amount", amount, "--reason", "r")
    assert ran.code == USAGE and "is no amount" in ran.err
