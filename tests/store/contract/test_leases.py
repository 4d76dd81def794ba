"""Leases of many models in two parts: a reader has the states that the runtime had when the runtime wrote the lease."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from store.contract import wire
from store.contract.leases import BASE_S, BASE_S_LEAST, WHOLE_MOST, LeaseParts, WholeLeases
from store.contract.wire import Accounts, Attained, Lease, LeaseBase, ModelState, Residency

MANY = 3 * WHOLE_MOST


def state(turns: int) -> ModelState:
    return ModelState(residency=Residency.STAGED, turns=turns)


def lease(turns: dict[int, int], epoch: int = 1) -> Lease:
    """A lease of models with so many turns each; the models' labels are the models' names."""
    models = {f"m{number}": state(count) for number, count in turns.items()}
    attainment = {f"l{number}": Attained(count) for number, count in turns.items() if count}
    accounts = Accounts(us=9, labels={f"l{number}": (count, 1) for number, count in turns.items() if count})
    return Lease(
        runtime="r1", epoch=epoch, engine="e", switches=5, models=models, attainment=attainment, accounts=accounts
    )


@dataclass
class Reader:
    heard: list[Lease | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.whole = WholeLeases(lambda id, lease: self.heard.append(lease))

    def hear(self, *messages: LeaseBase | Lease | None) -> None:
        for message in messages:
            if isinstance(message, LeaseBase):
                self.whole.base_changed("r1", wire.decode(LeaseBase, wire.encode(message)))
            else:
                said = None if message is None else wire.decode(Lease, wire.encode(message))
                self.whole.lease_changed("r1", said)


def test_a_lease_of_few_models_is_whole() -> None:
    said = lease({number: 0 for number in range(WHOLE_MOST)})
    assert LeaseParts().split(said, 0.0) == (None, said)
    reader = Reader()
    reader.hear(said, None)
    assert reader.heard == [said, None]


def test_a_lease_of_many_models_holds_what_changed_since_the_base() -> None:
    parts, turns = LeaseParts(), dict.fromkeys(range(MANY), 0)
    base, first = parts.split(lease(turns), 0.0)
    assert base is not None and base.models.keys() == {f"m{number}" for number in range(MANY)} and not first.models
    turns[3] = 1
    del turns[4]
    none, second = parts.split(lease(turns), 1.0)
    assert none is None and second.base == base.version
    assert list(second.models) == ["m3"] and second.gone == ["m4"]
    assert list(second.attainment) == list(second.accounts.labels) == ["l3"]


def test_a_base_is_made_again_when_much_changed_time_passed_a_device_began_anew_or_the_bucket_was_lost() -> None:
    parts, turns = LeaseParts(), dict.fromkeys(range(MANY), 0) | {0: 1}
    assert parts.split(lease(turns), 0.0)[0] is not None
    assert parts.split(lease(turns), 1.0)[0] is None
    much = turns | dict.fromkeys(range(MANY // 2), 7)
    assert parts.split(lease(much), BASE_S_LEAST)[0] is not None, "much changed"
    at = BASE_S_LEAST
    assert parts.split(lease(much | {0: 0}), at)[0] is not None, "an attainment is gone"
    assert parts.split(lease(turns, epoch=2), at)[0] is not None, "an epoch began"
    assert parts.split(lease(turns, epoch=2), at + 0.7 * BASE_S)[0] is None
    assert parts.split(lease(turns, epoch=2), at + 1.3 * BASE_S)[0] is not None, "time passed"
    parts.forget()
    assert parts.split(lease(turns, epoch=2), at + 1.3 * BASE_S)[0] is not None, "the bucket was lost"


def test_models_that_are_always_busy_do_not_make_every_lease_a_base() -> None:
    parts, busy, bases = LeaseParts(), MANY // 4, 0
    for second in range(100):
        base, each = parts.split(lease(dict.fromkeys(range(MANY), 1) | dict.fromkeys(range(busy), second + 1)), second)
        bases += base is not None
        assert len(each.models) <= busy
    assert bases == 1 + 99 // BASE_S_LEAST


def test_a_lease_waits_for_the_base_that_the_lease_amends() -> None:
    parts, reader, turns = LeaseParts(), Reader(), dict.fromkeys(range(MANY), 0)
    base, first = parts.split(lease(turns), 0.0)
    reader.hear(first)
    assert reader.heard == []
    reader.hear(base)
    assert reader.heard == [lease(turns)]
    other, second = parts.split(lease(turns, epoch=2), 0.0)
    reader.hear(second)
    assert len(reader.heard) == 1, "the base of an earlier epoch is not amended"
    reader.hear(None, other)
    assert reader.heard == [lease(turns), None], "a lease given back does not come back with a base"


changes = st.lists(
    st.tuples(st.dictionaries(st.integers(0, MANY), st.integers(0, 3), max_size=20), st.booleans(), st.booleans()),
    min_size=1,
    max_size=8,
)


@given(changes, st.data())
def test_whatever_changes_a_reader_has_the_last_lease_once_all_was_heard(
    changes: list[tuple[dict[int, int], bool, bool]], data: st.DataObject
) -> None:
    """Bases and leases each come in order, bases any time before or after the leases that amend the bases."""
    parts, reader, now, epoch = LeaseParts(), Reader(), 0.0, 1
    turns = dict.fromkeys(range(MANY), 0)
    bases: list[LeaseBase] = []
    leases: list[Lease] = []
    said: list[Lease] = []
    for changed, restarts, passes in changes:
        turns |= changed
        for number in list(changed)[:2]:
            del turns[number]
        epoch += restarts
        now += BASE_S if passes else 1.0
        said.append(lease(turns, epoch))
        base, each = parts.split(said[-1], now)
        bases += [base] if base is not None else []
        leases.append(each)
    while bases or leases:
        queue = bases if bases and (not leases or data.draw(st.booleans())) else leases
        reader.hear(queue.pop(0))
    assert reader.heard and reader.heard[-1] == said[-1]
    assert all(each in said for each in reader.heard)
