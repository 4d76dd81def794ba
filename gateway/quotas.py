"""Who may begin a request now, and go on with it: tenants' limits, held across gateways by slices of shared accounts.

A request is let in from memory. The account is asked, over the bus, before a slice runs out, once a second for what
changed, and by a request for which there is not enough. Without the bus a gateway goes on with what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field

import structlog

from gateway.allowance import Ask, Clock, Grant, Holding, Kind, Need, Rate, Ticket, Witness, exchanged
from gateway.auth import Caller, Target
from gateway.cache import Cache
from gateway.errors import Problem, budget_exhausted, rate_limited
from gateway.meter import Call
from store import budget, wire
from store.billing import Price, cost_pico
from store.bus import Bus, BusError
from store.db import Database, DatabaseError, now_us
from store.tenants import NO_LIMITS, Limits
from store.usage import period_of

log = structlog.get_logger()

TICK_S = 1.0
BEAT_US = 3_000_000  # a gateway that has nothing to say says so, this often
IDLE_TICKS = 3  # then its slice goes back
AGAIN_US = {Kind.REQUESTS: 50_000, Kind.TOKENS: 50_000, Kind.STREAMS: 200_000, Kind.MONEY: 500_000}
AWAY_US = 1_000_000  # before the bus is tried again
TOP_UP_PAUSE_US = 20_000  # when there was not enough
SWAPS_MOST = 20  # lost to other gateways, each to one that won
FETCHES_MOST = 3  # by one request: others may take before it what was there
PRICE_TTL_S = 4.0
BOOKED_TTL_US = 60_000_000


@dataclass(slots=True)
class Lease:
    """One tenant's, at this gateway."""

    tenant_id: str
    holding: Holding
    revision: int | None = None  # of the account in `holding.seen`; None: it was not read yet
    witness: Witness = field(default_factory=Witness)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one exchange at a time
    denied: dict[Kind, tuple[int, int]] = field(default_factory=dict)  # so much is not asked for before that time
    said_us: int = 0
    idle_ticks: int = 0
    booked: int = 0  # pico
    booked_month: str = ""
    booked_us: int = 0  # when it was read; 0: not at all
    users: int = 0  # requests that are open, or wait to be let in
    topping: bool = False
    top_up_us: int = 0  # not before
    away: bool = False  # the last exchange did not come about

    def was_denied(self, kind: Kind, need: Need) -> bool:
        """Just now, as much or less of it."""
        again_us, amount = self.denied.get(kind, (0, 0))
        return _steady_us() < again_us and bool(getattr(need, kind) >= amount)


class Quotas:
    """All tenants' leases at this gateway."""

    def __init__(self, bus: Bus, database: Database, gateway: str, clock: Clock | None = None) -> None:
        self._bus, self._database, self._gateway = bus, database, gateway
        self._clock = clock or Clock(time.time_ns() // 1000 - time.monotonic_ns() // 1000)
        self._leases: dict[str, Lease] = {}
        self._prices: Cache[tuple[str, str, int], Price | None] = Cache(PRICE_TTL_S)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._spawn(self._tend())
        self._spawn(self._follow_bookings())

    async def stop(self, timeout_s: float = 2.0) -> None:
        """Gives back what is not used."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                leaving = (self._leave(lease) for lease in list(self._leases.values()))
                await asyncio.gather(*leaving, return_exceptions=True)

    # ── letting in ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def admit(self, caller: Caller, target: Target) -> Admission | None:
        """None: the tenant has no limits. What is admitted must be closed. Raises Problem, DatabaseError."""
        limits = caller.limits
        if limits == NO_LIMITS:
            return None
        assert caller.tenant_id is not None
        price = await self._price(caller.tenant_id, target, limits) if limits.monthly_budget else None
        lease = self._lease(caller.tenant_id, limits)
        ticket = Ticket(lease.holding)
        if price is not None:
            ticket.prompt_pico, ticket.output_pico = max(price.prompt_pico, price.cached_pico), price.output_pico
        lease.users += 1
        try:
            await self.have(lease, ticket.first_need)
        except BaseException as error:
            lease.users -= 1
            if isinstance(error, Problem):
                error.headers |= self.headers(lease)
            raise
        ticket.open()
        self.top_up(lease, ticket)
        return Admission(self, lease, ticket, price)

    async def have(self, lease: Lease, need: Need) -> None:
        """Returns when all of it is there, to be taken before anything is awaited. Raises Problem, DatabaseError."""
        lacking = lease.holding.lacks(need, _steady_us())
        for _ in range(FETCHES_MOST):
            if lacking is None or lease.was_denied(lacking, need):
                break
            # Of its own: who asks may be cancelled, and what the account has given would be lost with it.
            await asyncio.shield(self._spawn(self._fetch(lease, need)))
            lacking = lease.holding.lacks(need, _steady_us())
        if lacking is not None:
            raise self._refusal(lease, lacking, need)

    def top_up(self, lease: Lease, ticket: Ticket) -> None:
        """Ask for more in time, without waiting for it."""
        if lease.topping or not lease.holding.low or _steady_us() < lease.top_up_us:
            return
        lease.topping = True
        self._spawn(self._topped_up(lease, ticket.output_pico))

    def close(self, lease: Lease) -> None:
        lease.users -= 1
        lease.denied.clear()  # something was given back

    def headers(self, lease: Lease) -> dict[str, str]:
        """OpenAI's, of the rates that are limited."""
        said = {}
        for kind, rate in self._rates(lease):
            said[f"x-ratelimit-limit-{kind}"] = str(rate.limit)
            said[f"x-ratelimit-remaining-{kind}"] = str(rate.remaining)
            said[f"x-ratelimit-reset-{kind}"] = duration_text(rate.full_in_us)
        return said

    def _rates(self, lease: Lease) -> list[tuple[Kind, Rate]]:
        return lease.holding.rates(self._clock.at_us(_steady_us()))

    def _lease(self, tenant_id: str, limits: Limits) -> Lease:
        if not limits.shared:
            return Lease(tenant_id, Holding(limits))  # nobody else need know of it
        lease = self._leases.get(tenant_id)
        if lease is None:
            lease = self._leases[tenant_id] = Lease(tenant_id, Holding(limits))
        if lease.holding.limits != limits:
            lease.holding.limits = limits
            lease.denied.clear()
        lease.idle_ticks = 0
        return lease

    async def _price(self, tenant_id: str, target: Target, limits: Limits) -> Price | None:
        key = (tenant_id, target.deployment_id, target.revision)
        price = await self._prices.get(key, lambda: self._find_price(*key))
        assert limits.monthly_budget is not None
        currency = limits.monthly_budget.currency
        if price is not None and price.currency != currency:
            detail = f"the model's price is in {price.currency} and the tenant's budget in {currency}: they must agree"
            raise budget_exhausted(detail, self._month_left_s(), retry=False)
        return price

    async def _find_price(self, tenant_id: str, deployment_id: str, revision: int) -> Price | None:
        async with self._database.read() as connection:
            return await budget.price(connection, tenant_id, deployment_id, revision, now_us())

    def _refusal(self, lease: Lease, lacking: Kind, need: Need) -> Problem:
        if lease.away:
            detail = "the tenant's limits can't be checked now: try again in a few seconds"
            return Problem(503, "limits_unavailable", detail, headers={"retry-after": "2"})
        limits = lease.holding.limits
        rates = dict(self._rates(lease))
        if lacking is Kind.MONEY:
            return self._no_money(lease, need)
        if lacking is Kind.STREAMS:
            most = limits.concurrent_streams
            return rate_limited(lacking, f"{most} requests of this tenant are being answered, the most at once", 1)
        count = need.requests if lacking is Kind.REQUESTS else need.tokens
        wait_s = max(1, math.ceil(rates[lacking].wait_us(count) / 1e6))
        said = f"this tenant may use {rates[lacking].limit} {lacking} a minute"
        if lacking is Kind.TOKENS:
            said += f", {rates[lacking].remaining} are left and this request may take {count} (lower max_tokens)"
        return rate_limited(lacking, said, wait_s)

    def _no_money(self, lease: Lease, need: Need) -> Problem:
        monthly = lease.holding.limits.monthly_budget
        assert monthly is not None
        if monthly.pico - lease.holding.seen.spent >= need.money:
            return budget_exhausted("what is left of this month's budget is in use by open requests", 1, retry=True)
        detail = f"this month's budget of {monthly.amount} {monthly.currency} is spent: the operator can raise it"
        return budget_exhausted(detail, self._month_left_s(), retry=False)

    def _month_left_s(self) -> int:
        now = now_us()
        return math.ceil((budget.month_us(period_of(now))[1] - now) / 1e6)

    # ── exchanges with the account ────────────────────────────────────────────────────────────────────────────────────

    async def _fetch(self, lease: Lease, need: Need) -> None:
        async with lease.lock:
            lacking = lease.holding.lacks(need, _steady_us())
            if lacking is None or lease.was_denied(lacking, need):
                return  # as somebody who waited in front
            await self._asked(lease, need)
            if lacking := lease.holding.lacks(need, _steady_us()):
                again_us = _steady_us() + (AWAY_US if lease.away else AGAIN_US[lacking])
                lease.denied[lacking] = (again_us, getattr(need, lacking))

    async def _topped_up(self, lease: Lease, token_pico: int) -> None:
        try:
            async with lease.lock:
                need = Need(money=lease.holding.money + token_pico)
                await self._asked(lease, need)
        except DatabaseError as error:
            log.warning("quotas.database", tenant=lease.tenant_id, error=str(error))
        finally:
            lease.topping = False
            lease.top_up_us = _steady_us() + (TOP_UP_PAUSE_US if lease.holding.low else 0)

    async def _asked(self, lease: Lease, need: Need, leaving: bool = False) -> None:
        """An exchange that may fail. Raises DatabaseError."""
        try:
            await self._exchange(lease, need, leaving)
        except (BusError, wire.WireError) as error:
            if not lease.away:
                log.warning("quotas.away", tenant=lease.tenant_id, error=str(error))
            lease.away = True
        else:
            lease.away = False

    async def _exchange(self, lease: Lease, need: Need, leaving: bool) -> None:
        """Raises BusError, WireError, DatabaseError. Under the lease's lock."""
        holding = lease.holding
        for _ in range(SWAPS_MOST):
            if not self._bus.connected:
                raise BusError("the bus is away")
            if lease.revision is None:
                account, lease.revision = await self._bus.read(wire.QUOTAS, lease.tenant_id, wire.Account)
                holding.seen = account or wire.Account()
            await self._enter_month(lease)
            said_us = _steady_us()
            ask = holding.ask(self._gateway, need, lease.booked, leaving)
            account, grant = self._computed(lease, ask, said_us)
            given = holding.give(grant)
            last, lease.revision = lease.revision, None  # not known until it is stored
            lease.revision = await self._bus.swap(wire.QUOTAS, lease.tenant_id, account, last)
            if lease.revision is not None:
                holding.take(grant, account, ask, said_us)
                lease.said_us = said_us
                return
            holding.restore(given)
        raise BusError(f"{SWAPS_MOST} times another gateway was faster: there are too many for this tenant")

    def _computed(self, lease: Lease, ask: Ask, now_us: int) -> tuple[wire.Account, Grant]:
        holding = lease.holding
        self._clock.heard(holding.seen, now_us)
        dead = lease.witness.dead(holding.seen, now_us)
        if dead.intersection(holding.seen.slices):
            lease.booked_us = 0  # what they spent and did not say is booked, or soon will be
        return exchanged(holding.seen, holding.limits, ask, dead, self._clock.at_us(now_us))

    async def _enter_month(self, lease: Lease) -> None:
        """The account's, or the next when it has begun. What is booked must be known before a new account is made."""
        holding = lease.holding
        month = max(period_of(now_us()), holding.seen.month)
        holding.roll(month)
        if holding.limits.monthly_budget and lease.booked_month != month:
            if holding.seen.month == month:
                lease.booked, lease.booked_month, lease.booked_us = 0, month, 0
            else:
                await self._read_booked(lease)

    async def _read_booked(self, lease: Lease) -> None:
        month, monthly = lease.holding.month, lease.holding.limits.monthly_budget
        if not monthly:
            return
        async with self._database.read() as connection:
            booked = await budget.booked_pico(connection, lease.tenant_id, month, monthly.currency)
        if month == lease.holding.month:
            lease.booked, lease.booked_month, lease.booked_us = booked, month, _steady_us()

    # ── once a second ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await asyncio.gather(*(self._tick(lease) for lease in list(self._leases.values())))

    async def _tick(self, lease: Lease) -> None:
        lease.holding.tick()
        lease.idle_ticks = lease.idle_ticks + 1 if not lease.users else 0
        try:
            if lease.idle_ticks >= IDLE_TICKS:
                await self._leave(lease)
            elif lease.holding.moved or lease.holding.low or _steady_us() - lease.said_us >= BEAT_US:
                async with lease.lock:
                    await self._asked(lease, Need())
        except DatabaseError as error:
            log.warning("quotas.database", tenant=lease.tenant_id, error=str(error))

    async def _leave(self, lease: Lease) -> None:
        async with lease.lock:
            await self._asked(lease, Need(), leaving=True)
            if not (lease.users or lease.away):
                self._leases.pop(lease.tenant_id, None)

    async def _follow_bookings(self) -> None:
        """In a loop of its own: the sum over a month may take a while, and slices must not grow old meanwhile."""
        while True:
            await asyncio.sleep(TICK_S)
            for lease in list(self._leases.values()):
                if lease.booked_us and _steady_us() - lease.booked_us < BOOKED_TTL_US:
                    continue
                try:
                    await self._read_booked(lease)
                except DatabaseError as error:
                    log.warning("quotas.database", tenant=lease.tenant_id, error=str(error))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@dataclass(slots=True)
class Admission:
    """One request that was let in, until it is closed."""

    quotas: Quotas
    lease: Lease
    ticket: Ticket
    price: Price | None
    call: Call | None = None  # once there is one

    @property
    def exhausted(self) -> bool:
        """The budget ended it."""
        return self.ticket.exhausted

    async def begin(self, prompt_tokens: int, max_tokens: int) -> int:
        """Reserve what a prompt and its answer may take; how many tokens the answer may have. Raises Problem."""
        most = self.ticket.output_most(prompt_tokens, max_tokens)
        if most < 1:
            limit = self.lease.holding.limits.tokens_per_minute
            detail = f"the prompt has {prompt_tokens} tokens, and this tenant may use {limit} a minute: shorten it"
            raise Problem(400, "request_too_large", detail)
        need = self.ticket.need(prompt_tokens, most)
        await self.quotas.have(self.lease, need)
        self.ticket.begin(need)
        self.quotas.top_up(self.lease, self.ticket)
        return most

    def pay(self, tokens: int) -> bool:
        """For output tokens that came; false when there is no money for them."""
        paid = self.ticket.pay(tokens, _steady_us())
        if self.lease.holding.low_on_money:
            self.quotas.top_up(self.lease, self.ticket)
        return paid

    def headers(self) -> dict[str, str]:
        return self.quotas.headers(self.lease)

    def close(self) -> None:
        """With what was counted until now: once, when nothing more will be."""
        prompt, cost, call = 0, 0, self.call
        if call is not None:
            prompt = call.prompt_tokens
            cost = cost_pico(self.price, call.prompt_tokens, call.cached_tokens, call.output_tokens)
        self.ticket.close(prompt, cost)
        self.quotas.close(self.lease)


def duration_text(us: int) -> str:
    """As OpenAI writes durations: 120ms, 1.5s, 6m0s; rounded up."""
    ms = -(-us // 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    seconds = f"{ms / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds


def _steady_us() -> int:
    return time.monotonic_ns() // 1000
