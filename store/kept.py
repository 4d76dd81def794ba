"""Texts that are made once and kept in a file that only the process's user can read: keys, seeds, the pepper."""

from __future__ import annotations

import os
from pathlib import Path


def kept(path: Path, fresh: str) -> str:
    """Return the text of `path`; write `fresh` first if the file is missing. Concurrent processes agree on a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    if not path.exists():
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(fresh + "\n")
            file.flush()
            os.fsync(descriptor)
        try:
            os.link(draft, path)  # fails, instead of replacing the file, if another process was first
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text().strip()
