"""Store of imported files by content: each file once, whoever imported the file, and a folder of links for each model.

    blobs/SHA256        a file, whole and verified, read-only
    partial/KEY         a file being fetched, as far as received; locked by the fetching process
    known/KEY           the SHA-256 of the file KEY, if the source did not say the SHA-256 before
    folders/DIGEST/     a model: hard links into blobs, by the names that the source gave
    folders.lock        locked by the process that makes or removes a folder

Gateways on a machine, or with a common file system, share the store. Files that no model needs are swept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

RESERVE = 1 << 30  # bytes of the disk left for other programs
KEEP_S = 7 * 86_400.0  # files of an unfinished import are kept so long, while an import may be taken up again
POLL_S = 0.1


class Lost(Exception):
    """Error of a blob that has vanished."""


class Blobs:
    """Store of imported files in `folder`, which is made with the first file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _make(self) -> None:
        for name in ("blobs", "partial", "known", "folders"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def find(self, key: str, size: int) -> str | None:
        """Return the SHA-256 of the blob for a key, or None if no blob of the size exists."""
        with contextlib.suppress(OSError):
            sha256 = key if self._is_blob(key, size) else (self.folder / "known" / key).read_text()
            return sha256 if self._is_blob(sha256, size) else None
        return None

    def _is_blob(self, sha256: str, size: int) -> bool:
        path = self.folder / "blobs" / sha256
        return path.is_file() and path.stat().st_size == size

    def here(self, key: str, size: int) -> int:
        """Return how many bytes of the file are here."""
        if self.find(key, size):
            return size
        with contextlib.suppress(OSError):
            return min(size, (self.folder / "partial" / key).stat().st_size)
        return 0

    @contextlib.contextmanager
    def claimed(self, key: str, waits: Callable[[], None]) -> Iterator[Path]:
        """Lock the partial file of a key. `waits` is called while a different process has the lock, and may raise."""
        self._make()
        path = self.folder / "partial" / key
        while True:
            with path.open("ab") as file:
                if _locked(file.fileno()) and _is_at(file.fileno(), path):
                    yield path
                    return
            waits()
            time.sleep(POLL_S)

    def keep(self, partial: Path, sha256: str) -> None:
        """Make a claimed file, now whole, the blob."""
        partial.chmod(0o444)
        known = self.folder / "known" / partial.name
        if partial.name != sha256:
            draft = known.with_name(f".{known.name}.{os.getpid()}")
            draft.write_text(sha256)
            draft.replace(known)
        partial.replace(self.folder / "blobs" / sha256)

    def drop(self, sha256: str) -> None:
        """Remove a blob that turned out to be damaged."""
        (self.folder / "blobs" / sha256).unlink(missing_ok=True)

    @contextlib.contextmanager
    def draft(self, files: Mapping[str, str]) -> Iterator[Path]:
        """Make a folder of files (name → SHA-256) for the time of the context. Raises Lost."""
        self._make()
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=self.folder) as name:
            self._link(files, Path(name))
            yield Path(name)

    def assemble(self, files: Mapping[str, str]) -> Path:
        """Return the folder of files (name → SHA-256). Equal files give one folder. Raises Lost."""
        said = "".join(f"{name}\0{sha256}\n" for name, sha256 in sorted(files.items()))
        path = self.folder / "folders" / hashlib.sha256(said.encode()).hexdigest()
        self._make()
        with self._folders_locked():  # two imports of equal files end at the same time: the second finds the first's
            if self._is_folder_of(files, path):
                os.utime(path)  # tells a sweeping process that the folder is wanted
                return path
            made = Path(tempfile.mkdtemp(prefix=".draft-", dir=self.folder))
            try:
                self._link(files, made)
                made.chmod(0o755)
                if path.is_dir():  # the old folder has a blob that was dropped as damaged
                    shutil.rmtree(path)
                made.rename(path)
            finally:
                shutil.rmtree(made, ignore_errors=True)
        return path

    @contextlib.contextmanager
    def _folders_locked(self) -> Iterator[None]:
        """Wait until no other thread or process makes or removes a folder, and keep all others waiting."""
        with (self.folder / "folders.lock").open("ab") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            yield

    def _is_folder_of(self, files: Mapping[str, str], path: Path) -> bool:
        try:
            return all(os.path.samefile(path / name, self.folder / "blobs" / files[name]) for name in files)
        except FileNotFoundError:
            return False

    def _link(self, files: Mapping[str, str], folder: Path) -> None:
        for name, sha256 in files.items():
            (folder / name).parent.mkdir(exist_ok=True)  # a file may lie in a folder below: 1_Pooling/config.json
            try:
                os.link(self.folder / "blobs" / sha256, folder / name)
            except FileNotFoundError as error:
                raise Lost(name) from error

    # ── room ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def used_bytes(self) -> int:
        """Bytes used by blobs and partial files."""
        return sum(entry.stat().st_size for name in ("blobs", "partial") for entry in _entries(self.folder / name))

    def free_bytes(self) -> int:
        """Free bytes of the disk, less the reserve."""
        self._make()
        return max(0, shutil.disk_usage(self.folder).free - RESERVE)

    def candidates(self) -> dict[Path, int]:
        """Return the folders with the time of the last use, in ns. Call before asking the database for used folders."""
        return {Path(entry.path): entry.stat().st_mtime_ns for entry in _entries(self.folder / "folders")}

    def sweep(self, candidates: Mapping[Path, int], used: set[str], pending: bool, now_s: float) -> int:
        """Remove folders not in `used`, then blobs in no folder. Return the number of freed bytes.

        `pending`: an unfinished import may still need files, so only files unused for KEEP_S seconds are removed."""
        before = self.used_bytes()
        for path, wanted_ns in candidates.items():
            with contextlib.suppress(OSError), self._folders_locked():
                old = not pending or now_s - wanted_ns / 1e9 > KEEP_S
                if str(path) not in used and old and path.stat().st_mtime_ns == wanted_ns:
                    shutil.rmtree(path)
        for entry in _entries(self.folder / "blobs"):
            with contextlib.suppress(OSError):
                status = entry.stat()
                if status.st_nlink == 1 and (not pending or now_s - status.st_mtime > KEEP_S):
                    os.unlink(entry.path)
        for entry in _entries(self.folder / "partial"):
            with contextlib.suppress(OSError):
                if not pending or now_s - entry.stat().st_mtime > KEEP_S:
                    _unlink_unlocked(Path(entry.path))
        for entry in _entries(self.folder / "known"):
            with contextlib.suppress(OSError):
                if not (self.folder / "blobs" / Path(entry.path).read_text()).exists():
                    os.unlink(entry.path)
        return before - self.used_bytes()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still lies at `path`: the previous holder of the lock may have made the file a blob."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _unlink_unlocked(path: Path) -> None:
    with path.open("ab") as file:
        if _locked(file.fileno()) and _is_at(file.fileno(), path):
            path.unlink()
