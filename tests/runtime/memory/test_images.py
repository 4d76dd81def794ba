"""The host cache of images: several runtimes over one file, real memory, real dying processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from runtime.core.host_index import RUNS_MOST, FolioRun, Index, Range, RunState, best_fit
from runtime.memory.images import (
    _TURN_AT,
    FOLIO_BYTES,
    INDEX_BYTES,
    META_MOST,
    NOTES_BYTES,
    HostCacheFull,
    HostCacheMismatch,
    Image,
    ImageBusy,
    ImageKey,
    Images,
    Making,
    _read_index,
    _write_index,
)
from runtime.memory.locks import HostCacheStuck
from runtime.memory.native import CacheMemory, Code, PoolError
from runtime.memory.slabs import Slabs
from tests.conftest import ROOT

MIB = 1 << 20
ROOM = 16 * FOLIO_BYTES


def key(name: str) -> ImageKey:
    return ImageKey(digest=name, engine="vllm 0", dtype="float32", shard="0/1", architecture="x86")


@pytest.fixture
def images() -> Iterator[Images]:
    images = Images.create(INDEX_BYTES + ROOM)
    yield images
    images.close()


@pytest.fixture
def other(images: Images) -> Iterator[Images]:
    other = Images.open(images.fd)
    yield other
    other.close()


def make(images: Images, name: str, size: int, wait_s: float = 0) -> Making:
    making = images.make(key(name), size, wait_s)
    assert isinstance(making, Making)
    return making


def put(images: Images, name: str, size: int, fill: bytes = b"x", meta: bytes = b"") -> Image:
    with make(images, name, size) as making:
        making.view[:] = fill * size
        return making.seal(meta)


def there(images: Images, name: str) -> bool:
    if image := images.find(key(name)):
        image.release()
    return image is not None


def memory_bytes(images: Images) -> int:
    """Memory given to the file, in whole folios: the index takes some pages of a folio."""
    return os.fstat(images.fd).st_blocks * 512 // FOLIO_BYTES * FOLIO_BYTES


def write(images: Images, block_bytes: int, block: int, fill: int) -> None:
    images.cache.view(block * block_bytes, block_bytes)[:] = bytes([fill]) * block_bytes


# ── images ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_image_is_found_by_all_runtimes_with_what_its_maker_noted(images: Images, other: Images) -> None:
    put(images, "a", 3 * MIB, b"7", b"golden").release()
    found = other.find(key("a"))
    assert found
    with found as image:
        assert (image.bytes, image.meta, bytes(image.view)) == (3 * MIB, b"golden", b"7" * (3 * MIB))
        assert image.view.readonly and image.offset % FOLIO_BYTES == 0


@pytest.mark.parametrize("field", ["digest", "engine", "dtype", "shard", "architecture"])
def test_what_decides_the_bytes_decides_the_key(field: str) -> None:
    values = {"digest": "d", "engine": "e", "dtype": "t", "shard": "0/2", "architecture": "a"}
    changed = values | {field: "other"}
    assert str(ImageKey(**values)) == str(ImageKey(**values)) != str(ImageKey(**changed))  # type: ignore[arg-type]


def test_an_image_that_is_not_sealed_is_not_found_and_leaves_no_memory(images: Images, other: Images) -> None:
    with make(images, "a", MIB) as making:
        making.view[:] = b"x" * MIB
        assert other.find(key("a")) is None
    assert images.find(key("a")) is None
    assert images.stats().image_bytes == 0 and memory_bytes(images) == 0


def test_who_makes_what_another_has_made_gets_that(images: Images, other: Images) -> None:
    put(images, "a", MIB, b"7").release()
    image = other.make(key("a"), MIB)
    assert isinstance(image, Image) and bytes(image.view) == b"7" * MIB


def test_who_makes_what_another_makes_waits_for_it(images: Images, other: Images) -> None:
    making, got = make(images, "a", MIB), []
    waiting = threading.Thread(target=lambda: got.append(other.make(key("a"), MIB, wait_s=30)))
    waiting.start()
    making.seal(b"first")
    waiting.join()
    assert isinstance(got[0], Image) and got[0].meta == b"first"


def test_who_waits_for_a_maker_that_gives_up_makes_it(images: Images, other: Images) -> None:
    making, got = make(images, "a", MIB), []
    waiting = threading.Thread(target=lambda: got.append(other.make(key("a"), MIB, wait_s=30)))
    waiting.start()
    making.abandon()
    waiting.join()
    assert isinstance(got[0], Making)


def test_who_waited_long_enough_is_told_whom_for(images: Images, other: Images) -> None:
    make(images, "a", MIB)
    with pytest.raises(ImageBusy, match=f"process {os.getpid()} makes the image .* of 1 MiB"):
        other.make(key("a"), MIB, wait_s=0)


def test_an_image_of_another_size_under_the_same_key_is_refused(images: Images) -> None:
    put(images, "a", MIB).release()
    with pytest.raises(ValueError, match=f"has {MIB} bytes, {MIB + 1} are expected"):
        images.make(key("a"), MIB + 1)
    assert images.stats().pinned_bytes == 0


def test_a_sealed_image_is_not_sealed_again_and_more_meta_than_there_is_room_for_is_refused(images: Images) -> None:
    making = make(images, "a", MIB)
    with pytest.raises(ValueError, match=f"at most {META_MOST} are kept"):
        making.seal(bytes(META_MOST + 1))
    making.seal(bytes(META_MOST))
    with pytest.raises(ValueError, match="sealed or abandoned before"):
        making.seal(b"")


@pytest.mark.parametrize("size", [1, 65536, 65537, 5 * MIB])
def test_any_changed_byte_of_a_small_image_is_seen(images: Images, size: int) -> None:
    image = put(images, "a", size)
    assert image.verify()
    for place in (0, size // 2, size - 1):
        byte = images.cache.view(image.offset + place, 1)
        byte[0] ^= 1
        assert not image.verify()
        assert image.sample(0) == (place >= 65536)
        byte[0] ^= 1
    assert image.verify() and image.sample(1_000_003)


def test_the_first_and_the_last_bytes_of_a_large_image_are_sampled(images: Images) -> None:
    image = put(images, "a", 24 * MIB)
    for place in (0, image.bytes - 1):
        byte = images.cache.view(image.offset + place, 1)
        byte[0] ^= 1
        assert not image.verify()
        byte[0] ^= 1
    assert image.verify()


# ── eviction ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_least_recently_used_image_goes_and_its_memory_with_it(images: Images, other: Images) -> None:
    for name in "abcd":
        put(images, name, ROOM // 4 - NOTES_BYTES).release()
    assert there(other, "a")
    put(images, "e", 2 * MIB).release()
    assert [name for name in "abcde" if not there(other, name)] == ["b"]
    assert images.stats().evictions == 1
    assert memory_bytes(images) == ROOM // 4 * 3 + 2 * FOLIO_BYTES


def test_an_image_counts_as_used_until_it_is_let_go(images: Images, other: Images) -> None:
    for name in "abc":
        put(images, name, 7 * MIB).release()
    first, second = images.find(key("a")), other.find(key("b"))
    assert first and second
    there(images, "c")
    second.release()
    first.release()
    put(images, "d", 7 * MIB).release()
    put(images, "e", 7 * MIB).release()
    assert not there(images, "c")
    put(images, "f", 7 * MIB).release()
    assert not there(images, "b") and there(images, "a")


def test_an_image_that_is_used_is_not_evicted(images: Images, other: Images) -> None:
    put(images, "a", ROOM // 2 - NOTES_BYTES).release()
    held = other.find(key("a"))
    put(images, "b", ROOM // 2 - NOTES_BYTES).release()
    put(images, "c", ROOM // 2 - NOTES_BYTES).release()
    assert held and held.verify() and not there(images, "b")


def test_an_image_goes_into_the_smallest_gap_that_holds_it() -> None:
    assert best_fit([Range(0, 10), Range(20, 24), Range(30, 33), Range(40, 42)], 3) == [Range(30, 33)]
    assert best_fit([Range(0, 10), Range(20, 24)], 11) == []


def test_no_more_is_evicted_than_has_to_be(images: Images) -> None:
    held = put(images, "a", MIB)
    put(images, "b", MIB).release()
    kept = put(images, "c", MIB)
    put(images, "d", ROOM - 3 * FOLIO_BYTES - NOTES_BYTES).release()
    put(images, "e", 4 * MIB).release()
    assert there(images, "b") and not there(images, "d")  # b is older, but its place has no room for e
    assert held.verify() and kept.verify()


def test_an_image_that_finds_no_room_evicts_nothing_and_says_who_has_it(images: Images, other: Images) -> None:
    used = put(other, "a", 20 * MIB - NOTES_BYTES)
    put(images, "b", MIB).release()
    numbers = f"16 MiB.* of 32 MiB.* 10 MiB are free, 12 MiB in one.* {os.getpid()} use 20 MiB.*STACCATO_HOST_CACHE"
    with pytest.raises(HostCacheFull, match=numbers) as full:
        images.make(key("c"), 14 * MIB)
    assert (full.value.asked_bytes, full.value.held_bytes, full.value.largest_bytes) == (16 * MIB, 20 * MIB, 12 * MIB)
    assert there(images, "b")
    used.release()
    make(images, "c", 14 * MIB)


def test_a_machine_without_memory_is_said_and_costs_no_room(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(cache: CacheMemory, offset: int, size: int) -> int:
        raise PoolError(Code.NO_MEMORY, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(CacheMemory, "commit", refuse)
        with pytest.raises(PoolError):
            images.make(key("a"), MIB)
        assert Slabs(images.parked, 4096).take(1) is None
    assert images.stats().free_bytes == ROOM


def test_a_discarded_image_is_found_no_more_and_stays_for_those_that_use_it(images: Images, other: Images) -> None:
    used = put(images, "a", MIB, b"1")
    assert other.discard(key("a")) and not other.discard(key("a"))
    assert images.find(key("a")) is None and used.verify()
    remade = put(other, "a", MIB, b"2")
    assert bytes(used.view) == b"1" * MIB and bytes(remade.view) == b"2" * MIB
    used.release()
    used.release()
    assert images.stats().image_bytes == FOLIO_BYTES == memory_bytes(images)


def test_hits_and_misses_are_counted_for_all_runtimes(images: Images, other: Images) -> None:
    put(images, "a", MIB).release()
    assert other.find(key("a")) and images.find(key("a")) and not other.find(key("b"))
    stats = images.stats()
    assert (stats.hits, stats.misses, stats.images) == (2, 1, 1)
    assert (stats.total_bytes, stats.pinned_bytes, stats.free_bytes) == (ROOM, FOLIO_BYTES, ROOM - FOLIO_BYTES)


# ── parked blocks ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("block_bytes", [512, 65536, 96 << 10, FOLIO_BYTES, 3 * MIB + 512])
def test_blocks_lie_at_multiples_of_their_size_and_do_not_overlap(images: Images, block_bytes: int) -> None:
    image, slabs = put(images, "a", 5 * MIB), Slabs(images.parked, block_bytes)
    blocks = slabs.take(5)
    assert blocks and len(set(blocks)) == 5
    for block in blocks:
        write(images, block_bytes, block, block % 251)
    for block in blocks:
        assert bytes(images.cache.view(block * block_bytes, block_bytes)) == bytes([block % 251]) * block_bytes
    assert image.verify()
    slabs.free(blocks)
    assert memory_bytes(images) == images.stats().image_bytes


def test_blocks_that_are_free_are_taken_before_more_memory_is(images: Images) -> None:
    slabs = Slabs(images.parked, FOLIO_BYTES // 8)
    first = slabs.take(8) or []
    second = slabs.take(4) or []
    slabs.free(first[2:4])
    assert (slabs.take(6) or []) == first[2:4] + [second[-1] + n for n in (1, 2, 3, 4)]
    assert images.stats().parked_bytes == 2 * FOLIO_BYTES


def test_memory_of_parked_blocks_is_kept_for_whatever_model_parks_next() -> None:
    images = Images.create(INDEX_BYTES + ROOM, kept_bytes=3 * FOLIO_BYTES)
    ours, others = Slabs(images.parked, FOLIO_BYTES), Slabs(images.parked, FOLIO_BYTES // 2)
    blocks = ours.take(2) or []
    ours.free(blocks)
    assert (ours.spare, images.parked.reserved_bytes, images.stats().parked_bytes) == (0, *[2 * FOLIO_BYTES] * 2)
    assert ours.take(2) == blocks and images.parked.reserved_bytes == 0
    ours.free(blocks)
    assert (others.take(4) or [])[0] == 2 * blocks[0] and images.parked.reserved_bytes == 0
    assert images.stats().parked_bytes == 2 * FOLIO_BYTES
    images.close()


def test_kept_memory_and_the_room_around_it_serve_a_larger_block() -> None:
    images = Images.create(INDEX_BYTES + ROOM, kept_bytes=ROOM)
    folios, large = Slabs(images.parked, FOLIO_BYTES), Slabs(images.parked, 4 * FOLIO_BYTES)
    kept = [folios.take(1) or [] for _ in range(16)]
    for number in range(1, 16):
        folios.free(kept[number])
    assert images.parked.reserved_bytes == 15 * FOLIO_BYTES
    assert len(large.take(3) or []) == 3
    assert images.parked.reserved_bytes == 0 and images.stats().parked_bytes == 13 * FOLIO_BYTES
    images.close()


def test_what_runtimes_keep_together_gives_way_before_images_and_the_kept_share_of_a_runtime_after() -> None:
    images = Images.create(INDEX_BYTES + ROOM, kept_bytes=2 * FOLIO_BYTES, kept_together=8 * FOLIO_BYTES)
    slabs = Slabs(images.parked, FOLIO_BYTES)
    singles = [slabs.take(1) or [] for _ in range(8)]

    def put_folios(name: str, folios: int) -> None:
        put(images, name, folios * FOLIO_BYTES - NOTES_BYTES).release()

    put_folios("a", 1)
    for single in singles:
        slabs.free(single)
    put_folios("b", 7)
    assert images.parked.reserved_bytes == 8 * FOLIO_BYTES and images.stats().free_bytes == 0
    put_folios("c", 1)
    assert images.parked.reserved_bytes == 7 * FOLIO_BYTES and there(images, "a") and there(images, "b")
    put_folios("d", 8)
    assert images.parked.reserved_bytes == 2 * FOLIO_BYTES and there(images, "c") and not there(images, "b")
    put_folios("e", 16)
    assert images.parked.reserved_bytes == 0
    images.close()


def test_more_than_may_be_kept_goes_back_at_once() -> None:
    images = Images.create(INDEX_BYTES + ROOM, kept_bytes=3 * FOLIO_BYTES)
    ours = Slabs(images.parked, FOLIO_BYTES)
    ours.free(ours.take(4) or [])
    assert images.stats().parked_bytes == 0 == memory_bytes(images)
    images.close()


def test_parked_blocks_evict_images_that_nobody_uses_and_no_others(images: Images, other: Images) -> None:
    put(images, "a", ROOM // 2 - NOTES_BYTES).release()
    used = put(images, "b", ROOM // 4 - NOTES_BYTES)
    slabs = Slabs(other.parked, FOLIO_BYTES)
    assert slabs.take(13) is None and there(images, "a")
    assert slabs.take(12) and not there(images, "a")
    assert used.verify() and images.stats().parked_bytes == 12 * FOLIO_BYTES


def test_what_a_runtime_parked_can_be_held_beyond_its_death(images: Images) -> None:
    other = Images.open(images.fd)
    blocks = Slabs(other.parked, 3000).take(900)
    assert blocks is not None
    write(images, 3000, blocks[-1], 7)
    hold, life = images.hold(blocks, 3000, other.life), other.life
    assert hold is not None
    other.close()
    assert images.stats().parked_bytes > 0
    assert images.cache.view(blocks[-1] * 3000, 3000)[0] == 7
    assert images.hold(blocks, 3000, life) is None, "nobody knows of whom they are"
    hold.release()
    hold.release()
    assert images.stats().parked_bytes == 0


def test_what_is_another_runtimes_now_is_not_held_for_what_it_was(images: Images) -> None:
    other = Images.open(images.fd)
    blocks, life = Slabs(other.parked, 3000).take(10), other.life
    assert blocks is not None
    assert images.hold([blocks[-1] + 10_000], 3000, life) is None
    other.close()
    with contextlib.closing(Images.open(images.fd)) as next_one:
        assert Slabs(next_one.parked, 3000).take(10) == blocks
        assert next_one.life != life
        assert images.hold(blocks, 3000, life) is None
        hold = images.hold(blocks, 3000, next_one.life)
        assert hold is not None
        hold.release()


def test_a_block_that_is_not_taken_is_not_freed(images: Images) -> None:
    slabs = Slabs(images.parked, FOLIO_BYTES // 8)
    blocks = slabs.take(3) or []
    for wrong in (0, blocks[-1] + 1, blocks[-1] + 100):
        with pytest.raises(ValueError, match=f"block {wrong} of 262144 bytes is not taken"):
            slabs.free([wrong])
    slabs.free(blocks[:1])
    with pytest.raises(ValueError, match="is not taken"):
        slabs.free(blocks[:1])


# ── other processes ───────────────────────────────────────────────────────────────────────────────────────────────────


class Process:
    """A second process. The process opens the cache by descriptor, runs `lines`, then waits to be ended."""

    def __init__(self, images: Images, lines: str) -> None:
        script = (
            "import sys\nfrom runtime.memory.images import *\nfrom runtime.memory.slabs import Slabs\n"
            "from tests.runtime.memory.test_images import key, put\n"
            f"images = Images.open({images.fd})\n{lines}\nprint('done', flush=True)\nsys.stdin.read()\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=ROOT,
            pass_fds=[images.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid
        assert self._process.stdout
        self.said: list[str] = []
        while (line := self._process.stdout.readline()) != b"done\n":
            assert line, "the process ended before its lines were over"
            self.said.append(line.decode().strip())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_another_process_finds_the_image_and_pins_it(images: Images) -> None:
    put(images, "a", 20 * MIB, b"7", b"golden").release()
    lines = "image = images.find(key('a'))\nprint(image.meta, bytes(image.view) == b'7' * image.bytes, image.verify())"
    process = Process(images, lines)
    assert process.said == ["b'golden' True True"]
    with pytest.raises(HostCacheFull, match=f"processes {process.pid} use"):
        images.make(key("b"), 20 * MIB)
    process.kill()
    make(images, "b", 20 * MIB)


def test_an_image_counts_as_used_until_its_user_dies(images: Images) -> None:
    put(images, "a", 14 * MIB).release()
    put(images, "b", 14 * MIB).release()
    process = Process(images, "image = images.find(key('a'))")
    assert there(images, "b")
    process.kill()
    put(images, "c", 14 * MIB)
    assert there(images, "a") and not there(images, "b")


def test_what_a_killed_maker_began_is_taken_over(images: Images) -> None:
    process = Process(images, "making = images.make(key('a'), 1 << 20)\nmaking.view[:] = b'x' * (1 << 20)")
    with pytest.raises(ImageBusy, match=f"process {process.pid} makes"):
        images.make(key("a"), MIB, wait_s=0)
    process.kill()
    making = make(images, "a", MIB)
    assert bytes(making.view) == bytes(MIB)


def test_what_a_killed_runtime_parked_goes_back_to_the_machine(images: Images) -> None:
    process = Process(images, "slabs = Slabs(images.parked, 4096)\nblocks = slabs.take(1000)")
    assert memory_bytes(images) == 2 * FOLIO_BYTES == images.stats().parked_bytes
    process.kill()
    assert images.stats().parked_bytes == 0 and memory_bytes(images) == 0


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_file_becomes_a_host_cache_and_any_other_is_refused(images: Images) -> None:
    plain = CacheMemory(3 * FOLIO_BYTES)
    first, second = Images.open(plain.fd), Images.open(plain.fd)
    put(first, "a", MIB).release()
    assert there(second, "a")
    first.close()
    second.close()
    plain.view(0, 1)[0] = 7
    with pytest.raises(HostCacheMismatch, match="from one release"):
        Images.open(plain.fd)
    plain.close()
    images.cache.view(8, 1)[0] += 1
    with pytest.raises(HostCacheMismatch, match="from one release"):
        Images.open(images.fd)


def test_a_cache_without_room_for_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="STACCATO_HOST_CACHE to 4 MiB or more"):
        Images.create(INDEX_BYTES + FOLIO_BYTES - 1)


def test_a_runtime_that_stops_in_the_middle_of_a_change_is_not_waited_for_without_end(
    images: Images, other: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.memory.locks.LOCK_S", 0.0)
    with other.change(), pytest.raises(HostCacheStuck, match="let that runtime go on or end it"):
        images.stats()
    assert images.stats().images == 0


def test_what_fails_in_the_middle_of_a_change_changes_nothing(images: Images, other: Images) -> None:
    put(images, "a", MIB).release()
    with pytest.raises(ZeroDivisionError), other.change() as index:
        index.runs.clear()
        _ = 1 // 0
    assert there(images, "a")


def test_a_runtime_killed_before_the_byte_turned_leaves_the_index_as_it_was() -> None:
    file = bytearray(INDEX_BYTES)
    for turn in range(3):
        _write_index(memoryview(file), Index(1, clock=turn))
    last = file[_TURN_AT]
    _write_index(memoryview(file), Index(1, clock=3, members={1: 1}))
    assert _read_index(memoryview(file)).clock == 3
    file[_TURN_AT] = last
    assert _read_index(memoryview(file)) == Index(1, clock=2)


def test_the_index_has_room_for_as_many_runs_as_there_may_be() -> None:
    pins = {member: 1000 for member in range(8)}
    runs = [FolioRun(1 << 40, 1 << 40, RunState.DISCARDED, pins, str(key("a")), 1 << 40, 1 << 20, 1 << 40)] * RUNS_MOST
    _write_index(memoryview(bytearray(INDEX_BYTES)), Index(1 << 40, runs=runs))


def test_threads_and_runtimes_at_once_lose_no_pin(images: Images, other: Images) -> None:
    put(images, "a", MIB).release()

    def use(runtime: Images) -> None:
        for _ in range(200):
            assert there(runtime, "a")

    threads = [threading.Thread(target=use, args=[runtime]) for runtime in (images, other) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = images.stats()
    assert (stats.hits, stats.misses, stats.pinned_bytes) == (800, 0, 0)


def test_a_runtime_that_closes_lets_go_of_all_it_had(images: Images) -> None:
    other = Images.open(images.fd)
    used = put(other, "a", MIB)
    make(other, "b", MIB)
    Slabs(other.parked, 4096).take(1)
    other.close()
    used.release()
    stats = images.stats()
    assert (stats.images, stats.pinned_bytes, stats.parked_bytes) == (1, 0, 0)
    assert memory_bytes(images) == FOLIO_BYTES


def test_spare_room_comes_from_named_unused_images_alone(images: Images, other: Images) -> None:
    size = 5 * FOLIO_BYTES - NOTES_BYTES
    for name in ("a", "b"):
        put(images, name, size).release()
    used = put(other, "c", size)
    assert images.spare_room(FOLIO_BYTES - NOTES_BYTES, []) == 0, "a folio is free"
    assert images.spare_room(size, []) == 4 * FOLIO_BYTES
    assert images.spare_room(size, [key("c")]) == 4 * FOLIO_BYTES, "another runtime uses the image"
    assert images.spare_room(2 * size, [key("a")]) > 0 and there(images, "a"), "nothing goes in vain"
    assert images.spare_room(size, [key("b")]) == 0
    assert there(images, "a") and not there(images, "b") and there(images, "c")
    used.release()
