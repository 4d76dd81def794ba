"""Place of a client in a stream: the `id` of the last event that the client has. Pure.

Tokens and characters are counted, not events: a second gateway cuts the same text into other pieces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum


class Part(IntEnum):
    """Last part of a stream that a client has seen."""

    NOTHING = 0
    TEXT = 1  # the event before the text, or a piece
    END = 2  # the event with the finish reason
    USAGE = 3


_WORDS = {Part.TEXT: "", Part.END: ".end", Part.USAGE: ".usage"}
_PARTS = {word: part for part, word in _WORDS.items()}
_FORM = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(|\.end|\.usage)", re.ASCII)


@dataclass(frozen=True)
class Position:
    """Place in a stream with one answer."""

    tokens: int = 0
    characters: int = 0
    part: Part = Part.NOTHING

    def __str__(self) -> str:
        return "0" if self.part is Part.NOTHING else f"{self.tokens}.{self.characters}{_WORDS[self.part]}"

    @classmethod
    def of(cls, said: str) -> Position | None:
        """Return the place that an event's id names; None if no event has such an id. `0`: the start of the stream."""
        if said == "0":
            return cls()
        found = _FORM.fullmatch(said)
        return cls(int(found[1]), int(found[2]), _PARTS[found[3]]) if found else None
