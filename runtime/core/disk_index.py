"""Choice of the images that leave the disk when a new image needs room: decides on values. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

IDLE_S_LEAST = 1.0  # an image used a moment ago counts as idle for a second: values stay comparable


class ImageFile(NamedTuple):
    """An image on disk."""

    name: str
    bytes: int
    used_at: float  # seconds, of the clock that `to_remove` is given
    built_s: float  # time to make the image again without the disk


def to_remove(files: Iterable[ImageFile], short_bytes: int, now: float) -> list[str] | None:
    """Names of the images to remove for `short_bytes` bytes, the least valuable image first; None: never enough.

    An image is worth the time that the image saves for each of its bytes, divided by the time since its last use."""
    removed: list[str] = []
    for file in sorted(files, key=lambda file: (_value(file, now), file.name)):
        if short_bytes <= 0:
            break
        removed.append(file.name)
        short_bytes -= file.bytes
    return removed if short_bytes <= 0 else None


def _value(file: ImageFile, now: float) -> float:
    return file.built_s / max(file.bytes, 1) / max(now - file.used_at, IDLE_S_LEAST)
