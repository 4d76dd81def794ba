"""Limits over real NATS: gateways that share a tenant, a gateway's death, a bus away, budgets and the database."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.core import allowance
from gateway.core.allowance import UNIT
from gateway.http.auth import Caller, Target
from gateway.http.errors import Problem
from gateway.inference import admission as quotas
from gateway.inference.admission import Admission, Quotas, duration_text
from gateway.inference.meter import MeteredCall
from store.bus import Bus
from store.contract import wire
from store.contract.deployments import Slo
from store.contract.limits import NO_LIMITS, Account, Budget, Limits
from store.db import billing, tenants, usage
from store.db.database import Database, now_us
from store.db.tenants import SCOPES
from store.db.usage import period_of
from tests.conftest import NatsServer, soon
from tests.store import test_bus

SPEC = wire.EngineSpec(
    key="m",
    path="",
    digest="",
    architecture="",
    dtype="auto",
    max_model_len=100,
    weight_bytes=1,
    kv_bytes_per_token=1,
)
TARGET = Target("d", "chat", 1, SPEC, Slo(), "normal", 1.0, None, "acme", 0.0)
PRICE = 1_000_000  # pico of a token


def caller(limits: Limits, tenant_id: str = "t") -> Caller:
    return Caller(tenant_id, "acme", "k", SCOPES, limits)


@contextlib.asynccontextmanager
async def gateway(server: NatsServer, database: Database, name: str) -> AsyncIterator[Quotas]:
    async with Bus.connect(server.url, name) as bus:
        made = Quotas(bus, database, name)
        await made.start()
        yield made
        await made.stop()


@pytest.fixture
async def base(sqlite_url: str) -> AsyncIterator[Database]:
    async with Database.open(sqlite_url) as database:
        async with database.write() as connection:
            now = now_us()
            await billing.add_price(
                connection, None, None, "USD", {"prompt_pico": PRICE, "output_pico": PRICE}, now, now
            )
        yield database


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorter periods, so that the death of a gateway is noticed in seconds."""
    for name, us in (("TTL_US", 1_500_000), ("TRUST_US", 1_000_000)):
        monkeypatch.setattr(allowance, name, us)
    monkeypatch.setattr(quotas, "BEAT_US", 200_000)
    monkeypatch.setattr(quotas, "TICK_S", 0.1)
    yield


async def refusal(gateway: Quotas, limits: Limits, within: int = 1) -> Problem:
    """The refusal of one of the next `within` requests."""
    with pytest.raises(Problem) as caught:
        for _ in range(within):
            await gateway.admit(caller(limits), TARGET)
    return caught.value


async def admitted(gateway: Quotas, limits: Limits) -> Admission:
    admission = await gateway.admit(caller(limits), TARGET)
    assert admission is not None
    return admission


async def flood(gateways: list[Quotas], limits: Limits, count: int) -> list[Admission]:
    """Ask for `count` requests at once. Returns the requests let in; the rest must be refused with 429."""
    asked = [gateways[n % len(gateways)].admit(caller(limits), TARGET) for n in range(count)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    wrong = [r for r in results if isinstance(r, BaseException) and not isinstance(r, Problem)]
    assert not wrong
    assert {r.status for r in results if isinstance(r, Problem)} <= {429}
    return [r for r in results if isinstance(r, Admission)]


def delivered(admission: Admission, prompt: int, output: int) -> None:
    admission.call = MeteredCall(test_bus.usage("q"), 0, prompt_tokens=prompt, output_tokens=output)


# ── shared ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_tenant_without_limits_is_not_counted(nats_server: NatsServer, base: Database) -> None:
    async with gateway(nats_server, base, "a") as one:
        assert await one.admit(caller(Limits()), TARGET) is None


async def test_a_limit_of_one_request_needs_no_account(nats_server: NatsServer, base: Database) -> None:
    limits = Limits(max_output_tokens=5)
    async with gateway(nats_server, base, "a") as one, Bus.connect(nats_server.url, "eye") as bus:
        admission = await admitted(one, limits)
        assert await admission.begin(10, 50) == 5 and admission.pay(5) and admission.headers() == {}
        admission.close()
        assert await bus.keys(wire.QUOTAS) == []


async def test_two_gateways_together_let_in_what_a_minute_allows(nats_server: NatsServer, base: Database) -> None:
    limits = Limits(requests_per_minute=60)
    async with gateway(nats_server, base, "a") as one, gateway(nats_server, base, "b") as other:
        began = asyncio.get_running_loop().time()
        let_in = await flood([one, other], limits, 300)
        took_s = asyncio.get_running_loop().time() - began
        assert 54 <= len(let_in) <= 60 + took_s + 1  # 1 comes back per second; a slice may be left unused
        problem = await refusal(one, limits, within=20)  # time makes room for a request each second
        assert (problem.status, problem.code, problem.kind) == (429, "rate_limit_exceeded", "requests")
        assert problem.headers["retry-after"] == "1"
        assert problem.headers["x-ratelimit-limit-requests"] == "60"
        assert problem.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_tenant_at_one_gateway_of_several_has_nearly_all_of_its_limit(
    nats_server: NatsServer, base: Database
) -> None:
    limits = Limits(requests_per_minute=60)
    async with gateway(nats_server, base, "a") as one, gateway(nats_server, base, "b") as other:
        for admission in await flood([other], limits, 1):
            admission.close()
        let_in = await flood([one], limits, 100)
        assert 55 <= len(let_in) <= 61


async def test_streams_are_counted_across_gateways_and_given_back(nats_server: NatsServer, base: Database) -> None:
    limits = Limits(concurrent_streams=3)
    async with gateway(nats_server, base, "a") as one, gateway(nats_server, base, "b") as other:
        open = [await admitted(one, limits), await admitted(other, limits), await admitted(one, limits)]
        problem = await refusal(other, limits)
        assert (problem.status, problem.kind) == (429, "streams") and problem.headers["retry-after"] == "1"
        open.pop().close()
        async with asyncio.timeout(30):  # within a tick, and the pause between two fetches
            while True:
                with contextlib.suppress(Problem):
                    open.append(await admitted(other, limits))
                    break
                await asyncio.sleep(0.05)
        assert (await refusal(one, limits)).kind == "streams"
        for admission in open:
            admission.close()


async def test_streams_of_a_gateway_that_was_killed_come_back(
    nats_server: NatsServer, base: Database, quick: None
) -> None:
    limits = Limits(concurrent_streams=2)
    async with gateway(nats_server, base, "a") as one, Bus.connect(nats_server.url, "dead") as bus:
        dead = Quotas(bus, base, "dead")  # not started: no task tends the leases, as after a kill
        await admitted(dead, limits)
        await admitted(dead, limits)
        assert (await refusal(one, limits)).kind == "streams"

        async def let_in() -> bool:
            with contextlib.suppress(Problem):
                (await admitted(one, limits)).close()
                return True
            return False

        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(60):
            while not await let_in():
                await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - began > 1.0, "not before its time"


async def test_a_tenant_that_is_idle_holds_nothing(nats_server: NatsServer, base: Database, quick: None) -> None:
    async with gateway(nats_server, base, "a") as one, Bus.connect(nats_server.url, "eye") as bus:
        (await admitted(one, Limits(concurrent_streams=5, requests_per_minute=600))).close()
        async with asyncio.timeout(30):
            while True:
                account, _ = await bus.read(wire.QUOTAS, "t", Account)
                assert account is not None
                if not account.slices:
                    break
                await asyncio.sleep(0.05)


async def test_one_that_gives_up_while_it_waits_leaves_nothing_behind(nats_server: NatsServer, base: Database) -> None:
    limits = Limits(concurrent_streams=1)
    async with gateway(nats_server, base, "a") as one:
        asking = asyncio.create_task(one.admit(caller(limits), TARGET))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(30):
            (await admitted(one, limits)).close()


# ── without the bus ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_the_bus_it_goes_on_with_what_it_has_and_then_refuses_until_the_bus_is_back(
    nats_server: NatsServer, base: Database, quick: None
) -> None:
    limits = Limits(requests_per_minute=160, concurrent_streams=50)
    async with gateway(nats_server, base, "a") as one, Bus.connect(nats_server.url, "eye") as bus:
        (await admitted(one, limits)).close()
        nats_server.kill()
        await soon(lambda: not bus.connected)
        let_in = 0
        while True:
            try:
                (await admitted(one, limits)).close()
                let_in += 1
            except Problem as problem:
                assert (problem.status, problem.code) == (503, "limits_unavailable")
                assert int(problem.headers["retry-after"]) >= 1
                break
        assert 0 < let_in < 160
        nats_server.start()

        async def back() -> bool:
            with contextlib.suppress(Problem):
                (await admitted(one, limits)).close()
                return True
            return False

        async with asyncio.timeout(20):
            while not await back():
                await asyncio.sleep(0.1)


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_tokens_are_reserved_and_what_was_not_used_comes_back(nats_server: NatsServer, base: Database) -> None:
    limits = Limits(tokens_per_minute=100)
    async with gateway(nats_server, base, "a") as one:
        first, second = await admitted(one, limits), await admitted(one, limits)
        assert await first.begin(10, 50) == 50
        with pytest.raises(Problem) as caught:
            await second.begin(10, 50)
        assert caught.value.kind == "tokens" and 1 <= int(caught.value.headers["retry-after"]) <= 12
        assert first.pay(5)
        delivered(first, 10, 5)
        first.close()
        assert await second.begin(10, 50) == 50
        said = second.headers()
        assert said["x-ratelimit-limit-tokens"] == "100" and 25 <= int(said["x-ratelimit-remaining-tokens"]) <= 30
        assert said["x-ratelimit-reset-tokens"].startswith(("42s", "43", "44", "45"))
        second.close()


async def test_a_prompt_that_no_minute_has_room_for_is_refused_for_good(
    nats_server: NatsServer, base: Database
) -> None:
    async with gateway(nats_server, base, "a") as one:
        admission = await admitted(one, Limits(tokens_per_minute=100))
        with pytest.raises(Problem, match="the prompt has 100 tokens, and this tenant may use 100 a minute") as caught:
            await admission.begin(100, 5)
        assert caught.value.status == 400
        assert await admission.begin(90, 50) == 10
        admission.close()


# ── money ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def budget(tokens: int, currency: str = "USD") -> Limits:
    """A budget for `tokens` tokens at PRICE."""
    return Limits(monthly_budget=Budget(amount=billing.decimal(tokens * PRICE, 12), currency=currency))


async def test_a_budget_pays_to_its_last_token_and_then_lets_nobody_in(nats_server: NatsServer, base: Database) -> None:
    limits = budget(5000)
    async with gateway(nats_server, base, "a") as one:
        admission = await admitted(one, limits)
        await admission.begin(100, 9000)
        paid = 0
        while admission.pay(7):
            paid += 7
            await asyncio.sleep(0.001)  # as between two frames: the slice is topped up meanwhile
        assert paid == 4900 and admission.exhausted
        problem = await refusal(one, limits)
        assert problem.code == "budget_exhausted" and problem.headers["retry-after"] == "1", "it may not be used"
        delivered(admission, 100, 4900)
        admission.close()
        await asyncio.sleep(0.6)
        problem = await refusal(one, limits)
        assert (problem.status, problem.code, problem.kind) == (429, "budget_exhausted", "insufficient_quota")
        assert problem.headers["x-should-retry"] == "false"
        assert 0 < int(problem.headers["retry-after"]) <= 31 * 86_400


async def test_a_limit_that_is_raised_holds_at_once(nats_server: NatsServer, base: Database) -> None:
    async with gateway(nats_server, base, "a") as one:
        await book(base, "t", 1000)
        assert (await refusal(one, budget(1000))).code == "budget_exhausted"
        (await admitted(one, budget(1001))).close()
        first = await admitted(one, Limits(concurrent_streams=1))
        assert (await refusal(one, Limits(concurrent_streams=1))).kind == "streams"
        (await admitted(one, Limits(concurrent_streams=2))).close()
        first.close()


async def test_a_budget_is_shared_by_gateways_and_never_exceeded(nats_server: NatsServer, base: Database) -> None:
    limits = budget(2000)
    async with gateway(nats_server, base, "a") as one, gateway(nats_server, base, "b") as other:
        admissions = [await admitted(one, limits), await admitted(other, limits)]
        for admission in admissions:
            await admission.begin(1, 5000)
        made = [0, 0]
        async with asyncio.timeout(30):
            while not all(admission.exhausted for admission in admissions):
                for n, admission in enumerate(admissions):
                    if not admission.exhausted and admission.pay(1):
                        made[n] += 1
                await asyncio.sleep(0.002)
        assert 1900 <= sum(made) <= 1998 and min(made) > 100
        for admission, output in zip(admissions, made, strict=True):
            delivered(admission, 1, output)
            admission.close()


async def book(database: Database, tenant_id: str, tokens: int) -> None:
    async with database.write() as connection:
        now = now_us()
        used = wire.replace(
            test_bus.usage(f"q{now}"), tenant_id=tenant_id, prompt_tokens=0, output_tokens=tokens, started_at=now / 1e6
        )
        await usage.book(connection, [used], now)


async def test_what_is_booked_of_the_month_is_spent_though_the_bus_forgot_it(
    nats_server: NatsServer, base: Database
) -> None:
    await book(base, "t", 990)
    async with gateway(nats_server, base, "a") as one:
        admission = await admitted(one, budget(1000))
        await admission.begin(5, 50)
        paid = 0
        while admission.pay(1):
            paid += 1
            await asyncio.sleep(0)
        assert paid == 5
        admission.close()


async def test_what_was_spent_and_is_not_booked_is_known_to_a_gateway_that_starts(
    nats_server: NatsServer, base: Database
) -> None:
    async with gateway(nats_server, base, "a") as one:
        admission = await admitted(one, budget(1000))
        await admission.begin(100, 5000)
        assert admission.pay(800)
        delivered(admission, 100, 800)
        admission.close()
    async with gateway(nats_server, base, "b") as next, Bus.connect(nats_server.url, "eye") as bus:
        admission = await admitted(next, budget(1000))
        with pytest.raises(Problem, match="is spent|in use"):
            await admission.begin(100, 10)
        admission.close()
        account, _ = await bus.read(wire.QUOTAS, "t", Account)
        assert account is not None
        assert (account.month, account.spent) == (period_of(now_us()), Decimal(900 * PRICE))


async def test_a_price_in_another_currency_than_the_budget_is_refused(nats_server: NatsServer, base: Database) -> None:
    async with gateway(nats_server, base, "a") as one:
        problem = await refusal(one, budget(1000, "EUR"))
        assert problem.code == "budget_exhausted" and "USD" in problem.detail and "EUR" in problem.detail


async def test_what_has_no_price_costs_nothing(nats_server: NatsServer, sqlite_url: str) -> None:
    async with Database.open(sqlite_url) as database, gateway(nats_server, database, "a") as one:
        admission = await admitted(one, Limits(monthly_budget=Budget(amount="0")))
        await admission.begin(100, 5000)
        assert admission.pay(5000) and not admission.exhausted
        admission.close()


@pytest.mark.parametrize(
    ("us", "said"),
    [(0, "0ms"), (1, "1ms"), (120_000, "120ms"), (8_640_000, "8.64s"), (360_000_000, "6m0s"), (61_500_000, "1m1.5s")],
)
def test_durations_are_written_as_openai_does(us: int, said: str) -> None:
    assert duration_text(us) == said


async def test_limits_are_kept_with_the_tenant(database: Database) -> None:
    limits = Limits(requests_per_minute=5, monthly_budget=Budget(amount="12.50"))
    async with database.write() as connection:
        made = await tenants.create(connection, "acme", 1, 1.0, limits)
        assert await tenants.tenant(connection, "acme") == made and made.limits == limits
        assert limits.monthly_budget is not None and limits.monthly_budget.pico == 12_500_000_000_000
        await tenants.change(connection, made, 2.0, NO_LIMITS, keep_prefixes=False)
        seen = await tenants.tenant(connection, "acme")
        assert seen is not None and (seen.weight, seen.limits, seen.keep_prefixes) == (2.0, NO_LIMITS, False)


async def test_an_account_that_the_bus_has_lost_goes_on_as_gateways_knew_it(
    nats_server: NatsServer, base: Database, quick: None, tmp_path: Path
) -> None:
    """Neither the budget, spent and not booked yet, nor the rate of the minute begins anew."""
    limits = wire.replace(budget(1000), requests_per_minute=5)  # twelve seconds give a request back
    async with gateway(nats_server, base, "a") as one:
        admission = await admitted(one, limits)
        await admission.begin(100, 5000)
        assert admission.pay(800)
        delivered(admission, 100, 800)
        admission.close()
        await soon(lambda: one._leases == {} or all(lease.holding.seen.spent for lease in one._leases.values()))
        keeping = await admitted(one, limits)  # a tenant without requests is forgotten
        nats_server.kill()
        shutil.rmtree(tmp_path / "nats" / "js")
        await soon(lambda: not one._bus.connected)
        nats_server.start()
        await soon(lambda: one._bus.connected)
        async with Bus.connect(nats_server.url, "eye") as bus, asyncio.timeout(20):
            account = None
            while account is None:
                account, _ = await bus.read(wire.QUOTAS, "t", Account)
                await asyncio.sleep(0.1)
        assert account.spent == Decimal(900 * PRICE)
        assert account.requests.left < 5 * UNIT
        keeping.close()
        async with gateway(nats_server, base, "b") as next:
            with pytest.raises(Problem, match="is spent|in use"):
                await (await admitted(next, limits)).begin(100, 10)
