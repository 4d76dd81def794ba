"""Blocks over pages: for any sizes, a block exists exactly if every byte of the block is mapped."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.memory.kv import KvRegion
from runtime.memory.native import DevicePool, FaultPoint, PoolError

PAGE, PAGES = 1 << 16, 24


def grown(kv: KvRegion, count: int) -> list[int]:
    """Blocks completed by `count` pages that were mapped on a thread of the library."""
    kv.begin(count)
    assert kv.pages_coming == count
    kv.wait(10)
    assert kv.landed()
    return kv.land()


@settings(max_examples=60)
@given(block_bytes=st.integers(1, 5 * PAGE // 512).map(lambda n: 512 * n), seed=st.integers(0, 2**32))
def test_a_block_is_there_when_all_its_pages_are(block_bytes: int, seed: int) -> None:
    rng = random.Random(seed)
    device = DevicePool(PAGES * PAGE, page_bytes=PAGE, huge_folios=False)
    kv = KvRegion(device, block_bytes, blocks=PAGES * PAGE // block_bytes)
    there: set[int] = set()
    for _ in range(20):
        if rng.random() < 0.6 and len(kv.mapped) < kv.pages_total:
            count = rng.randint(1, kv.pages_total - len(kv.mapped))
            new = kv.map(count) if rng.random() < 0.5 else grown(kv, count)
            assert there.isdisjoint(new)
            there.update(new)
        elif kv.mapped:
            pages = rng.sample(sorted(kv.mapped), rng.randint(1, len(kv.mapped)))
            there.difference_update(kv.blocks_on(pages))
            kv.unmap(pages)
            device.settle(10)
        stretch = [byte // PAGE for byte in range(0, kv.pages_total * PAGE, PAGE) if byte // PAGE in kv.mapped]
        assert stretch == sorted(kv.mapped) and device.stats().pages_mapped == len(kv.mapped)
        assert there == {
            block
            for block in range(kv.blocks)
            if all(byte // PAGE in kv.mapped for byte in (*range(block * block_bytes, (block + 1) * block_bytes, 512),))
        }
    kv.reservation.release()
    device.close()


def test_pages_come_as_many_as_asked_for_or_none() -> None:
    device = DevicePool(4 * PAGE, page_bytes=PAGE, huge_folios=False)
    kv, other = KvRegion(device, PAGE, 8), KvRegion(device, PAGE, 8)
    assert other.map(2) == [0, 1]
    kv.map(1)
    other.unmap([0])
    device.settle(10)
    with pytest.raises(PoolError, match="3 pages"):
        kv.map(3)
    device.inject(FaultPoint.MAP, 1)
    with pytest.raises(PoolError, match="made to fail"):
        kv.map(2)
    assert kv.mapped == {0} and device.stats().pages_mapped == 2
    with pytest.raises(PoolError, match="3 pages"):
        kv.begin(3)
    device.inject(FaultPoint.MAP, 1)
    with pytest.raises(PoolError, match="made to fail"):
        grown(kv, 2)
    assert kv.mapped == {0} and not kv.coming and device.stats().pages_promised == 0
    assert grown(kv, 2) == [1, 2]
    for region in (kv, other):
        region.reservation.release()
    device.close()


def test_pages_for_blocks_are_the_fewest_that_hold_them_from_the_first_on() -> None:
    device = DevicePool(PAGES * PAGE, page_bytes=PAGE, huge_folios=False)
    kv = KvRegion(device, PAGE * 3 // 4, blocks=8)
    assert [kv.pages_for(count) for count in (0, 1, 2, 4, 5, 8, 99)] == [0, 1, 2, 3, 4, 6, 6]
    kv.reservation.release()
    device.close()
