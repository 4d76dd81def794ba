"""Builds and checks of a model in parts, between the steps of other models of the device."""

from __future__ import annotations

from itertools import pairwise

import pytest

from runtime.core.device.events import Arrived, Build, Check, Placed, Step
from runtime.core.device.request import ModelKey, Objective
from runtime.core.turns.slack import Slack
from runtime.core.turns.turn import RoundRobin, Turns
from tests.runtime.world import World, request, spec

A, B = ModelKey("a"), ModelKey("b")
TURNS = pytest.mark.parametrize("turns", [RoundRobin(4), Slack()], ids=["round robin", "slack"])
PARTS = 10


def used(turns: Turns) -> World:
    """A device with a model that steps for a request, and with a second, newly placed model."""
    world = World(300, {"a": 5, "b": 5}, tokens_most=200, turns=turns)
    world.hear(Placed(spec("a")))
    world.settle()
    arrive(world, 1, A)
    go_on(world)
    world.unfinished = PARTS
    world.hear(Placed(spec("b")))
    return world


def arrive(world: World, number: int, model: ModelKey, ttft_s: float = 10.0) -> None:
    asked = request(number, model, now=world.now, objective=Objective(ttft_s=ttft_s))
    world.open.add(asked.id)
    world.hear(Arrived(asked))


def go_on(world: World) -> None:
    """End a fetch or the use of the device, ten milliseconds later."""
    world.now += 0.01
    if world.fetching:
        world.arrive()
    else:
        world.answer()


def uses(world: World) -> list[tuple[type, ModelKey]]:
    """Uses of the device so far: for each use, the kind and the model."""
    used = [effect for effect in world.log if isinstance(effect, Build | Check | Step)]
    return [(type(use), ModelKey(use.spec.key) if isinstance(use, Build) else use.model) for use in used]


@TURNS
def test_a_model_steps_between_two_parts_of_a_build_and_of_a_check_that_no_request_waits_for(turns: Turns) -> None:
    world = used(turns)
    while world.unfinished > PARTS // 2:
        go_on(world)
    world.unfinished = 0
    while (Check, B) not in uses(world):  # the build ends, and the first fetch
        go_on(world)
    world.unfinished = PARTS
    while world.unfinished:
        go_on(world)
    assert sum(model == B for _, model in uses(world)) > PARTS
    assert not any(one[1] == other[1] == B for one, other in pairwise(uses(world)))


def test_a_build_that_an_urgent_request_waits_for_comes_before_steps_that_can_wait() -> None:
    world = used(Slack())
    while world.unfinished == PARTS:
        go_on(world)
    arrive(world, 2, B, ttft_s=0.05)
    began = len(uses(world))
    while world.unfinished:
        go_on(world)
    assert all(model == B for _, model in uses(world)[began:])
