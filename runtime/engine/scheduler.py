"""vLLM's scheduler, extended: running requests are taken out between two steps and put back without recomputation.

A request taken out is in none of vLLM's queues, but in one of three states:

    leaving   the request's blocks are being copied to the host
    parked    the blocks are on the host, and the device holds nothing of the request
    arriving  the request has new blocks on the device, and the copies into the new blocks are under way

A request comes back through `kv_holding_waiting`, vLLM's queue of requests with a KV cache brought in from elsewhere.
`schedule` continues a request of that queue at the token where the request stopped, and looks for no prefixes.

A request begun in an engine that is gone enters as if vLLM had preempted the request, and is computed again.

If vLLM is short of blocks and would preempt a request, the request is parked. Only if the host has no room is the
request recomputed, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import structlog
from vllm import outputs
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from runtime.engine import ranks
from runtime.engine.blocks import ElasticBlockPool, Transfer, elastic_pools
from runtime.engine.groups import Groups, ZeroedKvCache, pools
from runtime.memory.images import Images
from runtime.memory.kv import KvRegion
from runtime.memory.native import Direction, PoolError, TransferTicket
from runtime.memory.slabs import Slabs

log = structlog.get_logger()


@dataclass(slots=True)
class Away:
    """A request taken out after `computed` tokens.

    `host`: blocks on the host that hold the KV cache, or will, in the order of `Groups.live`."""

    request: Request
    computed: int
    host: list[int]
    coming: list[Transfer] = field(default_factory=list)  # copies of the blocks back to the device


@dataclass(slots=True)
class ParkingBatch:
    """Requests with blocks that are copied to the host in one transfer."""

    requests: list[Away]
    transfer: Transfer


class PooledScheduler(AsyncScheduler):
    """A scheduler with parking. vLLM constructs the scheduler; `take_over` must then give it a model's memory."""

    blocks: ElasticBlockPool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if current_platform.is_cpu():
            # Kernels for CPUs weigh what stands behind a request's last token by zero, and zero times NaN is NaN: one
            # request with numbers out of range would spoil later requests, also of other tenants.
            kwargs["kv_cache_config"] = ZeroedKvCache.of(kwargs["kv_cache_config"])
        with elastic_pools():
            super().__init__(*args, **kwargs)
        self.groups = Groups.of(self.kv_cache_config, self.vllm_config)
        self.pools = pools(self.vllm_config)
        self._leaving: ParkingBatch | None = None
        self._parked: dict[str, Away] = {}
        self._arriving: dict[str, Away] = {}
        self._behind: set[str] = set()  # requests begun elsewhere with output that the grammar has not seen yet
        self.recomputed = 0  # requests that lost the KV cache: the host had no room, or a copy failed
        self.scheduled_tokens = 0  # by the last step
        self._alone: frozenset[str] = frozenset()  # the runtime's own requests, while no other requests may be stepped
        self.keeps_prefixes = False  # whether blocks of ended requests go to the host cache; needs plain groups

    def take_over(self, kv: KvRegion, images: Images) -> None:
        self.kv, self._cache, self._slabs = kv, images.cache, Slabs(images.parked, kv.block_bytes)
        pool = self.kv_cache_manager.block_pool
        assert isinstance(pool, ElasticBlockPool), f"this vLLM has a {type(pool).__name__}"
        pool.follow(kv)
        self.blocks = pool

    # ── out ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def take_out(self, after: TransferTicket | None) -> None:
        """Take every request out of the batch, and begin to copy the blocks to the host.

        `after`: a ticket that is over when the device has written the blocks. Copies wait for the ticket."""
        assert self._leaving is None, "requests are leaving already"
        self._settle_arriving()
        inside = self.running + list(self.kv_holding_waiting)
        self.kv_holding_waiting.remove_requests(inside)
        self.running = []
        batch = [away for request in inside if (away := self._detach(request)) is not None]
        if batch:
            device = [block for away in batch for block in self._device_blocks(away)]
            host = [block for away in batch for block in away.host]
            self._leaving = ParkingBatch(batch, self._transfer(device, host, Direction.TO_HOST, after))

    def all_out(self) -> bool:
        """Whether every copy to the host is over. If so, the device blocks of the requests taken out are free."""
        leaving = self._leaving
        if leaving is None:
            return True
        saved = True
        try:
            if not leaving.transfer.over():
                return False
        except PoolError as error:
            log.error("engine.park_failed", requests=len(leaving.requests), error=str(error))
            saved = False
        self._leaving = None
        for away in leaving.requests:
            self._off_device(away, saved)
        return True

    def _off_device(self, away: Away, saved: bool) -> None:
        """Free the request's device blocks: the copy to the host is over. `saved`: whether the copy succeeded."""
        self.kv_cache_manager.free(away.request)
        if saved:
            self._parked[away.request.request_id] = away
        else:
            self._recompute(away)

    def _detach(self, request: Request) -> Away | None:
        """Take a request out of vLLM's books; the device blocks stay the request's.

        Returns None if the host has no room: then vLLM recomputes the request."""
        assert not request.num_in_flight_tokens, f"{request.request_id} has tokens in flight"
        computed = request.num_computed_tokens
        host = self._take(len(self.groups.live(computed)))
        if host is None:
            request.status = RequestStatus.RUNNING  # as `_preempt_request` expects
            self.recomputed += 1
            super()._preempt_request(request, 0.0)
            return None
        self._strike_off(request)
        return Away(request, computed, host)

    def _take(self, blocks: int) -> list[int] | None:
        """Allocate blocks on the host of every rank. Returns None if any rank has too little room."""
        host = self._slabs.take(blocks)
        if ranks.all_say(lambda: host is not None):
            return host
        self._slabs.free(host or [])
        return None

    def _strike_off(self, request: Request) -> None:
        """Remove the request from vLLM's books: from now on only this scheduler knows the request."""
        self.encoder_cache_manager.free(request)
        self._inflight_prefills.discard(request)
        request.status = RequestStatus.PREEMPTED
        request.spec_token_ids = []
        self.reset_preempted_req_ids.add(request.request_id)

    def _transfer(
        self, device: list[int], host: list[int], direction: Direction, after: TransferTicket | None = None
    ) -> Transfer:
        return Transfer(self.kv, self._cache, device, host, direction, after)

    def _device_blocks(self, away: Away) -> list[int]:
        """Blocks of the device that matter, in the order of the blocks on the host."""
        return self._at(away.request, self.groups.live(away.computed))

    def _at(self, request: Request, places: list[tuple[int, int]]) -> list[int]:
        """Device blocks of a request at (group, place) of the block tables."""
        tables = self.kv_cache_manager.get_block_ids(request.request_id)
        blocks = [tables[group][place] for group, place in places]
        assert all(blocks), f"{request.request_id} lacks a block that still matters: {places}, {tables}"
        return blocks

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """Park a request that vLLM drops for want of blocks in the middle of `schedule`; waits for the copy."""
        away = self._detach(request)
        if away is None:
            return
        transfer = self._transfer(self._device_blocks(away), away.host, Direction.TO_HOST)
        self._off_device(away, saved=transfer.went_well())

    def _recompute(self, away: Away) -> None:
        """Queue a request with a lost KV cache to be computed again, as vLLM queues a preempted request."""
        self._slabs.free(away.host)
        away.request.num_computed_tokens = 0
        self.recomputed += 1
        self.waiting.prepend_request(away.request)

    # ── in ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def bring_in(self, leave: int = 0) -> None:
        """Begin to copy parked requests to the device, the request parked longest first.

        Stops at the first request for which too few blocks are free; `leave` free blocks are left over."""
        for id, away in list(self._parked.items()):
            if len(away.host) + leave > self.blocks.get_num_free_blocks() or not self._place(away):
                return
            away.coming = [self._transfer(self._device_blocks(away), away.host, Direction.TO_DEVICE)]
            del self._parked[id]
            self._arriving[id] = away

    def land(self) -> None:
        """Let every request with finished copies go on; a request with a failed copy is computed again."""
        for id, away in list(self._arriving.items()):
            try:
                if not all([transfer.over() for transfer in away.coming]):  # a list: `over` makes a failed copy again
                    continue
            except PoolError as error:
                log.error("engine.resume_failed", requests=1, error=str(error))
                self._end_coming(away)
                del self._arriving[id]
                self.kv_cache_manager.free(away.request)
                self._recompute(away)
                continue
            del self._arriving[id]
            self._go_on(away)

    def prepare(self) -> None:
        """Prepare a step. Arrived requests take part; if no request is in, waits for the first arriving request."""
        self.land()
        self.bring_in()
        while self._arriving and not self.kv_holding_waiting and not self.running:
            self._end_coming(next(iter(self._arriving.values())))
            self.land()
        # Parked requests come before new requests: new requests would take the blocks that parked requests wait for.
        self._pause_state = PauseState.PAUSED_NEW if self._parked else PauseState.UNPAUSED

    def _place(self, away: Away) -> bool:
        """Give the request blocks for its computed tokens. Returns False for want of blocks.

        A request comes back only if all requests in can still make the next step; a first request always comes back."""
        request = away.request
        inside = [*self.running, *self.kv_holding_waiting]
        wanted = self._needs(request, away.computed) + sum(
            [self._lacks(other, other.num_computed_tokens) for other in inside]
        )
        wanted += sum([self._lacks(other.request, other.computed) for other in self._arriving.values()])
        if wanted > self.blocks.get_num_free_blocks() and (inside or self._arriving):
            return False  # vLLM would preempt running requests for the returning request, or could step none at all
        return self._allocate(request, away.computed)

    def _allocate(self, request: Request, computed: int) -> bool:
        """Give the request the blocks that matter once `computed` tokens are computed. False for want of blocks."""
        request.num_computed_tokens = 0
        placed = self.kv_cache_manager.allocate_slots(
            request, 0, num_external_computed_tokens=computed, delay_cache_blocks=True
        )
        self.kv_cache_manager.take_new_block_ids()  # else the next step would zero the new blocks
        return placed is not None

    def _go_on(self, away: Away) -> None:
        request = away.request
        self._slabs.free(away.host)
        self.kv_cache_manager.cache_blocks(request, away.computed)
        request.num_computed_tokens = away.computed
        self.kv_holding_waiting.add_request(request)

    def _settle_arriving(self) -> None:
        """Wait for every arriving request. An arrived request is scheduled and may be taken out again."""
        for away in self._arriving.values():
            self._end_coming(away)
        self.land()
        assert not self._arriving

    def _end_coming(self, away: Away) -> None:
        for transfer in away.coming:
            transfer.went_well()

    # ── begun elsewhere ───────────────────────────────────────────────────────────────────────────────────────────────

    def take_up(self, request: Request) -> None:
        """Enter a request with output made elsewhere: to vLLM the request looks like a preempted request."""
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions = 1
        if request.use_structured_output:
            self._behind.add(request.request_id)
        # An earlier request may have had this id. The runner must not be told of the earlier request's end now: the
        # runner would end the new request.
        self.finished_req_ids.discard(request.request_id)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return self._caught_up(request) and super()._handle_blocked_waiting_request(request)

    def _end_with_an_error(self, id: str) -> None:
        """Let the step end a request with an error. From 0.33 on vLLM keeps a reason for each such request."""
        errors: Any = self.grammar_compile_error_reqs
        if isinstance(errors, set):
            errors.add(id)
        else:
            reason = "the tokens so far are outside the grammar of the request"
            errors[id] = outputs.RequestError(code="validation_error", message=reason)

    def _caught_up(self, request: Request) -> bool:
        """Whether the request's grammar, compiled meanwhile, has seen all of the request's output."""
        if request.request_id not in self._behind:
            return True
        assert request.structured_output_request is not None
        grammar = request.structured_output_request.grammar
        if grammar is None:
            return False
        self._behind.discard(request.request_id)
        if isinstance(grammar, Exception) or not self.structured_output_manager.accept_tokens(
            request, list(request.output_token_ids)
        ):
            self._end_with_an_error(request.request_id)
            return False
        return True

    # ── asked by the engine ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ticket(self) -> TransferTicket | None:
        """The ticket of a copy under way, to wait for; None if no copy is under way."""
        if self._leaving is not None:
            return self._leaving.transfer.ticket
        return next((transfer.ticket for away in self._arriving.values() for transfer in away.coming), None)

    @property
    def arriving(self) -> int:
        return len(self._arriving)

    @property
    def inside(self) -> int:
        """Number of requests that a step can compute. New requests do not count while requests are parked."""
        return len(self.running) + len(self.kv_holding_waiting) + (0 if self._parked else len(self.waiting))

    def blocks_wanted(self, ahead: int, early: int = 0) -> tuple[int, int]:
        """Blocks, the null block included, that all requests together need.

        Returns two numbers: blocks for the next step of every request and `early` more tokens each, and blocks for
        `ahead` more tokens each."""
        sizes, most = self.groups.keeping_sizes, self.max_num_scheduled_tokens
        soon = later = 1 + self.blocks.used_blocks
        has = [(request, request.num_computed_tokens) for request in self.running]
        has += [(request, request.num_computed_tokens) for request in self.kv_holding_waiting]
        has += [(away.request, away.computed) for away in self._arriving.values()]
        for request, computed in has:  # no helpers: the loop runs after each step, for every request with blocks
            tokens = min(request.num_tokens + request.num_output_placeholders, computed + most)
            for size in sizes:
                blocks = -(-computed // size)
                soon += -(-(tokens + early) // size) - blocks
                later += -(-(tokens + ahead) // size) - blocks
        if self.groups.forgetting:
            for request, computed in has:
                tokens = min(request.num_tokens + request.num_output_placeholders, computed + most)
                next_step, further = self._forgetting_lack(request, computed, tokens + early, tokens + ahead)
                soon, later = soon + next_step, later + further
        for away in self._parked.values():
            next_step = self._needs(away.request, away.computed)
            soon += next_step
            later += max(next_step, self._needs(away.request, away.computed, ahead))
        for request in self.waiting:
            soon += self.groups.admission(request.num_tokens)
            later += self.groups.admission(request.num_tokens + ahead)
        total = len(self.blocks.blocks)
        return min(soon, total), min(later, total)

    def _needs(self, request: Request, computed: int, ahead: int = 0) -> int:
        """Blocks in all for the request's next step, or for the step to `ahead` more tokens."""
        tokens = min(request.num_tokens + request.num_output_placeholders, computed + self.max_num_scheduled_tokens)
        return self.groups.need(tokens + ahead - 1 if ahead else computed, tokens + ahead)

    def _lacks(self, request: Request, computed: int) -> int:
        """Blocks that a request with blocks for `computed` tokens lacks for the next step."""
        return max(0, self._needs(request, computed) - self.groups.held(self._tables(request)))

    def _forgetting_lack(self, request: Request, computed: int, tokens: int, later: int) -> tuple[int, int]:
        """Blocks that the groups that forget lack: for the next step, to `tokens` tokens, and up to `later` tokens."""
        tables, next_step, further = self._tables(request), 0, 0
        for number, group in self.groups.forgetting:
            held = group.held(tables[number])
            lacks = max(0, group.need(computed, tokens) - held)
            next_step += lacks
            further += max(lacks, group.need(later - 1, later) - held)
        return next_step, further

    def _tables(self, request: Request) -> list[Sequence[KVCacheBlock]]:
        """The request's block tables, one for each group."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        return [manager.req_to_blocks.get(request.request_id, ()) for manager in managers]

    @contextmanager
    def alone(self, ids: Collection[str]) -> Iterator[None]:
        """Within the context, steps compute only the runtime's own requests `ids`; other requests keep their order.

        Between two steps, and in the midst of a step, other requests may arrive, leave or end: such requests step aside
        only while vLLM makes a schedule."""
        assert not self.running, f"{len(self.running)} requests are running"
        self._pause_state, self._alone = PauseState.UNPAUSED, frozenset(ids)
        try:
            yield
        finally:
            self._alone = frozenset()

    @contextmanager
    def _others_aside(self) -> Iterator[None]:
        """Within the context, vLLM's queues hold no requests but the runtime's own. Nothing may pause meanwhile."""
        aside: list[tuple[RequestQueue, list[Request]]] = []
        for queue in (self.kv_holding_waiting, self.waiting):
            others = [request for request in queue if request.request_id not in self._alone]
            queue.remove_requests(others)
            aside.append((queue, others))
        try:
            yield
        finally:
            for queue, others in aside:
                for request in others:
                    queue.add_request(request)

    def change_blocks(self, copy: Callable[[list[int], list[int]], None]) -> None:
        """Give every running request other blocks, as if the request had been parked.

        `copy` is called with the old and the new blocks of each request, and must copy what lies in the old blocks.
        Does nothing for a request if too few blocks are free."""
        for request in self.running:
            away = Away(request, request.num_computed_tokens, [])
            old = self._device_blocks(away)
            if len(old) > self.blocks.get_num_free_blocks():
                continue
            pinned = [self.blocks.blocks[block] for block in old]
            self.blocks.touch(pinned)  # else the request might get its old blocks again
            self.kv_cache_manager.free(request)
            self._strike_off(request)
            placed = self._allocate(request, away.computed)
            assert placed, f"{request.request_id} has lost its blocks"
            copy(old, self._device_blocks(away))
            self.blocks.free_blocks(pinned)
            self._go_on(away)
        self.running = [request for request in self.running if request.status == RequestStatus.RUNNING]

    def wait_all_out(self) -> None:
        if self._leaving is not None:
            self._leaving.transfer.went_well()
        assert self.all_out()

    # ── asked by vLLM ─────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        with self._others_aside() if self._alone else nullcontext():
            output = super().schedule(*args, **kwargs)
        self.scheduled_tokens = output.total_num_scheduled_tokens
        return output

    def may_begin_ahead(self) -> bool:
        """Whether the next step can be scheduled before the tokens of the step under way are known.

        Every request in must make a token in each step, by no grammar, and must find a block; a request for a vector
        ends with the step. Parked, arriving and new requests come first: the next step shall compute them."""
        if self.pools or self._parked or self._arriving or self._leaving is not None or self.kv_holding_waiting:
            return False
        if self.new_requests() or any([one.is_prefill_chunk or one.use_structured_output for one in self.running]):
            return False
        return 0 < len(self.running) * len(self.groups.groups) <= self.blocks.get_num_free_blocks()

    def may_keep_prefixes(self) -> bool:
        """Whether blocks of ended requests may be kept on the host, for later requests with an equal prefix.

        With several groups, or layers that forget, a prefix needs matching blocks of every group, and the groups lose
        blocks at different times. On several devices the ranks would have to agree on each block. A vector is made of a
        whole prompt."""
        return self.groups.plain and not self.pools and ranks.size() == 1

    def new_requests(self) -> list[Request]:
        """Waiting requests that the next step may take up, the first in front, with nothing computed yet."""
        if self._pause_state != PauseState.UNPAUSED:
            return []
        places = self.max_num_active_reqs - len(self.running) - len(self.kv_holding_waiting)
        return [request for request in islice(self.waiting, max(0, places)) if not request.num_computed_tokens]

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.keeps_prefixes and request.request_id not in self._alone:
            (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
            self.blocks.end(blocks, request.cache_salt or "")
        return super()._free_request(request, *args, **kwargs)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests. A request's blocks, on device and host, become free only when no copy uses the blocks.

        Requests end one after the other: vLLM ends several requests in no fixed order, and all ranks of a group must
        free blocks in equal order."""
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        ids = list(dict.fromkeys(self.requests if request_ids is None else request_ids))
        if self._leaving is not None and any(away.request.request_id in ids for away in self._leaving.requests):
            self.wait_all_out()
        for id in ids:
            if id in self._arriving:
                self._end_coming(self._arriving[id])
            away = self._arriving.pop(id, None) or self._parked.pop(id, None)
            if away is not None:
                self._slabs.free(away.host)
        self._behind.difference_update(ids)
        ended: list[Request] = []
        for id in ids:
            ended += super().finish_requests(id, finished_status)
        return ended
