"""Priorities of requests, of deployments and of keys: ranks on the wire and words for people. Pure."""

from __future__ import annotations

from enum import IntEnum


class Priority(IntEnum):
    """Rank of a request; a higher rank is served first."""

    BATCH = 0
    NORMAL = 1
    HIGH = 2

    @property
    def word(self) -> str:
        return self.name.lower()


def priority(word: str) -> Priority:
    """Return the priority that a word of `WORDS` names. Raises KeyError for any other word."""
    return Priority[word.upper()]


# Seconds by which a token of a tenant of weight 1 may be late before the token counts as lost.
PATIENCE_S = {Priority.BATCH: 0.0, Priority.NORMAL: 1.5, Priority.HIGH: 6.0}
WORDS = tuple([each.word for each in Priority])
