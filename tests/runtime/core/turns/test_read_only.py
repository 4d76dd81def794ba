"""No turn policy writes into models, requests or turns given to the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pytest

from runtime.core.device.events import Arrived, Placed
from runtime.core.device.model import Model
from runtime.core.device.record import Turn
from runtime.core.device.request import Request
from runtime.core.device.view import ModelView
from runtime.core.turns.registry import POLICIES
from runtime.core.turns.slack import Slack
from runtime.core.turns.turn import TurnOrder, Turns
from tests.runtime.core.device.test_instance_any_order import SIZES
from tests.runtime.world import World, request, spec


def looks(model: Model) -> tuple[object, ...]:
    """Every value of the model that a policy could write into, except the memo of `next_due`."""
    queues, shares = model.queues, model.shares
    facts = (model.phase, model.wish, model.withdrawn, model.used_at, model.sequential)
    counts = (queues.context, queues.prompts, queues.ttft_s, list(queues.waiting), list(queues.running))
    requests = [repr(request) for request in (*queues.waiting.values(), *queues.running.values())]
    objects = [repr(each) for each in (model.demand, model.failures, model.loads, model.record, vars(shares))]
    return (*facts, *counts, *requests, *objects)


T = TypeVar("T")


class Watched:
    """A policy whose every answer is compared with the models before the question."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.shares, self.relieves = turns, turns.shares, turns.relieves
        self.models: dict[str, Model] = {}
        self.asked = 0
        self.was_over = False  # whether a tenant was over its share in any question

    def _watch(self, ask: Callable[[], T], turn: Turn | None = None) -> T:
        before = [looks(model) for model in self.models.values()], repr(turn)
        answer = ask()
        assert before == ([looks(model) for model in self.models.values()], repr(turn))
        self.asked += 1
        self.was_over |= any(model.shares.over for model in self.models.values())
        return answer

    def arrived(self, request: Request, now: float) -> None:
        self._watch(lambda: self.turns.arrived(request, now))

    def order(self, working: Iterable[Model], now: float) -> TurnOrder:
        return self._watch(lambda: self.turns.order(working, now))

    def next(self, order: Sequence[Model], turn: Turn | None, now: float) -> tuple[Model, int] | None:
        return self._watch(lambda: self.turns.next(order, turn, now), turn)  # type: ignore[return-value]

    def admit(self, model: Model, now: float) -> Sequence[Request]:
        return self._watch(lambda: self.turns.admit(model, now))

    def yields(self, model: Model, needy: Model, turn: Turn | None, now: float) -> bool:
        return self._watch(lambda: self.turns.yields(model, needy, turn, now), turn)


def asked(watched: Watched) -> World:
    """A device with more models than fit, and the requests of three tenants."""
    world = World(10, SIZES, turns=watched, step_s=1.0)  # type: ignore[arg-type]
    watched.models = world.instance.models  # type: ignore[assignment]
    for stream in range(1, 25):
        asked = request(stream, "abcd"[stream % 4], tenant="xyz"[stream % 3])
        if stream <= 4:
            world.hear(Placed(spec(asked.model)))
        world.open.add(asked.id)
        world.hear(Arrived(asked))
    return world


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_policy_reads_and_never_writes(policy: Callable[[], Turns]) -> None:
    watched = Watched(policy())
    world = asked(watched)
    world.settle(2000)
    assert not world.open and watched.asked > 50 and watched.was_over == watched.shares


def test_a_policy_that_writes_is_found() -> None:
    class Scores(Slack):
        def admit(self, model: ModelView, now: float) -> Sequence[Request]:
            model.used_at += 1.0  # type: ignore[misc]
            return super().admit(model, now)

    with pytest.raises(AssertionError):
        asked(Watched(Scores())).settle(2000)
