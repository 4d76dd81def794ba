"""Limits hold for any order of gateways' deeds, deaths and clocks; and nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.allowance import (
    TRUST_US,
    TTL_US,
    UNIT,
    Clock,
    Grant,
    Holding,
    Kind,
    Need,
    Rate,
    SliceRequest,
    Ticket,
    Witness,
    exchanged,
    units_left,
)
from store.contract.limits import Account, Budget, Level, Limits
from store.contract.wire import decode, encode

MONTH = "2026-11"
PICO = 10**12
NOTHING = Need()
LIMITS = Limits(
    requests_per_minute=12,
    tokens_per_minute=600,
    concurrent_streams=5,
    monthly_budget=Budget(amount="0.000000001"),  # 1000 pico
)


@dataclass
class Sent:
    """An exchange on its way to the account."""

    ask: SliceRequest
    account: Account
    grant: Grant
    given: Grant
    last: int
    said_us: int


@dataclass
class Gateway:
    """Real holdings; only the bus and the clocks are the test's."""

    name: str
    steady_us: int  # the gateway's clock at time 0
    holding: Holding
    clock: Clock
    witness: Witness = field(default_factory=Witness)
    revision: int | None = None
    sent: Sent | None = None
    tickets: list[Ticket] = field(default_factory=list)
    tokens_taken: int = 0
    tokens_used: int = 0


class Store:
    """An account under compare-and-set."""

    def __init__(self) -> None:
        self.account, self.revision = Account(), 0
        self.taken = [0, 0]  # requests and tokens, less the returned amounts

    def swap(self, sent: Sent) -> int | None:
        if sent.last != self.revision:
            return None
        self.account, self.revision = sent.account, self.revision + 1
        self.taken = [self.taken[0] + sent.grant.requests, self.taken[1] + sent.grant.tokens]
        return self.revision


def send(gateway: Gateway, store: Store, need: Need, t_us: int, booked: int, leaving: bool = False) -> None:
    holding, now_us = gateway.holding, t_us + gateway.steady_us
    if gateway.revision is None:
        holding.seen, gateway.revision = store.account, store.revision
    holding.roll(max(MONTH, holding.seen.month))
    gateway.clock.heard(holding.seen, now_us)
    dead = gateway.witness.dead(holding.seen, now_us)
    ask = holding.ask(gateway.name, need, booked, leaving)
    account, grant = exchanged(holding.seen, holding.limits, ask, dead, gateway.clock.at_us(now_us))
    gateway.sent = Sent(ask, account, grant, holding.give(grant), gateway.revision, now_us)
    gateway.tokens_taken += gateway.sent.given.tokens
    gateway.revision = None


def receive(gateway: Gateway, revision: int | None) -> None:
    sent, gateway.sent = gateway.sent, None
    assert sent is not None
    gateway.revision = revision
    if revision is None:
        gateway.holding.restore(sent.given)
        gateway.tokens_taken -= sent.given.tokens
        return
    gateway.holding.take(sent.grant, sent.account, sent.ask, sent.said_us)
    gateway.tokens_taken += max(0, sent.grant.tokens)


def gateway(name: str = "a", skew_us: int = 0, limits: Limits = LIMITS) -> Gateway:
    steady_us = 1_000_000 * (1 + sum(name.encode()))
    return Gateway(name, steady_us, Holding(limits), Clock(10**15 + skew_us - steady_us))


class World:
    """Two to four gateways on one account, with clocks that differ by up to four hours, and random deeds and faults."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        skews_us = [10**6 * self.random.randint(-7200, 7200) for _ in range(self.random.randint(2, 4))]
        self.t_us, self.true_spent, self.skew_us = 0, 0, 10**6 * 14_400
        self.store = Store()
        self.gateways = [gateway(f"g{n}", skew_us) for n, skew_us in enumerate(skews_us)]
        self.born = len(self.gateways)

    def step(self) -> None:
        acts = (self.ask, self.arrive, self.let_in, self.make_tokens, self.wait, self.end, self.tick)
        rare = (self.pause, self.lose_the_answer, self.die, self.join)
        self.random.choices(acts + rare, [6, 12, 6, 6, 4, 4, 4, 1, 1, 1, 1])[0](self.random.choice(self.gateways))
        self.check_limits()
        self.check_nothing_is_negative()
        self.check_conservation()

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, _: Gateway) -> None:
        self.t_us += self.random.randint(0, 2_000_000)

    def pause(self, _: Gateway) -> None:
        self.t_us += self.random.randint(0, 2 * TTL_US)

    def ask(self, chosen: Gateway) -> None:
        need = Need(1, self.random.randint(0, 200), 1, self.random.randint(0, 300))
        self.send(chosen, need)

    def tick(self, chosen: Gateway) -> None:
        chosen.holding.tick()
        self.send(chosen, Need())

    def send(self, chosen: Gateway, need: Need) -> None:
        if chosen.sent is None:
            silent = [g for g in self.gateways if self.t_us + g.steady_us >= g.holding.until_us]
            booked = self.true_spent + sum(g.holding.reserved for g in silent)  # open requests are booked on the way
            send(chosen, self.store, need, self.t_us, booked)

    def arrive(self, chosen: Gateway) -> None:
        if chosen.sent is not None:
            receive(chosen, self.store.swap(chosen.sent))

    def lose_the_answer(self, chosen: Gateway) -> None:
        if chosen.sent is not None:
            if self.random.random() < 0.5:
                self.store.swap(chosen.sent)
            chosen.sent = None

    def let_in(self, chosen: Gateway) -> None:
        price = self.random.randint(0, 9)
        ticket, now_us = Ticket(chosen.holding, price, price), self.t_us + chosen.steady_us
        if chosen.holding.lacks(ticket.first_need, now_us) is not None:
            return
        ticket.open()
        chosen.tickets.append(ticket)
        prompt = self.random.randint(1, 30)
        need = ticket.need(prompt, ticket.output_most(prompt, self.random.randint(1, 60)))
        if chosen.holding.lacks(need, now_us) is None:
            ticket.begin(need)

    def make_tokens(self, chosen: Gateway) -> None:
        for ticket in chosen.tickets:
            tokens = self.random.randint(1, 20)
            if ticket.tokens - ticket.made >= tokens:
                ticket.pay(tokens, self.t_us + chosen.steady_us)

    def end(self, chosen: Gateway) -> None:
        if not chosen.tickets:
            return
        ticket, holding = chosen.tickets.pop(0), chosen.holding
        spent, reserved, free = holding.spent, ticket.tokens, holding.tokens
        ticket.close(min(3, ticket.tokens - ticket.made), self.random.randint(0, ticket.money))
        chosen.tokens_used += reserved - (holding.tokens - free)
        self.true_spent += holding.spent - spent

    def die(self, chosen: Gateway) -> None:
        if len(self.gateways) > 1:
            self.gateways.remove(chosen)
            self.true_spent += sum(ticket.money for ticket in chosen.tickets)  # the dead gateway's journal is booked

    def join(self, _: Gateway) -> None:
        if len(self.gateways) < 4:
            self.born += 1
            self.gateways.append(gateway(f"g{self.born}"))

    # ── what must hold ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_limits(self) -> None:
        trusted = [g.holding for g in self.gateways if self.t_us + g.steady_us < g.holding.until_us]
        assert sum(holding.streams for holding in trusted) <= 5
        assert self.true_spent + sum(holding.money + holding.reserved for holding in trusted) <= 1000
        for taken, limit in zip(self.store.taken, (12, 600), strict=True):
            assert taken * UNIT <= limit * (UNIT + self.t_us + self.skew_us)

    def check_nothing_is_negative(self) -> None:
        account = self.store.account
        assert account.requests.left >= 0 and account.tokens.left >= 0 and account.spent >= 0
        for slice in account.slices.values():
            assert slice.streams >= 0 and slice.money >= 0 and slice.spent >= 0
        for g in self.gateways:
            held = g.holding
            counts = (held.requests, held.tokens, held.streams, held.open, held.money, held.reserved, held.spent)
            assert min(counts) >= 0 and held.ahead >= 0

    def check_conservation(self) -> None:
        for g in self.gateways:
            assert g.tokens_taken == g.holding.tokens + sum(ticket.tokens for ticket in g.tickets) + g.tokens_used
            assert g.holding.reserved == sum(ticket.money for ticket in g.tickets)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_limits_hold_whatever_gateways_do_and_whenever_they_die(seed: int) -> None:
    world = World(seed)
    for _ in range(400):
        world.step()


# ── one thing at a time ───────────────────────────────────────────────────────────────────────────────────────────────


def exchange(chosen: Gateway, store: Store, need: Need = NOTHING, t_us: int = 0, leaving: bool = False) -> None:
    send(chosen, store, need, t_us, 0, leaving)
    assert chosen.sent is not None
    revision = store.swap(chosen.sent)
    receive(chosen, revision)
    if revision is None:
        exchange(chosen, store, need, t_us, leaving)


def opened(chosen: Gateway, price: int = 1, t_us: int = 0) -> Ticket:
    ticket = Ticket(chosen.holding, price, price)
    assert chosen.holding.lacks(ticket.first_need, chosen.steady_us + t_us) is None
    ticket.open()
    return ticket


def test_a_request_is_settled_by_what_it_used() -> None:
    one, store = gateway(), Store()
    exchange(one, store, Need(1, 50, 1, 100))
    tokens, money, requests = one.holding.tokens, one.holding.money, one.holding.requests
    ticket = opened(one)
    ticket.begin(ticket.need(prompt_tokens=10, max_tokens=30))
    assert (one.holding.tokens, one.holding.money) == (tokens - 40, money - 11)
    assert ticket.pay(5, one.steady_us) and one.holding.money == money - 15
    ticket.close(prompt_tokens=10, cost=12)  # three tokens were not delivered
    assert (one.holding.tokens, one.holding.money) == (tokens - 15, money - 12)
    assert (one.holding.spent, one.holding.reserved, one.holding.open) == (12, 0, 0)
    assert one.holding.requests == requests - 1
    exchange(one, store)
    assert store.account.spent == 12


def test_what_the_database_knows_is_spent_at_least() -> None:
    one, store = gateway(), Store()
    send(one, store, Need(money=1), 0, booked=990)
    assert one.sent is not None
    receive(one, store.swap(one.sent))
    assert store.account.spent == 990 and one.holding.money == 1
    exchange(one, store, Need(money=11))
    assert one.holding.lacks(Need(money=11), one.steady_us) is Kind.MONEY


def test_the_budget_ends_a_stream_at_the_last_token_that_it_can_pay() -> None:
    one, store = gateway(), Store()
    exchange(one, store, Need(1, 500, 1, 1000))
    ticket = opened(one, price=9)
    ticket.begin(ticket.need(prompt_tokens=10, max_tokens=490))
    paid = 0
    while ticket.pay(1, one.steady_us):
        paid += 1
    assert paid == (1000 - 90) // 9 and ticket.exhausted
    assert not ticket.pay(1, one.steady_us), "and it stays so"


def test_a_gateway_alone_gets_all_though_another_was_there() -> None:
    one, other, store = gateway("a"), gateway("b"), Store()
    exchange(other, store, Need(1, 100, 2, 300))
    assert other.holding.streams == 2 and other.holding.money == 300
    exchange(other, store, leaving=True)
    assert "b" not in store.account.slices and other.holding == Holding(LIMITS, month=MONTH, beat=2, **kept(other))
    exchange(one, store, Need(12, 600, 5, 1000))
    assert one.holding.lacks(Need(12, 600, 5, 1000), one.steady_us) is None


def kept(chosen: Gateway) -> dict[str, object]:
    return {"until_us": chosen.holding.until_us, "seen": chosen.holding.seen}


def test_what_a_dead_gateway_had_comes_back_when_it_was_silent_for_its_time() -> None:
    one, dead, store = gateway("a"), gateway("b"), Store()
    exchange(dead, store, Need(streams=4, money=900))
    exchange(one, store, Need(streams=1))
    for t_us in range(0, TTL_US, 1_000_000):
        exchange(one, store, Need(streams=2, money=200), t_us)
        assert one.holding.streams == 1 and one.holding.money == 0
    exchange(one, store, Need(streams=5, money=1000), TTL_US)
    assert one.holding.streams == 5 and one.holding.money == 1000


def test_a_gateway_that_can_not_say_that_it_lives_stops_in_time() -> None:
    one, store = gateway(), Store()
    exchange(one, store, Need(1, 1, 1, 100))
    assert one.holding.lacks(Need(1, 1, 1, 100), one.steady_us + TRUST_US - 1) is None
    assert one.holding.lacks(Need(streams=1), one.steady_us + TRUST_US) is Kind.STREAMS
    assert one.holding.lacks(Need(money=1), one.steady_us + TRUST_US) is Kind.MONEY
    assert one.holding.lacks(Need(requests=1, tokens=1), one.steady_us + TRUST_US) is None  # taken for good


def test_a_stream_is_paid_only_with_money_that_is_surely_ours() -> None:
    one, store = gateway(), Store()
    exchange(one, store, Need(1, 500, 1, 1000))
    ticket = opened(one)
    ticket.begin(ticket.need(prompt_tokens=1, max_tokens=100))
    assert ticket.pay(2, one.steady_us + TRUST_US - 1) and not ticket.pay(1, one.steady_us + TRUST_US)


def test_who_still_works_for_a_closed_request_gets_nothing() -> None:
    one, store = gateway(), Store()
    exchange(one, store, Need(1, 500, 1, 1000))
    ticket = opened(one)
    tokens, money = one.holding.tokens, one.holding.money
    ticket.close(0, 0)
    ticket.begin(ticket.need(prompt_tokens=1, max_tokens=100))
    assert not ticket.pay(1, one.steady_us)
    assert (one.holding.tokens, one.holding.money, one.holding.reserved) == (tokens, money, 0)


def test_clocks_that_differ_fill_a_rate_once() -> None:
    store = Store()
    fast, slow = gateway("a", skew_us=3600 * 10**6), gateway("b", skew_us=-3600 * 10**6)
    for second in range(600):
        for chosen in (slow, fast):
            exchange(chosen, store, Need(requests=1), second * 10**6)
            chosen.holding.requests = 0  # every granted request is used
    most = 12 * (1 + 600 / 60)
    assert most - 1 <= store.taken[0] <= most + 12  # a bucket more: when the fast clock was first heard


def test_a_rate_fills_with_time_and_never_runs_back() -> None:
    level = Level(3 * UNIT, 10**15)
    assert units_left(level, 12, 10**15 - 5) == 3 * UNIT
    assert units_left(level, 12, 10**15 + 30_000_000) == 9 * UNIT
    assert units_left(level, 12, 10**15 + 10**9) == 12 * UNIT
    rate = Rate(12, 3 * UNIT + 1)
    assert (rate.remaining, rate.wait_us(3), rate.wait_us(4)) == (3, 0, 5_000_000)
    assert rate.full_in_us == 45_000_000


def test_another_month_begins_with_the_whole_budget_and_ends_no_stream() -> None:
    one, other, store = gateway("a"), gateway("b"), Store()
    exchange(one, store, Need(1, 100, 1, 1000))
    ticket = opened(one, price=10)
    ticket.begin(ticket.need(prompt_tokens=10, max_tokens=60))
    assert ticket.pay(50, one.steady_us)
    other.holding.roll("2026-12")
    exchange(other, store, Need(money=200))
    assert store.account.month == "2026-12" and other.holding.money == 200
    exchange(one, store, Need(money=100))
    assert one.holding.month == "2026-12" and ticket.pay(10, one.steady_us)
    assert one.holding.reserved == 100
    ticket.close(10, cost=700)
    exchange(one, store)
    assert (one.holding.reserved, one.holding.spent, store.account.spent) == (0, 100, 100)


def test_most_output_tokens_are_the_least_of_what_was_said_and_the_limits() -> None:
    limits = Limits(tokens_per_minute=100, max_output_tokens=50)
    ticket = Ticket(Holding(limits))
    assert [ticket.output_most(prompt, most) for prompt, most in ((10, 20), (10, 80), (70, 80), (100, 1))] == [
        20,
        50,
        30,
        0,
    ]


def test_a_limit_that_is_taken_away_binds_nobody_and_leaves_nothing_behind() -> None:
    one, store = gateway(), Store()
    exchange(one, store, Need(1, 10, 1, 100))
    ticket = opened(one)
    ticket.begin(ticket.need(5, 5))
    one.holding.limits = Limits()
    assert ticket.pay(1000, one.steady_us)
    ticket.close(5, 10)
    exchange(one, store)
    assert (one.holding.requests, one.holding.tokens, one.holding.streams, one.holding.money) == (0, 0, 0, 0)


def test_budgets_outgrow_64_bits() -> None:
    one, store = gateway(limits=Limits(monthly_budget=Budget(amount="999999999999"))), Store()
    most = 999_999_999_999 * PICO
    exchange(one, store, Need(money=most))
    assert one.holding.money == most
    decoded = decode(Account, encode(store.account))
    assert decoded == store.account and decoded.slices["a"].money == most
