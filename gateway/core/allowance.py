"""How gateways share a tenant's limits without a network call per request: slices of an account. Pure.

    limit ──▶ Account, changed by compare-and-set ──▶ Holding, of one gateway ──▶ Ticket, of one request
              rates: units left, filling with time     taken, and not used yet     reserved, settled at the end
              streams, money: amounts by gateway

The holdings of all gateways together never exceed the limit. Gateways take units of a rate for good: units lost with a
dead gateway fill up again with time. Streams and money are a slice under the gateway's name. A slice becomes free again
when its gateway has been silent for TTL_US. The gateway itself stops using the slice after TRUST_US, so clocks must
agree only on the length of a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum

from store.contract.limits import Account, Level, Limits, Slice

UNIT = 60_000_000  # units of a Level per request or token: a limit of N a minute gains N units a microsecond
TTL_US = 15_000_000
TRUST_US = 10_000_000
SPARE_SHARE = 8  # if several gateways share an account, each takes ahead at most this part (1/8) of the remainder
FIRST_SHARE = 16  # part (1/16) of a rate taken ahead while the tenant's pace is unknown
AHEAD_TOKENS = 1024  # a stream holds money for so many: seconds of output, which may come at once after a pause


class Kind(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    STREAMS = "streams"
    MONEY = "money"


@dataclass(frozen=True, slots=True)
class Need:
    """Requests, tokens, streams and money that must be free before a request, or a step of a request, can begin."""

    requests: int = 0
    tokens: int = 0
    streams: int = 0
    money: int = 0  # pico


@dataclass(frozen=True, slots=True)
class Want:
    """Amounts of one kind: free at the gateway, needed free, and wanted free beyond the need.

    `have` is negative if the account gave away slices that the gateway still uses.
    """

    have: int
    need: int
    like: int

    def change(self, available: int, alone: bool) -> int:
        """Return the amount that the gateway takes, or (negative) gives back; 0 if the need can't be met."""
        left = available + self.have
        if self.need > left:
            return 0
        spare = self.like if alone else min(self.like, (left - self.need) // SPARE_SHARE)
        return min(left, self.need + spare) - self.have


@dataclass(frozen=True, slots=True)
class Grant:
    """Amounts that a holding gains (negative: loses) by an exchange."""

    requests: int = 0
    tokens: int = 0
    streams: int = 0
    money: int = 0


# ── the account ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """A gateway's side of an exchange. `month` is not before the account's month."""

    gateway: str
    beat: int
    leaving: bool
    month: str  # YYYY-MM
    requests: Want
    tokens: Want
    streams: Want
    streams_held: int
    money: Want
    money_held: int
    spent: int  # pico that the gateway spent in this month, since the gateway began
    told: int  # part of `spent` that the account is known to have heard of
    booked: int  # pico: lower bound of the month's bookings in the database


def exchanged(
    account: Account, limits: Limits, ask: SliceRequest, dead: frozenset[str], at_us: int
) -> tuple[Account, Grant]:
    """Return the account after a gateway took and gave back, and the gateway's gain.

    `at_us` is the account's time. `dead` names the gateways whose slices are free again.
    """
    slices = {name: slice for name, slice in account.slices.items() if name not in dead or name == ask.gateway}
    before = account.spent
    if ask.month > account.month:
        before = Decimal(0)
        slices = {name: Slice(slice.beat, slice.streams, Decimal(0), Decimal(0)) for name, slice in slices.items()}
    own = slices.pop(ask.gateway, Slice(0, 0, Decimal(0), Decimal(ask.told)))
    paid = max(0, ask.spent - int(own.spent))
    spent = max(int(before) + paid, ask.booked)
    alone = not slices

    requests, levels_requests = _rate(account.requests, limits.requests_per_minute, ask.requests, alone, at_us)
    tokens, levels_tokens = _rate(account.tokens, limits.tokens_per_minute, ask.tokens, alone, at_us)
    others = sum(slice.streams for slice in slices.values())
    streams = _shared(limits.concurrent_streams, others, own.streams, ask.streams_held, ask.streams, alone)
    budget = limits.monthly_budget.pico - spent if limits.monthly_budget else None
    others = sum(int(slice.money) for slice in slices.values())
    money = _shared(budget, others, max(0, int(own.money) - paid), ask.money_held, ask.money, alone)

    if not ask.leaving:
        held = (ask.streams_held + streams, Decimal(ask.money_held + money))
        slices[ask.gateway] = Slice(ask.beat, *held, Decimal(ask.spent))
    new = Account(requests=levels_requests, tokens=levels_tokens, month=ask.month, spent=Decimal(spent), slices=slices)
    return new, Grant(requests, tokens, streams, money)


def _rate(level: Level, limit: int | None, want: Want, alone: bool, at_us: int) -> tuple[int, Level]:
    if limit is None:
        return -want.have, level
    left = units_left(level, limit, at_us)
    change = want.change(left // UNIT, alone)
    return change, Level(min(limit * UNIT, left - change * UNIT), max(at_us, level.at_us))


def units_left(level: Level, limit: int, at_us: int) -> int:
    """Return the units left of a rate of `limit` a minute. Time that runs backwards adds nothing."""
    return min(limit * UNIT, level.left + limit * max(0, at_us - level.at_us))


def _shared(limit: int | None, others: int, own: int, held: int, want: Want, alone: bool) -> int:
    """Return the change of the streams or money that the account keeps under the gateway's name.

    `own` is the amount in the account, `held` the amount that the gateway believes it holds. `own` is smaller if the
    gateway was taken for dead in the meantime.
    """
    if limit is None:
        return -held
    lost = max(0, held - own)
    available = max(0, limit - others - (held - lost))
    return replace(want, have=want.have - lost).change(available, alone) - lost


@dataclass(frozen=True, slots=True)
class Rate:
    """State of a rate, as far as one gateway knows."""

    limit: int  # a minute
    units: int  # units left

    @property
    def remaining(self) -> int:
        return self.units // UNIT

    @property
    def full_in_us(self) -> int:
        return self.wait_us(self.limit)

    def wait_us(self, count: int) -> int:
        """Return microseconds until `count` requests or tokens are available, if no gateway takes any."""
        return -(min(0, self.units - count * UNIT) // self.limit)


class Clock:
    """The account's time: the clock of the gateway farthest ahead among all gateways that took from an account.

    Account time therefore never runs backwards, and fills no bucket twice when the clocks of gateways disagree.
    """

    def __init__(self, offset_us: int) -> None:
        """`offset_us` turns a clock that is never set into UNIX time: clock + offset."""
        self._offset_us = offset_us

    def at_us(self, now_us: int) -> int:
        return now_us + self._offset_us

    def heard(self, account: Account, now_us: int) -> None:
        newest_us = max(account.requests.at_us, account.tokens.at_us)
        self._offset_us = max(self._offset_us, newest_us - now_us)


class Witness:
    """Tells which gateways are dead: gateways whose slices of one account have not changed for TTL_US."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}  # gateway → beat, and the time when this beat was first seen

    def dead(self, account: Account, now_us: int) -> frozenset[str]:
        """Return the names of dead gateways. `now_us` comes from a clock of this process that is never set."""
        for name, slice in account.slices.items():
            if self._seen.get(name, (-1, 0))[0] != slice.beat:
                self._seen[name] = (slice.beat, now_us)
        self._seen = {name: seen for name, seen in self._seen.items() if name in account.slices}
        return frozenset(name for name, (_, since_us) in self._seen.items() if now_us - since_us >= TTL_US)


# ── what one gateway holds ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Holding:
    """A gateway's part of an account. Requests are admitted and paid from the holding, without a network call."""

    limits: Limits
    requests: int = 0  # taken and not used, like tokens and money below
    tokens: int = 0
    streams: int = 0  # taken, used or not
    open: int = 0  # streams in use
    money: int = 0  # pico
    reserved: int = 0  # pico, by open tickets
    ahead: int = 0  # pico: money that open tickets would like to have in hand
    spent: int = 0  # pico, of `month`
    told: int = 0
    month: str = ""
    beat: int = 0
    until_us: int = 0  # until then the gateway may use its streams and money
    seen: Account = field(default_factory=Account)  # the account after the last exchange
    used_requests: int = 0  # since the last tick; `used_tokens` too
    used_tokens: int = 0
    pace_requests: int = 0  # per tick, lately; `pace_tokens` too
    pace_tokens: int = 0

    def lacks(self, need: Need, now_us: int) -> Kind | None:
        """Return the first kind of `need` that the holding can't cover; None if the holding covers the need."""
        limits, ours = self.limits, now_us < self.until_us
        if limits.requests_per_minute and self.requests < need.requests:
            return Kind.REQUESTS
        if limits.tokens_per_minute and self.tokens < need.tokens:
            return Kind.TOKENS
        if limits.concurrent_streams and need.streams and not (ours and self.streams - self.open >= need.streams):
            return Kind.STREAMS
        if limits.monthly_budget and need.money and not (ours and self.money >= need.money):
            return Kind.MONEY
        return None

    @property
    def low(self) -> bool:
        """True if the gateway should take more before the holding runs out."""
        limits = self.limits
        return bool(
            (limits.requests_per_minute and self.requests * 2 < self._like_requests)
            or (limits.tokens_per_minute and self.tokens * 2 < self._like_tokens)
            or (limits.concurrent_streams and self.streams - self.open < min(1, self.pace_requests))
            or self.low_on_money
        )

    @property
    def low_on_money(self) -> bool:
        return self.money * 2 < self.ahead

    @property
    def _like_requests(self) -> int:
        return max(2 * self.pace_requests, (self.limits.requests_per_minute or 0) // FIRST_SHARE)

    @property
    def _like_tokens(self) -> int:
        return max(2 * self.pace_tokens, (self.limits.tokens_per_minute or 0) // FIRST_SHARE)

    def rates(self, at_us: int) -> list[tuple[Kind, Rate]]:
        """Return the state of each rate that the tenant's limits name."""
        limits, seen = self.limits, self.seen
        known = (
            (Kind.REQUESTS, limits.requests_per_minute, seen.requests, self.requests),
            (Kind.TOKENS, limits.tokens_per_minute, seen.tokens, self.tokens),
        )
        return [
            (kind, Rate(limit, min(limit * UNIT, units_left(level, limit, at_us) + have * UNIT)))
            for kind, limit, level, have in known
            if limit
        ]

    @property
    def moved(self) -> bool:
        """True if the holding used something lately, or holds more streams or money than it would like to."""
        pace = self.pace_requests or self.pace_tokens
        return bool(pace or self.streams > self.open or self.money > self.ahead)

    def tick(self) -> None:
        """Update the pace of the tenant; to be called once a second."""
        self.pace_requests = max(self.used_requests, self.pace_requests // 2)
        self.pace_tokens = max(self.used_tokens, self.pace_tokens // 2)
        self.used_requests = self.used_tokens = 0

    def roll(self, month: str) -> None:
        """Begin `month` if later than the holding's month: money reserved or taken in the last month is dropped."""
        if month > self.month:
            self.month, self.money, self.reserved, self.spent, self.told = month, 0, 0, 0, 0

    # ── exchanges ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, gateway: str, need: Need, booked: int, leaving: bool = False) -> SliceRequest:
        like = 0 if leaving else 1
        self.beat += 1
        return SliceRequest(
            gateway=gateway,
            beat=self.beat,
            leaving=leaving,
            month=self.month,
            requests=Want(self.requests, need.requests, like * self._like_requests),
            tokens=Want(self.tokens, need.tokens, like * self._like_tokens),
            streams=Want(self.streams - self.open, need.streams, like * self.pace_requests),
            streams_held=self.streams,
            money=Want(self.money, need.money, like * self.ahead),
            money_held=self.money + self.reserved,
            spent=self.spent,
            told=self.told,
            booked=booked,
        )

    def give(self, grant: Grant) -> Grant:
        """Subtract the losses in the grant before the account is written: no two gateways may use the same amount.

        Return the amounts given. If the account could not be written, the caller must pass them to `restore`.
        """
        given = Grant(
            requests=-min(self.requests, max(0, -grant.requests)),
            tokens=-min(self.tokens, max(0, -grant.tokens)),
            streams=-min(self.streams, max(0, -grant.streams)),
            money=-min(self.money, max(0, -grant.money)),
        )
        self._add(given, 1)
        return given

    def restore(self, given: Grant) -> None:
        self._add(given, -1)

    def take(self, grant: Grant, account: Account, ask: SliceRequest, said_us: int) -> None:
        """Add the gains in the grant after the account was written, at `said_us` or later."""
        more = Grant(*(max(0, gain) for gain in (grant.requests, grant.tokens, grant.streams, grant.money)))
        self._add(more, 1)
        self.told, self.seen, self.until_us = ask.spent, account, said_us + TRUST_US

    def _add(self, grant: Grant, sign: int) -> None:
        self.requests += sign * grant.requests
        self.tokens += sign * grant.tokens
        self.streams += sign * grant.streams
        self.money += sign * grant.money


# ── one request ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Ticket:
    """Amounts that one admitted request has reserved. Must be closed exactly once, however the request ends."""

    holding: Holding
    prompt_pico: int = 0  # price of a token, at most
    output_pico: int = 0
    tokens: int = 0  # reserved
    made: int = 0  # output tokens delivered so far
    money: int = 0  # pico, reserved in `month`
    month: str = ""
    earlier: int = 0  # pico reserved in the month before
    prepaid: int = 0  # output tokens already paid for
    exhausted: bool = False  # the budget ended the request
    closed: bool = False  # after the close, code still working for the request gets nothing more

    @property
    def first_need(self) -> Need:
        """Need that must be covered before the request is admitted."""
        return Need(requests=1, tokens=1, streams=1, money=self.output_pico)

    def open(self) -> None:
        """Admit the request. The holding must cover `first_need`."""
        holding = self.holding
        if holding.limits.requests_per_minute:
            holding.requests -= 1
        holding.open += 1
        holding.used_requests += 1
        holding.ahead += AHEAD_TOKENS * self.output_pico
        self.month = holding.month

    def output_most(self, prompt_tokens: int, max_tokens: int) -> int:
        """Return how many tokens may answer a prompt; 0 or less if the prompt exceeds the tenant's tokens a minute."""
        limits = self.holding.limits
        most = min(max_tokens, limits.max_output_tokens or max_tokens)
        return min(most, limits.tokens_per_minute - prompt_tokens) if limits.tokens_per_minute else most

    def need(self, prompt_tokens: int, max_tokens: int) -> Need:
        """Return the need of a prompt of `prompt_tokens` with at most `max_tokens` to answer.

        The need has all tokens that the request could use, and money for the prompt and the first output token.
        With a `max_tokens` of 0 the answer is a vector, and has no output token.
        """
        first_pico = self.output_pico if max_tokens else 0
        return Need(tokens=prompt_tokens + max_tokens, money=prompt_tokens * self.prompt_pico + first_pico)

    def begin(self, need: Need) -> None:
        """Reserve a need covered by the holding. A closed ticket reserves nothing."""
        if self.closed:
            return
        if self.holding.limits.tokens_per_minute:
            self.tokens += need.tokens
            self.holding.tokens -= need.tokens
            self.holding.used_tokens += need.tokens
        if self.holding.limits.monthly_budget:
            self._reserve(need.money)
            self.prepaid += 1

    def pay(self, tokens: int, now_us: int) -> bool:
        """Pay for received output tokens. Return False if money is short: the tokens may not be delivered then."""
        if self.closed:
            return False
        holding = self.holding
        if holding.limits.monthly_budget is None:
            self.made += tokens
            return True
        prepaid = min(tokens, self.prepaid)
        cost = (tokens - prepaid) * self.output_pico
        if cost and (cost > holding.money or now_us >= holding.until_us):
            self.exhausted = True
            return False
        self.prepaid -= prepaid
        self.made += tokens
        self._reserve(cost)
        return True

    def close(self, prompt_tokens: int, cost: int) -> None:
        """Settle the ticket. `prompt_tokens` were computed; `cost` (pico) is the price of the delivered tokens."""
        holding, self.closed = self.holding, True
        holding.open -= 1
        holding.ahead -= AHEAD_TOKENS * self.output_pico
        holding.tokens += max(0, self.tokens - prompt_tokens - self.made)
        self.tokens = 0
        self._roll()
        spent = min(self.money, max(0, cost - self.earlier))
        holding.money += self.money - spent
        holding.spent += spent
        holding.reserved -= self.money
        self.money = 0

    def _reserve(self, pico: int) -> None:
        self._roll()
        self.money += pico
        self.holding.money -= pico
        self.holding.reserved += pico

    def _roll(self) -> None:
        if self.month != self.holding.month:
            self.earlier += self.money
            self.month, self.money = self.holding.month, 0
