"""What two models at once could be worth: between nothing and twice, and nothing where the memory is the limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.ledgers.costs import ModelSize, load_profile
from runtime.core.ledgers.overlap import StepParts, at_once_s, decode_parts, prefill_parts, worth
from tests.conftest import ROOT

MODEL = ModelSize("8B", 16_000_000_000, 131_072, 8e9)
seconds = st.floats(0, 1, allow_nan=False)
parts = st.builds(StepParts, st.floats(1e-6, 1), seconds, seconds)


@given(parts, parts)
def test_two_steps_at_once_take_no_less_than_each_and_no_more_than_both(one: StepParts, other: StepParts) -> None:
    assert max(one.alone_s, other.alone_s) <= at_once_s(one, other) <= (one.alone_s + other.alone_s) * (1 + 1e-9)
    assert 1 - 1e-9 <= worth(one, other) <= 2
    assert worth(one, other) == worth(other, one)


def test_steps_that_use_up_the_memory_or_the_arithmetic_gain_nothing_and_steps_of_launches_alone_gain_all() -> None:
    assert worth(StepParts(0.0, 3.0, 0.0), StepParts(0.0, 1.0, 0.0)) == 1
    assert worth(StepParts(0.0, 0.0, 2.0), StepParts(0.0, 0.0, 2.0)) == 1
    assert worth(StepParts(1.0, 0.0, 0.0), StepParts(1.0, 0.0, 0.0)) == 2
    assert worth(StepParts(0.0, 1.0, 0.0), StepParts(0.0, 0.0, 1.0)) == 2


@pytest.mark.parametrize("requests", [1, 64])
def test_the_parts_of_a_step_add_up_to_the_step_of_the_law(requests: int) -> None:
    law = load_profile((ROOT / "deploy/profiles/h100.json").read_bytes(), "h100").law
    assert law is not None
    costs = law.costs(MODEL)
    assert decode_parts(law, MODEL, requests, 1000).alone_s == pytest.approx(costs.step(requests, 1000 * requests))
    assert prefill_parts(law, MODEL, 512).alone_s == pytest.approx(costs.prefill(512))
