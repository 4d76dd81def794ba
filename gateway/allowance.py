"""How a tenant's limits are shared by gateways without asking each time: slices of an account. Pure.

    limit ──▶ Account, changed by compare-and-set ──▶ Holding, of one gateway ──▶ Ticket, of one request
              rates: what is left, filling with time   taken, and not used yet     reserved, settled at the end
              streams, money: who has how much

What gateways hold together is never more than the limit. Of a rate they take for good: what is lost with a gateway
fills up again. Streams and money are a slice with the gateway's name on it, free again when it has said nothing for
TTL_US; the gateway itself stops using them after TRUST_US, so clocks must agree on how long a second is, and on nothing
else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum

from store.tenants import Limits
from store.wire import Account, Level, Slice

UNIT = 60_000_000  # of a Level, for one request or token: a limit of N a minute gains N units a microsecond
TTL_US = 15_000_000
TRUST_US = 10_000_000
SPARE_SHARE = 8  # where others take of an account too, at most one part in so many of what is left is taken ahead
FIRST_SHARE = 16  # of a rate, taken ahead before it is known how fast the tenant asks
AHEAD_TOKENS = 1024  # money for so many is held for each stream: seconds of it, which may come at once after a pause


class Kind(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    STREAMS = "streams"
    MONEY = "money"


@dataclass(frozen=True, slots=True)
class Need:
    """What must be there before something can begin."""

    requests: int = 0
    tokens: int = 0
    streams: int = 0
    money: int = 0  # pico


@dataclass(frozen=True, slots=True)
class Want:
    """Of one kind: what a gateway has free, needs free, and would like to have beyond that. `have` is negative when
    others were given what it uses."""

    have: int
    need: int
    like: int

    def change(self, available: int, alone: bool) -> int:
        """What it takes, or (negative) gives back; nothing when its need can't be met."""
        left = available + self.have
        if self.need > left:
            return 0
        spare = self.like if alone else min(self.like, (left - self.need) // SPARE_SHARE)
        return min(left, self.need + spare) - self.have


@dataclass(frozen=True, slots=True)
class Grant:
    """What a holding gains (negative: loses) by an exchange."""

    requests: int = 0
    tokens: int = 0
    streams: int = 0
    money: int = 0


# ── the account ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Ask:
    """A gateway's side of an exchange. `month` is not before the account's."""

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
    spent: int  # pico, of this month, since the gateway began
    told: int  # how much of that the account is known to have heard
    booked: int  # pico: what the database has for this month at least


def exchanged(account: Account, limits: Limits, ask: Ask, dead: frozenset[str], at_us: int) -> tuple[Account, Grant]:
    """The account after a gateway took and gave back, and what that is for the gateway. `at_us` is the account's time,
    `dead` are gateways whose slices are free again."""
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
    """Of a rate of `limit` a minute. Time that runs backwards adds nothing."""
    return min(limit * UNIT, level.left + limit * max(0, at_us - level.at_us))


def _shared(limit: int | None, others: int, own: int, held: int, want: Want, alone: bool) -> int:
    """The change of what is held by name. `own` is what the account has under the gateway's name: less than what it
    thinks it holds when it was taken for dead meanwhile."""
    if limit is None:
        return -held
    lost = max(0, held - own)
    available = max(0, limit - others - (held - lost))
    return replace(want, have=want.have - lost).change(available, alone) - lost


@dataclass(frozen=True, slots=True)
class Rate:
    """How a rate stands, as far as one gateway knows."""

    limit: int  # a minute
    units: int  # left

    @property
    def remaining(self) -> int:
        return self.units // UNIT

    @property
    def full_in_us(self) -> int:
        return self.wait_us(self.limit)

    def wait_us(self, count: int) -> int:
        """Until so many are there, if nobody else takes any."""
        return -(min(0, self.units - count * UNIT) // self.limit)


class Clock:
    """The account's time: that of the gateway whose clock was the farthest ahead of all who took of an account. So time
    never runs backwards, and fills no bucket twice when gateways disagree."""

    def __init__(self, offset_us: int) -> None:
        """`offset_us` is what must be added to a clock that is never set to make UNIX time of it."""
        self._offset_us = offset_us

    def at_us(self, now_us: int) -> int:
        return now_us + self._offset_us

    def heard(self, account: Account, now_us: int) -> None:
        newest_us = max(account.requests.at_us, account.tokens.at_us)
        self._offset_us = max(self._offset_us, newest_us - now_us)


class Witness:
    """Which gateways are dead, by how long their slices of one account have not changed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}  # gateway → beat, when it was first seen

    def dead(self, account: Account, now_us: int) -> frozenset[str]:
        """`now_us` is of a clock of this process that is never set."""
        for name, slice in account.slices.items():
            if self._seen.get(name, (-1, 0))[0] != slice.beat:
                self._seen[name] = (slice.beat, now_us)
        self._seen = {name: seen for name, seen in self._seen.items() if name in account.slices}
        return frozenset(name for name, (_, since_us) in self._seen.items() if now_us - since_us >= TTL_US)


# ── what one gateway holds ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Holding:
    """What one gateway has taken of one account. All that is on a request's way happens here."""

    limits: Limits
    requests: int = 0  # taken and not used, like the tokens and the money
    tokens: int = 0
    streams: int = 0  # taken, used or not
    open: int = 0  # streams that are used
    money: int = 0  # pico
    reserved: int = 0  # pico, by open tickets
    ahead: int = 0  # pico: what open tickets would like to have in hand
    spent: int = 0  # pico, of `month`
    told: int = 0
    month: str = ""
    beat: int = 0
    until_us: int = 0  # so long streams and money are surely ours
    seen: Account = field(default_factory=Account)  # as it was after the last exchange
    used_requests: int = 0  # since the last tick
    used_tokens: int = 0
    pace_requests: int = 0  # in a tick, lately
    pace_tokens: int = 0

    def lacks(self, need: Need, now_us: int) -> Kind | None:
        """What is not there of it."""
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
        """More should be taken before it runs out."""
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
        """Those that are limited."""
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
        """It used something lately, or holds more than it would like to."""
        pace = self.pace_requests or self.pace_tokens
        return bool(pace or self.streams > self.open or self.money > self.ahead)

    def tick(self) -> None:
        """A second is over."""
        self.pace_requests = max(self.used_requests, self.pace_requests // 2)
        self.pace_tokens = max(self.used_tokens, self.pace_tokens // 2)
        self.used_requests = self.used_tokens = 0

    def roll(self, month: str) -> None:
        """Another month has begun: the money of the last one is nobody's."""
        if month > self.month:
            self.month, self.money, self.reserved, self.spent, self.told = month, 0, 0, 0, 0

    # ── exchanges ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, gateway: str, need: Need, booked: int, leaving: bool = False) -> Ask:
        like = 0 if leaving else 1
        self.beat += 1
        return Ask(
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
        """What the grant takes away, before the account hears of it: nothing may be used here and by others. Returns
        what was given, for `take` to bring back if the account would not have it."""
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

    def take(self, grant: Grant, account: Account, ask: Ask, said_us: int) -> None:
        """The account has it so; it was told at `said_us` or later."""
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
    """What one admitted request has reserved. Closed once, whatever became of the request."""

    holding: Holding
    prompt_pico: int = 0  # of a token, at most
    output_pico: int = 0
    tokens: int = 0  # reserved
    made: int = 0  # output tokens that came
    money: int = 0  # pico, reserved in `month`
    month: str = ""
    earlier: int = 0  # pico: what was reserved in the month before
    prepaid: int = 0  # output tokens
    exhausted: bool = False  # the budget ended it
    closed: bool = False  # whoever still works for it gets nothing more

    @property
    def first_need(self) -> Need:
        """What it takes to be let in."""
        return Need(requests=1, tokens=1, streams=1, money=self.output_pico)

    def open(self) -> None:
        """Its first need was there."""
        holding = self.holding
        if holding.limits.requests_per_minute:
            holding.requests -= 1
        holding.open += 1
        holding.used_requests += 1
        holding.ahead += AHEAD_TOKENS * self.output_pico
        self.month = holding.month

    def output_most(self, prompt_tokens: int, max_tokens: int) -> int:
        """How many tokens a prompt may be answered with; 0 or less: it is more than the tenant may use in a minute."""
        limits = self.holding.limits
        most = min(max_tokens, limits.max_output_tokens or max_tokens)
        return min(most, limits.tokens_per_minute - prompt_tokens) if limits.tokens_per_minute else most

    def need(self, prompt_tokens: int, max_tokens: int) -> Need:
        """Of a prompt with so many tokens to answer: all it could use, and money for the prompt and the first token."""
        return Need(
            tokens=prompt_tokens + max_tokens,
            money=prompt_tokens * self.prompt_pico + self.output_pico,
        )

    def begin(self, need: Need) -> None:
        """It was there."""
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
        """For output tokens that came; false when there is no money for them: then they may not be delivered."""
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
        """`prompt_tokens` were computed, `cost` (pico) is what was delivered."""
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
