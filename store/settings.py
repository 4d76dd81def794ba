"""Reading of a role's settings from `STACCATO_*` variables, and the error sentence of an unusable setting."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings

PREFIX = "STACCATO_"
SECRETS = PREFIX + "SECRETS"

PERCENT_MOST = 95  # contexts and workspaces need the rest of a device's memory


@dataclass(frozen=True)
class MemoryShare:
    """Part of a memory, a device's or the host cache, written as 90%."""

    percent: int

    def __str__(self) -> str:
        return f"{self.percent}%"


def size_or_share(value: object) -> object:
    """Read percent as a `MemoryShare`, and leave other values to pydantic. Raises ValueError."""
    if not (isinstance(value, str) and value.strip().endswith("%")):
        return value
    number = value.strip().removesuffix("%")
    if not number.isdigit() or not 0 < int(number) <= PERCENT_MOST:
        raise ValueError(f"write a part as 1% to {PERCENT_MOST}%, or a size as 8GB")
    return MemoryShare(int(number))


# Servers of the bus that keep each stream and bucket; None: 1, and streams that are there stay as they are.
Replicas = Annotated[int, Field(ge=1, le=5)] | None


def _days(value: float) -> float:
    if 0 < value < 1:
        raise ValueError("usage waits there for the ledger: 1 day or more, or 0 for no end")
    return value


# Days for which the bus keeps usage, whether booked or not; 0: without end. A restored backup may be as old.
UsageDays = Annotated[float, Field(ge=0), AfterValidator(_days)]
USAGE_DAYS = 35.0


def addresses(url: str) -> list[str]:
    """Return the addresses of a URL that names several servers, with commas between."""
    return [part.strip() for part in url.split(",") if part.strip()]


Kind = TypeVar("Kind", bound=BaseSettings)


class SettingsError(ValueError):
    """Error of an unusable setting: names the variable, the value and the expected form."""


def read(kind: type[Kind], secret: Collection[str] = (), **given: object) -> Kind:
    """Read the settings from the environment and the folder of secrets; values in `given` take precedence.

    Raises SettingsError; the error does not show the value of a setting named in `secret`."""
    try:
        return kind(_secrets_dir=os.environ.get(SECRETS), **given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        missing = first["type"] == "missing"  # the input is all settings then, passwords included
        shown = " is not set" if missing else "" if name in secret else f" is {str(first['input'])!r}"
        reason = _words(first["type"], first.get("ctx", {})) or first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{PREFIX}{name.upper()}{shown}: {reason}") from error


SIZE = "write a size in bytes, as 512MiB or 8GB"
# Sentences by pydantic's type of error; pydantic's context of the error fills the braces.
WORDS = {
    "int_parsing": "write a whole number",
    "int_from_float": "write a whole number",
    "float_parsing": "write a number, as 2.5",
    "bool_parsing": "write true or false",
    "byte_size": SIZE,
    "byte_size_unit": SIZE,
    "greater_than": "write more than {gt}",
    "greater_than_equal": "write at least {ge}",
    "less_than_equal": "write at most {le}",
    "literal_error": "choose one of {expected}",
    "enum": "choose one of {expected}",
    "missing": "the setting is needed",
}


def _words(kind: str, context: Mapping[str, object]) -> str | None:
    """Return the sentence of WORDS for an error; None: the message of the setting's own validator is to be shown."""
    return WORDS[kind].format(**context) if kind in WORDS else None
