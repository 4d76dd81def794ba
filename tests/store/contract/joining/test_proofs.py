"""Property: over every state of tokens and bindings, a valid proof alone gets in."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from store.contract.joining.proofs import (
    RUNTIME_ID,
    AlreadyBound,
    JoinedRuntime,
    JoinProof,
    JoinsNow,
    JoinToken,
    NotAdmitted,
    decide,
)

IDS, KEYS, TIMES = ("r1", "r2"), ("U1", "U2"), (0, 5, 10)
when = st.none() | st.sampled_from(TIMES)
bindings = st.lists(
    st.builds(JoinedRuntime, st.sampled_from(IDS), st.sampled_from(KEYS), st.just("t"), st.just(0), when),
    max_size=4,
    unique_by=lambda each: each.id,
).filter(lambda found: len({each.public_key for each in found if each.revoked_us is None}) == sum(map(_lives, found)))
tokens = st.none() | st.builds(
    JoinToken, st.just("t"), st.none() | st.sampled_from(IDS), st.just(0), st.sampled_from(TIMES), when, st.none(), when
)
proofs = st.builds(JoinProof, st.sampled_from(IDS), st.sampled_from(KEYS), st.booleans())


def _lives(binding: JoinedRuntime) -> bool:
    return binding.revoked_us is None


@given(proofs, tokens, bindings, st.sampled_from(TIMES))
@example(JoinProof("r1", "U1", False), None, [JoinedRuntime("r1", "U1", "t", 0, 5)], 10)
@settings(max_examples=400)
def test_a_valid_proof_alone_gets_in(
    proof: JoinProof, token: JoinToken | None, bindings: list[JoinedRuntime], now_us: int
) -> None:
    living = {each.id: each.public_key for each in bindings if _lives(each)}
    bound = living.get(proof.runtime) == proof.public_key
    free = proof.runtime not in living and proof.public_key not in living.values()
    fresh = (
        proof.with_token
        and token is not None
        and (token.used_us, token.revoked_us) == (None, None)
        and token.expires_us > now_us
        and token.runtime in (None, proof.runtime)
    )
    match decide(proof, token, bindings, now_us):
        case AlreadyBound():
            assert bound
        case JoinsNow(token_id):
            assert not bound and free and fresh and token_id == "t"
        case NotAdmitted(reason):
            assert not bound and not (free and fresh) and reason


@pytest.mark.parametrize("id", ("r1", "gpu-7", "A", "a" * 63))
def test_an_id_is_a_word_of_a_subject(id: str) -> None:
    assert RUNTIME_ID.fullmatch(id)


@pytest.mark.parametrize("id", ("", "*", ">", "a.b", "a b", "a\n", "ä", "a" * 64, "a/b"))
def test_an_id_that_says_more_is_none(id: str) -> None:
    assert not RUNTIME_ID.fullmatch(id)
