"""The bill is right for any process that dies: a platform under load is hurt at random moments. Afterwards the clients'
records are compared with the bill (checker.py says how), and the devices' time with the charges.

A run is named by its seed, STACCATO_CHAOS_SEED: the seed determines the requests and the plan of faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.billing.formats import FORMATS, ExportQuery, write
from store.bus import Bus
from store.contract import wire
from store.db.database import Database, now_us
from store.db.usage import period_of
from tests.chaos import nemesis as chaos
from tests.chaos import workload
from tests.chaos.checker import billed, flaws
from tests.chaos.devices import REPORT_AGE_S, Devices, used_us
from tests.chaos.history import Ask, End, Seen, ask
from tests.chaos.ledgers import CONSUMER, booked, ledger
from tests.chaos.nemesis import Hurt, Kill, Lock, Nemesis, Pause, RestartServer
from tests.conftest import NatsServer, free_port
from tests.databases import Postgres
from tests.e2e.conftest import READY_S, Platform

Kind = tuple[str, str, str]  # of a file: period, format, detail
RUNTIMES = 2
CLIENTS = 8
PAUSE_S = 0.3  # of a client that was refused or reached no gateway
SETTLED_S = 90.0
CALM, CALM_ROUNDS = 12, 8  # requests
LEASE_S = 1.5  # until the next lease has come
STATUSES = {0, 200, 400, 401, 404, 429, 503}


@pytest.fixture
def seed() -> Iterator[int]:
    chosen = int(os.environ.get("STACCATO_CHAOS_SEED", "1"))
    print(f"STACCATO_CHAOS_SEED={chosen}")  # pytest shows it with a failure
    yield chosen


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def server(request: pytest.FixtureRequest) -> Postgres | None:
    if request.param == "sqlite":
        return None
    running: Postgres = request.getfixturevalue("postgres_server")
    return running


@dataclass
class Run:
    """A platform, its clients and the clients' records."""

    platform: Platform
    seed: int
    requests: int
    history: list[Seen] = field(default_factory=list)
    answered: int = 0
    gateways_killed: int = 0

    async def clients(self, hurting: asyncio.Task[None]) -> None:
        """Let clients ask until `hurting` is done and `requests` requests at least were answered."""
        numbers = iter(range(1 << 30))
        await asyncio.gather(*(self._client(numbers, hurting) for _ in range(CLIENTS)))

    async def _client(self, numbers: Iterator[int], hurting: asyncio.Task[None]) -> None:
        while self.answered < self.requests or not hurting.done():
            seen = await self._ask(workload.asked(self.seed, next(numbers), self.platform.keys))
            if seen.end in (End.UNREACHED, End.REFUSED):
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, asked: Ask) -> Seen:
        seen = await ask("127.0.0.1", self.platform.port, asked)
        if seen.end is not End.UNREACHED:
            self.history.append(seen)
        self.answered += seen.status == 200
        return seen

    async def past(self, requests: int) -> None:
        """Return when `requests` requests were answered."""
        while self.answered < requests:
            await asyncio.sleep(0.02)

    async def calm(self) -> None:
        """Check that requests that end well are charged the devices' whole time and no more, to the microsecond.

        On a loaded machine a runtime may be taken for dead, and the time of its later work is charged to no tenant. A
        round without a false death has to come.
        """
        for _ in range(CALM_ROUNDS):
            used, booked = await self._times()
            asks = [workload.calm(number, self.platform.keys) for number in range(CALM)]
            assert [seen.end for seen in await asyncio.gather(*map(self._ask, asks))] == [End.DONE] * CALM
            assert await self.settled() == []
            used_then, booked_then = await self._times()
            spent, charged = used_then - used, booked_then - booked
            assert charged and charged <= spent, f"{charged} charged, {spent} spent"
            if charged == spent:
                return
        raise AssertionError(f"in no round all was charged that devices spent, in the last {charged} of {spent}")

    async def _times(self) -> tuple[Counter[str], Counter[str]]:
        """Microseconds that devices spent on each tenant, and microseconds charged to each tenant, by tenant id."""
        await self.until(self.at_rest)
        await asyncio.sleep(LEASE_S)
        used = used_us(gpu["time"] for gpu in await asyncio.to_thread(self.gpus))
        return used, await asyncio.to_thread(self.booked_us)

    # ── the bill ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def periods(self) -> list[str]:
        """Billing periods of the last hour: a run may see the end of a month."""
        return sorted({period_of(now_us() - 3600 * 1_000_000), period_of(now_us())})

    def rows(self) -> list[dict[str, object]]:
        """Rows of the bill, as exported to the operator."""
        found: list[dict[str, object]] = []
        for period in self.periods:
            answer = self.platform.get(f"/api/v1/billing/export?period={period}&format=jsonl&detail=rows")
            assert answer.status_code == 200, answer.text
            found += map(json.loads, answer.text.splitlines())
        return found

    def flaws(self) -> list[str]:
        return list(flaws(self.history, billed(self.rows()), self.gateways_killed))

    def booked_us(self) -> Counter[str]:
        booked: Counter[str] = Counter()
        for row in self.rows():
            booked[str(row["tenant_id"])] += int(str(row["gpu_us"])) + int(str(row["switch_us"]))
        return booked

    # ── rest ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def until(self, done: Callable[[], bool], timeout_s: float = SETTLED_S) -> None:
        await asyncio.to_thread(self.platform.until, done, timeout_s)

    async def settled(self) -> list[str]:
        """Flaws of the bill that are left when every booking has come, or after SETTLED_S."""
        deadline = asyncio.get_running_loop().time() + SETTLED_S
        while (found := await asyncio.to_thread(self.flaws)) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(1)
        return found

    def at_rest(self) -> bool:
        """Whether every runtime has every model, and no request."""
        gpus = self.gpus()
        models = [model for gpu in gpus for model in gpu["models"].values()]
        there = len(gpus) == RUNTIMES and len(models) == RUNTIMES * len(workload.NAMES)
        return there and not sum(gpu["time"]["open_us"] for gpu in gpus) + sum(
            m["running"] + m["waiting"] for m in models
        )

    def gpus(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.platform.get("/api/v1/gpus").json()["data"]
        return found


@contextlib.asynccontextmanager
async def running(folder: Path, server: Postgres | None, seed: int, requests: int) -> AsyncIterator[Run]:
    """A run on a new platform. After the platform has stopped, the whole usage is booked a second time, and the bill
    must not change."""
    settings = {"STACCATO_DRAIN_S": "1", "STACCATO_HANG_S": "4"}
    settings["STACCATO_DATABASE_URL"] = database_url = (
        await server.create(f"chaos_{free_port()}", "template0") if server else f"sqlite:///{folder}/data/staccato.db"
    )
    platform = Platform(folder / "data", free_port(), settings)
    run = Run(platform, seed, requests)
    try:
        await asyncio.to_thread(platform.start, "--runtimes", str(RUNTIMES), "--device-memory", "128MiB")
        await asyncio.to_thread(workload.prepare, platform)
        await run.until(run.at_rest, READY_S)
        yield run
    finally:
        (folder / "history.jsonl").write_text("".join(seen.line() + "\n" for seen in run.history))
        code = await asyncio.to_thread(platform.stop)
    assert code == 0
    before, after = await book_all_again(folder / "again", platform.data / "nats", database_url, run.periods)
    assert changed(before, after) == {}


async def history_is_billed(run: Run, hurts: list[tuple[int, Hurt]], server: Postgres | None) -> None:
    platform, devices = run.platform, Devices()
    nemesis = Nemesis(platform, random.Random(run.seed), server)
    watching = asyncio.create_task(devices.watch(platform))
    async with asyncio.TaskGroup() as group:
        hurting = group.create_task(nemesis.run(hurts, run.past))
        group.create_task(run.clients(hurting))
    run.gateways_killed = nemesis.done[Kill("gateway")]
    print("done to it:", dict(nemesis.done))
    print("seen:", Counter((str(seen.end), seen.status) for seen in run.history))
    await run.until(lambda: platform.get("/readyz").status_code == 200 and run.at_rest(), READY_S)
    await asyncio.sleep(REPORT_AGE_S)  # else the devices' last reports may be older than the last requests
    watching.cancel()
    devices.look(await asyncio.to_thread(run.gpus), time.monotonic())
    assert await run.settled() == []
    assert {seen.status for seen in run.history} <= STATUSES
    assert list(devices.flaws(run.booked_us())) == []

    await run.calm()
    for period in run.periods:
        verified = platform.get(f"/api/v1/usage:verify?period={period}").json()
        assert verified["ok"], verified


async def exports(database_url: str, periods: list[str]) -> dict[Kind, bytes]:
    """Every file of every bill, by period, format and detail."""
    found = {}
    async with Database.open(database_url) as database, database.snapshot() as connection:
        for period, (name, format) in itertools.product(periods, FORMATS.items()):
            for detail in format.details:
                file = io.BytesIO()
                await write(connection, ExportQuery(period, None, name, detail), file)
                found[period, name, detail] = file.getvalue()
    return found


def changed(before: dict[Kind, bytes], after: dict[Kind, bytes]) -> dict[Kind, tuple[list[bytes], list[bytes]]]:
    """Lines that only one of two exports of all bills has, by the kind of the file: lines of `before`, of `after`."""
    kinds = [kind for kind in before | after if before.get(kind) != after.get(kind)]
    lines = {kind: (before.get(kind, b"").splitlines(), after.get(kind, b"").splitlines()) for kind in kinds}
    return {
        kind: ([n for n in old if n not in new], [n for n in new if n not in old]) for kind, (old, new) in lines.items()
    }


async def book_all_again(
    folder: Path, stored: Path, database_url: str, periods: list[str]
) -> tuple[dict[Kind, bytes], dict[Kind, bytes]]:
    """Book every message of the run again: JetStream has kept the messages, and a ledger unknown to JetStream gets them
    all.

    JetStream first delivers messages again that a killed ledger did not acknowledge. JetStream waits half a minute with
    such a message, and the platform may have stopped before.

    Returns the exports of all bills before and after."""
    shutil.copytree(stored, folder / "js")
    nats = NatsServer(folder)
    nats.start()
    try:
        async with Bus.connect(nats.url, "chaos") as bus:
            with ledger(nats.url, database_url):
                await booked(bus)
            before = await exports(database_url, periods)
            await bus._js.delete_consumer(wire.USAGE_STREAM, CONSUMER)
            with ledger(nats.url, database_url):
                await booked(bus)
            assert (await bus._js.consumer_info(wire.USAGE_STREAM, CONSUMER)).delivered.consumer_seq > 0
            return before, await exports(database_url, periods)
    finally:
        nats.kill()


SHORT = 80


def a_few(server: Postgres | None) -> list[tuple[int, Hurt]]:
    """A short plan of faults: the ledger is killed while the ledger can't commit."""
    away: Hurt = RestartServer(4.0) if server else Lock(4.0)
    hurts = [(5, Pause("nats", 1.0)), (15, away), (20, Kill("ledger")), (30, Kill("device")), (42, Kill("nats"))]
    return [*hurts, (52, Kill("gateway")), (64, Pause("node", 3.0))]


@pytest.mark.timeout(600)
async def test_some_requests_amid_a_few_faults(tmp_path: Path, server: Postgres | None, seed: int) -> None:
    async with running(tmp_path, server, seed, SHORT) as run:
        await history_is_billed(run, a_few(server), server)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_thousand_requests_amid_all_faults(tmp_path: Path, server: Postgres | None, seed: int) -> None:
    async with running(tmp_path, server, seed, 1000) as run:
        plan = chaos.plan(random.Random(seed), 1000, 3, server is not None)
        await history_is_billed(run, plan, server)
