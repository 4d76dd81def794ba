"""vLLM's scheduler, whose running requests can be taken out between two steps and put back without recomputation.

A request that is away is in none of vLLM's queues: *leaving* (its blocks are being copied to the host), *parked* (they
are there, and nothing of it is on the device), or *arriving* (it has blocks again, other ones, and they are being
filled). It comes back through `kv_holding_waiting`, where vLLM expects requests whose KV cache was brought in from
elsewhere: `schedule` goes on with those where they stopped, without looking for prefixes.

A request that was begun in an engine that is no more comes as one that vLLM preempted: it is computed again.

What vLLM would preempt for want of blocks is parked too; only where the host has no room it is recomputed, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from runtime.engine import ranks
from runtime.engine.blocks import ElasticBlockPool
from runtime.engine.transfer import Transfer
from runtime.memory.images import Images
from runtime.memory.kv import KvRegion
from runtime.memory.native import Direction, PoolError, Ticket
from runtime.memory.slabs import Slabs

log = structlog.get_logger()


@dataclass(slots=True)
class Away:
    """A request that was taken out after `computed` tokens, whose blocks are, or will be, at `host`."""

    request: Request
    computed: int
    host: list[int]
    coming: list[Transfer] = field(default_factory=list)  # its blocks, back to the device


@dataclass(slots=True)
class Leaving:
    """Requests whose blocks travel to the host together."""

    requests: list[Away]
    transfer: Transfer


class PooledScheduler(Scheduler):
    """Built by vLLM; `take_over` gives it the memory it schedules over."""

    blocks: ElasticBlockPool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leaving: Leaving | None = None
        self._parked: dict[str, Away] = {}
        self._arriving: dict[str, Away] = {}
        self._behind: set[str] = set()  # begun elsewhere, with output that their grammar has not seen yet
        self.recomputed = 0  # requests that lost their KV cache for want of room on the host

    def take_over(self, kv: KvRegion, images: Images) -> None:
        self._kv, self._cache, self._slabs = kv, images.cache, Slabs(images, kv.block_bytes)
        self.blocks = ElasticBlockPool.take_over(self.kv_cache_manager.block_pool, kv)

    # ── out ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def take_out(self, after: Ticket | None) -> None:
        """Begin to copy out what every request that is in has; `after` is over when the device has written it."""
        assert self._leaving is None, "requests are leaving already"
        self._settle_arriving()
        inside = self.running + list(self.kv_holding_waiting)
        self.kv_holding_waiting.remove_requests(inside)
        self.running = []
        batch = [away for request in inside if (away := self._detach(request)) is not None]
        if batch:
            device = [block for away in batch for block in self._device_blocks(away)]
            host = [block for away in batch for block in away.host]
            self._leaving = Leaving(batch, self._transfer(device, host, Direction.TO_HOST, after))

    def all_out(self) -> bool:
        """Whether every copy out is over; the blocks of those requests are free then."""
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
        """The copy out is over."""
        self.kv_cache_manager.free(away.request)
        if saved:
            self._parked[away.request.request_id] = away
        else:
            self._recompute(away)

    def _detach(self, request: Request) -> Away | None:
        """Out of vLLM's books but for its blocks. None: the host has no room, vLLM will compute it again."""
        assert not request.num_in_flight_tokens, f"{request.request_id} has tokens in flight"
        computed = request.num_computed_tokens
        host = self._take(self._blocks_of(computed))
        if host is None:
            request.status = RequestStatus.RUNNING  # as `_preempt_request` expects
            self.recomputed += 1
            super()._preempt_request(request, 0.0)
            return None
        self._strike_off(request)
        return Away(request, computed, host)

    def _take(self, blocks: int) -> list[int] | None:
        """Room on the host, of every rank; None where there is not enough."""
        host = self._slabs.take(blocks)
        if ranks.all_say(lambda: host is not None):
            return host
        self._slabs.free(host or [])
        return None

    def _strike_off(self, request: Request) -> None:
        """Nobody but us knows of it from here on."""
        self.encoder_cache_manager.free(request)
        self._inflight_prefills.discard(request)
        request.status = RequestStatus.PREEMPTED
        request.spec_token_ids = []
        self.reset_preempted_req_ids.add(request.request_id)

    def _transfer(
        self, device: list[int], host: list[int], direction: Direction, after: Ticket | None = None
    ) -> Transfer:
        return Transfer(self._kv, self._cache, device, host, direction, after)

    def _device_blocks(self, away: Away) -> list[int]:
        (blocks,) = self.kv_cache_manager.get_block_ids(away.request.request_id)
        return blocks[: len(away.host)]

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """vLLM is short of blocks in the middle of `schedule`: what it drops is parked, here and now."""
        away = self._detach(request)
        if away is None:
            return
        transfer = self._transfer(self._device_blocks(away), away.host, Direction.TO_HOST)
        self._off_device(away, saved=transfer.went_well())

    def _recompute(self, away: Away) -> None:
        """Its KV cache is lost: to the queue, to be computed anew, as vLLM does with what it preempts."""
        self._slabs.free(away.host)
        away.request.num_computed_tokens = 0
        self.recomputed += 1
        self.waiting.prepend_request(away.request)

    # ── in ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def bring_in(self, leave: int = 0) -> None:
        """Begin to copy in parked requests, the longest away first, while there are blocks and `leave` more."""
        for id, away in list(self._parked.items()):
            if len(away.host) + leave > self.blocks.get_num_free_blocks() or not self._place(away):
                return
            away.coming = [self._transfer(self._device_blocks(away), away.host, Direction.TO_DEVICE)]
            del self._parked[id]
            self._arriving[id] = away

    def land(self) -> None:
        """Let requests go on whose copies are over."""
        for id, away in list(self._arriving.items()):
            try:
                if not all([transfer.over() for transfer in away.coming]):  # asked of each: who failed is made again
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
        """Before a step: whoever is there by now takes part, and if nobody is, the first who comes is waited for."""
        self.land()
        self.bring_in()
        while self._arriving and not self.kv_holding_waiting and not self.running:
            self._end_coming(next(iter(self._arriving.values())))
            self.land()
        # Parked requests come before new ones, which would take the blocks that they wait for.
        self._pause_state = PauseState.PAUSED_NEW if self._parked else PauseState.UNPAUSED

    def _place(self, away: Away) -> bool:
        request = away.request
        wanted = self._needs(request, away.computed) + sum([self._lacks(other) for other in self.running])
        if wanted > self.blocks.get_num_free_blocks() and self.running:
            return False  # those that are in would be preempted for it at once
        request.num_computed_tokens = 0
        placed = self.kv_cache_manager.allocate_slots(
            request, 0, num_external_computed_tokens=away.computed, delay_cache_blocks=True
        )
        return placed is not None

    def _go_on(self, away: Away) -> None:
        request = away.request
        self._slabs.free(away.host)
        self.kv_cache_manager.cache_blocks(request, away.computed)
        self.kv_cache_manager.take_new_block_ids()  # the next step would zero them
        request.num_computed_tokens = away.computed
        self.kv_holding_waiting.add_request(request)

    def _settle_arriving(self) -> None:
        """Wait for what is on its way in. What arrived is in; it may be taken out again."""
        for away in self._arriving.values():
            self._end_coming(away)
        self.land()
        assert not self._arriving

    def _end_coming(self, away: Away) -> None:
        for transfer in away.coming:
            transfer.went_well()

    # ── begun elsewhere ───────────────────────────────────────────────────────────────────────────────────────────────

    def take_up(self, request: Request) -> None:
        """It has output that was made elsewhere: what vLLM sees is a request that it preempted."""
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions = 1
        if request.use_structured_output:
            self._behind.add(request.request_id)
        # Was there one of this name before, the runner has not heard of its end, and must not take this for it.
        self.finished_req_ids.discard(request.request_id)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return self._caught_up(request) and super()._handle_blocked_waiting_request(request)

    def _caught_up(self, request: Request) -> bool:
        """Whether its grammar, which is compiled meanwhile, has seen all of its output."""
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
            self.grammar_compile_error_reqs.add(request.request_id)  # the step ends it with an error
            return False
        return True

    # ── asked by the engine ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ticket(self) -> Ticket | None:
        """Of a copy under way."""
        if self._leaving is not None:
            return self._leaving.transfer.ticket
        return next((transfer.ticket for away in self._arriving.values() for transfer in away.coming), None)

    @property
    def arriving(self) -> int:
        return len(self._arriving)

    @property
    def inside(self) -> int:
        """Requests that a step can take up."""
        return len(self.running) + len(self.kv_holding_waiting) + (0 if self._parked else len(self.waiting))

    def blocks_wanted(self, ahead: int) -> tuple[int, int]:
        """With so many, the null block included, every request could make its next step; and `ahead` more tokens."""
        size, most = self.block_size, self.max_num_scheduled_tokens
        soon = later = 1 + self.blocks.used_blocks
        has = [(request, request.num_computed_tokens) for request in self.running]
        has += [(request, request.num_computed_tokens) for request in self.kv_holding_waiting]
        has += [(away.request, away.computed) for away in self._arriving.values()]
        for request, computed in has:  # each step, for all that run
            blocks, tokens = -(-computed // size), min(request.num_tokens, computed + most)
            soon += -(-tokens // size) - blocks
            later += -(-(tokens + ahead) // size) - blocks
        for away in self._parked.values():
            soon += self._needs(away.request, away.computed)
            later += self._needs(away.request, away.computed, ahead)
        for request in self.waiting:
            soon += self._blocks_of(request.num_tokens)
            later += self._blocks_of(request.num_tokens + ahead)
        total = len(self.blocks.blocks)
        return min(soon, total), min(later, total)

    def _needs(self, request: Request, computed: int, ahead: int = 0) -> int:
        """Blocks in all, for its next step."""
        return self._blocks_of(min(request.num_tokens, computed + self.max_num_scheduled_tokens) + ahead)

    def _lacks(self, request: Request) -> int:
        """Of these, for one that runs."""
        return self._needs(request, request.num_computed_tokens) - self._blocks_of(request.num_computed_tokens)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For a request of our own: nobody else runs, those that wait stay out of the way and keep their order."""
        assert not self.running, f"{len(self.running)} requests are running"
        held, waiting = list(self.kv_holding_waiting), list(self.waiting)
        self.kv_holding_waiting.remove_requests(held)
        self.waiting.remove_requests(waiting)
        self._pause_state = PauseState.UNPAUSED
        try:
            yield
        finally:
            for request in held:
                self.kv_holding_waiting.add_request(request)
            for request in waiting:
                self.waiting.add_request(request)

    def wait_all_out(self) -> None:
        if self._leaving is not None:
            self._leaving.transfer.went_well()
        assert self.all_out()

    # ── asked by vLLM ─────────────────────────────────────────────────────────────────────────────────────────────────

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Blocks of a request are not free for others, here or on the host, while a copy uses them.

        One after the other: vLLM takes several in no order, and all ranks of a group must free blocks in the same."""
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
