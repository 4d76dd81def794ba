"""This version takes over the database and the bus of a killed 71e32b0, while clients stream from this version.

The ledger of this version sleeps until clients have the first tokens of long streams. The ledger therefore reads the
old usage while streams run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.inference.meter import UsageJournal
from store.bus import Bus
from store.contract import grants
from store.db.database import head
from tests.chaos.ledgers import BOOKED_S, booked
from tests.conftest import free_port
from tests.e2e.conftest import MODELS, READY_S, Platform
from tests.earlier import installation
from tests.earlier.installation import Installation, Sent, asked

pytestmark = pytest.mark.timeout(600)  # the start of a platform takes minutes on an overloaded machine

LONG_TOKENS = 900
LONG = (("faq", "What is a page?"), ("weather", "How is the weather in Vienna?"))
PICO = Decimal(10) ** 12


@dataclass(frozen=True)
class Takeover:
    """A platform of this version on the data folder of 71e32b0, with the answers of both versions."""

    platform: Platform
    old: Installation
    rows_before: set[str]  # requests booked when the long streams had their first tokens
    whole: list[Sent]  # the questions of the old version's whole answers, asked again
    long: list[Sent]  # streams during the takeover

    def rows(self, requests: list[Sent]) -> dict[str, dict[str, Any]]:
        """Booked rows of the requests, by request. Raises AssertionError if a request has two rows."""
        found = {}
        wanted = {sent.request for sent in requests}
        for row in select(self.platform.data, "SELECT * FROM usage"):
            if row["request"] in wanted:
                assert row["request"] not in found, row
                found[row["request"]] = row
        return found


@pytest.fixture(scope="module")
def takeover(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Takeover]:
    old = installation.read()
    platform = Platform(tmp_path_factory.mktemp("takeover") / "data", free_port())
    platform.data.mkdir()
    installation.unpack(platform.data)
    point_to_models(platform.data)
    try:
        ledger = start_without_ledger(platform)
        whole, long = again(old.whole), [Sent(*asking) for asking in LONG]
        with asked(platform.url, old.key, whole):
            pass  # afterwards the models are built: long streams begin at the same time
        with asked(platform.url, old.key, long, ignore_eos=True, max_tokens=LONG_TOKENS) as streams:
            begun(streams, long)
            rows_before = {row["request"] for row in select(platform.data, "SELECT request FROM usage")}
            assert not any(stream.done() for stream in streams)
            ledger.resume()
        asyncio.run(everything_booked(platform, len(old.whole + old.torn + whole + long)))
        yield Takeover(platform, old, rows_before, whole, long)
    finally:
        code = platform.stop()
    assert code == 0
    journal = UsageJournal(platform.data / installation.JOURNAL)
    assert journal.left_behind() == []
    journal.close()


def point_to_models(data: Path) -> None:
    """Write the folders of this tree's models into the database, in place of the recording's folders."""
    with contextlib.closing(sqlite3.connect(data / "staccato.db")) as database, database:
        for name in installation.MODELS:
            path = str(MODELS / name)
            database.execute("UPDATE models SET source = ?, path = ? WHERE name = ?", (path, path, name))


def start_without_ledger(platform: Platform) -> psutil.Process:
    """Start the platform. Returns the ledger's process, stopped before the ledger could read usage."""
    found: list[psutil.Process] = []

    def stop_ledger() -> None:
        deadline = time.monotonic() + READY_S
        while not found and time.monotonic() < deadline:
            if platform.process is not None:
                found.extend(platform.children("store.db.ledger"))
            time.sleep(0.05)
        found[0].suspend()

    stopping = threading.Thread(target=stop_ledger)
    stopping.start()
    platform.start()
    stopping.join()
    return found[0]


def begun(streams: list[Future[Sent]], answers: list[Sent]) -> None:
    """Return once each answer has a token, or has ended. Looks often: the streams last a second or two."""
    deadline = time.monotonic() + READY_S
    while not all(sent.tokens or stream.done() for stream, sent in zip(streams, answers, strict=True)):
        assert time.monotonic() < deadline, f"no first tokens within {READY_S} s"
        time.sleep(0.01)


def again(answers: list[Sent]) -> list[Sent]:
    return [Sent(sent.model, sent.question) for sent in answers]


async def everything_booked(platform: Platform, requests: int) -> None:
    """Return when the ledger has read all of JetStream.

    Waits at most BOOKED_S seconds until the database has the ends of `requests` requests: the ledger must have begun,
    and the gateway must have published the end of each request."""
    url = f"nats://127.0.0.1:{(platform.data / 'nats.port').read_text().strip()}"

    def all_ended() -> bool:
        return len(select(platform.data, "SELECT * FROM usage WHERE final")) >= requests

    async with Bus.connect(url, "test", grants.LEDGER, platform.data / "nats-users" / "ledger.nk") as bus:
        with contextlib.suppress(AssertionError):  # the tests say which request is missing
            await asyncio.to_thread(platform.until, all_ended, BOOKED_S)
        await booked(bus)


def select(data: Path, query: str) -> list[dict[str, Any]]:
    with contextlib.closing(sqlite3.connect(f"file:{data / 'staccato.db'}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(query)]


def counted(answers: list[Sent]) -> dict[str, tuple[int, int]]:
    """Number of prompt tokens and of output tokens sent to clients, by request."""
    return {sent.request: (sent.prompt_tokens, len(sent.tokens)) for sent in answers}


def charged(rows: dict[str, dict[str, Any]]) -> dict[str, tuple[int, int]]:
    return {request: (row["prompt_tokens"], row["output_tokens"]) for request, row in rows.items()}


def test_the_database_is_at_the_head_of_the_migrations(takeover: Takeover) -> None:
    assert select(takeover.platform.data, "SELECT version_num FROM alembic_version") == [{"version_num": head()}]


def test_models_serve_the_old_key_without_help_and_say_the_tokens_of_71e32b0(takeover: Takeover) -> None:
    said = {(sent.model, sent.question): sent.tokens for sent in takeover.whole if sent.ended}
    assert said == {(sent.model, sent.question): sent.tokens for sent in takeover.old.whole}


def test_the_deployments_of_71e32b0_are_awake(takeover: Takeover) -> None:
    shown = takeover.platform.get("/api/v1/deployments", key=takeover.old.key).json()["data"]
    assert {row["name"]: row["status"]["phase"] for row in shown} == dict.fromkeys(installation.MODELS, "awake")


def test_an_answer_that_ended_in_71e32b0_is_booked_once_with_the_tokens_of_its_client(takeover: Takeover) -> None:
    rows = takeover.rows(takeover.old.whole)
    assert charged(rows) == counted(takeover.old.whole)
    assert {row["finish"] for row in rows.values()} == {"stop"}


def test_an_answer_in_mid_stream_at_the_kill_is_charged_as_delivered(takeover: Takeover) -> None:
    rows = takeover.rows(takeover.old.torn)
    assert charged(rows) == counted(takeover.old.torn)
    assert {(row["finish"], row["final"]) for row in rows.values()} == {("gateway_lost", 1)}


def test_streams_run_to_their_end_while_the_ledger_reads_the_old_usage(takeover: Takeover) -> None:
    assert takeover.rows_before == {sent.request for sent in takeover.old.booked}
    assert [(sent.ended, len(sent.tokens)) for sent in takeover.long] == [(True, LONG_TOKENS)] * len(LONG)
    assert charged(takeover.rows(takeover.long)) == counted(takeover.long)


def test_the_tenant_pays_old_and_new_answers_at_the_old_price(takeover: Takeover) -> None:
    old, answers = takeover.old, takeover.old.whole + takeover.old.torn + takeover.whole + takeover.long
    asked_for = f"/api/v1/usage?from={old.started_at}&group_by=tenant"
    (total,) = takeover.platform.get(asked_for, key=old.key).json()["data"]
    prompt, output = (sum(tokens) for tokens in zip(*counted(answers).values(), strict=True))
    assert (total["requests"], total["prompt_tokens"], total["output_tokens"]) == (len(answers), prompt, output)
    assert Decimal(total["amount"]) == (prompt * old.prompt_pico + output * old.output_pico) / PICO
    assert total["currency"] == old.currency
    corrections = takeover.platform.get("/api/v1/billing/corrections", key=old.key).json()["data"]
    assert [row["amount_minor"] for row in corrections] == [old.credit_minor]


def test_usage_and_audit_verify_agree(takeover: Takeover) -> None:
    periods = [row["period"] for row in select(takeover.platform.data, "SELECT DISTINCT period FROM usage")]
    for command in (*(("usage", "verify", "--period", period) for period in periods), ("audit", "verify")):
        environment = os.environ | {"STACCATO_KEY": takeover.platform.admin_key, "STACCATO_URL": takeover.platform.url}
        staccato = str(Path(sys.executable).with_name("staccato"))
        ran = subprocess.run([staccato, *command], env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
