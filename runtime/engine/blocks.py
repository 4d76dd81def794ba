"""vLLM's pool of KV blocks, over pages that come and go, and copies of blocks between device and host.

A block with all pages mapped is in circulation. `num_gpu_blocks`, a field of vLLM's pool, is the number of blocks in
circulation. Block 0, the null block, is always in circulation.

Prefixes outlast the pages: full blocks of ended requests go to the host cache when their pages are given back, and come
back before vLLM looks for the prefix of a request. A block that came back only needs its hash in vLLM's table, so
vLLM's own look-up finds the block, and vLLM counts the tokens as cached. The hash covers the tokens, the pictures and
the tenant's salt: no tenant finds another tenant's blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import structlog
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request

from runtime.core.prefix_index import BringingCosts
from runtime.engine import ranks
from runtime.memory.kv import KvRegion
from runtime.memory.native import Backend, CacheMemory, Code, Direction, PoolError, TransferTicket
from runtime.memory.prefixes import EndedBlock, PrefixSpace
from store.contract.wire import ONCE

log = structlog.get_logger()

COPY_TRIES = 3  # a failed copy is made again: the source is still there
COPY_WAIT_S = 60.0  # the longest wait for a copy
GROWN_AHEAD = 4  # tokens: pages that come while the engine steps are asked for this long before a request needs them
REQUESTS = 8  # the last requests, by whose lengths blocks are kept ahead


class LazyBlocks(dict[int, KVCacheBlock]):
    """The blocks of a pool by number, a block made when first asked for. Iterating yields the blocks made so far.

    vLLM makes every block at once. The pool of a large GPU has 100,000 blocks for each engine, most of which the engine
    never uses, and each search for garbage visits all of these."""

    def __init__(self, pool: BlockPool, count: int) -> None:
        super().__init__({pool.null_block.block_id: pool.null_block})
        self._pool, self._count = pool, count

    def __missing__(self, number: int) -> KVCacheBlock:
        assert 0 <= number < self._count, f"block {number} of {self._count}"
        block = self[number] = KVCacheBlock(number, pool=self._pool)
        return block

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[KVCacheBlock]:  # type: ignore[override]
        return iter([*self.values()])


@contextmanager
def elastic_pools() -> Iterator[None]:
    """Within the context, schedulers of vLLM are made with an ElasticBlockPool: vLLM has no setting for the class."""
    before = vars(kv_cache_coordinator)["BlockPool"]
    vars(kv_cache_coordinator)["BlockPool"] = ElasticBlockPool
    try:
        yield
    finally:
        vars(kv_cache_coordinator)["BlockPool"] = before


class ElasticBlockPool(BlockPool):
    """A pool of blocks whose pages come and go. Until `follow` is called, no block is in circulation but the null
    block."""

    _kv: KvRegion
    _used: list[int]  # for each page, number of the page's blocks in use; the null block is always in use
    _pages_in_use: int
    _ended: dict[int, str]  # salts of blocks that ended requests have left, the block to be lost first in front
    _passed: set[int]  # blocks of `_ended` that `next_ended` has returned
    lengths: deque[int]  # numbers of blocks that the last ended requests had
    before_reuse: Callable[[int], None] | None  # called with a number: so many blocks are about to be handed out

    def __init__(self, num_gpu_blocks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(1, *args, **kwargs)
        self.blocks = LazyBlocks(self, num_gpu_blocks)  # type: ignore[assignment]

    def follow(self, kv: KvRegion) -> None:
        """Follow the pages of `kv`, which has no page yet."""
        self._kv, self._used, self._pages_in_use = kv, [0] * kv.pages_total, 0
        self._ended, self._passed, self.lengths, self.before_reuse = {}, set(), deque(maxlen=REQUESTS), None
        self._count(self.null_block, 1)

    def take_apart(self) -> None:
        """Undo the circles in which pool and blocks refer to each other, when the engine ends."""
        for block in self.blocks:
            block.prev_free_block = block.next_free_block = None
        vars(self).clear()

    def grow(self, pages: int) -> None:
        """Begin to add pages; `land` puts the blocks of the new pages into circulation.

        On the host, and for an engine on several devices, whose schedulers must agree, the pages come at once. Raises
        PoolError; then no page is added."""
        if pages <= 0:
            return
        if self.grows_behind:
            self._kv.begin(pages)
        else:
            self.open(self._kv.map(pages))

    @property
    def grows_behind(self) -> bool:
        """Whether new pages come while the engine steps, and not at once."""
        return self._kv.reservation.device.backend is not Backend.HOST and ranks.size() == 1

    def land(self, wait_s: float = 0.0) -> bool:
        """Put the blocks of pages that `grow` began to add into circulation, if the pages are there.

        `wait_s`: the longest wait for the pages. Returns whether no page is on the way any more. Raises PoolError if
        the pages could not be added."""
        if wait_s:
            self._kv.wait(wait_s)
        if not self._kv.landed():
            return False
        self.open(self._kv.land())
        return True

    def take_grown(self, wait_s: float = 0.0) -> None:
        """As `land`, for an engine that goes on without the pages if the pages could not be added."""
        if self._kv.coming:
            with self.telling_failures(self._kv.pages_coming):
                self.land(wait_s)

    @staticmethod
    @contextmanager
    def telling_failures(pages: int) -> Iterator[None]:
        """Within the context, log that `pages` pages could not be added: the engine goes on with fewer pages."""
        try:
            yield
        except PoolError as error:
            log.warning("engine.not_grown", pages=pages, error=str(error))

    def open(self, blocks: Sequence[int]) -> None:
        """Put blocks with freshly mapped pages into circulation.

        The pool hands out opened blocks last, so that pages with blocks in use fill up first."""
        self.free_block_queue.append_n([self.blocks[block] for block in blocks if block])
        self.num_gpu_blocks += sum(1 for block in blocks if block)

    def retire(self, blocks: Sequence[int]) -> None:
        """Take unused blocks out of circulation, before the blocks' pages are unmapped.

        From now on no request gets the blocks, and no prefix is found in the blocks."""
        for block in (self.blocks[number] for number in blocks if number):
            assert block.ref_cnt == 0, f"block {block.block_id} is retired with {block.ref_cnt} owners"
            self._maybe_evict_cached_block(block)
            self._forget_ended(block.block_id)
            self.free_block_queue.remove(block)
        self.num_gpu_blocks -= sum(1 for block in blocks if block)

    @property
    def used_blocks(self) -> int:
        return self.num_gpu_blocks - 1 - self.get_num_free_blocks()

    def pages_wanted(self, blocks: int) -> int:
        """Number of mapped pages needed to have `blocks` blocks in circulation, the null block included.

        Gaps between mapped pages cut blocks, so that the mapped pages hold fewer blocks than the number of pages
        allows. Then the result is larger than the number of mapped pages."""
        pages = self._kv.pages_for(blocks)
        missing = blocks - self.num_gpu_blocks
        return max(pages, len(self._kv.mapped) + self._kv.pages_for(missing)) if missing > 0 else pages

    @property
    def spare(self) -> int:
        """Number of pages that `spare_pages` would return."""
        return max(0, len(self._kv.mapped) - self._pages_in_use)

    @property
    def fragmentation(self) -> float:
        """Share of the bytes of pages in use, 0 to 1, that no block in use takes."""
        pages = len(self._kv.mapped) - self.spare
        return 1 - (1 + self.used_blocks) * self._kv.block_bytes / (pages * self._kv.page_bytes) if pages else 0.0

    def spare_pages(self) -> list[int]:
        """Numbers of mapped pages without a block in use, the highest first."""
        return [page for page in sorted(self._kv.mapped, reverse=True) if not self._used[page]]

    def end(self, blocks: Sequence[int], salt: str) -> None:
        """Note that a request ends that has the blocks, in the order of its tokens, under the tenant's salt."""
        for block in reversed(blocks):
            self._forget_ended(block)
            self._ended[block] = salt
        self.lengths.append(len(blocks))

    def ended(self, blocks: Collection[int]) -> list[EndedBlock]:
        """Those of the blocks that hold prefixes of ended requests and have no owner, in the order of going."""
        found = []
        for number, salt in self._ended.items():
            block = self.blocks[number]
            if number in blocks and block.block_hash is not None and block.ref_cnt == 0:
                found.append(EndedBlock(number, block.block_hash, salt))
        return found

    def next_blocks(self, count: int) -> Iterator[KVCacheBlock]:
        """The next `count` blocks that vLLM would hand out, or all free blocks."""
        block = self.free_block_queue.fake_free_list_head.next_free_block
        while count and block is not None and block.next_free_block is not None:  # the list's end is no block
            yield block
            block, count = block.next_free_block, count - 1

    def next_ended(self, count: int) -> list[EndedBlock]:
        """Those of the next `count` blocks to be handed out that hold prefixes of ended requests, in this order.

        A block is returned once, until a further request ends that has the block."""
        found = []
        for block in self.next_blocks(count) if self._ended else ():
            number = block.block_id
            if number not in self._passed and number in self._ended and block.block_hash is not None:
                found.append(EndedBlock(number, block.block_hash, self._ended[number]))
        self._passed.update(each.block for each in found)
        return found

    def cache_full_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if not _only_once(request):
            super().cache_full_blocks(request, *args, **kwargs)

    def cache_partial_block(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        return None if _only_once(request) else super().cache_partial_block(request, *args, **kwargs)

    def forget(self, salt: str) -> None:
        """Forget the prefixes in blocks without an owner, left by requests under the salt or under an unknown salt."""
        for block in [*self.next_blocks(self.get_num_free_blocks())]:
            if self._ended.get(block.block_id, salt) == salt:
                self._maybe_evict_cached_block(block)
                self._forget_ended(block.block_id)

    def _forget_ended(self, block: int) -> None:
        self._ended.pop(block, None)
        self._passed.discard(block)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if self.before_reuse is not None:
            self.before_reuse(num_blocks)
        blocks = super().get_new_blocks(num_blocks)
        for block in blocks:
            self._count(block, 1)
            self._forget_ended(block.block_id)
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self._count(block, 1)
        super().touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self._count(block, -1)

    def _count(self, block: KVCacheBlock, change: int) -> None:
        for page in self._kv.pages_of(block.block_id):
            was, self._used[page] = self._used[page], self._used[page] + change
            self._pages_in_use += bool(self._used[page]) - bool(was)


def _only_once(request: Request) -> bool:
    """Whether the request leaves no prefix behind."""
    return (request.cache_salt or "").startswith(ONCE)


class Transfer:
    """A copy of some blocks, made up to COPY_TRIES times if the copy fails. Keep the blocks until the copy is over."""

    def __init__(
        self,
        kv: KvRegion,
        cache: CacheMemory,
        device: Sequence[int],
        host: Sequence[int],
        direction: Direction,
        after: TransferTicket | None = None,
    ) -> None:
        self._copy = partial(kv.copy, cache, device, host, direction)
        self._tries = 1
        self._ended: PoolError | bool = False  # True once the copy is over on all ranks, the error if the copy failed
        self.ticket = self._copy(after)

    def over(self) -> bool:
        """Whether the copy is over on all ranks; repeats a failed copy.

        Raises PoolError if the copy failed for good, then and at every later call."""
        if isinstance(self._ended, PoolError):
            raise self._ended
        if not self._ended:
            try:
                self._ended = ranks.all_say(self._over_here)
            except PoolError as error:
                self._ended = error
                if ranks.size() > 1:
                    _wait(self.ticket)  # the failed copy may be another rank's: wait for the own copy
                raise
        return self._ended is True

    def _over_here(self) -> bool:
        try:
            return self.ticket.done()
        except PoolError:
            if self._tries == COPY_TRIES:
                raise
            self._tries += 1
            self.ticket = self._copy(None)
            return False

    def went_well(self) -> bool:
        """Wait until the copy is over. Returns whether the copy succeeded."""
        try:
            while not self.over():
                _wait(self.ticket)
        except PoolError as error:
            log.warning("engine.copy_failed", error=str(error))
            return False
        return True


def _wait(ticket: TransferTicket) -> None:
    """Wait until the copy is over, or COPY_WAIT_S have passed; the next call of `over` tells of a failure."""
    try:
        ticket.wait(COPY_WAIT_S)
    except PoolError as error:
        log.warning("engine.copy_waited", error=str(error))


def _wait_over(ticket: TransferTicket) -> None:
    """Wait until a copy reads the blocks no longer, whether the copy succeeds or fails."""
    over = False
    while not over:
        try:
            ticket.wait(COPY_WAIT_S)
            over = True
        except PoolError as error:
            log.warning("engine.copy_waited", error=str(error))
            over = error.code is not Code.TIMEOUT


class Prefix(NamedTuple):
    """Full blocks of a request's prefix: on the device, or missing there and in the host cache."""

    here: list[KVCacheBlock]
    keys: list[bytes]  # of missing blocks
    places: list[int]  # of missing blocks, in the request's block table


class Prefixes:
    """Prefixes of one engine in the host cache. The model has one group of layers, and the group forgets nothing.

    `block_tokens`: tokens of a block."""

    def __init__(
        self,
        pool: ElasticBlockPool,
        space: PrefixSpace,
        block_tokens: int,
        written: Callable[[], TransferTicket | None],
    ) -> None:
        self._pool, self._space, self._block_tokens, self._written = pool, space, block_tokens, written
        self._costs = BringingCosts()
        self._copies: dict[int, TransferTicket] = {}  # the last copy of a block that stays in circulation
        self._waited_s = 0.0
        pool.before_reuse = self._before_reuse

    def keep(self, blocks: Sequence[int]) -> None:
        """Begin to copy the prefixes in blocks without an owner to the host: the blocks are about to be retired."""
        if ended := self._pool.ended(set(blocks)):
            self._space.keep(ended, self._written())

    def keep_ahead(self) -> None:
        """Begin to copy prefixes in blocks that vLLM is likely to hand out for the next request.

        The copies run beside the next steps, so that the device's thread rarely waits when blocks are handed out. An
        engine with blank blocks for as long a request as the last requests copies nothing."""
        self._keep_next(max(self._pool.lengths, default=0))

    def _keep_next(self, count: int) -> None:
        ended = self._pool.next_ended(count)
        if ended and (ticket := self._space.keep(ended, self._written())) is not None:
            self._copies.update(dict.fromkeys([each.block for each in ended], ticket))

    def _before_reuse(self, count: int) -> None:
        """Keep the prefixes in the next `count` blocks, and wait until no copy reads the blocks."""
        self._keep_next(count)
        began = time.monotonic()
        for block in self._pool.next_blocks(count) if self._copies else ():
            if (ticket := self._copies.pop(block.block_id, None)) is not None:
                _wait_over(ticket)
        self._waited_s += time.monotonic() - began

    def bring(self, requests: Iterable[Request]) -> float:
        """Bring back the prefixes of requests that vLLM is about to take up, the first in front.

        Returns the seconds that this took."""
        began, free = time.monotonic(), self._pool.get_num_free_blocks()
        for request in requests:
            prefix = self._prefix(request)
            free -= -(-(request.num_tokens + 1) // self._block_tokens) - sum(b.ref_cnt > 0 for b in prefix.here)
            if free < 0:
                break  # vLLM will not take the request up, nor any request behind
            count = len(prefix.keys)
            if count and self._costs.pays(count * self._block_tokens, count * self._space.kv.block_bytes):
                self._bring(request, prefix)
        self._waited_s = 0.0
        return time.monotonic() - began

    def computed(self, tokens: int, took_s: float) -> float:
        """Learn from a step that computed `tokens` tokens in `took_s` seconds, waits for copies included.

        Returns the seconds of the waits."""
        if tokens:
            self._costs.computed(tokens, took_s - self._waited_s)
        return self._waited_s

    def forget(self, salt: str) -> None:
        """Forget the blocks in the host cache that requests under the salt have left."""
        self._space.forget(salt)

    def close(self) -> None:
        self._space.close()

    def _prefix(self, request: Request) -> Prefix:
        """The blocks of a prefix that the device or the host has, up to the first that neither has.

        vLLM computes the last token of a prompt in any case."""
        prefix = Prefix([], [], [])
        if request.skip_reading_prefix_cache:
            return prefix
        full = (request.num_tokens - 1) // self._block_tokens
        for place, block_hash in enumerate(request.block_hashes[:full]):
            key = make_block_hash_with_group_id(block_hash, 0)
            if (found := self._pool.get_cached_block(block_hash, [0])) is not None:
                prefix.here.append(found[0])
            elif self._space.has(key):
                prefix.keys.append(key)
                prefix.places.append(place)
            else:
                break
        return prefix

    def _bring(self, request: Request, prefix: Prefix) -> None:
        """Bring missing blocks back, and leave the blocks as an ended request with an equal prefix would."""
        pool, began = self._pool, time.monotonic()
        pool.touch(prefix.here)  # else the coming blocks might take the place of blocks of the same prefix
        coming = pool.get_new_blocks(len(prefix.keys))
        whole = self._space.bring(prefix.keys, [block.block_id for block in coming])
        if whole:
            table = [pool.null_block] * (prefix.places[whole - 1] + 1)
            for place, block in zip(prefix.places[:whole], coming[:whole], strict=True):
                table[place] = block
            pool.cache_full_blocks(request, table, prefix.places[0], len(table), self._block_tokens, 0)
            pool.end([block.block_id for block in coming[:whole]], request.cache_salt or "")
            self._costs.brought(whole * self._space.kv.block_bytes, time.monotonic() - began)
        pool.free_blocks(reversed(coming))
        pool.free_blocks(reversed(prefix.here))
