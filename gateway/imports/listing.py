"""Files that a source holds, as the source lists these files before a download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import msgspec


@dataclass(frozen=True)
class Digests:
    """Digests of a file promised by its source; None: not promised."""

    sha256: str | None = None
    git_sha1: str | None = None  # git blob's SHA-1
    md5: str | None = None


@dataclass(frozen=True)
class Listed:
    """A file of a source.

    `etag`: sent as If-Match, so that a changed file is refused. `asked` makes URL and headers anew each time, because
    signatures expire.
    """

    name: str
    size: int
    digests: Digests
    etag: str | None
    asked: Callable[[], tuple[str, dict[str, str]]]
    place: str  # URL of the source at the endpoint

    @property
    def key(self) -> str:
        """Key of the file's bytes: equal for equal bytes, as far as the source's promises tell before the download."""
        if self.digests.sha256:
            return self.digests.sha256
        said = [self.place, self.name, self.size, self.digests.git_sha1, self.etag]
        return sha256(msgspec.json.encode(said)).hexdigest()


@dataclass(frozen=True)
class Listing:
    """Files of a source at a revision."""

    revision: str | None  # the commit, if the source has commits
    files: tuple[Listed, ...]
