"""The fair queue: for work in any order, a tenant waits for at most one turn of every further tenant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.fair_queue import FairQueue

TENANTS = ("a", "b", "c")
MAX = 5


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.booleans()), max_size=60))
def test_a_tenant_waits_for_one_piece_of_work_of_each_other_tenant(asked: list[tuple[str, bool]]) -> None:
    """An example is a sequence of steps: put work in, or take work and be done at once."""
    queue: FairQueue[int] = FairQueue(MAX)
    waiting: dict[str, list[int]] = {tenant: [] for tenant in TENANTS}
    passed = dict.fromkeys(TENANTS, 0)  # turns of other tenants while the tenant waited
    for number, (tenant, puts) in enumerate(asked):
        if puts:
            assert queue.put(tenant, number) == (len(waiting[tenant]) < MAX)
            waiting[tenant] = [*waiting[tenant], number][:MAX]
        elif taken := queue.take():
            turn, work = taken
            assert work == waiting[turn].pop(0)
            queue.done(turn)
            for other in TENANTS:
                passed[other] = passed[other] + 1 if waiting[other] and other != turn else 0
        else:
            assert not any(waiting.values())
        assert max(passed.values()) < len(TENANTS)
        assert len(queue) == sum(map(len, waiting.values()))


def test_work_under_way_holds_up_its_own_tenant_alone() -> None:
    queue: FairQueue[str] = FairQueue(MAX)
    for tenant, work in (("a", "slow"), ("a", "next"), ("b", "quick")):
        assert queue.put(tenant, work)
    assert queue.take() == ("a", "slow")
    assert queue.take() == ("b", "quick")
    assert queue.take() is None
    queue.done("a")
    assert queue.take() == ("a", "next")


def test_work_that_was_removed_takes_no_turn() -> None:
    queue: FairQueue[str] = FairQueue(MAX)
    for tenant, work in (("a", "left"), ("b", "stays")):
        queue.put(tenant, work)
    queue.remove("a", "left")
    queue.remove("a", "never there")
    assert queue.take() == ("b", "stays")
    assert len(queue) == 0
