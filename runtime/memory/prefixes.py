"""KV blocks of ended requests in the host cache: prefixes that outlast the pages of the device.

The blocks lie in runs of state PREFIX, which a device process makes and pins only while blocks are copied. Whenever an
image or a parked request needs the room, on any runtime of the node, the runs without a pin go first. So each copy
begins with a pin, and the blocks of runs that went meanwhile are forgotten. Each block has a checksum, taken after the
copy to the host and compared before a prompt builds on the block. The blocks stay in memory, and end with the process.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from runtime.core.host_index import RUNS_MOST, FolioRun, Range, RunState, fit_blocks
from runtime.core.prefix_index import KeptBlock, PrefixIndex
from runtime.memory.images import Images
from runtime.memory.kv import KvRegion
from runtime.memory.native import Direction, PoolError, TransferTicket
from runtime.memory.slabs import Slabs

log = structlog.get_logger()

COPY_WAIT_S = 60.0
LOOK_S = 5.0  # longest time between two looks for blocks that are too old
READERS = 4  # threads that compare checksums
RESERVE_MOST = 64 << 20  # bytes of memory that an engine has ready for blocks to be kept


@dataclass(frozen=True, slots=True)
class EndedBlock:
    """A block on the device that ended requests have left behind."""

    block: int  # number on the device
    key: bytes
    tenant: str


class PrefixRuns:
    """Runs of the host cache for kept blocks of this process: the `HostMemory` of their slabs.

    Another runtime may take any run without a pin. A run found to be missing is listed in `lost`, and no further run is
    lent before the caller has called `forget`: a new run might lie where a lost run lay."""

    def __init__(self, images: Images, most_bytes: int) -> None:
        self._images, self._most_bytes = images, most_bytes
        self._known: dict[int, int] = {}  # bytes by offset
        self.lost: set[int] = set()
        self.fresh: set[int] = set()  # lent runs, which have a pin until `unpin`

    def pin(self, offsets: Iterable[int]) -> set[int]:
        """Pin the runs that are still there. Returns the offsets of the pinned runs."""
        images, there = self._images, set[int]()
        with images.change() as index:
            runs = index.prefixes(images.life)
            for offset in offsets:
                if offset in runs:
                    index.pin(runs[offset], images.member)
                    there.add(offset)
        self.lost.update(set(offsets) - there)
        for offset in there:
            images.pinned.take(offset, self._known[offset])
        return there

    def unpin(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self.fresh.discard(offset)
            self._images.release(offset)

    def forget(self, offset: int) -> None:
        self._known.pop(offset, None)
        self.lost.discard(offset)

    def lend(self, blocks: int, block_bytes: int) -> list[Range]:
        ranges = self.claim(blocks, block_bytes)
        if not self.commit(ranges):
            self.let(ranges)
            for at in ranges:
                self.release(at.start)
            return []
        for at in ranges:
            self._images.pinned.take(at.start, at.bytes)
            self.fresh.add(at.start)
        return ranges

    def claim(self, blocks: int, block_bytes: int) -> list[Range]:
        """Blank room for blocks, pinned and without memory; [] if there is too little.

        At the bound of the node, other runtimes' runs go if theirs are the oldest."""
        images = self._images
        with images.change() as index:
            self.lost.update(self._known.keys() - index.prefixes(images.life).keys())
            ranges = fit_blocks(index.gaps(index.runs), blocks, block_bytes)
            size = sum(range_.bytes for range_ in ranges)
            if self.lost or size > self._most_bytes or len(index.runs) + len(ranges) > RUNS_MOST // 2:
                return []
            while index.bytes_of(RunState.PREFIX) + size > self._most_bytes:
                if not index.drop_oldest_prefix(spared=images.life):
                    return []
            for at in ranges:
                run = FolioRun(at.start, at.bytes, RunState.PREFIX, {images.member: 1}, life=images.life)
                index.runs.append(run)
                self._known[at.start] = at.bytes
        return ranges

    def commit(self, ranges: Sequence[Range]) -> bool:
        """Get memory for claimed room, which may take milliseconds; False if the machine has none."""
        try:
            for at in ranges:
                self._images.cache.commit(at.start, at.bytes)
        except PoolError as error:
            log.warning("prefixes.no_memory", error=str(error))
            return False
        return True

    def let(self, ranges: Sequence[Range]) -> None:
        """Give back the pins of claimed room, where nothing was copied yet."""
        with self._images.change() as index:
            for at in ranges:
                index.unpin(index.at(at.start), self._images.member)

    def release(self, offset: int) -> None:
        """Give a run back; does nothing for a run that another runtime has taken."""
        self.forget(offset)
        with self._images.change() as index:
            if (run := index.prefixes(self._images.life).get(offset)) is not None:
                run.state = RunState.DISCARDED
                index.sweep()

    def take_back(self, lent: Range) -> None:
        self.release(lent.start)


class PrefixSpace:
    """Kept blocks of one engine. Thread-safe."""

    def __init__(self, store: HostPrefixes, number: int, kv: KvRegion) -> None:
        self._store, self.number, self.kv = store, number, kv
        self.slabs = Slabs(store.runs, kv.block_bytes)
        self.kept_most = 0  # blocks that were kept at a time

    def keep(self, ended: Sequence[EndedBlock], after: TransferTicket | None) -> TransferTicket | None:
        """Begin to copy blocks to the host, in the order in which blocks are to go: the last block stays longest.

        The pages of the blocks may be unmapped at once: the pages leave when the copy is over. Blocks that stay mapped
        must not change before the copy is over. If the room does not suffice, only the last blocks are kept.

        `after`: a ticket that is over when the device has written the blocks.
        Returns the ticket of the copy; None if nothing is copied, for want of room or because the host has the blocks.
        """
        return self._store.keep(self, ended, after)

    def has(self, key: bytes) -> bool:
        return self._store.has(self, key)

    def bring(self, keys: Sequence[bytes], device: Sequence[int]) -> int:
        """Copy the blocks of a chain into the blocks `device`; waits for the copy.

        Returns the number of blocks, from the first on, that came whole; the bytes of the others must not be used."""
        return self._store.bring(self, keys, device)

    def forget(self, tenant: str) -> None:
        """Forget every block of a tenant."""
        self._store.forget(self, tenant)

    def close(self) -> None:
        """Forget every block, and end."""
        self._store.end(self)


@dataclass(frozen=True, slots=True)
class KeepingBatch:
    """Blocks that are copied to the host in one transfer. `runs`: offsets of the runs, pinned for the copy."""

    space: PrefixSpace
    blocks: list[KeptBlock]
    runs: set[int]
    ticket: TransferTicket


class HostPrefixes:
    """Kept blocks of every engine of a device process.

    Args:
        images: the host cache.
        most_bytes: bound on the kept blocks of all runtimes of the node; 0: nothing is kept.
        ttl_s: seconds after the last use until a block goes."""

    def __init__(
        self, images: Images, most_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.runs = PrefixRuns(images, most_bytes)
        self.most_bytes = most_bytes
        self._cache, self._clock, self._look_s = images.cache, clock, min(LOOK_S, ttl_s / 4)
        self._index, self._spaces, self._made = PrefixIndex(ttl_s), dict[int, PrefixSpace](), 0
        self._lock = threading.RLock()
        self._arriving: queue.Queue[KeepingBatch | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._readers = ThreadPoolExecutor(READERS, "prefix")
        self._counts: Counter[str] = Counter()

    def space(self, kv: KvRegion) -> PrefixSpace:
        with self._lock:
            self._made += 1
            space = self._spaces[self._made] = PrefixSpace(self, self._made, kv)
            return space

    def counts(self) -> dict[str, int]:
        """Blocks kept, brought, dropped and wrong so far, and the bytes held now, by name."""
        with self._lock:
            return {**self._counts, "held_bytes": self._index.held_bytes}

    def settle(self) -> None:
        """Wait until every copy to the host begun so far is over, and its blocks can be brought back."""
        self._arriving.join()

    def close(self) -> None:
        """End the threads. Close every engine before."""
        if self._thread is not None:
            self._arriving.put(None)
            self._thread.join()
        self._readers.shutdown()

    # ── out ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(
        self, space: PrefixSpace, ended: Sequence[EndedBlock], after: TransferTicket | None
    ) -> TransferTicket | None:
        """See `PrefixSpace.keep`."""
        with self._lock:
            now, batch = self._clock(), None
            new = {each.key: each for each in ended if self._index.get(space.number, each.key) is None}
            wanted = list(new.values())
            if (blocks := self._room(space, len(wanted))) and (batch := self._copy(space, wanted, blocks, now, after)):
                self._counts["kept"] += len(batch.blocks)
                space.kept_most = max(space.kept_most, len(batch.blocks))
                self._begin()
                self._arriving.put(batch)
            for each in ended:
                if (block := self._index.get(space.number, each.key)) is not None:
                    self._index.use([block], now)
            return None if batch is None else batch.ticket

    def _room(self, space: PrefixSpace, count: int) -> list[int]:
        """Host blocks for at most `count` blocks; older blocks go for these."""
        size = space.kv.block_bytes
        count = min(count, self.most_bytes // size)
        while count:
            if (host := space.slabs.take(count)) is not None:
                return host
            if self.runs.lost:
                self._forget_lost()
            elif victims := self._index.victims((count - space.slabs.spare) * size):
                self._remove(victims)
            else:
                count //= 2  # images and parked requests have the rest of the cache
        return []

    def _copy(
        self, space: PrefixSpace, wanted: list[EndedBlock], host: list[int], now: float, after: TransferTicket | None
    ) -> KeepingBatch | None:
        """Begin to copy the last blocks of `wanted` into the host blocks; None if nothing is copied."""
        runs = self._pin(space, host)
        pairs = [
            (each, block)
            for each, block in zip(wanted[len(wanted) - len(host) :], host, strict=True)
            if space.slabs.extent_of(block) is not None  # else the block's run went before the pin
        ]
        device, host = [each.block for each, _ in pairs], [block for _, block in pairs]
        try:
            ticket = space.kv.copy(self._cache, device, host, Direction.TO_HOST, after) if pairs else None
        except PoolError as error:
            log.warning("prefixes.not_kept", blocks=len(pairs), error=str(error))
            ticket = None
        if ticket is None:
            self.runs.unpin(runs)
            _free(space, host)
            return None
        size = space.kv.block_bytes
        made = [KeptBlock(space.number, each.key, each.tenant, block, size, now, copies=1) for each, block in pairs]
        for kept in made:
            self._index.add(kept)
        return KeepingBatch(space, made, runs, ticket)

    def _pin(self, space: PrefixSpace, host: Iterable[int]) -> set[int]:
        """Pin the runs of host blocks. Returns the offsets; runs that went, and the runs' blocks, are forgotten."""
        runs = {extent.offset for block in host if (extent := space.slabs.extent_of(block)) is not None}
        fresh = self.runs.fresh & runs
        self.runs.unpin(self.runs.fresh - runs)
        self.runs.fresh -= fresh
        pinned = fresh | (self.runs.pin(runs - fresh) if runs - fresh else set())
        if self.runs.lost:
            self._forget_lost()
        return pinned

    # ── in ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def has(self, space: PrefixSpace, key: bytes) -> bool:
        """Whether a block is in the host cache, as far as known: the block may have gone for an image."""
        with self._lock:
            block = self._index.get(space.number, key)
            return block is not None and block.ready

    def bring(self, space: PrefixSpace, keys: Sequence[bytes], device: Sequence[int]) -> int:
        """See `PrefixSpace.bring`."""
        with self._lock:
            chain = self._chain(space, keys)
            runs = self._pin(space, [block.host for block in chain])
            chain = chain[: next((n for n, block in enumerate(chain) if block.gone), len(chain))]
            for block in chain:
                block.copies += 1
        whole = self._read(space, chain, device[: len(chain)]) if chain else 0
        with self._lock:
            self._index.use([block for block in chain if not block.gone], self._clock())
            self._counts["brought"] += whole
            self._over(space, chain, runs)
        return whole

    def _chain(self, space: PrefixSpace, keys: Sequence[bytes]) -> list[KeptBlock]:
        chain: list[KeptBlock] = []
        for key in keys:
            block = self._index.get(space.number, key)
            if block is None or not block.ready:
                break
            chain.append(block)
        return chain

    def _read(self, space: PrefixSpace, chain: Sequence[KeptBlock], device: Sequence[int]) -> int:
        """Copy blocks to the device, and meanwhile compare the checksums. Returns the number of sound blocks."""
        try:
            ticket = space.kv.copy(self._cache, device, [block.host for block in chain], Direction.TO_DEVICE, None)
            sound = [*self._readers.map(self._is_sound, chain)]
            ticket.wait(COPY_WAIT_S)
        except PoolError as error:
            log.warning("prefixes.not_brought", blocks=len(chain), error=str(error))
            return 0
        if all(sound):
            return len(chain)
        with self._lock:
            wrong = chain[sound.index(False)]
            log.error("prefixes.changed", blocks=sound.count(False))
            self._counts["wrong"] += sound.count(False)
            self._remove([block for block, is_sound in zip(chain, sound, strict=True) if not is_sound])
        return chain.index(wrong)

    def _is_sound(self, block: KeptBlock) -> bool:
        return self._checksum(block) == block.checksum

    def _checksum(self, block: KeptBlock) -> int:
        return zlib.crc32(self._cache.view(block.host * block.bytes, block.bytes))

    # ── the end of copies, and of blocks ──────────────────────────────────────────────────────────────────────────────

    def forget(self, space: PrefixSpace, tenant: str) -> None:
        """See `PrefixSpace.forget`."""
        with self._lock:
            self._remove([block for block in self._index.of(space.number) if block.tenant == tenant])

    def end(self, space: PrefixSpace) -> None:
        """Forget every block of an engine that ends."""
        with self._lock:
            self._remove(self._index.of(space.number))
            _free(space, [])
            del self._spaces[space.number]

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="prefixes", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        """Take the checksums of copied blocks, and look for blocks that are too old."""
        while True:
            try:
                batch = self._arriving.get(timeout=self._look_s)
            except queue.Empty:
                self.expire()
                continue
            if batch is None:
                return
            try:
                self._arrived(batch)
            except Exception as error:  # blocks that never become ready cost room, and nothing else
                log.error("prefixes.failed", error=type(error).__name__, detail=str(error)[:300])
            finally:
                self._arriving.task_done()

    def _arrived(self, batch: KeepingBatch) -> None:
        try:
            batch.ticket.wait(COPY_WAIT_S)
            checksums = [self._checksum(block) for block in batch.blocks]
        except PoolError as error:
            log.warning("prefixes.not_kept", blocks=len(batch.blocks), error=str(error))
            checksums = []
        with self._lock:
            for block, checksum in zip(batch.blocks, checksums, strict=False):
                block.checksum, block.ready = checksum, True
            if not checksums:
                self._remove([block for block in batch.blocks if not block.gone])
            self._over(batch.space, batch.blocks, batch.runs)
        self._reserve(batch.space)

    def _reserve(self, space: PrefixSpace) -> None:
        """Get memory for as many blocks as were ever kept at a time: the thread of the device must not wait for it."""
        with self._lock:
            missing = min(space.kept_most, RESERVE_MOST // space.kv.block_bytes) - space.slabs.spare
            if missing <= 0 or space.number not in self._spaces:
                return
            ranges = self.runs.claim(missing, space.kv.block_bytes)
        there = self.runs.commit(ranges)
        with self._lock:
            self.runs.let(ranges)
            if there and space.number in self._spaces:
                space.slabs.add(ranges)
            else:
                for at in ranges:
                    self.runs.release(at.start)

    def _over(self, space: PrefixSpace, blocks: Iterable[KeptBlock], runs: set[int]) -> None:
        """Note that a copy is over: unpin the runs, and free blocks that were forgotten meanwhile."""
        self.runs.unpin(runs)
        free = []
        for block in blocks:
            block.copies -= 1
            if block.gone and not block.copies:
                free.append(block.host)
        _free(space, free)

    def expire(self) -> None:
        """Forget blocks that were not used for too long."""
        with self._lock:
            self._remove(self._index.expired(self._clock()))

    def _remove(self, blocks: Sequence[KeptBlock]) -> None:
        """Forget blocks. Blocks of a copy under way become free at the end of the copy."""
        free: dict[int, list[int]] = {}
        for block in blocks:
            self._index.remove(block)
            if not block.copies:
                free.setdefault(block.space, []).append(block.host)
        self._counts["dropped"] += len(blocks)
        for number, host in free.items():
            _free(self._spaces[number], host)

    def _forget_lost(self) -> None:
        """Forget the blocks of runs that other runtimes, or images of this runtime, have taken."""
        lost = set(self.runs.lost)
        for space in self._spaces.values():
            for extent in space.slabs.extents(lost):
                within = range(extent.first, extent.first + extent.blocks)
                gone = [block for block in self._index.of(space.number) if block.host in within]
                for block in gone:
                    self._index.remove(block)
                self._counts["dropped"] += len(gone)
                space.slabs.lose(extent)
        for offset in lost:
            self.runs.forget(offset)


def _free(space: PrefixSpace, host: Iterable[int]) -> None:
    """Free host blocks of a space. A space without blocks keeps no memory."""
    space.slabs.free(host)
    if not space.slabs.taken:
        space.slabs.give_back_empty()
