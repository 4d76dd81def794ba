"""Builds that take pages of the pool, as on a GPU: room is made first, and nobody else gets the pages meanwhile."""

from __future__ import annotations

import pytest

from runtime.core.device.events import Arrived, Build, Evict, Park, Placed, Withdrawn
from runtime.core.device.model import Phase
from runtime.core.device.request import ModelKey
from runtime.core.engine import Held
from runtime.core.turns.slack import Slack
from runtime.core.turns.turn import RoundRobin, Turns
from tests.runtime.world import World, request, spec

A, B, C = ModelKey("a"), ModelKey("b"), ModelKey("c")
TURNS = pytest.mark.parametrize("turns", [RoundRobin(4), Slack()], ids=["round robin", "slack"])
SIZES = {"a": 5, "b": 5, "c": 5}


def full(turns: Turns, total: int = 12) -> World:
    """A device whose pool is taken by two idle models."""
    world = World(total, SIZES, tokens_most=6, turns=turns)
    for key in "ab":
        world.hear(Placed(spec(key)))
        world.settle()
    assert world.free <= 2
    return world


def arrive(world: World, number: int, model: ModelKey) -> None:
    asked = request(number, model, now=world.now)
    world.open.add(asked.id)
    world.hear(Arrived(asked))


def builds(world: World) -> list[str]:
    return [effect.spec.key for effect in world.log if isinstance(effect, Build)]


@TURNS
def test_idle_models_give_pages_to_a_build(turns: Turns) -> None:
    world = full(turns)
    world.unfinished = 3
    world.hear(Placed(spec("c"), build_pages=6))
    while world.instance.models[C].phase is not Phase.BUILDING:
        world.leave(world.parking[0])
    assert world.instance.pages.of(C) == Held(6, 0)
    while world.unfinished:
        assert world.instance.pages.of(C) == Held(6, 0)
        world.answer()
    world.settle()
    assert any(isinstance(effect, Evict | Park) for effect in world.log) and builds(world)[-1] == "c"
    assert world.instance.models[C].phase is Phase.RESIDENT


@TURNS
def test_a_build_comes_in_the_end_although_all_models_have_requests(turns: Turns) -> None:
    world = full(turns)
    arrive(world, 1, A)
    arrive(world, 2, B)
    world.hear(Placed(spec("c"), build_pages=12))
    arrive(world, 3, C)
    world.settle(2000)
    assert "c" in builds(world) and not world.open


@TURNS
def test_a_build_larger_than_the_device_keeps_no_other_build_waiting(turns: Turns) -> None:
    world = World(12, SIZES, tokens_most=6, turns=turns)
    world.hear(Placed(spec("a")))
    assert isinstance(world.out, Build), "the device is busy while the others come"
    world.hear(Placed(spec("c"), build_pages=13))
    world.hear(Placed(spec("b"), build_pages=2))
    arrive(world, 1, B)
    world.answer(fails=True)  # nothing else is under way: the next event would come from outside
    world.settle()
    assert "b" in builds(world) and not world.open
    assert world.instance.models[C].phase is Phase.FAILED


@TURNS
def test_pages_of_a_build_come_back_when_the_build_fails(turns: Turns) -> None:
    world = full(turns)
    world.hear(Placed(spec("c"), build_pages=2))
    assert isinstance(world.out, Build)
    world.answer(fails=True)
    assert world.instance.pages.of(C) == Held() and world.instance.models[C].failures.error
    arrive(world, 1, A)
    world.settle()
    assert not world.open


def test_a_model_that_leaves_while_the_model_is_built_keeps_no_pages() -> None:
    world = full(RoundRobin(4))
    world.hear(Placed(spec("c"), build_pages=2))
    world.hear(Withdrawn(C))
    world.answer()
    world.settle()
    assert C not in world.instance.models and C not in world.instance.pages.held


def test_a_build_that_the_device_can_never_hold_is_refused_with_numbers() -> None:
    world = full(RoundRobin(4))
    world.hear(Placed(spec("c"), build_pages=13))
    said = world.instance.models[C].failures.error
    assert said.startswith("the model needs 13 pages (26 MiB) while it is built, and the device has 12 pages (24 MiB)")
    assert "c" not in builds(world)
