"""The host cache of model images: shared by a node's runtimes, each image made once, least recently used evicted.

An image is the weights of a model after the engine's post-processing: a run of bytes, laid out as in the engine's
reservation. All runtimes map one file of bounded size; the file also takes the KV blocks of parked requests and of
ended requests (runtime/memory/prefixes.py).

    index, 2 MiB: magic, version, number of the valid copy, copy 0, copy 1
    runs of whole folios: image, then notes on the image │ blocks of one runtime, parked or of ended requests │ free

The index is read and written whole, under a lock between processes. A change writes the invalid copy, then a byte that
makes the copy valid: a process killed at any moment leaves a whole index. While a runtime lives, the runtime holds the
lock of a byte of its own. If that lock is free, the next runtime to change the index drops the dead runtime's pins,
unfinished images and parked blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol

import msgspec

from runtime.core.host_index import (
    FOLIO_BYTES,
    INDEX_BYTES,
    FolioRun,
    Index,
    RunState,
    best_fit,
    whole_folios,
)
from runtime.memory.locks import MEMBER_LOCKS, IndexLocks
from runtime.memory.native import CacheMemory, DevicePool
from runtime.memory.parked import ParkedMemory
from runtime.memory.pinning import NothingPinned, PinnedRuns
from runtime.memory.slabs import HostBlockHold

META_MOST = (1 << 20) - 4096  # bytes
NOTES_BYTES = META_MOST + 4096  # room behind each image for meta and checksums, asked for before both are known
SAMPLE_BYTES = 64 << 10
SAMPLES_MOST = 256  # 16 MiB to read, about 10 ms
MAKING_S = 600.0
POLL_S = 0.02

_MAGIC = struct.Struct("<8sI")
_MAGIC_VALUE, _BLANK = (b"staccato", 3), (bytes(8), 0)
_TURN_AT = _MAGIC.size
_COPIES_AT = (4096, 4096 + (INDEX_BYTES - 4096) // 2)
_LENGTH = struct.Struct("<I")


class HostCacheFull(Exception):
    """The host cache has no room, even if every unused image is evicted."""

    def __init__(self, asked_bytes: int, index: Index) -> None:
        held = [run for run in index.runs if run.pins]
        self.asked_bytes = asked_bytes
        self.total_bytes = index.end - INDEX_BYTES
        self.held_bytes = sum(run.bytes for run in held)
        self.largest_bytes = max((gap.bytes for gap in index.gaps(held)), default=0)
        # At least so many bytes must go; 0: the image fits into no cache of this size.
        spare = sum(gap.bytes for gap in index.gaps(held))
        self.lacks_bytes = max(1, asked_bytes - spare) if asked_bytes <= self.total_bytes else 0
        pids = sorted({index.members[member] for run in held for member in run.pins})
        free_bytes = sum(gap.bytes for gap in index.gaps(index.runs))
        super().__init__(
            f"an image takes {_mib(asked_bytes)} MiB, and the host cache of {_mib(self.total_bytes)} MiB has no room: "
            f"{_mib(free_bytes)} MiB are free, {_mib(self.largest_bytes)} MiB in one piece if all images go that "
            f"nobody uses; processes {', '.join(map(str, pids)) or '(none)'} use {_mib(self.held_bytes)} MiB, of it "
            f"{_mib(index.bytes_of(RunState.PARKED))} MiB for parked requests: raise STACCATO_HOST_CACHE or place "
            "fewer models here"
        )


class ImageBusy(Exception):
    """Another runtime makes the image, and takes longer than the caller waits."""


class HostCacheMismatch(Exception):
    """The file is not a host cache, or has another version."""


@dataclass(frozen=True, slots=True)
class ImageKey:
    """Everything that decides the bytes of an image. `engine`: name, version and settings that change the layout."""

    digest: str  # of the artefact
    engine: str
    dtype: str
    shard: str  # part of the weights, and number of parts: "0/2"
    architecture: str  # of the device

    def __str__(self) -> str:
        parts = (self.digest, self.engine, self.dtype, self.shard, self.architecture)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class HostCacheStats:
    """Use of the host cache by all runtimes of a node.

    total = images + parked + prefixes + free; pinned images are images too."""

    total_bytes: int
    image_bytes: int
    pinned_bytes: int
    parked_bytes: int
    prefix_bytes: int
    free_bytes: int
    images: int
    hits: int
    misses: int
    evictions: int


class Notes(msgspec.Struct, frozen=True):
    """Notes on an image, stored behind the image."""

    checksums: list[int]  # one for each sample of the image
    meta: bytes  # the engine's own, given to `Making.seal`


class ImageTier(Protocol):
    """A tier below the host cache, with copies of images."""

    def discard(self, key: ImageKey) -> None:
        """Remove the copy: the image is not to be trusted."""


class Images:
    """A runtime's access to the host cache. Thread-safe; close when no transfer uses the cache any more."""

    def __init__(self, cache: CacheMemory, kept_bytes: int = 0, kept_together: int = 0) -> None:
        self.cache = cache
        self.below: ImageTier | None = None
        self.pinned = NothingPinned()
        self.parked = ParkedMemory(self, kept_bytes, kept_together)
        self.members = 1  # runtimes of the cache, as of the last change of the index
        self._locks = IndexLocks(cache.fd)
        self._view = cache.view(0, INDEX_BYTES)
        self._closed = False
        self.member = next(member for member in range(1 << 16) if self._locks.take(MEMBER_LOCKS + member))
        with self.change() as index:
            index.forget([self.member])  # pins of a dead runtime with equal number
            index.members[self.member] = os.getpid()
            self.life = index.begin(self.member)

    @classmethod
    def create(cls, cache_bytes: int, kept_bytes: int = 0, kept_together: int = 0) -> Images:
        """Make a new cache; other processes open the cache by `fd`.

        Args:
            cache_bytes: the most bytes of the cache, the index included; rounded down to whole folios.
            kept_bytes: memory for parked requests is dear to get, so up to `kept_bytes` are kept while empty.
            kept_together: where a GPU's driver registers the memory besides, which takes 0.2 s for each GiB, all
                runtimes of the cache keep up to `kept_together` bytes in equal parts, if that is more, and get these
                bytes before a request is parked. Of these bytes, those above `kept_bytes` give way to images."""
        size = cache_bytes // FOLIO_BYTES * FOLIO_BYTES
        if size <= INDEX_BYTES:
            raise ValueError(
                f"a host cache of {cache_bytes} bytes holds nothing: set STACCATO_HOST_CACHE to "
                f"{_mib(INDEX_BYTES + FOLIO_BYTES)} MiB or more"
            )
        return cls(_begin(CacheMemory(size)), kept_bytes, kept_together)

    @classmethod
    def open(cls, fd: int, kept_bytes: int = 0, kept_together: int = 0) -> Images:
        """Open the cache of another process, or begin a cache in a file of zeroes. The caller closes `fd` later.

        `kept_bytes` and `kept_together`: see `create`.

        Raises HostCacheMismatch."""
        size = os.fstat(fd).st_size // FOLIO_BYTES * FOLIO_BYTES
        locks = IndexLocks(fd)
        with locks.index():
            found = _MAGIC.unpack(os.pread(fd, _MAGIC.size, 0)) if size > INDEX_BYTES else None
            if found not in (_MAGIC_VALUE, _BLANK):
                raise HostCacheMismatch(
                    f"file {fd} begins with {found}, a host cache with {_MAGIC_VALUE}: start all runtimes of a node "
                    "from one release"
                )
            cache = CacheMemory(size, fd)
            if found == _BLANK:
                _begin(cache)
        locks.close()
        return cls(cache, kept_bytes, kept_together)

    @property
    def fd(self) -> int:
        return self.cache.fd

    def pin_for(self, device: DevicePool) -> None:
        """Register with the driver of a GPU whatever this runtime holds from now on; call before anything is held.

        A thread fills the reserve for parked requests, and registers its memory, within this runtime's share."""
        self.pinned = PinnedRuns(self.cache, device)
        self.parked.fill()

    def find(self, key: ImageKey) -> Image | None:
        """The image with a key, pinned until released; None if the cache has no finished image."""
        with self.change() as index:
            run = index.image(str(key))
            if run is None or run.state is not RunState.READY:
                index.misses += 1
                return None
            index.hits += 1
            index.pin(run, self.member)
        self.pinned.take(run.offset, run.bytes)
        return self._image(run)

    def state(self, key: ImageKey) -> RunState | None:
        """State of the image with a key; None: the cache has no such image. The state may change at any time."""
        with self.change() as index:
            run = index.image(str(key))
            return None if run is None else run.state

    def make(self, key: ImageKey, image_bytes: int, wait_s: float = MAKING_S, commit: bool = True) -> Image | Making:
        """Get room to make an image in, or the image, pinned, if the cache has the image.

        The room has memory if `commit` is set, else the caller gets memory for each part with `Making.commit`.

        Waits while another runtime makes the image: a second copy would cost the room of a model and as much time.
        Takes over if the other runtime dies or gives up. Raises HostCacheFull, ImageBusy after `wait_s` seconds, and
        PoolError if the machine has no memory."""
        deadline = time.monotonic() + wait_s
        while (run := self._claimed(str(key), image_bytes, deadline)) is None:
            time.sleep(POLL_S)
        if run.image_bytes != image_bytes:
            self.give_back(run.offset)
            raise ValueError(
                f"the image of {key.digest} has {run.image_bytes} bytes, {image_bytes} are expected: something that "
                "decides its layout is missing in its key"
            )
        if run.state is RunState.READY:
            self.pinned.take(run.offset, run.bytes)
            return self._image(run)
        try:
            if commit:
                self.cache.commit(run.offset, run.bytes)
            self.pinned.take(run.offset, run.bytes)
        except BaseException:
            self.give_back(run.offset)
            raise
        return Making(self, run)

    def discard(self, key: ImageKey) -> bool:
        """Hide an image from `find`, and remove the copy below; the memory is free once no runtime uses the image.

        False if no image was found."""
        if self.below is not None:
            self.below.discard(key)
        with self.change() as index:
            run = index.image(str(key))
            if run is None or run.state is not RunState.READY:
                return False
            run.state = RunState.DISCARDED
            index.sweep()
        return True

    def check_room(self, image_bytes: int) -> None:
        """Raises HostCacheFull if an image of the size could not be made now, even if unused images were evicted."""
        size = whole_folios(image_bytes + NOTES_BYTES)
        with self.change() as index:
            if not best_fit(index.gaps([run for run in index.runs if run.pins]), size):
                raise HostCacheFull(size, index)

    def spare_room(self, image_bytes: int, later: Iterable[ImageKey]) -> int:
        """Make room for an image: free room, or the room of unused images with a key in `later`, and no other room.

        Returns the bytes that lack; 0 if there is room now."""
        size = whole_folios(image_bytes + NOTES_BYTES)
        with self.change() as index:
            return index.let_go(partial(best_fit, size=size), size, {str(key) for key in later})

    def hold(self, blocks: Iterable[int], block_bytes: int, life: int) -> HostBlockHold | None:
        """Pin blocks parked by the member with the life `life`, until the hold is released, even if the member dies.

        Returns None if the member is dead, or did not park every block: the blocks may belong to any runtime then."""
        with self.change() as index:
            runs = index.parked([(block * block_bytes, (block + 1) * block_bytes) for block in blocks], life)
            if runs is None:
                return None
            for run in runs:
                index.pin(run, self.member)
        for run in runs:
            self.pinned.take(run.offset, run.bytes)
        return HostBlockHold(self.release, [run.offset for run in runs])

    def stats(self) -> HostCacheStats:
        with self.change() as index:
            images = [run for run in index.runs if run.state not in (RunState.PARKED, RunState.PREFIX)]
            parked, prefixes = index.bytes_of(RunState.PARKED), index.bytes_of(RunState.PREFIX)
            total, stored = index.end - INDEX_BYTES, sum(run.bytes for run in images)
            return HostCacheStats(
                total_bytes=total,
                image_bytes=stored,
                pinned_bytes=sum(run.bytes for run in images if run.pins),
                parked_bytes=parked,
                prefix_bytes=prefixes,
                free_bytes=total - stored - parked - prefixes,
                images=len(images),
                hits=index.hits,
                misses=index.misses,
                evictions=index.evictions,
            )

    def close(self) -> None:
        """Let go of pins, unfinished images and parked blocks of this runtime, and close the cache.

        Touching a view of the cache afterwards ends the process."""
        self.parked.close()
        self._closed = True
        self.pinned.close()
        with self.change() as index:
            index.forget([self.member])
        self._locks.close()
        self.cache.close()

    # ── for Image, Making and Slabs ───────────────────────────────────────────────────────────────────────────────────

    def _image(self, run: FolioRun) -> Image:
        notes = self.cache.view(_notes_at(run), run.notes_bytes)
        return Image(self, run, msgspec.msgpack.decode(notes, type=Notes))

    def _claimed(self, key: str, image_bytes: int, deadline: float) -> FolioRun | None:
        """As `_claim`, and waits for runs whose registration with a GPU's driver is about to end."""
        try:
            return self._claim(key, image_bytes, deadline)
        except HostCacheFull:
            if not self.pinned.settle():
                raise
            return self._claim(key, image_bytes, deadline)

    def _claim(self, key: str, image_bytes: int, deadline: float) -> FolioRun | None:
        """The image's run, pinned: a finished image (READY), or room for this runtime to make the image (MAKING).

        Returns None while another runtime makes the image. Raises HostCacheFull, and ImageBusy after `deadline`."""
        size = whole_folios(image_bytes + NOTES_BYTES)
        with self.change() as index:
            run = index.image(key)
            if run and run.state is RunState.MAKING:
                if time.monotonic() < deadline:
                    return None
                maker = index.members[next(iter(run.pins))]
                raise ImageBusy(
                    f"process {maker} makes the image {key[:12]} of {_mib(run.image_bytes)} MiB and takes longer than "
                    "was waited for: see what holds it up, or end it and another takes over"
                )
            if run is None and (ranges := self.parked.allocate(index, lambda gaps: best_fit(gaps, size))):
                run = FolioRun(ranges[0].start, size, RunState.MAKING, {}, key, image_bytes)
                index.runs.append(run)
            if run is not None:
                index.pin(run, self.member)
                return run
        raise HostCacheFull(size, index)  # the index was written: the reserve may have gone, if in vain

    def _seal(self, run: FolioRun, meta: bytes) -> Image:
        if len(meta) > META_MOST:
            raise ValueError(f"{len(meta)} bytes of meta for an image, at most {META_MOST} are kept")
        checksums = [zlib.crc32(self.cache.view(*sample)) for sample in _samples(run.offset, run.image_bytes)]
        notes = msgspec.msgpack.encode(Notes(checksums, meta))
        self.cache.view(_notes_at(run), len(notes))[:] = notes
        with self.change() as index:
            run = index.at(run.offset)
            run.state, run.notes_bytes = RunState.READY, len(notes)
        return self._image(run)

    def release(self, offset: int) -> None:
        """Give back a pin of this runtime on the run at `offset`, after the run's registration has ended."""
        if not self._closed:
            self.pinned.leave(offset, partial(self.give_back, offset))

    def give_back(self, offset: int) -> None:
        """Give back a pin of this runtime in the index alone: the run is not registered with a driver."""
        if self._closed:  # `close` dropped all pins
            return
        with self.change() as index:
            index.unpin(index.at(offset), self.member)

    @contextlib.contextmanager
    def change(self) -> Iterator[Index]:
        """The index, locked. On leaving without an error, the index is written, and memory of removed runs given back.

        Also drops the members that have died."""
        with self._locks.index():
            index = _read_index(self._view)
            before = index.runs
            index.forget([m for m in index.members if m != self.member and not self._locks.taken(MEMBER_LOCKS + m)])
            yield index
            self.members = max(1, len(index.members))
            _write_index(self._view, index)
            kept = {id(run) for run in index.runs}
            for run in before:
                if id(run) not in kept:
                    self.cache.discard(run.offset, run.bytes)


class Image:
    """A pinned image: the weights stay in place until `release`, even if the image is discarded meanwhile."""

    def __init__(self, images: Images, run: FolioRun, notes: Notes) -> None:
        self.offset = run.offset
        self.bytes = run.image_bytes
        self.meta = notes.meta
        self._images = images
        self._checksums = notes.checksums
        self._released = False

    @property
    def view(self) -> memoryview:
        return self._images.cache.view(self.offset, self.bytes).toreadonly()

    def sample(self, number: int) -> bool:
        """Whether a sample is unchanged since `seal`; takes tens of microseconds. `number` counts round."""
        samples = _samples(self.offset, self.bytes)
        number %= len(samples)
        return zlib.crc32(self._images.cache.view(*samples[number])) == self._checksums[number]

    def verify(self) -> bool:
        """Whether all samples are unchanged since `seal`. The samples of an image up to 16 MiB cover every byte."""
        return all(self.sample(number) for number in range(len(self._checksums)))

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._images.release(self.offset)

    def __enter__(self) -> Image:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class Making:
    """Room for an image to be made. Leaving the context without `seal` abandons the image."""

    def __init__(self, images: Images, run: FolioRun) -> None:
        self.offset = run.offset
        self.bytes = run.image_bytes
        self._images = images
        self._run: FolioRun | None = run

    @property
    def view(self) -> memoryview:
        return self._images.cache.view(self.offset, self.bytes)

    def commit(self, offset: int, size: int) -> memoryview:
        """Get memory for a part of the image, and perhaps for bytes behind the image. Returns the bytes of the part.

        Raises PoolError if the machine has no memory."""
        self._images.cache.commit(self.offset + offset, size)
        return self._images.cache.view(self.offset + offset, size)

    def commit_notes(self) -> None:
        """Get memory for the notes behind the image, which `seal` writes. Raises PoolError."""
        assert self._run is not None
        first = _notes_at(self._run) // FOLIO_BYTES * FOLIO_BYTES
        self._images.cache.commit(first, self._run.end - first)

    def seal(self, meta: bytes) -> Image:
        """Finish the image: from now on all runtimes find the image. `meta` is kept with it, at most META_MOST bytes.

        Returns the image, pinned. Raises ValueError."""
        if self._run is None:
            raise ValueError("this image was sealed or abandoned before")
        image = self._images._seal(self._run, meta)
        self._run = None
        return image

    def abandon(self) -> None:
        if self._run:
            self._run = None
            self._images.release(self.offset)

    def __enter__(self) -> Making:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abandon()


# ── where things lie ──────────────────────────────────────────────────────────────────────────────────────────────────


def _samples(offset: int, size: int) -> list[tuple[int, int]]:
    """Samples of an image as (offset, length): the first bytes, the last bytes, and bytes spread evenly between."""
    if size <= SAMPLE_BYTES:
        return [(offset, size)]
    count = min(SAMPLES_MOST, -(-size // SAMPLE_BYTES))
    return [(offset + number * (size - SAMPLE_BYTES) // (count - 1), SAMPLE_BYTES) for number in range(count)]


def _notes_at(run: FolioRun) -> int:
    return run.offset + run.image_bytes


def _mib(size: int) -> str:
    return f"{round(size / (1 << 20), 2):.12g}"


def _begin(cache: CacheMemory) -> CacheMemory:
    """Write an empty index into the cache, the magic last. Returns the cache."""
    view = cache.view(0, INDEX_BYTES)
    _write_index(view, Index(cache.bytes))
    _MAGIC.pack_into(view, 0, *_MAGIC_VALUE)
    return cache


# ── the index in the file ─────────────────────────────────────────────────────────────────────────────────────────────


def _read_index(view: memoryview) -> Index:
    at = _COPIES_AT[view[_TURN_AT]] + _LENGTH.size
    (length,) = _LENGTH.unpack_from(view, at - _LENGTH.size)
    return msgspec.msgpack.decode(view[at : at + length], type=Index)


def _write_index(view: memoryview, index: Index) -> None:
    encoded = msgspec.msgpack.encode(index)
    room = _COPIES_AT[1] - _COPIES_AT[0] - _LENGTH.size
    assert len(encoded) <= room, f"{len(index.runs)} runs do not fit into the index"
    turn = 1 - view[_TURN_AT]
    at = _COPIES_AT[turn]
    _LENGTH.pack_into(view, at, len(encoded))
    view[at + _LENGTH.size : at + _LENGTH.size + len(encoded)] = encoded
    view[_TURN_AT] = turn
