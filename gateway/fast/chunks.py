"""Server-sent events of a stream, spliced into templates: bytes made once for each request.

vLLM's own classes write an event of each kind once for a front, with marks in place of the values. `Template` splits
the event at the marks, so the fast way sends what vLLM would send, under any version of vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

_encode = msgspec.json.Encoder().encode
# Marks for texts are texts, and marks for numbers are numbers: vLLM's classes check the types.
TEXTS = ("id", "model", "content", "finish", "stop")
NUMBERS = {
    name: 9_000_000_001 + at
    for at, name in enumerate(
        ("created", "index", "prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "written_tokens")
    )
}
_NAMES = {str(number): name for name, number in NUMBERS.items()}
_MARK = re.compile(rb'"@(\w+)@"|(90000000\d\d)')
DONE = b"data: [DONE]\n\n"


def text_mark(name: str) -> str:
    """Return the text that marks the place of a text in an event."""
    return f"@{name}@"


class Template:
    """An event with places for values. Bytes stand at even positions, names of values at odd positions."""

    def __init__(self, parts: tuple[bytes | str, ...]) -> None:
        self._parts = parts

    @classmethod
    def of_event(cls, event: str) -> Template:
        """Return the template of an event's JSON with marks."""
        data, parts, at = b"data: " + event.encode() + b"\n\n", list[bytes | str](), 0
        for found in _MARK.finditer(data):
            text, number = found.groups()
            parts += [data[at : found.start()], text.decode() if text else _NAMES[number.decode()]]
            at = found.end()
        return cls((*parts, data[at:]))

    def bound(self, values: Mapping[str, bytes]) -> Template:
        """Return the template with the values that are known already, in JSON."""
        parts: list[bytes | str] = []
        literal = b""
        for part in self._parts:
            if isinstance(part, bytes):
                literal += part
            elif part in values:
                literal += values[part]
            else:
                parts += [literal, part]
                literal = b""
        return Template((*parts, literal))

    def filled(self, values: Mapping[str, bytes]) -> bytes:
        """Return the event with every value."""
        return b"".join([part if isinstance(part, bytes) else values[part] for part in self._parts])

    @property
    def around(self) -> tuple[bytes, bytes] | None:
        """The bytes before and after the content, if the content is the only value left."""
        match self._parts:
            case (bytes() as before, "content", bytes() as after):
                return before, after
        return None


@dataclass(frozen=True)
class EventTemplates:
    """Events of a stream with marks: of a kind of request at a front, without and with the usage in each event."""

    first: Template | None  # before the first piece of each answer; None: completions have no such event
    piece: Template
    last: Template  # the last piece of an answer
    last_of_all: Template  # the same, in a stream that ends without usage
    usage: Template

    def bound(self, values: Mapping[str, bytes]) -> EventTemplates:
        return EventTemplates(
            self.first and self.first.bound(values),
            self.piece.bound(values),
            self.last.bound(values),
            self.last_of_all.bound(values),
            self.usage.bound(values),
        )


class StreamEvents:
    """Writes the events of one stream."""

    def __init__(self, templates: EventTemplates, id: str, model: str, created: int, prompt_tokens: int, answers: int):
        values = {"id": id, "model": model, "created": created, "prompt_tokens": prompt_tokens}
        self._templates = templates.bound({name: _encode(value) for name, value in values.items()})
        self.prompt_tokens = prompt_tokens
        self._pieces = [self._templates.piece.bound({"index": b"%d" % index}) for index in range(answers)]
        self._around = [piece.around for piece in self._pieces]

    def first(self, index: int) -> bytes:
        """The event before the first piece of answer `index`; empty for completions."""
        first = self._templates.first
        return first.filled({"index": b"%d" % index, **self._counts(0)}) if first else b""

    def piece(self, index: int, text: str, tokens: int) -> bytes:
        """A piece of answer `index`. `tokens`: tokens of the answer up to this piece."""
        if (around := self._around[index]) is not None:
            return around[0] + _encode(text) + around[1]
        return self._pieces[index].filled({"content": _encode(text), **self._counts(tokens)})

    def last(self, index: int, text: str, tokens: int, finish: str, stop: int | str | None, of_all: bool) -> bytes:
        """The last piece of answer `index`. `of_all`: no usage follows."""
        template = self._templates.last_of_all if of_all else self._templates.last
        said = {"index": index, "content": text, "finish": finish, "stop": stop}
        return template.filled({**{name: _encode(value) for name, value in said.items()}, **self._counts(tokens)})

    def usage(self, tokens: int, cached_tokens: int, written_tokens: int) -> bytes:
        """The usage at the end of a stream. `tokens`: tokens of all answers."""
        found = {"cached_tokens": b"%d" % cached_tokens, "written_tokens": b"%d" % written_tokens}
        return self._templates.usage.filled({**found, **self._counts(tokens)})

    def _counts(self, tokens: int) -> dict[str, bytes]:
        return {"completion_tokens": b"%d" % tokens, "total_tokens": b"%d" % (self.prompt_tokens + tokens)}
