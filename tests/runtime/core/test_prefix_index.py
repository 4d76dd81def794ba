"""Kept blocks of ended requests: which go first, and when bringing back is cheaper than computing."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.prefix_index import BringingCosts, KeptBlock, PrefixIndex

TTL_S = 60.0


def chain(index: PrefixIndex, tenant: str, name: str, length: int, now: float = 0.0) -> list[KeptBlock]:
    """Add the blocks of a conversation, as an engine keeps them: the tail first."""
    blocks = [KeptBlock(1, f"{tenant} {name} {n}".encode(), tenant, n, 10, now) for n in range(length)]
    for block in reversed(blocks):
        index.add(block)
    return blocks


def test_the_tail_of_the_oldest_conversation_goes_first() -> None:
    index = PrefixIndex(TTL_S)
    old, young = chain(index, "a", "old", 3), chain(index, "a", "young", 3)
    assert index.victims(40) == [*reversed(old), young[2]]
    index.use(old, 1.0)
    assert index.victims(40) == [*reversed(young), old[2]]


def test_a_head_shared_by_two_conversations_stays_as_long_as_the_younger() -> None:
    index = PrefixIndex(TTL_S)
    head, first = chain(index, "a", "head", 2), chain(index, "a", "first", 2)
    second = chain(index, "a", "second", 2)
    index.use([*head, *second], 1.0)
    assert index.victims(60) == [*reversed(first), *reversed(second), *reversed(head)]


def test_the_tenant_with_the_most_bytes_loses_blocks_first() -> None:
    index = PrefixIndex(TTL_S)
    small, large = chain(index, "small", "c", 2), chain(index, "large", "c", 4)
    assert index.victims(20) == [large[3], large[2]]
    assert set(index.victims(1000)) == {*small, *large}


def test_blocks_being_copied_do_not_go() -> None:
    index = PrefixIndex(TTL_S)
    blocks = chain(index, "a", "c", 3)
    blocks[2].copies = 1
    assert index.victims(1000) == [blocks[1], blocks[0]]
    assert index.expired(TTL_S) == [blocks[1], blocks[0]]


def test_blocks_go_a_while_after_their_last_use() -> None:
    index = PrefixIndex(TTL_S)
    used, unused = chain(index, "a", "used", 2), chain(index, "a", "unused", 2)
    index.use(used, 30.0)
    assert index.expired(TTL_S - 1) == []
    assert index.expired(TTL_S) == [*reversed(unused)]
    assert index.expired(30.0 + TTL_S) == [*reversed(unused), *reversed(used)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=8), st.integers(0, 200), st.randoms())
def test_the_books_are_right_under_any_order(chains: list[tuple[str, int]], size: int, rng: random.Random) -> None:
    index = PrefixIndex(TTL_S)
    blocks = [block for n, (tenant, length) in enumerate(chains) for block in chain(index, tenant, str(n), length)]
    for block in rng.sample(blocks, len(blocks) // 2):
        index.remove(block)
        assert block.gone and index.get(1, block.key) is None
    left = [block for block in blocks if not block.gone]
    assert index.held_bytes == sum(block.bytes for block in left) and set(index.of(1)) == set(left)
    victims = index.victims(size)
    assert len(set(victims)) == len(victims) == min(len(left), -(-size // 10))
    assert all(index.get(1, block.key) is block for block in left)


def test_bringing_pays_until_the_rates_say_otherwise() -> None:
    costs = BringingCosts()
    assert costs.pays(128, 1 << 20)
    costs.computed(1, 0.005)
    costs.computed(1000, 1.005)  # 1 ms a token
    costs.brought(1 << 20, 0.1)
    assert costs.pays(101, 1 << 20) and not costs.pays(99, 1 << 20)


def test_a_single_slow_copy_is_not_the_last() -> None:
    costs = BringingCosts()
    costs.computed(1, 0.005)
    costs.computed(1000, 1.005)
    costs.brought(1 << 20, 1.0)
    refused = 0
    while not costs.pays(128, 1 << 20):
        refused += 1
    assert 0 < refused < 50
