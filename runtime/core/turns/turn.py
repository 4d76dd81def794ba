"""Interface of the turn policies and the simplest policy; a turn policy decides which model steps next. Pure.

A policy object belongs to one device. The device asks the policy with the models that have work, and never tells the
policy facts visible in the models. The policy keeps its own memory between two questions, and must itself prevent
starvation of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.core.device.request import Request
from runtime.core.device.view import ModelView, TurnView


@dataclass(slots=True)
class TurnOrder:
    """Working models by their next turn, soonest first."""

    models: Sequence[ModelView]
    room_pages: float = 0.0  # pages of the pool left to waiting requests of tenants over their share


class Turns(Protocol):
    """A turn policy. `working` and `order` are models with requests, or models wished to be resident.

    A policy reads models, requests and turns, and writes into none of them: scores stay in the policy object, and the
    machine gets what the machine needs from the returned values."""

    shares: bool  # whether the policy heeds tenants over their share; under a policy without it no tenant is ever over

    relieves: bool  # whether models that can wait are parked for a stepping model short of pages for more requests

    def arrived(self, request: Request, now: float) -> None:
        """Notes a request that came for a model of this device.

        The policy is not told of ended or departed requests: the models just no longer list these requests."""

    def order(self, working: Iterable[ModelView], now: float) -> TurnOrder:
        """Working models by their next turn, soonest first. `working` is in the order in which the models got work.

        A model unable to step when its turn comes lets later models step first and keeps its place. Pages are brought
        in for the first model short of pages, and taken from the last models."""

    def next(self, order: Sequence[ModelView], turn: TurnView | None, now: float) -> tuple[ModelView, int] | None:
        """The model to step now, and the number of steps until the policy is asked again if nothing changes.

        The model must be able to step. Returns None only if no model can step."""

    def admit(self, model: ModelView, now: float) -> Sequence[Request]:
        """Waiting requests of a resident model to give to its engine before the next step, in order.

        Must return at least one request if the model has no running request."""

    def yields(self, model: ModelView, needy: ModelView, turn: TurnView | None, now: float) -> bool:
        """Whether `model`, which has work, may be parked for `needy`, a model with an earlier turn."""


class RoundRobin:
    """Each model with work steps `quota` times, then the model that waited longest gets its turn."""

    shares = False
    relieves = False

    def __init__(self, quota: int = 8) -> None:
        self.quota = quota

    def arrived(self, request: Request, now: float) -> None:
        pass

    def order(self, working: Iterable[ModelView], now: float) -> TurnOrder:
        return TurnOrder(sorted(working, key=_last_turn))

    def next(self, order: Sequence[ModelView], turn: TurnView | None, now: float) -> tuple[ModelView, int] | None:
        if turn is not None and turn.steps < self.quota:
            for model in order:
                if model.key == turn.holder and model.can_step:
                    return model, self.quota - turn.steps
        return next(((model, self.quota) for model in order if model.can_step), None)

    def admit(self, model: ModelView, now: float) -> Sequence[Request]:
        return list(model.queues.waiting.values())

    def yields(self, model: ModelView, needy: ModelView, turn: TurnView | None, now: float) -> bool:
        if model.demand.fresh:  # else two models could push each other out forever
            return False
        return turn is None or turn.holder != model.key or turn.steps >= self.quota or not model.can_step


def _last_turn(model: ModelView) -> int:
    return model.record.turn_no
