"""Images on disk, the tier below the host cache: a folder with a file for each image, written once and kept for ever.

    KEY.image: image, padded to whole blocks │ checksums and notes, padded │ last block: where the notes lie
    KEY.part:  an image being written; the writer holds the lock of the file
    lock:      locked while files are counted, removed or renamed

Attributes of an image's file note which devices have served which models from the image.

A file is an image from the moment of its rename on, and the rename follows a sync: a killed process leaves a `.part`
file, whose lock is free, and the next writer in the folder removes the file. Processes of several nodes may share the
folder. Each extent of an image has a checksum. The folder outlives nodes, restarts of the machine and releases: the key
names everything that decides the bytes of an image.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from runtime.core.disk_index import ImageFile, to_remove
from runtime.memory.images import Image, ImageKey, Images

log = structlog.get_logger()

BLOCK_BYTES = 4096  # direct reads and writes are of whole blocks, from and to addresses of whole blocks
EXTENT_BYTES = 4 << 20  # bytes with a checksum of their own: 4 MiB reach a disk's full rate with eight readers
IMAGE, PART = ".image", ".part"
LOCK_S = 10.0  # the folder is locked for milliseconds, or longer on a slow disk with many files
PAUSE_S = 60.0  # after a full disk, no image is written for a minute
LISTED_S = 2.0  # a list of the folder is taken for true for so long
FREE_LEAST = 1 << 30  # bytes of the disk that images leave free: for the database, the bus and the journal
NOTES_MOST = 64 << 20  # bytes: a larger number in a file is damage

WAITING_PART = 4  # images that wait to be written are pinned up to a quarter of the host cache
PROOF = "user.staccato.proof."  # attributes of an image's file: proofs that a device serves a model from the image

_LAST = struct.Struct("<8sIQIdI")  # magic, version, bytes of the notes, their checksum, time of the build, checksum
_MAGIC, _VERSION = b"stcimage", 1


class TornImage(Exception):
    """A file in the folder is not, or is no longer, the image that was written."""


class StoredNotes(msgspec.Struct, frozen=True):
    """Notes behind an image on disk."""

    key: str
    image_bytes: int
    extent_bytes: int
    checksums: list[int]  # of each extent
    meta: bytes  # the engine's own, as given to `Making.seal`


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Images in the folder, and what this process did there."""

    limit_bytes: int
    bytes: int
    images: int
    reads: int
    writes: int
    torn: int
    evictions: int


class StoredImage:
    """An image on disk, open for reading: the bytes stay readable even if the file is removed meanwhile."""

    def __init__(self, path: Path, notes: StoredNotes, fd: int, direct: bool) -> None:
        self.path, self.bytes, self.meta = path, notes.image_bytes, notes.meta
        self.extents = len(notes.checksums)
        self._notes, self._fd, self._direct = notes, fd, direct

    @classmethod
    def open(cls, path: Path, key: str) -> StoredImage:
        """Raises FileNotFoundError, and TornImage if the file is no whole image with the key."""
        with open(path, "rb", buffering=0) as file:
            notes = _read_notes(file.fileno(), path)
        if notes.key != key:
            raise TornImage(f"{path} holds the image {notes.key[:12]}, not the image of its name")
        fd, direct = _open_direct(path, os.O_RDONLY)
        return cls(path, notes, fd, direct)

    def span(self, extent: int) -> tuple[int, int]:
        """Offset and length in bytes of an extent in the image."""
        at = extent * self._notes.extent_bytes
        return at, min(self._notes.extent_bytes, self.bytes - at)

    def read(self, extent: int, target: memoryview) -> None:
        """Read an extent to the beginning of `target`, which has room for the extent in whole blocks.

        Raises TornImage if the bytes are not those that were written, and if the disk can't read the bytes."""
        at, size = self.span(extent)
        wanted = padded(size) if self._direct else size
        got = 0
        while got < size:
            try:
                read = os.preadv(self._fd, [target[got:wanted]], at + got)
            except OSError as error:
                raise TornImage(f"{self.path} can't be read at byte {at + got}: {error.strerror}") from error
            if read <= 0:
                raise TornImage(f"{self.path} ends at byte {at + got}, within an extent")
            got += read
        if zlib.crc32(target[:size]) != self._notes.checksums[extent]:
            raise TornImage(f"{self.path} has changed between bytes {at} and {at + size}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskCache:
    """The images in one folder. Thread-safe; a thread of this process writes new images, one after another.

    `limit_bytes` bounds all files in the folder together, whoever wrote the files; `free_bytes` of the disk stay free.
    """

    def __init__(self, folder: Path, limit_bytes: int, free_bytes: int = FREE_LEAST) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.limit_bytes, self._free_bytes = folder, limit_bytes, free_bytes
        self._orders: queue.SimpleQueue[tuple[Images, Image | None, ImageKey, float] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._pending: set[str] = set()  # keys that wait for the writer, or are being written
        self._held_bytes = 0  # of images pinned until they are written
        self._start = threading.Lock()
        self._paused_until = 0.0
        self._counts = {"reads": 0, "writes": 0, "torn": 0, "evictions": 0}
        self._listed: tuple[float, frozenset[str]] = (float("-inf"), frozenset())
        self._built_s: dict[tuple[str, int], float] = {}  # time of the build, by name and number of a file
        self._quiet = (
            threading.Event()
        )  # set while nobody reads: a reader keeps requests waiting, and the writer nobody
        self._quiet.set()
        self._readers = 0

    @classmethod
    def at(cls, folder: str, limit_bytes: int) -> DiskCache | None:
        """The images in a folder; None if no folder is named, or if the folder can't be used: the log says why."""
        try:
            return cls(Path(folder), limit_bytes) if folder else None
        except OSError as error:
            log.error("disk.no_folder", folder=folder, detail=str(error))
            return None

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, key: ImageKey) -> StoredImage | None:
        """The image with the key, to be closed by the caller; None if the disk has no such image.

        A damaged file is removed."""
        path = self._path(key)
        try:
            stored = StoredImage.open(path, str(key))
        except FileNotFoundError:
            return None
        except (TornImage, OSError) as error:
            self.lose(key, error)
            return None
        self._counts["reads"] += 1
        with contextlib.suppress(OSError):  # used now, for the order of removal; another node may just remove the file
            os.utime(path)
        return stored

    def has(self, key: ImageKey) -> bool:
        """Whether the disk has the image, as of at most LISTED_S seconds ago."""
        return str(key) + IMAGE in self._list()

    def proved(self, key: ImageKey, proof: str) -> bool:
        """Whether `proof` was noted of the image. A note leaves the disk with the image."""
        try:
            os.getxattr(self._path(key), PROOF + proof)
        except OSError:  # no image, no note, or a file system without attributes: the proof is made again
            return False
        return True

    def note_proof(self, key: ImageKey, proof: str) -> bool:
        """Note that a device serves a model from the image; `proof` says which device and which model.

        Returns whether the note need not be tried again: False while the disk has no such image."""
        try:
            os.setxattr(self._path(key), PROOF + proof, b"")
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("disk.no_proof", image=str(key)[:12], detail=str(error))
        return True

    def drop_proof(self, key: ImageKey, proof: str) -> None:
        with contextlib.suppress(OSError):
            os.removexattr(self._path(key), PROOF + proof)

    def lose(self, key: ImageKey, error: Exception) -> None:
        """Remove a damaged image: the next build reads the model's own files."""
        self._counts["torn"] += 1
        log.warning("disk.image_torn", image=str(key)[:12], detail=str(error)[:300])
        self.discard(key)

    def discard(self, key: ImageKey) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink()
        self._forget_list()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within the context, the writer of this process waits: requests wait for the reader."""
        with self._start:
            self._readers += 1
            self._quiet.clear()
        try:
            yield
        finally:
            with self._start:
                self._readers -= 1
                if not self._readers:
                    self._quiet.set()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, images: Images, key: ImageKey, built_s: float) -> None:
        """Have the image with the key copied from the host cache to the disk, soon. Returns at once.

        The image stays in the host cache until then, because an image that gave way would be made from files again.
        Beyond a part of the host cache images may give way: a slow disk must not keep other images out.
        `built_s`: time to make the image again without the disk."""
        if not self.limit_bytes or self.has(key):
            return
        with self._start:
            if str(key) in self._pending:
                return
            self._pending.add(str(key))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="disk-images", daemon=True)
                self._writer.start()
        self._orders.put((images, self._held(images, key), key, built_s))

    def _held(self, images: Images, key: ImageKey) -> Image | None:
        """The image, pinned, unless the images that wait for the writer would take more than their part."""
        if (image := images.find(key)) is None:
            return None
        with self._start:
            if fits := self._held_bytes + image.bytes <= images.cache.bytes // WAITING_PART:
                self._held_bytes += image.bytes
        if fits:
            return image
        image.release()
        return None

    @property
    def writing(self) -> bool:
        """Whether an image is being written, or waits to be written: the image is pinned for as long."""
        return bool(self._pending)

    def stats(self) -> DiskStats:
        names, size = self._list(), 0
        for name in names:
            with contextlib.suppress(OSError):
                size += (self.folder / name).stat().st_size
        return DiskStats(limit_bytes=self.limit_bytes, bytes=size, images=len(names), **self._counts)

    def close(self) -> None:
        """End the writer, after the orders given so far."""
        if self._writer is not None:
            self._orders.put(None)
            self._writer.join()
            self._writer = None

    def _write_all(self) -> None:
        while (order := self._orders.get()) is not None:
            images, held, key, built_s = order
            try:
                if time.monotonic() >= self._paused_until:
                    self._write(images, key, built_s)
            except Exception as error:  # the disk is a cache: whatever happens here, models go on being served
                full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
                if full:
                    self._paused_until = time.monotonic() + PAUSE_S
                log.warning("disk.image_not_written", image=str(key)[:12], full=full, detail=str(error)[:300])
            finally:
                if held is not None:
                    held.release()
                    with self._start:
                        self._held_bytes -= held.bytes
                self._pending.discard(str(key))

    def _write(self, images: Images, key: ImageKey, built_s: float) -> None:
        image = images.find(key)
        if image is None:  # discarded, or evicted, before its turn came
            return
        with image, self._part(key) as fd:
            if fd is None or not image.verify():
                return
            meta = image.meta
            room = padded(image.bytes) + padded(len(meta) + 16 * -(-image.bytes // EXTENT_BYTES) + 256) + BLOCK_BYTES
            if not self._make_room(fd, room):
                return
            began = time.monotonic()
            self._fill(fd, images, image, str(key), built_s)
            with self._locked():
                self._part_path(key).rename(self._path(key))
            _sync_folder(self.folder)
        self._counts["writes"] += 1
        self._forget_list()
        log.info("disk.image_written", image=str(key)[:12], took_ms=round((time.monotonic() - began) * 1e3))

    @contextlib.contextmanager
    def _part(self, key: ImageKey) -> Iterator[int | None]:
        """The file to write the image to, locked by this process; None if there is nothing to write.

        The file is removed at the end unless it has been renamed."""
        path = self._part_path(key)
        if self._path(key).exists():
            yield None
            return
        fd, _ = _open_direct(path, os.O_RDWR | os.O_CREAT)
        try:
            if not _locks(fd) or not _is_at(fd, path):  # another node writes the image, or has just written the image
                yield None
                return
            os.ftruncate(fd, 0)
            try:
                yield fd
            finally:
                if _is_at(fd, path):
                    path.unlink()
        finally:
            os.close(fd)

    def _make_room(self, fd: int, size: int) -> bool:
        """Allocate `size` bytes for the file `fd`, removing the least valuable images; False if the limit is too low.

        Raises OSError if the disk is full."""
        with self._locked():
            self._sweep()
            files = self._files()
            written = sum(path.stat().st_size for path in self.folder.glob("*" + PART))
            held = sum(file.bytes for file in files)
            if size + written > self.limit_bytes:
                log.warning("disk.no_room", image_bytes=size, limit_bytes=self.limit_bytes)
                return False
            lacks = size + self._free_bytes - shutil.disk_usage(self.folder).free
            removed = to_remove(files, max(size + written + held - self.limit_bytes, lacks), time.time())
            if removed is None:
                raise OSError(errno.ENOSPC, f"the disk lacks {lacks} bytes, and images there hold {held}")
            for name in removed:
                (self.folder / name).unlink(missing_ok=True)
            self._counts["evictions"] += len(removed)
            os.posix_fallocate(fd, 0, size)
        return True

    def _fill(self, fd: int, images: Images, image: Image, key: str, built_s: float) -> None:
        checksums = []
        for at in range(0, image.bytes, EXTENT_BYTES):
            self._quiet.wait(LOCK_S)
            size = min(EXTENT_BYTES, image.bytes - at)
            extent = images.cache.view(image.offset + at, padded(size))
            checksums.append(zlib.crc32(extent[:size]))
            _write_whole(fd, extent, at)
        notes = msgspec.msgpack.encode(StoredNotes(key, image.bytes, EXTENT_BYTES, checksums, image.meta))
        notes_at = padded(image.bytes)
        last = _LAST.pack(_MAGIC, _VERSION, len(notes), zlib.crc32(notes), built_s, 0)
        last = last[:-4] + struct.pack("<I", zlib.crc32(last[:-4]))
        # An ordinary descriptor: notes need no alignment.
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), notes, notes_at)
            end = notes_at + padded(len(notes)) + BLOCK_BYTES
            os.ftruncate(file.fileno(), end)
            os.pwrite(file.fileno(), last, end - BLOCK_BYTES)
            os.fsync(file.fileno())

    def _sweep(self) -> None:
        """Remove files of writers that have died: their locks are free. The folder must be locked."""
        for path in self.folder.glob("*" + PART):
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                if _locks(file.fileno()) and _is_at(file.fileno(), path):
                    path.unlink()

    def _files(self) -> list[ImageFile]:
        """The images on disk. A file is read once: a thousand reads would hold up other threads for 20 ms each time."""
        files, known = [], self._built_s
        self._built_s = {}
        with os.scandir(self.folder) as listed:
            images = [entry for entry in listed if entry.name.endswith(IMAGE)]
        for entry in images:
            with contextlib.suppress(OSError):  # another node may just remove the file
                stat = entry.stat()
                file = entry.name, entry.inode()
                built_s = known[file] if file in known else _built_s(self.folder / entry.name)
                self._built_s[file] = built_s
                files.append(ImageFile(entry.name, stat.st_size, stat.st_mtime, built_s))
        return files

    # ── the folder ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, key: ImageKey) -> Path:
        return self.folder / f"{key}{IMAGE}"

    def _part_path(self, key: ImageKey) -> Path:
        return self.folder / f"{key}{PART}"

    def _list(self) -> frozenset[str]:
        """Names of the images' files, as of at most LISTED_S seconds ago."""
        listed_at, images = self._listed
        if time.monotonic() - listed_at > LISTED_S:
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = os.listdir(self.folder)
            images = frozenset([name for name in names if name.endswith(IMAGE)])
            self._listed = time.monotonic(), images
        return images

    def _forget_list(self) -> None:
        self._listed = float("-inf"), frozenset()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder, locked. Raises TimeoutError after LOCK_S seconds."""
        fd, deadline = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), 0.0
        try:
            deadline = time.monotonic() + LOCK_S
            while not _locks(fd):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.folder} is locked for {LOCK_S:.0f} s: a writer there was stopped")
                time.sleep(0.005)
            yield
        finally:
            os.close(fd)


def _read_notes(fd: int, path: Path) -> StoredNotes:
    size, checksum, _ = _read_last(fd, path)
    notes_at = os.fstat(fd).st_size - BLOCK_BYTES - padded(size)
    encoded = os.pread(fd, size, notes_at) if notes_at >= 0 else b""
    if len(encoded) != size or zlib.crc32(encoded) != checksum:
        raise TornImage(f"{path} has no whole notes at byte {notes_at}")
    try:
        notes = msgspec.msgpack.decode(encoded, type=StoredNotes)
    except msgspec.DecodeError as error:
        raise TornImage(f"{path} has unreadable notes: {error}") from error
    extents = -(-notes.image_bytes // max(notes.extent_bytes, 1))
    if notes.image_bytes <= 0 or notes_at != padded(notes.image_bytes) or len(notes.checksums) != extents:
        raise TornImage(f"{path} has notes on {notes.image_bytes} bytes, and {notes_at} bytes lie ahead of the notes")
    return notes


def _built_s(path: Path) -> float:
    """The time of the build, by the file of an image; 0 of a damaged file, which is of no value."""
    with open(path, "rb", buffering=0) as file:
        try:
            return _read_last(file.fileno(), path)[2]
        except TornImage:
            return 0.0


def _read_last(fd: int, path: Path) -> tuple[int, int, float]:
    """Bytes and checksum of the notes, and the time of the build, from the last block of a file."""
    size = os.fstat(fd).st_size
    last = os.pread(fd, _LAST.size, size - BLOCK_BYTES) if size >= BLOCK_BYTES else b""
    if len(last) < _LAST.size:
        raise TornImage(f"{path} has {size} bytes, too few for an image")
    magic, version, notes_bytes, checksum, built_s, own = _LAST.unpack(last)
    if magic != _MAGIC or own != zlib.crc32(last[:-4]) or notes_bytes > NOTES_MOST:
        raise TornImage(f"{path} does not end as an image ends: cut off, or overwritten")
    if version != _VERSION:
        raise TornImage(f"{path} has version {version}, this release reads {_VERSION}")
    return notes_bytes, checksum, built_s


def padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """A descriptor that passes by the kernel's cache, where the file system can; and whether the descriptor does."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o600), False


def _write_whole(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


def _locks(fd: int) -> bool:
    """Whether this process has the lock of the file now. The lock ends with the open file description."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether the path still names the open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
