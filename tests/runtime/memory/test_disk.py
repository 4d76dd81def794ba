"""Images on disk: real files, torn files, dying writers, nodes that share a folder, and disks without room."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.memory import disk as disk_module
from runtime.memory.arriving import ArrivingImage, read_in
from runtime.memory.disk import BLOCK_BYTES, EXTENT_BYTES, DiskCache, StoredImage, TornImage
from runtime.memory.images import INDEX_BYTES, HostCacheFull, Images
from tests.conftest import ROOT
from tests.runtime.engines import until
from tests.runtime.memory.test_images import MIB, key, make, put, there

SIZE = 2 * EXTENT_BYTES + 12345
ROOM = 64 * MIB
LIMIT = 1 << 30


@pytest.fixture
def images() -> Iterator[Images]:
    images = Images.create(INDEX_BYTES + ROOM)
    yield images
    images.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskCache]:
    disk = DiskCache(tmp_path, LIMIT, free_bytes=0)
    yield disk
    disk.close()


def noise(size: int, seed: int = 0) -> bytes:
    return bytes((seed + at) % 251 for at in range(256)) * (size // 256) + bytes(size % 256)


def keep(disk: DiskCache, images: Images, name: str, data: bytes, built_s: float = 1.0) -> None:
    """Make an image, have the image written, and take the image out of the host cache."""
    with make(images, name, len(data)) as making:
        making.view[:] = data
        image = making.seal(name.encode())
    disk.keep(images, key(name), built_s)
    until(lambda: not disk.writing)
    image.release()
    images.below = None  # the copy on disk stays
    assert images.discard(key(name))


def read(disk: DiskCache, images: Images, name: str) -> bytes | None:
    """The image's bytes, read into the host cache; None if the disk has no whole image."""
    image = read_in(images, disk, key(name))
    if image is None:
        return None
    try:
        if isinstance(image, ArrivingImage):
            assert image.meta == name.encode()
            image = image.ended()
            if image is None:
                return None
        return bytes(image.view)
    finally:
        if image is not None:
            image.release()
            images.discard(key(name))


# ── there and back ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_image_comes_back_from_disk_as_it_was(disk: DiskCache, images: Images) -> None:
    keep(disk, images, "a", noise(SIZE))
    assert not there(images, "a") and disk.has(key("a"))
    arriving = read_in(images, disk, key("a"))
    assert isinstance(arriving, ArrivingImage)
    image = arriving.ended()
    assert image is not None and bytes(image.view) == noise(SIZE) and image.meta == b"a" and image.verify()
    assert arriving.landed_bytes == SIZE and arriving.whole() is image
    arriving.release()
    assert images.stats().pinned_bytes == 0 and there(images, "a")


def test_bytes_that_have_landed_are_right_while_others_are_read(disk: DiskCache, images: Images) -> None:
    data = noise(9 * EXTENT_BYTES + 1)
    keep(disk, images, "a", data)
    arriving = read_in(images, disk, key("a"))
    assert isinstance(arriving, ArrivingImage)
    landed = 0
    while arriving.whole() is None:
        landed = arriving.landed_bytes
        assert bytes(images.cache.view(arriving.offset, landed)) == data[:landed]
        arriving.wait(1)
    arriving.release()


def test_an_image_given_up_while_it_is_read_leaves_no_room_taken(disk: DiskCache, images: Images) -> None:
    keep(disk, images, "a", noise(9 * EXTENT_BYTES))
    arriving = read_in(images, disk, key("a"))
    assert arriving is not None
    arriving.release()
    images.discard(key("a"))
    assert images.stats().free_bytes == ROOM


def test_an_image_is_written_once(disk: DiskCache, images: Images) -> None:
    put(images, "a", MIB).release()
    for _ in range(3):
        disk.keep(images, key("a"), 1.0)
        until(lambda: not disk.writing)
    assert disk.stats().writes == 1 and disk.stats().images == 1


class ForgettingCache(DiskCache):
    """A cache whose list is forgotten as soon as the list is kept, as by the thread that has just written an image."""

    @property
    def _listed(self) -> tuple[float, frozenset[str]]:
        return float("-inf"), frozenset()

    @_listed.setter
    def _listed(self, listed: tuple[float, frozenset[str]]) -> None:
        pass


def test_an_image_is_there_while_a_thread_forgets_the_list(disk: DiskCache, images: Images) -> None:
    keep(disk, images, "a", noise(MIB))
    assert ForgettingCache(disk.folder, disk.limit_bytes).has(key("a"))


def test_a_discarded_image_leaves_the_disk_as_well(disk: DiskCache, images: Images) -> None:
    put(images, "a", MIB).release()
    disk.keep(images, key("a"), 1.0)
    until(lambda: not disk.writing)
    images.below = disk
    assert images.discard(key("a")) and not disk.has(key("a"))
    assert read_in(images, disk, key("a")) is None


# ── torn files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def the_file(disk: DiskCache) -> Path:
    (path,) = disk.folder.glob("*.image")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of an image, as written."""
    folder = tmp_path_factory.mktemp("whole")
    images, disk = Images.create(INDEX_BYTES + ROOM), DiskCache(folder, LIMIT, free_bytes=0)
    keep(disk, images, "a", noise(SIZE))
    disk.close()
    images.close()
    return the_file(disk).read_bytes()


PLACES = ["the first byte", "an extent", "the last byte", "the notes", "the last block"]


def place(whole: bytes, name: str) -> int:
    notes_at = -(-SIZE // BLOCK_BYTES) * BLOCK_BYTES
    return dict(zip(PLACES, (0, EXTENT_BYTES + 77, SIZE - 1, notes_at + 5, len(whole) - BLOCK_BYTES + 9), strict=True))[
        name
    ]


@pytest.mark.parametrize("where", PLACES)
def test_an_altered_image_is_not_served_and_leaves(where: str, whole: bytes, disk: DiskCache, images: Images) -> None:
    at = place(whole, where)
    (disk.folder / f"{key('a')}.image").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert read(disk, images, "a") is None
    assert not list(disk.folder.glob("*.image")) and disk.stats().torn == 1
    assert images.stats().free_bytes == ROOM
    keep(disk, images, "a", noise(SIZE))  # built again, and written again
    assert read(disk, images, "a") == noise(SIZE)


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES, EXTENT_BYTES, SIZE, SIZE + BLOCK_BYTES])
def test_a_file_cut_off_is_not_served_and_leaves(length: int, whole: bytes, disk: DiskCache, images: Images) -> None:
    (disk.folder / f"{key('a')}.image").write_bytes(whole[:length])
    assert read(disk, images, "a") is None and not list(disk.folder.glob("*.image"))


def test_an_image_under_the_name_of_another_is_not_served(whole: bytes, disk: DiskCache, images: Images) -> None:
    (disk.folder / f"{key('b')}.image").write_bytes(whole)
    assert read(disk, images, "b") is None


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_happens_to_a_file_no_wrong_byte_is_served(data: st.DataObject, whole: bytes) -> None:
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["cut", "alter", "zero", "insert"])):
            case "cut":
                del damaged[at:]
            case "alter":
                damaged[at : at + 3] = data.draw(st.binary(min_size=len(damaged[at : at + 3]), max_size=3))
            case "zero":
                span = min(data.draw(st.sampled_from([512, BLOCK_BYTES, EXTENT_BYTES])), len(damaged) - at)
                damaged[at : at + span] = bytes(span)
            case _:
                damaged[at:at] = data.draw(st.binary(max_size=BLOCK_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.image"
        path.write_bytes(damaged)
        try:
            assert all_bytes(path) == noise(SIZE)
        except TornImage:
            pass


def all_bytes(path: Path) -> bytes:
    """The image in a file, read extent by extent. Raises TornImage."""
    stored, read = StoredImage.open(path, str(key("a"))), bytearray()
    room = mmap.mmap(-1, EXTENT_BYTES)  # direct reads want an aligned target
    try:
        for extent in range(stored.extents):
            stored.read(extent, memoryview(room))
            read += room[: stored.span(extent)[1]]
    finally:
        stored.close()
    return bytes(read)


# ── deaths and neighbours ─────────────────────────────────────────────────────────────────────────────────────────────

WRITER = """
import sys
from pathlib import Path
from runtime.memory.disk import DiskCache
from runtime.memory.images import Images
from tests.runtime.memory.test_disk import keep
folder, size = Path(sys.argv[1]), int(sys.argv[2])
keep(DiskCache(folder, 1 << 30, free_bytes=0), Images.create(size + (64 << 20)), "a", b"7" * size)
print("written", flush=True)
"""


def test_a_killed_writer_leaves_no_image_and_its_rest_is_swept(tmp_path: Path, images: Images) -> None:
    size = 256 * MIB
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(size)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
        until(lambda: any(path.stat().st_size for path in tmp_path.glob("*.part")))
        writer.send_signal(signal.SIGKILL)
    assert not list(tmp_path.glob("*.image")), "the test is to kill the writer in mid-writing"
    assert list(tmp_path.glob("*.part"))
    disk = DiskCache(tmp_path, LIMIT, free_bytes=0)
    keep(disk, images, "b", noise(MIB))
    assert not list(tmp_path.glob("*.part")), "the dead writer's lock is free, so its file goes"
    assert read(disk, images, "b") == noise(MIB) and read(disk, images, "a") is None
    disk.close()


def test_nodes_that_share_a_folder_write_an_image_once_and_harm_no_image(tmp_path: Path) -> None:
    nodes = [(DiskCache(tmp_path, LIMIT, free_bytes=0), Images.create(INDEX_BYTES + ROOM)) for _ in range(3)]
    names = ["a", "b", "c", "d"]

    def live(disk: DiskCache, images: Images) -> None:
        for name in names:
            keep(disk, images, name, noise(SIZE, ord(name)))

    threads = [threading.Thread(target=live, args=node) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.name != "lock") == [".image"] * len(names)
    for disk, images in nodes:
        for name in names:
            assert read(disk, images, name) == noise(SIZE, ord(name))
        disk.close()
        images.close()


# ── room ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_folder_keeps_its_limit_and_the_least_valuable_image_goes(tmp_path: Path, images: Images) -> None:
    disk = DiskCache(tmp_path, 3 * SIZE, free_bytes=0)
    keep(disk, images, "slow", noise(SIZE), built_s=100.0)
    keep(disk, images, "quick", noise(SIZE), built_s=1.0)
    keep(disk, images, "new", noise(SIZE), built_s=1.0)
    assert disk.stats().bytes <= 3 * SIZE and disk.stats().evictions == 1
    assert [disk.has(key(name)) for name in ("slow", "quick", "new")] == [True, False, True]
    disk.close()


def test_an_image_larger_than_the_limit_is_not_written_and_displaces_no_image(tmp_path: Path, images: Images) -> None:
    disk = DiskCache(tmp_path, 2 * MIB, free_bytes=0)
    keep(disk, images, "a", noise(MIB))
    keep(disk, images, "b", noise(3 * MIB))
    assert disk.has(key("a")) and not disk.has(key("b")) and not list(tmp_path.glob("*.part"))
    disk.close()


def test_a_full_disk_stops_the_writing_and_not_the_reading(tmp_path: Path, images: Images) -> None:
    roomy = DiskCache(tmp_path, LIMIT, free_bytes=0)
    keep(roomy, images, "a", noise(SIZE))
    full = DiskCache(tmp_path, LIMIT, free_bytes=1 << 60)
    began = time.monotonic()
    keep(full, images, "b", noise(SIZE))
    keep(full, images, "c", noise(SIZE))
    assert time.monotonic() - began < 30 and not list(tmp_path.glob("*.part"))
    assert read(full, images, "b") is None and read(full, images, "a") == noise(SIZE)
    roomy.close()
    full.close()


def test_no_limit_means_no_image_on_disk(tmp_path: Path, images: Images) -> None:
    disk = DiskCache(tmp_path, 0)
    keep(disk, images, "a", noise(MIB))
    assert not list(tmp_path.iterdir())
    disk.close()


def test_a_host_cache_without_room_says_what_it_lacks(disk: DiskCache, images: Images) -> None:
    keep(disk, images, "a", noise(SIZE))
    with make(images, "big", ROOM - 4 * MIB):
        with pytest.raises(HostCacheFull) as full:
            read_in(images, disk, key("a"))
        assert 0 < full.value.lacks_bytes <= SIZE + 4 * MIB
    assert read(disk, images, "a") == noise(SIZE)


def test_a_proof_is_noted_of_an_image_on_disk_and_leaves_with_the_image(disk: DiskCache, images: Images) -> None:
    assert not disk.note_proof(key("a"), "p"), "there is no image yet"
    keep(disk, images, "a", noise(MIB))
    assert disk.note_proof(key("a"), "p") and disk.note_proof(key("a"), "q")
    later = DiskCache(disk.folder, LIMIT)
    assert later.proved(key("a"), "p") and later.proved(key("a"), "q") and not later.proved(key("a"), "r")
    later.drop_proof(key("a"), "p")
    assert not disk.proved(key("a"), "p") and disk.proved(key("a"), "q")
    disk.discard(key("a"))
    disk.drop_proof(key("a"), "q")
    keep(disk, images, "a", noise(MIB))
    assert not disk.proved(key("a"), "q")


def test_a_disk_that_takes_no_notes_is_not_asked_again(
    disk: DiskCache, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no attributes")

    keep(disk, images, "a", noise(MIB))
    monkeypatch.setattr(os, "setxattr", refuse)
    assert disk.note_proof(key("a"), "p") and not disk.proved(key("a"), "p")


def test_the_time_of_a_build_is_read_once_from_each_file(
    disk: DiskCache, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_of: list[str] = []

    def counted(path: Path, built_s: Callable[[Path], float] = disk_module._built_s) -> float:
        read_of.append(path.name)
        return built_s(path)

    monkeypatch.setattr(disk_module, "_built_s", counted)
    for name in "abcd":
        keep(disk, images, name, noise(MIB))
    assert sorted(read_of) == sorted(f"{key(name)}.image" for name in "abc")


def test_an_image_stays_in_the_host_cache_until_it_is_on_disk_up_to_a_part_of_the_cache(
    disk: DiskCache, images: Images
) -> None:
    size, small = ROOM - 14 * MIB, ROOM // 8 - MIB  # an image of the first size fits beside a single small image
    with disk.reading():  # the writer waits, with one image in hand
        for name in "ab":
            image = put(images, name, small)
            disk.keep(images, key(name), 1.0)
            image.release()
        with pytest.raises(HostCacheFull):
            make(images, "large", size)
        image = put(images, "c", small)  # a third image would be beyond the part
        disk.keep(images, key("c"), 1.0)
        image.release()
        make(images, "medium", ROOM - 22 * MIB).abandon()
        assert there(images, "a") and there(images, "b") and not there(images, "c")
    until(lambda: not disk.writing)
    assert disk.has(key("a")) and disk.has(key("b"))
    make(images, "large", size).abandon()
