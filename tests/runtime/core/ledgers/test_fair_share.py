"""Shares of a device: used time is counted once and completely, and no tenant gets more than its share plus a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.ledgers.device_time import DeviceTime
from runtime.core.ledgers.fair_share import BALANCE_S_MOST, OVER_S, FairShares
from tests.runtime.world import request

S = 10**6  # microseconds
WEIGHTS = st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0, 10.0]), min_size=2, max_size=5)


def shares_of(*weights: float) -> FairShares:
    """Shares of tenants "0", "1" and so on, with a request each."""
    shares = FairShares()
    for name, weight in enumerate(weights):
        shares.arrive(str(name), weight)
    return shares


def balances(shares: FairShares) -> list[float]:
    return [share.balance_us / S for share in (*shares.there.values(), *shares.away.values())]


def test_who_had_more_than_its_share_is_over_until_it_has_made_up_for_all_of_it() -> None:
    shares = shares_of(1.0, 3.0)
    assert not shares.settle({"0": S * 3 // 5})
    assert balances(shares) == [-0.45, 0.45]
    assert shares.settle({"0": 2 * S}) and shares.over == {"0"}
    assert not shares.settle({"1": 7 * S}), "a quarter of it was its share"
    assert shares.settle({"1": 2 * S}) and shares.over == set()


def test_alone_there_is_no_too_much() -> None:
    shares = shares_of(1.0)
    shares.settle({"0": 1000 * S})
    shares.arrive("1", 1.0)
    shares.settle({"0": S})
    assert balances(shares) == [-0.5, 0.5] and not shares.over


def test_nobody_gains_by_being_away_and_debts_stay() -> None:
    shares = shares_of(1.0, 1.0)
    shares.settle({"0": 6 * S})
    shares.leave("1")
    shares.settle({"0": 50 * S})
    shares.arrive("1", 1.0)
    assert shares.over == {"0"}
    shares.leave("0")
    shares.settle({"1": 50 * S})
    shares.arrive("0", 1.0)
    assert {name: share.balance_us / S for name, share in shares.there.items()} == {"0": -3.0, "1": 3.0}


def test_an_empty_device_has_forgotten_everything() -> None:
    shares = shares_of(1.0, 1.0)
    shares.settle({"0": 6 * S})
    shares.leave("0")
    shares.leave("1")
    assert not shares.there and not shares.away and not shares.over


def test_those_over_have_their_part_of_the_device() -> None:
    shares = shares_of(1.0, 1.0, 2.0)
    shares.settle({"0": 30 * S})
    assert shares.over == {"0"} and shares.part_over() == 0.25
    shares.leave("2")
    assert shares.part_over() == 0.5, "who is away leaves its share to the others"


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 10**6)), max_size=30)


@given(STEPS)
def test_all_that_steps_took_is_somebodys_and_nothing_else_is(steps: list[tuple[int, int, int]]) -> None:
    """Each step: number of decoding requests, number of prompts, microseconds."""
    account, tenants, now_us, stepped_us, had = DeviceTime.open(0.0), ["a", "b", "c"], 0, 0, Counter[str]()
    for decodes, prompts, us in steps:
        asked = [request(n, "m", prompt_tokens=n + 1, tenant=tenants[n % 3]) for n in range(decodes + prompts)]
        now_us += us
        if asked:
            account.stepped(now_us / S, asked[:decodes], asked[decodes:], us / 2 / S)
            stepped_us += us
        else:
            account.idle(now_us / S)
        had.update(account.take())
    assert had.total() == stepped_us == sum(total.gpu_us for total in account.totals.values())


class Served:
    """A device that steps for one tenant at a time. `choose` picks a tenant not over its share."""

    def __init__(self, weights: list[float]) -> None:
        self.shares, self.had_us = shares_of(*weights), Counter[str]()
        self.weights = weights

    def step(self, choose: Callable[[list[str]], str], us: int) -> None:
        within = [name for name in self.shares.there if name not in self.shares.over]
        assert within, "everybody is over"
        name = choose(within)
        self.had_us[name] += us
        self.shares.settle({name: us})


@given(WEIGHTS, st.data())
def test_however_it_is_chosen_nobody_is_far_from_its_share(weights: list[float], data: st.DataObject) -> None:
    """VTC's bound, for tenants that always have work: a tenant is ahead of its share by at most the time needed to
    count as over, and a step. A tenant is therefore behind by at most the sum of the other tenants' leads."""
    served, step_us = Served(weights), S // 4
    greedy = data.draw(st.sampled_from(sorted(served.shares.there)))
    for _ in range(data.draw(st.integers(1, 200))):
        served.step(lambda within: greedy if greedy in within else data.draw(st.sampled_from(within)), step_us)
    total_us, most_us = served.had_us.total(), OVER_S * S + step_us
    for name, weight in enumerate(weights):
        ahead_us = served.had_us[str(name)] - total_us * weight / sum(weights)
        assert -(len(weights) - 1) * most_us - 1 <= ahead_us <= most_us + 1


HISTORY = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("settle"), st.dictionaries(st.integers(0, 3), st.integers(0, S // 10), max_size=4)),
    ),
    max_size=40,
)


def told(history: list[tuple[str, object]], names: str) -> tuple[FairShares, set[int]]:
    """Shares after a history, and the tenants over their share. Aborts and moves count as arrivals and leavings."""
    shares, weights = FairShares(), [0.5, 1.0, 1.0, 4.0]
    for what, who in history:
        if what == "settle":
            shares.settle({names[each]: us for each, us in who.items()})  # type: ignore[attr-defined]
        elif what == "arrive":
            shares.arrive(names[who], weights[who])  # type: ignore[call-overload]
        elif names[who] in shares.there:  # type: ignore[call-overload]
            shares.leave(names[who])  # type: ignore[call-overload]
    return shares, {names.index(name) for name in shares.over}


@given(HISTORY)
def test_balances_sum_to_nought_and_names_mean_nothing(history: list[tuple[str, object]]) -> None:
    shares, over = told(history, "abcd")
    other, over_there = told(history, "dbac")
    assert over == over_there
    assert sum(balances(shares)) == pytest.approx(0, abs=1e-6)
    assert {"abcd".index(name): share for name, share in shares.there.items()} == {
        "dbac".index(name): share for name, share in other.there.items()
    }
    assert shares.over < shares.there.keys() or not shares.over
    assert all(abs(balance) <= BALANCE_S_MOST for balance in balances(shares))


@given(HISTORY, st.integers(0, 3), st.integers(0, S))
def test_who_had_more_is_never_better_off(history: list[tuple[str, object]], who: int, more_us: int) -> None:
    name = "abcd"[who]
    less, more = told(history, "abcd")[0], told(history, "abcd")[0]
    if name not in less.there:
        return
    less.settle({name: 1})
    more.settle({name: 1 + more_us})
    assert more.there[name].balance_us <= less.there[name].balance_us + 1e-3
