"""A sign of life on long work, for a person at a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def waiting(message: str) -> Iterator[None]:
    """A spinner on standard error while the block runs; nothing when nobody looks."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield
