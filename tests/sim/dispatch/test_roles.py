"""Dispatch of Aegaeon: gateways choose queues, devices of prompts choose devices that decode, by reports."""

from __future__ import annotations

import pytest

from runtime.core.device.request import ModelKey, Objective, RequestId
from runtime.core.turns.aegaeon import Aegaeon
from runtime.core.turns.groups import Prefill, Queue
from runtime.sim.dispatch.roles import Roles, SeenQueue
from runtime.sim.dispatch.sight import Sight
from runtime.sim.workload import base
from runtime.sim.world import World
from tests.sim.dispatch.test_gateways import profile


def prefill(number: int, model: str = "a") -> Prefill:
    return Prefill(RequestId(f"request-{number}"), ModelKey(model), 1.0, 0.5)


def requests(queue: Queue) -> list[str]:
    return [waiting.request for group in queue.groups for waiting in group.waiting]


def test_a_gateway_sees_a_queue_as_last_reported_and_its_own_prompts_since() -> None:
    seen, true = SeenQueue(0), Queue(0)
    for number, at in enumerate((1.0, 2.0, 3.0)):
        seen.add(prefill(number), at)
    true.add(prefill(0))
    true.add(prefill(7))  # of another gateway
    seen.hear(true.copy(), 1.5)
    assert requests(seen.queue) == ["request-0", "request-7", "request-1", "request-2"]
    seen.hear(Queue(0), 1.0)  # older
    assert len(requests(seen.queue)) == 4
    seen.hear(Queue(0), 3.0)  # all prompts are done
    assert requests(seen.queue) == []


def test_a_copy_of_a_queue_changes_alone() -> None:
    queue = Queue(0)
    queue.add(prefill(0))
    copy = queue.copy()
    copy.add(prefill(1))
    copy.done(prefill(0), 1.0)
    assert requests(queue) == ["request-0"] and requests(copy) == ["request-1"]


@pytest.mark.parametrize("sight", [Sight(), Sight(8, 1.0), Sight(exact=True)])
def test_prompts_and_tokens_have_their_own_devices_and_all_requests_end(sight: Sight) -> None:
    work = base(20, 1, duration_s=60.0)
    world = World(work, profile("h100"), Aegaeon, Roles(2, sight), 4, Objective(), checks=True)
    world.run(120.0)
    assert all(request.sent == request.max_tokens for request in world.requests)
    made = [sum(model.record.tokens for model in device.instance.models.values()) for device in world.devices]
    assert made[0] + made[1] == len(work.at_s)  # the first token of each request
    assert min(made[2:]) > 1000
    assert world.result(15.0).token_attainment >= 0.98
