"""Grammars that are dear to compile, as attacks for the benches of abuse: single requests for a model of the attacker.

At the default bounds the gateway refuses every attack except the last, and a child refuses the last after 5 s of a
processor. With the bounds of RAISED, as settings of the platform, the platform really compiles the grammars: the names
of the attacks then begin with `raised_`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

MODEL = "evil"  # the attacker's: the other tenant streams from a different model
PATH = "/v1/completions"
RAISED = {
    "STACCATO_GRAMMAR_BYTES_MAX": "8MiB",
    "STACCATO_GRAMMAR_CPU_S": "60",
    "STACCATO_GRAMMAR_MEMORY": "4GiB",
    "STACCATO_GRAMMAR_COMPILED_MAX": "64MiB",
}


def words(count: int) -> Iterator[str]:
    """Different words of nine letters."""
    letters = itertools.islice(itertools.product("etaoinshr", repeat=9), 7, None, 37)
    return ("".join(each) for each in itertools.islice(letters, count))


def schema(properties: int) -> dict[str, Any]:
    """A JSON schema with `properties` optional properties."""
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(properties)}}


def patterns(properties: int) -> dict[str, Any]:
    """A JSON schema below the default bound of 32 KiB. Even a check of the schema takes 20 s of a processor."""
    pattern = {"type": "string", "pattern": "[a-z]{1,900}"}
    return {"type": "object", "properties": {f"p{number}": pattern for number in range(properties)}}


# By name of the attack: the grammar, as `structured_outputs` of the request.
GRAMMARS: dict[str, Callable[[], dict[str, Any]]] = {
    "regex_of_20000_words": lambda: {"regex": "|".join(words(20_000))},
    "choice_of_10000_words": lambda: {"choice": [*words(10_000)]},
    "choice_of_100000_words": lambda: {"choice": [*words(100_000)]},
    "schema_of_3000_properties": lambda: {"json": schema(3_000)},
    "schema_of_560_patterns": lambda: {"json": patterns(560)},
}


def body(name: str) -> dict[str, Any]:
    """Body of the request of the attack `name`, without the model."""
    grammar = GRAMMARS[name.removeprefix("raised_")]()
    return {"prompt": "a", "max_tokens": 1, "structured_outputs": grammar}


def says(name: str, head: Callable[..., bytes]) -> Callable[[str], AsyncIterator[bytes]]:
    """Make an attack that yields the bytes sent on a connection; `head` writes the lines before the body."""
    text = b""

    async def attack(key: str) -> AsyncIterator[bytes]:
        nonlocal text
        text = text or json.dumps({"model": MODEL, **body(name)}).encode()
        yield head(key, f"content-length: {len(text)}", "connection: close", path=PATH) + text

    return attack


NAMES = (*GRAMMARS, *(f"raised_{name}" for name in GRAMMARS))
