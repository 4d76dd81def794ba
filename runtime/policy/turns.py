"""Whose turn it is: what every turn policy answers, and the simplest of them. Pure.

A policy is an object of one device. It is asked with the models that have work and never told what it could see for
itself; what it needs to remember between two questions it keeps. That nobody starves is its own to see to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.model import Model
from runtime.request import ModelKey, Request


@dataclass(slots=True)
class Turn:
    """The turn that is under way: who holds the device, since when, and how many steps it has had."""

    holder: ModelKey
    began_at: float
    steps: int = 0
    left: int = 0  # steps that it may make before the policy is asked again, if nothing changes
    until: float = float("inf")  # by when it is asked in any case: steps may take longer than they should


class Turns(Protocol):
    """A turn policy. `working` and `order` are the models that somebody waits for, or for whose tokens."""

    shares: bool  # whether it looks at who is over their share; for the others nobody is

    relieves: bool  # whether who can wait is parked for a model that steps and lacks pages for more requests

    def arrived(self, request: Request, now: float) -> None:
        """A request came for a model of this device. Those that end or go are just not there any more."""

    def order(self, working: Iterable[Model], now: float) -> list[Model]:
        """When whose next turn comes, soonest first. `working` are in the order in which they got work.

        Who can't step when its turn comes lets others go before, and keeps its place. Pages are brought in for the
        first that lacks them, and taken from the last."""

    def next(self, order: Sequence[Model], turn: Turn | None, now: float) -> tuple[Model, int] | None:
        """Who steps now, of those that can, and how often before the policy is asked again although nothing changed.

        None only if none can step."""

    def admit(self, model: Model, now: float) -> Sequence[Request]:
        """Of those that wait for this resident model, whom its engine gets before its next step, in this order.

        At least one if nobody runs in it."""

    def yields(self, model: Model, needy: Model, turn: Turn | None, now: float) -> bool:
        """Whether a model with work may be parked for `needy`, whose turn comes sooner."""


class RoundRobin:
    """Each model with work steps `quota` times, then the one that waited longest."""

    shares = False
    relieves = False

    def __init__(self, quota: int = 8) -> None:
        self.quota = quota

    def arrived(self, request: Request, now: float) -> None:
        pass

    def order(self, working: Iterable[Model], now: float) -> list[Model]:
        return sorted(working, key=_last_turn)

    def next(self, order: Sequence[Model], turn: Turn | None, now: float) -> tuple[Model, int] | None:
        if turn is not None and turn.steps < self.quota:
            for model in order:
                if model.key == turn.holder and model.can_step:
                    return model, self.quota - turn.steps
        return next(((model, self.quota) for model in order if model.can_step), None)

    def admit(self, model: Model, now: float) -> Sequence[Request]:
        return list(model.waiting.values())

    def yields(self, model: Model, needy: Model, turn: Turn | None, now: float) -> bool:
        if model.fresh:  # or two could push each other out forever
            return False
        return turn is None or turn.holder != model.key or turn.steps >= self.quota or not model.can_step


def _last_turn(model: Model) -> int:
    return model.turn_no
