"""What a model makes of a prompt. Pure."""

from __future__ import annotations

from enum import StrEnum


class Task(StrEnum):
    """Task of a deployed model, under vLLM's name."""

    GENERATE = "generate"  # text, token by token
    EMBED = "embed"  # one vector for each text
    CLASSIFY = "classify"  # one score for each label; with a single label: how well a document answers a query

    @property
    def pools(self) -> bool:
        """Whether an answer is a vector made in one piece: no token is sampled, and nothing is streamed."""
        return self is not Task.GENERATE
