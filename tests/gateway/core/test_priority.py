"""The priority of a request: what is asked for, and what the key may ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.core.priority import PriorityTooHigh, UnknownPriority, asked, granted
from store.contract.priorities import WORDS, Priority, priority

RANKS = st.sampled_from(Priority)


@pytest.mark.parametrize(
    ("tier", "rank"),
    [
        (b'"priority"', Priority.HIGH),
        (b'"flex"', Priority.BATCH),
        *((tier, None) for tier in (b"", b"null", b'"auto"', b'"default"', b'"scale"', b'"standard_only"', b"7", b"[")),
    ],
)
def test_a_tier_asks_for_a_priority_or_leaves_the_priority_to_the_deployment(tier: bytes, rank: Priority) -> None:
    assert asked(None, Raw(tier)) is rank


def test_the_header_goes_before_the_tier() -> None:
    assert [asked(word, Raw(b'"priority"')) for word in WORDS] == list(Priority)
    assert asked(" High ", Raw()) is Priority.HIGH


def test_a_header_that_names_no_priority_is_refused_with_the_words() -> None:
    with pytest.raises(UnknownPriority, match="'urgent': say one of batch, normal, high"):
        asked("urgent", Raw())


@given(RANKS, RANKS, RANKS)
def test_no_request_gets_more_than_the_key_or_the_deployment_gives(
    asks: Priority, deployment: Priority, bound: Priority
) -> None:
    assert granted(None, deployment, bound) is deployment
    if asks <= max(deployment, bound):
        assert granted(asks, deployment, bound) is asks
    else:
        with pytest.raises(
            PriorityTooHigh, match=f"{asks.word}, and this key .* {max(deployment, bound).word} at most"
        ):
            granted(asks, deployment, bound)


def test_every_priority_has_a_word() -> None:
    assert [priority(word) for word in WORDS] == list(Priority)
