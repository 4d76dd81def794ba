"""An import, from the source's list to a folder of verified files: a job that can stop anywhere and continue later.

A job runs on a thread. Small files come first, so that an unservable model is refused before its weights are fetched.
Then the job checks the size and the room on the disk; then it fetches the weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from gateway.imports.listing import Listed, Listing
from gateway.imports.sources import FILES_MOST, Hub, ObjectPrefix, Sources, listing
from store.files import artefact
from store.files.architectures import Known
from store.files.artefact import Artefact, ArtefactRefused
from store.files.blobs import Blobs, Lost

if TYPE_CHECKING:
    from gateway.imports.download import Downloader

log = structlog.get_logger()

FIRST_PATIENCE_S = 5.0  # until the source has listed its files: a client waits, and may have written a wrong name
PATIENCE_S = 600.0  # without a single byte received
PAUSE_S, PAUSE_S_MOST = 0.5, 30.0
RATE_S = 10.0  # window for the measured speed
DAMAGED_MOST = 2  # damaged downloads of a file
SMALL = (*artefact.CONFIGS, *artefact.VECTOR_CONFIGS, *artefact.TOKENIZERS, artefact.INDEX)

T = TypeVar("T")


class Stopped(Exception):
    """The import was cancelled, or the gateway ends."""


@dataclass(frozen=True)
class Imported:
    """Result of an import. `path`: the folder, if made by the job. `revision`: the commit that was imported."""

    path: Path | None
    revision: str | None
    artefact: Artefact


@dataclass
class Standing:
    """Progress of an import: written by the job's thread, read by every thread."""

    done_bytes: int = 0
    total_bytes: int = 0
    eta_s: int | None = None
    waits_for: str | None = None  # reason for a pause
    revision: str | None = None
    _marks: list[tuple[float, int]] = field(default_factory=list)

    def at(self, done_bytes: int, now_s: float) -> None:
        self.done_bytes, self.waits_for = done_bytes, None
        if not self._marks or now_s - self._marks[-1][0] >= 0.5:
            self._marks = [mark for mark in self._marks if now_s - mark[0] < RATE_S] + [(now_s, done_bytes)]
            since_s, before = self._marks[0]
            if now_s - since_s >= 1.0 and done_bytes > before:
                speed = (done_bytes - before) / (now_s - since_s)
                self.eta_s = round((self.total_bytes - done_bytes) / speed)

    def wait(self, why: str) -> None:
        self.waits_for, self.eta_s = why, None
        self._marks.clear()


class ImportSpace:
    """Bytes still to be written by running imports: two imports that fit alone may not fit together."""

    def __init__(self, blobs: Blobs, bytes_most: int | None) -> None:
        self._blobs, self._bytes_most = blobs, bytes_most
        self._promised: dict[str, Callable[[], int]] = {}
        self._lock = threading.Lock()

    def take(self, id: str, missing: Callable[[], int]) -> None:
        """Reserve room for an import. `missing` returns the bytes still to come. Raises Refused."""
        with self._lock:
            self._promised.pop(id, None)
            others = sum(bytes() for bytes in self._promised.values())
            needed = missing()
            if (free := self._blobs.free_bytes() - others) < needed:
                raise ArtefactRefused(
                    f"{_mib(needed)} MiB are still to be fetched, and the disk of STACCATO_MODELS has room for "
                    f"{_mib(free)}: free some, or set it to a larger one"
                )
            most = self._bytes_most
            if most is not None and (used := self._blobs.used_bytes() + others) + needed > most:
                raise ArtefactRefused(
                    f"{_mib(needed)} MiB are still to be fetched, and of STACCATO_MODELS_MOST, {_mib(most)} MiB, "
                    f"{_mib(used)} are used: delete models or raise it"
                )
            self._promised[id] = missing

    def give_back(self, id: str) -> None:
        with self._lock:
            self._promised.pop(id, None)


def _mib(size: int) -> int:
    return -(-size // (1 << 20))


@dataclass
class Job:
    """Everything that an import needs.

    `reserve` takes bytes from the owner's quota; `keep` records the commit.
    """

    id: str
    remote: Hub | ObjectPrefix
    revision: str | None  # the commit found by an earlier run
    sources: Sources
    blobs: Blobs
    room: ImportSpace
    known: Known
    reserve: Callable[[int], None]
    keep: Callable[[str], None]
    patience_s: float = PATIENCE_S
    standing: Standing = field(default_factory=Standing)
    halt: threading.Event = field(default_factory=threading.Event)
    _others_bytes: int = 0  # bytes of files not under way now

    def run(self) -> Imported:
        """Run the import on the calling thread. Raises Refused, Stopped."""
        from gateway.imports.download import Downloader

        door = Downloader(self.sources.endpoint(self.remote), self.sources.hosts(self.remote))
        try:
            return self._run(door)
        except OSError as error:
            log.error("model.not_written", model=self.id, error=str(error), path=str(self.blobs.folder))
            raise ArtefactRefused(
                f"the gateway can't keep the files ({error.strerror}): "
                "see that the folder of STACCATO_MODELS has room and may be written"
            ) from error
        finally:
            door.close()
            self.room.give_back(self.id)

    def _run(self, door: Downloader) -> Imported:
        resumed = self.revision is not None
        listed = self._patiently(
            lambda: listing(self.remote, self.revision, self.sources, door),
            self.patience_s if resumed else FIRST_PATIENCE_S,
        )
        if listed.revision is not None:
            self.standing.revision = listed.revision
            self.keep(listed.revision)
        small, weights = chosen(listed)
        while True:
            try:
                return self._assembled(door, listed, small, weights)
            except Lost:  # a swept or damaged blob is fetched again
                log.warning("model.blob_lost", model=self.id)

    def _assembled(self, door: Downloader, listed: Listing, small: list[Listed], weights: list[Listed]) -> Imported:
        self._plan([*small, *weights])
        self._take(small)
        files = {file.name: self._fetched(door, file) for file in small}
        with self.blobs.draft(files) as folder:
            shards = artefact.settings(folder, self.known)
        weights = weights if shards is None else _shards(shards, weights)
        self._plan([*small, *weights])
        self._take([*small, *weights])
        for file in weights:
            files[file.name] = self._fetched(door, file)
        path = self.blobs.assemble(files)
        found = artefact.inspect(path, self.known, progress=self._inspecting)
        if wrong := [read for read in found.files if files[read.name] != read.sha256]:
            for read in wrong:
                self.blobs.drop(files[read.name])
            raise Lost(wrong[0].name)
        return Imported(path, listed.revision, found)

    def _plan(self, files: list[Listed]) -> None:
        self.standing.total_bytes = sum(file.size for file in files)
        self._others_bytes = sum(self.blobs.here(file.key, file.size) for file in files)
        self.standing.done_bytes = self._others_bytes

    def _take(self, files: list[Listed]) -> None:
        """Reserve quota and room for `files`. Raises Refused."""
        self.reserve(sum(file.size for file in files))
        self.room.take(self.id, lambda: sum(file.size - self.blobs.here(file.key, file.size) for file in files))

    def _inspecting(self, done: int, total: int) -> None:
        self._go_on()
        self.standing.waits_for = f"reading it again, {_mib(done)} of {_mib(total)} MiB"

    def _go_on(self) -> None:
        """Raises Stopped if the job is to end."""
        if self.halt.is_set():
            raise Stopped

    # ── a file ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fetched(self, door: Downloader, file: Listed) -> str:
        """Fetch a file into a blob and return its SHA-256. Raises Refused, Stopped."""
        self._others_bytes -= self.blobs.here(file.key, file.size)
        while (sha256 := self.blobs.find(file.key, file.size)) is None:
            with self.blobs.claimed(file.key, lambda: self._wait_for(file)) as partial:
                if self.blobs.find(file.key, file.size) is None:
                    self.blobs.keep(partial, self._whole(door, file, partial))
                else:
                    partial.unlink()
        self._others_bytes += file.size
        self.standing.at(self._others_bytes, time.monotonic())
        return sha256

    def _wait_for(self, file: Listed) -> None:
        self._heard(self.blobs.here(file.key, file.size))

    def _heard(self, bytes: int) -> None:
        self._go_on()
        self.standing.at(self._others_bytes + bytes, time.monotonic())

    def _whole(self, door: Downloader, file: Listed, partial: Path) -> str:
        from gateway.imports.download import Damaged, download

        for damaged in range(1, DAMAGED_MOST + 1):
            try:
                return self._patiently(
                    lambda: download(door, file, partial, self._heard), self.patience_s, lambda: partial.stat().st_size
                )
            except Damaged as error:
                log.warning("model.damaged", model=self.id, name=file.name, error=str(error), tries=damaged)
                last = error
        raise ArtefactRefused(
            f"{last}, {DAMAGED_MOST} times: what the source holds is not what it says, or the way changes it"
        )

    def _patiently(self, act: Callable[[], T], patience_s: float, done: Callable[[], int] = lambda: 0) -> T:
        """Repeat `act` until it succeeds.

        Raises Refused if no try received a byte for `patience_s`.
        """
        from gateway.imports.download import DownloadFailed

        pause_s, since_s, before = PAUSE_S, time.monotonic(), done()
        while True:
            self._go_on()
            try:
                return act()
            except DownloadFailed as error:
                now_s = time.monotonic()
                if (here := done()) > before:
                    pause_s, since_s, before = PAUSE_S, now_s, here
                if now_s - since_s + pause_s > patience_s:
                    raise ArtefactRefused(
                        f"{error}: connect the gateway to the network, set {_setting(self.remote)} to a mirror "
                        "that it reaches, or give a local folder"
                    ) from error
                self.standing.wait(f"{error}; next try in {pause_s:g} s")
                log.warning("model.import_waits", model=self.id, error=str(error), retry_in_s=pause_s)
                self.halt.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MOST)


def _setting(remote: Hub | ObjectPrefix) -> str:
    return "STACCATO_HF_ENDPOINT" if isinstance(remote, Hub) else "STACCATO_S3_ENDPOINT"


# ── which files ───────────────────────────────────────────────────────────────────────────────────────────────────────


def chosen(listed: Listing) -> tuple[list[Listed], list[Listed]]:
    """Return configs, tokenizer and index; then weights. Further files, program code too, are not fetched.

    Raises Refused.
    """
    files = listed.files
    if len(files) > FILES_MOST:
        raise ArtefactRefused(f"the source has more than {FILES_MOST} files: it is no model")
    if hostile := [file.name for file in files if _escapes(file.name)]:
        raise ArtefactRefused(
            f"the source names a file {hostile[0]!r}, which leads out of its folder: nothing of it is taken"
        )
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        raise ArtefactRefused("the source names a file twice: nothing of it is taken")
    small = [file for file in files if file.name in SMALL]
    weights = [file for file in files if file.name.endswith(".safetensors") and "/" not in file.name]
    for file in small:
        config = file.name in artefact.CONFIGS or file.name in artefact.VECTOR_CONFIGS
        most = artefact.CONFIG_MOST if config else artefact.TOKENIZER_MOST
        if file.size > most:
            raise ArtefactRefused(f"{file.name} has {file.size} bytes, more than {most}: it is not what its name says")
    if not any(file.name == "config.json" for file in small):
        raise ArtefactRefused("the source has no config.json: name the one that holds the model's files")
    if not weights and (pickles := [name for name in names if name.endswith(artefact.PICKLES)]):
        raise ArtefactRefused(f"{pickles[0]} is a pickle, which can run code: convert the weights to safetensors")
    if not weights:
        raise ArtefactRefused("the source has no *.safetensors: name one that has the model's weights")
    return small, weights


def _escapes(name: str) -> bool:
    return not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in name.split("/"))


def _shards(shards: Iterable[str], weights: list[Listed]) -> list[Listed]:
    """Return the weight files named by the index. Raises Refused."""
    by_name = {file.name: file for file in weights}
    if missing := [shard for shard in shards if shard not in by_name]:
        raise ArtefactRefused(f"{artefact.INDEX} names {missing[0]!r}, which the source does not have beside it")
    return [by_name[shard] for shard in shards]
