"""Tokens of a step: when each token counts as made, and a vector as an answer."""

from __future__ import annotations

import pytest

from runtime.core.device.events import Stepped
from runtime.core.engine import Output
from store.contract.wire import Finish
from tests.runtime.core.device.test_instance import A, ask, world


def test_tokens_made_together_in_a_step_are_spread_over_the_time_of_the_step() -> None:
    """With speculation a step makes several tokens for a request; none of these may count as made in the future."""
    one = world(a=2)
    ask(one, "a")
    (id,) = one.open
    progress = one.instance.models[A].queues.running[id].progress
    one.now += 0.05
    one.instance.hear(Stepped(A, [Output(id, [1, 2, 3, 4])], True, one.engines[A].held(), 0.05), one.now)
    assert (progress.sent, progress.last_at) == (4, one.now)
    assert progress.first_at == pytest.approx(one.now - 0.05 + 0.05 / 4)


def test_a_vector_is_an_answer_in_time_or_late_as_a_first_token_is() -> None:
    one = world(a=2)
    ask(one, "a")
    (id,) = one.open
    progress = one.instance.models[A].queues.running[id].progress
    one.now += 0.05
    answer = Output(id, [], Finish.STOP, None, b"a vector")
    one.instance.hear(Stepped(A, [answer], False, one.engines[A].held(), 0.05), one.now)
    assert (progress.sent, progress.first_at) == (1, one.now) and not progress.first_late
    assert one.instance.requests.owner(id) is None
