"""Admission of requests by tenants' limits. Gateways hold a limit together by slices of a shared account.

A request is let in from memory. The gateway asks the account, over the bus, before a slice runs out, once a second if
the slice changed, and for a request that finds too little in the slice. Without the bus, a gateway goes on with its
slice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace

import structlog

from gateway.core.allowance import Clock, Grant, Holding, Kind, Need, Rate, SliceRequest, Ticket, Witness, exchanged
from gateway.http.auth import Caller, Target
from gateway.http.cache import Cache
from gateway.http.errors import Problem, budget_exhausted, rate_limited
from gateway.inference.meter import MeteredCall
from store.bus import Bus, BusError
from store.contract import wire
from store.contract.limits import NO_LIMITS, Account, Limits
from store.db import budget
from store.db.billing import Price, cost_pico
from store.db.database import Database, DatabaseError, now_us
from store.db.usage import period_of

log = structlog.get_logger()

TICK_S = 1.0
BEAT_US = 3_000_000  # longest time between two exchanges: a gateway with an unchanged slice shows that it lives
IDLE_TICKS = 3  # ticks without a request, after which the slice goes back
AGAIN_US = {Kind.REQUESTS: 50_000, Kind.TOKENS: 50_000, Kind.STREAMS: 200_000, Kind.MONEY: 500_000}
AWAY_US = 1_000_000  # before the bus is tried again
TOP_UP_PAUSE_US = 20_000  # to the next top-up, if the last top-up brought too little
SWAPS_MOST = 20  # lost in a row, each to a gateway that was faster
FETCHES_MOST = 3  # for one request: a rival request may take the fetched amount first
PRICE_TTL_S = 4.0
BOOKED_TTL_US = 60_000_000


@dataclass(slots=True)
class TenantAllowance:
    """The slice of one tenant at this gateway."""

    tenant_id: str
    holding: Holding
    revision: int | None = None  # of the account in `holding.seen`; None: the account must be read
    witness: Witness = field(default_factory=Witness)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one exchange at a time
    denied: dict[Kind, tuple[int, int]] = field(default_factory=dict)  # (time, amount): no fetch of `amount` until then
    said_us: int = 0
    idle_ticks: int = 0
    booked: int = 0  # pico
    booked_month: str = ""
    booked_us: int = 0  # when `booked` was read; 0: not at all
    users: int = 0  # requests that are open, or wait to be let in
    topping: bool = False
    top_up_us: int = 0  # earliest time of the next top-up
    away: bool = False  # the last exchange failed

    def was_denied(self, kind: Kind, need: Need) -> bool:
        """Whether the account just denied the need's amount of `kind`, or a smaller amount."""
        again_us, amount = self.denied.get(kind, (0, 0))
        return _steady_us() < again_us and bool(getattr(need, kind) >= amount)


class Quotas:
    """Leases of tenants' limits at this gateway."""

    def __init__(
        self, bus: Bus, database: Database, gateway: str, clock: Clock | None = None, kept_s: float = 0.0
    ) -> None:
        """`kept_s`: seconds for which known prices go on without the database."""
        self._bus, self._database, self._gateway = bus, database, gateway
        self._clock = clock or Clock(time.time_ns() // 1000 - time.monotonic_ns() // 1000)
        self._leases: dict[str, TenantAllowance] = {}
        self._prices: Cache[tuple[str, str, int], Price | None] = Cache(PRICE_TTL_S, kept_s)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._spawn(self._tend())
        self._spawn(self._follow_bookings())

    async def stop(self, timeout_s: float = 2.0) -> None:
        """End the tasks, and give unused parts of slices back to the accounts."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                leaving = (self._leave(lease) for lease in list(self._leases.values()))
                await asyncio.gather(*leaving, return_exceptions=True)

    # ── letting in ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def admit(
        self, caller: Caller, target: Target, generates: bool = True, resumes: bool = False
    ) -> Admission | None:
        """Let a request in. Returns an admission, which the caller must close, or None for a tenant without limits.

        `generates`: the request takes tokens and money, too. `resumes`: the request was let in before, and may still
        count as an open stream at another gateway. Raises Problem, DatabaseError.
        """
        limits = caller.limits
        if limits == NO_LIMITS:
            return None
        assert caller.tenant_id is not None
        priced = limits.monthly_budget and generates
        price = await self._price(caller.tenant_id, target, limits) if priced else None
        lease = self._lease(caller.tenant_id, limits)
        ticket = Ticket(lease.holding)
        if price is not None:
            ticket.prompt_pico, ticket.output_pico = max(price.prompt_pico, price.cached_pico), price.output_pico
        lease.users += 1
        try:
            first = replace(ticket.first_need, streams=0) if resumes else ticket.first_need
            await self.have(lease, first if generates else replace(first, tokens=0, money=0))
        except BaseException as error:
            lease.users -= 1
            if isinstance(error, Problem):
                error.headers |= self.headers(lease)
            raise
        ticket.open()
        self.top_up(lease, ticket)
        return Admission(self, lease, ticket, price)

    async def have(self, lease: TenantAllowance, need: Need) -> None:
        """Return when the slice holds the whole need. The caller must take the need before any await.

        Raises Problem, DatabaseError.
        """
        lacking = lease.holding.lacks(need, _steady_us())
        for _ in range(FETCHES_MOST):
            if lacking is None or lease.was_denied(lacking, need):
                break
            # A task of its own: the request may be cancelled, and would lose what the account has given.
            await asyncio.shield(self._spawn(self._fetch(lease, need)))
            lacking = lease.holding.lacks(need, _steady_us())
        if lacking is not None:
            raise self._refusal(lease, lacking, need)

    def top_up(self, lease: TenantAllowance, ticket: Ticket) -> None:
        """Ask the account for more before the slice runs out, without waiting for the answer."""
        if lease.topping or not lease.holding.low or _steady_us() < lease.top_up_us:
            return
        lease.topping = True
        self._spawn(self._topped_up(lease, ticket.output_pico))

    def close(self, lease: TenantAllowance) -> None:
        lease.users -= 1
        lease.denied.clear()  # something was given back

    def headers(self, lease: TenantAllowance) -> dict[str, str]:
        """OpenAI's rate-limit headers, for the limited rates."""
        said = {}
        for kind, rate in self._rates(lease):
            said[f"x-ratelimit-limit-{kind}"] = str(rate.limit)
            said[f"x-ratelimit-remaining-{kind}"] = str(rate.remaining)
            said[f"x-ratelimit-reset-{kind}"] = duration_text(rate.full_in_us)
        return said

    def _rates(self, lease: TenantAllowance) -> list[tuple[Kind, Rate]]:
        return lease.holding.rates(self._clock.at_us(_steady_us()))

    def _lease(self, tenant_id: str, limits: Limits) -> TenantAllowance:
        if not limits.shared:
            return TenantAllowance(
                tenant_id, Holding(limits)
            )  # no limit is shared: other gateways need not know of the lease
        lease = self._leases.get(tenant_id)
        if lease is None:
            lease = self._leases[tenant_id] = TenantAllowance(tenant_id, Holding(limits))
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

    def _refusal(self, lease: TenantAllowance, lacking: Kind, need: Need) -> Problem:
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
            left = rates[lacking].remaining
            said += f", {left} are left and this request may take {count} (send less, or lower max_tokens)"
        return rate_limited(lacking, said, wait_s)

    def _no_money(self, lease: TenantAllowance, need: Need) -> Problem:
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

    async def _fetch(self, lease: TenantAllowance, need: Need) -> None:
        async with lease.lock:
            lacking = lease.holding.lacks(need, _steady_us())
            if lacking is None or lease.was_denied(lacking, need):
                return  # an earlier waiter for the lock fetched enough, or was denied
            await self._asked(lease, need)
            if lacking := lease.holding.lacks(need, _steady_us()):
                again_us = _steady_us() + (AWAY_US if lease.away else AGAIN_US[lacking])
                lease.denied[lacking] = (again_us, getattr(need, lacking))

    async def _topped_up(self, lease: TenantAllowance, token_pico: int) -> None:
        try:
            async with lease.lock:
                need = Need(money=lease.holding.money + token_pico)
                await self._asked(lease, need)
        except DatabaseError as error:
            log.warning("quotas.database", tenant=lease.tenant_id, error=str(error))
        finally:
            lease.topping = False
            lease.top_up_us = _steady_us() + (TOP_UP_PAUSE_US if lease.holding.low else 0)

    async def _asked(self, lease: TenantAllowance, need: Need, leaving: bool = False) -> None:
        """Make an exchange. If the bus fails, the lease counts as `away`. Raises DatabaseError."""
        try:
            await self._exchange(lease, need, leaving)
        except (BusError, wire.WireError) as error:
            if not lease.away:
                log.warning("quotas.away", tenant=lease.tenant_id, error=str(error))
            lease.away = True
        else:
            lease.away = False

    async def _exchange(self, lease: TenantAllowance, need: Need, leaving: bool) -> None:
        """Exchange with the account. The caller holds the lease's lock. Raises BusError, WireError, DatabaseError."""
        holding = lease.holding
        for _ in range(SWAPS_MOST):
            if not self._bus.connected:
                raise BusError("the bus is away")
            if lease.revision is None:
                account, lease.revision = await self._bus.read(wire.QUOTAS, lease.tenant_id, Account)
                holding.seen = account or holding.seen  # an account lost by the bus goes on as last seen
            await self._enter_month(lease)
            said_us = _steady_us()
            ask = holding.ask(self._gateway, need, lease.booked, leaving)
            account, grant = self._computed(lease, ask, said_us)
            given = holding.give(grant)
            last, lease.revision = lease.revision, None  # unknown until the account is stored
            lease.revision = await self._bus.swap(wire.QUOTAS, lease.tenant_id, account, last)
            if lease.revision is not None:
                holding.take(grant, account, ask, said_us)
                lease.said_us = said_us
                return
            holding.restore(given)
        raise BusError(f"{SWAPS_MOST} times another gateway was faster: there are too many for this tenant")

    def _computed(self, lease: TenantAllowance, ask: SliceRequest, now_us: int) -> tuple[Account, Grant]:
        holding = lease.holding
        self._clock.heard(holding.seen, now_us)
        dead = lease.witness.dead(holding.seen, now_us)
        if dead.intersection(holding.seen.slices):
            lease.booked_us = 0  # money that the dead gateways spent and did not report is booked, or soon will be
        return exchanged(holding.seen, holding.limits, ask, dead, self._clock.at_us(now_us))

    async def _enter_month(self, lease: TenantAllowance) -> None:
        """Enter the account's month, or the next month if begun. Bookings must be known before an account is made."""
        holding = lease.holding
        month = max(period_of(now_us()), holding.seen.month)
        holding.roll(month)
        if holding.limits.monthly_budget and lease.booked_month != month:
            if holding.seen.month == month:
                lease.booked, lease.booked_month, lease.booked_us = 0, month, 0
            else:
                await self._read_booked(lease)

    async def _read_booked(self, lease: TenantAllowance) -> None:
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

    async def _tick(self, lease: TenantAllowance) -> None:
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

    async def _leave(self, lease: TenantAllowance) -> None:
        async with lease.lock:
            await self._asked(lease, Need(), leaving=True)
            if not (lease.users or lease.away):
                self._leases.pop(lease.tenant_id, None)

    async def _follow_bookings(self) -> None:
        """Follow the bookings in a loop of its own: while the sum over a month is read, slices must not grow old."""
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
    """A request that was let in, until the request is closed."""

    quotas: Quotas
    lease: TenantAllowance
    ticket: Ticket
    price: Price | None
    call: MeteredCall | None = None  # set when the meter has opened the call
    # Tokens of a resumed request that were paid for at another gateway; `_output_left`: not subtracted yet.
    _prompt_before: int = 0
    _output_before: int = 0
    _output_left: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether the budget ended the request."""
        return self.ticket.exhausted

    async def begin(self, prompt_tokens: int, max_tokens: int) -> int:
        """Reserve tokens and money for a prompt and the answer. Returns how many tokens the answer may have.

        Raises Problem.
        """
        most = self.ticket.output_most(prompt_tokens, max_tokens)
        if most < 1:
            limit = self.lease.holding.limits.tokens_per_minute
            detail = f"the prompt has {prompt_tokens} tokens, and this tenant may use {limit} a minute: shorten it"
            raise Problem(400, "request_too_large", detail)
        await self._reserve(self.ticket.need(prompt_tokens, most))
        return most

    async def begin_texts(self, tokens: int) -> None:
        """Reserve tokens and money for texts of `tokens` tokens together, answered with vectors. Raises Problem."""
        if self.ticket.output_most(tokens, 0) < 0:
            limit = self.lease.holding.limits.tokens_per_minute
            detail = f"the texts have {tokens} tokens, and this tenant may use {limit} a minute: send fewer at a time"
            raise Problem(400, "request_too_large", detail)
        await self._reserve(self.ticket.need(tokens, 0))

    async def _reserve(self, need: Need) -> None:
        await self.quotas.have(self.lease, need)
        self.ticket.begin(need)
        self.quotas.top_up(self.lease, self.ticket)

    async def go_on(self, prompt_tokens: int, output_tokens: int, max_tokens: int) -> int:
        """Reserve the rest of a resumed request, whose prompt and first `output_tokens` were paid for elsewhere.

        Returns how many tokens the whole answer may have. Raises Problem."""
        most = self.ticket.output_most(prompt_tokens, max_tokens)
        self._prompt_before, self._output_before = prompt_tokens, output_tokens
        self._output_left = output_tokens
        need = self.ticket.need(0, max(1, most - output_tokens))
        await self.quotas.have(self.lease, need)
        self.ticket.begin(need)
        return most

    def pay(self, tokens: int) -> bool:
        """Pay for `tokens` output tokens. Returns False if the money does not suffice."""
        before = min(tokens, self._output_left)
        self._output_left -= before
        paid = self.ticket.pay(tokens - before, _steady_us())
        if self.lease.holding.low_on_money:
            self.quotas.top_up(self.lease, self.ticket)
        return paid

    def headers(self) -> dict[str, str]:
        return self.quotas.headers(self.lease)

    def close(self) -> None:
        """Close the request with the tokens counted so far. To be called once, when no more tokens will be counted."""
        prompt, cost, call = 0, 0, self.call
        if call is not None:
            prompt = max(0, call.prompt_tokens - self._prompt_before)
            cost = cost_pico(self.price, call.prompt_tokens, call.cached_tokens, call.output_tokens)
            if self._prompt_before and call.prompt_tokens:
                output = min(self._output_before, call.output_tokens)
                cost -= cost_pico(self.price, call.prompt_tokens, call.cached_tokens, output)
        self.ticket.close(prompt, cost)
        self.quotas.close(self.lease)


def duration_text(us: int) -> str:
    """A duration as OpenAI writes durations: 120ms, 1.5s, 6m0s; rounded up to a millisecond."""
    ms = -(-us // 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    seconds = f"{ms / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds


def _steady_us() -> int:
    return time.monotonic_ns() // 1000
