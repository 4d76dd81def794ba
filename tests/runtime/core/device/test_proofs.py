"""Proofs: each placed model is loaded once, and requests do not wait for the proofs of all models."""

from __future__ import annotations

import pytest

from runtime.core.device.events import Arrived, Build, Check, Fetch, Placed
from runtime.core.device.model import WAKE_S
from runtime.core.device.request import ModelKey
from runtime.core.engine import Held
from runtime.core.turns.slack import Slack
from tests.runtime.world import World, request, spec, step

SIZES = {f"m{number}": 5 for number in range(9)}
LAST = ModelKey("m8")


@pytest.fixture
def new() -> World:
    """A device with room for one model, and nine models built whose proofs are overdue."""
    world = World(9, SIZES, turns=Slack())
    world.hear(*(Placed(spec(key)) for key in SIZES))
    while isinstance(world.out, Build):
        world.answer()
    world.now = 2 * WAKE_S
    return world


def go_on(world: World) -> None:
    """End one thing that is under way on the device, half a second later."""
    world.now += 0.5
    if world.fetching:
        world.arrive()
    elif world.parking:
        world.leave(world.parking[0])
    else:
        world.answer()


def test_a_request_waits_for_one_proof_at_most_however_many_models_are_to_be_proved(new: World) -> None:
    asked, began = request(1, LAST, now=new.now), len(new.log)
    new.open.add(asked.id)
    new.hear(Arrived(asked))
    while step(LAST) not in new.log[began:]:
        go_on(new)
    fetched = [effect.model for effect in new.log[began:] if isinstance(effect, Fetch)]
    assert len(fetched) <= 2 and fetched[-1] == LAST


def test_every_model_is_proved_once_without_a_pause_on_an_idle_device(new: World) -> None:
    while new.fetching or new.parking or new.out:
        go_on(new)
    assert all(model.loads.ever_resident for model in new.instance.models.values())
    assert sum(isinstance(effect, Fetch) for effect in new.log) == len(SIZES)


def test_a_model_with_a_noted_proof_waits_for_its_first_request_and_is_checked_then() -> None:
    world = World(9, SIZES, turns=Slack())
    world.hear(*(Placed(spec(key), prove=False, noted=True) for key in SIZES))
    assert not world.log, "nothing is loaded"
    states = [model.state(Held()) for model in world.instance.models.values()]
    assert all(state.was_loaded and not state.was_resident for state in states)
    asked = request(1, LAST, now=world.now)
    world.open.add(asked.id)
    world.hear(Arrived(asked))
    while step(LAST) not in world.log:
        go_on(world)
    assert [effect.model for effect in world.log if isinstance(effect, Check)] == [LAST]
