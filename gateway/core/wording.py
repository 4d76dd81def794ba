"""Sentences for wrong fields of a request's body, made from the field's type; msgspec's own words reach no client.

A pattern is no sentence, so the Meta of a text with a pattern has a `description` that names the values and gives an
example. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import inspect

_NAMES_A_FIELD = re.compile(r"(unknown|required) field `(.*)`")


def fault_of(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """The JSON pointer of the wrong field, and a sentence with values to write.

    `kind`: type of the whole body. msgspec's error reads `… - at `$.scaling.idle``."""
    message, _, path = str(error).partition(" - at `$")
    place = [part for part in re.split(r"[.\[\]]+", path.rstrip("`")) if part]
    if found := _NAMES_A_FIELD.search(message):
        whole = _pointer([*place, found[2]])
        return whole, unknown_field(found[2], kind, place) if found[1] == "unknown" else missing(
            kind, [*place, found[2]]
        )
    return _pointer(place), expected(kind, place)


def expected(kind: Any, place: Sequence[str] = ()) -> str:
    """`write …` or `choose …` for the field at `place` in a body of type `kind`."""
    node = _node(inspect.type_info(kind), place)
    words = _described(node) if node is not None else "another value"
    return words if words.startswith("choose") else f"write {words}"


def missing(kind: Any, place: Sequence[str]) -> str:
    return f"the field is missing: {expected(kind, place)}"


def unknown_field(name: str, kind: Any, place: Sequence[str] = ()) -> str:
    """`place`: path to the object that has the field."""
    node = _node(inspect.type_info(kind), place)
    names = _fields(node) if node is not None else []
    return f"there is no field {name!r}: {f'the fields are {_listed(names)}' if names else 'leave the field out'}"


def _pointer(place: Sequence[str]) -> str:
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in place)


# ── the type at a place ───────────────────────────────────────────────────────────────────────────────────────────────


def _node(node: inspect.Type, place: Sequence[str]) -> inspect.Type | None:
    """The type at `place`; None if the type has no such place."""
    if not place:
        return node
    match node:
        case inspect.Metadata(type=inner):
            return _node(inner, place)
        case inspect.UnionType(types=types):
            return next((found for each in types if (found := _node(each, place)) is not None), None)
        case inspect.StructType(fields=fields):
            return next((_node(field.type, place[1:]) for field in fields if field.encode_name == place[0]), None)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return _node(item, place[1:])
        case inspect.DictType(value_type=value):
            return _node(value, place[1:])
    return None


def _fields(node: inspect.Type) -> list[str]:
    match node:
        case inspect.Metadata(type=inner):
            return _fields(inner)
        case inspect.UnionType(types=types):
            return [name for each in types for name in _fields(each)]
        case inspect.StructType(fields=fields):
            return [field.encode_name for field in fields]
    return []


# ── the type in words ─────────────────────────────────────────────────────────────────────────────────────────────────


def _described(node: inspect.Type) -> str:
    match node:
        case inspect.Metadata(type=inner, extra_json_schema=said):
            return str(said["description"]) if said and "description" in said else _described(inner)
        case inspect.UnionType(types=types):
            others = [each for each in types if not isinstance(each, inspect.NoneType)]
            return " or ".join(map(_described, others)) + (", or null" if len(others) < len(types) else "")
        case inspect.StrType(min_length=least, max_length=most):
            return "a text" + (f" of {_range(least, most)} characters" if least or most else "")
        case inspect.IntType(ge=least, le=most):
            return f"a whole number{_bounds(least, most)}"
        case inspect.FloatType(ge=least, le=most):
            return f"a number{_bounds(least, most)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return f"choose one of {_listed(map(str, values))}"
        case inspect.EnumType(cls=cls):
            return f"choose one of {_listed(str(member.value) for member in cls)}"
        case inspect.DateTimeType():
            return "a time with a zone, as 2026-12-31T00:00:00Z"
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return f"a list, each item {_described(item)}"
        case inspect.StructType(fields=fields):
            return "an object" + (f" with some of {_listed(field.encode_name for field in fields)}" if fields else "")
        case inspect.DictType():
            return "an object"
    return "another value"


def _bounds(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return f" of at least {least}" if least is not None else f" of at most {most}" if most is not None else ""


def _range(least: int | None, most: int | None) -> str:
    return f"at least {least}" if most is None else f"{least or 0} to {most}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
