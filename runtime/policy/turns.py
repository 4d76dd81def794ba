"""Whose turn it is: asked at every token boundary, answered from values. Pure."""

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

    def next(self, ready: Sequence[ModelKey], turn: Turn | None) -> ModelKey:
        """Who steps next. `ready` are the resident models with work, in the order they were placed, never empty."""


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each model with work steps `quota` times, then the next one in the order of placement."""

    quota: int = 8

    def next(self, ready: Sequence[ModelKey], turn: Turn | None) -> ModelKey:
        if turn is None or turn.holder not in ready:
            return ready[0]
        if turn.steps < self.quota:
            return turn.holder
        return ready[(ready.index(turn.holder) + 1) % len(ready)]


POLICIES: dict[str, Turns] = {"round-robin": RoundRobin()}
