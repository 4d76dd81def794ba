"""Whose turn it is: asked when the turn ends or anything changed, answered from values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.request import ModelKey


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn that is under way: who holds the device and how many steps it has had."""

    holder: ModelKey
    steps: int


class Turns(Protocol):
    """A turn policy."""

    def order(self, models: Sequence[ModelKey]) -> Sequence[ModelKey]:
        """When whose next turn comes, soonest first. `models` begin with the one that is longest without a turn.

        Who can't step when its turn comes lets others go before, and keeps its place."""

    def over(self, turn: Turn) -> bool:
        """Whether the holder has had its share, so that others that can step go first."""


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each model with work steps `quota` times, then the one that waited longest."""

    quota: int = 8

    def order(self, models: Sequence[ModelKey]) -> Sequence[ModelKey]:
        return models

    def over(self, turn: Turn) -> bool:
        return turn.steps >= self.quota


POLICIES: dict[str, Turns] = {"round-robin": RoundRobin()}
