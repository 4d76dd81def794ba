"""How a role's settings are read from `STACCATO_*` variables, and what is said of one that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

PREFIX = "STACCATO_"
SECRETS = PREFIX + "SECRETS"

Kind = TypeVar("Kind", bound=BaseSettings)


class SettingsError(ValueError):
    """A setting that cannot be used: names the variable, its value and what is expected."""


def read(kind: type[Kind], secret: Collection[str] = (), **given: object) -> Kind:
    """The settings of the environment and of the folder of secrets, `given` before them; values of `secret` ones are
    not repeated. Raises SettingsError."""
    try:
        return kind(_secrets_dir=os.environ.get(SECRETS), **given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        shown = "" if name in secret else f" is {str(first['input'])!r}"
        reason = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{PREFIX}{name.upper()}{shown}: {reason}") from error
