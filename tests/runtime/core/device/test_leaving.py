"""Requests that leave a device, and stay after all."""

from __future__ import annotations

from runtime.core.device.events import Ordered
from tests.runtime.core.device.test_instance import A, ask, world


def test_a_request_that_stays_after_all_wakes_a_model_that_was_told_to_sleep_meanwhile() -> None:
    two = world(total=8, a=3, b=3, quota=8)
    ask(two, "a")
    two.answer()
    (id,) = two.instance.models[A].queues.running
    two.begin_to_leave(id)
    two.hear(Ordered(A, awake=False))
    two.answer()
    two.stay(id)
    two.settle()
    assert two.instance.models[A].queues.running == {} and A in two.instance.models, "the request has its tokens"
