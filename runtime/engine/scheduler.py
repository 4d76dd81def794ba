"""vLLM's scheduler, whose running requests can be taken out between two steps and put back without recomputation.

A request that is away is in none of vLLM's queues: *leaving* (its blocks are being copied to the host), *parked* (they
are there, and nothing of it is on the device), or *arriving* (it has blocks again, other ones, and they are being
filled). It comes back through `kv_holding_waiting`, where vLLM expects requests whose KV cache was brought in from
elsewhere: `schedule` goes on with those where they stopped, without looking for prefixes.

What vLLM would preempt for want of blocks is parked too; only where the host has no room it is recomputed, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from runtime.engine.blocks import ElasticBlockPool
from runtime.memory.images import Images, Slabs
from runtime.memory.kv import KvRegion
from runtime.memory.native import Direction, PoolError, Ticket

log = structlog.get_logger()

COPY_TRIES = 3  # a copy that fails is made again: the source is still there
COPY_WAIT_S = 60.0  # the longest that anything waits for a copy


@dataclass(slots=True)
class Away:
    """A request that was taken out after `computed` tokens, whose blocks are, or will be, at `host`."""

    request: Request
    computed: int
    host: list[int]
    ticket: Ticket | None = None  # of the copy in
    tries: int = 0


@dataclass(slots=True)
class Leaving:
    """Requests whose blocks travel to the host together."""

    requests: list[Away]
    device: list[int]
    host: list[int]
    ticket: Ticket
    tries: int = 1


class PooledScheduler(Scheduler):
    """Built by vLLM; `take_over` gives it the memory it schedules over."""

    blocks: ElasticBlockPool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leaving: Leaving | None = None
        self._parked: dict[str, Away] = {}
        self._arriving: dict[str, Away] = {}
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
            ticket = self._kv.copy(self._cache, device, host, Direction.TO_HOST, after)
            self._leaving = Leaving(batch, device, host, ticket)

    def all_out(self) -> bool:
        """Whether every copy out is over; the blocks of those requests are free then."""
        leaving = self._leaving
        if leaving is None:
            return True
        try:
            if not leaving.ticket.done():
                return False
        except PoolError as error:
            if leaving.tries < COPY_TRIES:
                leaving.tries += 1
                leaving.ticket = self._kv.copy(self._cache, leaving.device, leaving.host, Direction.TO_HOST, None)
                return False
            log.error("engine.park_failed", requests=len(leaving.requests), error=str(error))
            self._leaving = None
            for away in leaving.requests:
                self.kv_cache_manager.free(away.request)
                self._recompute(away)
            return True
        self._leaving = None
        for away in leaving.requests:
            self.kv_cache_manager.free(away.request)
            self._parked[away.request.request_id] = away
        return True

    def _detach(self, request: Request) -> Away | None:
        """Out of vLLM's books but for its blocks. None: the host has no room, vLLM will compute it again."""
        assert not request.num_in_flight_tokens, f"{request.request_id} has tokens in flight"
        computed = request.num_computed_tokens
        host = self._slabs.take(-(-computed // self.block_size))
        if host is None:
            request.status = RequestStatus.RUNNING  # as `_preempt_request` expects
            self.recomputed += 1
            super()._preempt_request(request, 0.0)
            return None
        self.encoder_cache_manager.free(request)
        self._inflight_prefills.discard(request)
        request.status = RequestStatus.PREEMPTED
        request.spec_token_ids = []
        self.reset_preempted_req_ids.add(request.request_id)
        return Away(request, computed, host)

    def _device_blocks(self, away: Away) -> list[int]:
        (blocks,) = self.kv_cache_manager.get_block_ids(away.request.request_id)
        return blocks[: len(away.host)]

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """vLLM is short of blocks in the middle of `schedule`: what it drops is parked, here and now."""
        away = self._detach(request)
        if away is None:
            return
        try:
            device = self._device_blocks(away)
            self._kv.copy(self._cache, device, away.host, Direction.TO_HOST, None).wait(COPY_WAIT_S)
        except PoolError as error:
            log.error("engine.park_failed", requests=1, error=str(error))
            self.kv_cache_manager.free(request)
            self._recompute(away)
            return
        self.kv_cache_manager.free(request)
        self._parked[request.request_id] = away

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
            self._copy_in(away)
            del self._parked[id]
            self._arriving[id] = away

    def land(self) -> None:
        """Let requests go on whose copies are over."""
        for id, away in list(self._arriving.items()):
            assert away.ticket is not None
            try:
                if not away.ticket.done():
                    continue
            except PoolError as error:
                self._copy_failed(away, error)
                continue
            del self._arriving[id]
            self._go_on(away)

    def prepare(self) -> None:
        """Before a step: whoever is there by now takes part, and if nobody is, the first who comes is waited for."""
        self.land()
        self.bring_in()
        while self._arriving and not self.kv_holding_waiting and not self.running:
            away = next(iter(self._arriving.values()))
            assert away.ticket is not None
            _wait(away.ticket)
            self.land()
        # Parked requests come before new ones, which would take the blocks that they wait for.
        self._pause_state = PauseState.PAUSED_NEW if self._parked else PauseState.UNPAUSED

    def _place(self, away: Away) -> bool:
        request, wanted = away.request, len(away.host) + 1  # its next token may need a block more
        if wanted + len(self.running) > self.blocks.get_num_free_blocks() and self.running:
            return False  # those that are in would be preempted for it at once
        request.num_computed_tokens = 0
        placed = self.kv_cache_manager.allocate_slots(
            request, 0, num_external_computed_tokens=away.computed, delay_cache_blocks=True
        )
        return placed is not None

    def _copy_in(self, away: Away) -> None:
        away.tries += 1
        away.ticket = self._kv.copy(self._cache, self._device_blocks(away), away.host, Direction.TO_DEVICE, None)

    def _copy_failed(self, away: Away, error: PoolError) -> None:
        if away.tries < COPY_TRIES:
            self._copy_in(away)
            return
        log.error("engine.resume_failed", requests=1, error=str(error))
        del self._arriving[away.request.request_id]
        self.kv_cache_manager.free(away.request)
        self._recompute(away)

    def _go_on(self, away: Away) -> None:
        request = away.request
        self._slabs.free(away.host)
        self.kv_cache_manager.cache_blocks(request, away.computed)
        self.kv_cache_manager.take_new_block_ids()  # the next step would zero them
        request.num_computed_tokens = away.computed
        self.kv_holding_waiting.add_request(request)

    def _settle_arriving(self) -> None:
        """Wait for what is on its way in. What arrived is in; it may be taken out again."""
        while self._arriving:
            for away in self._arriving.values():
                assert away.ticket is not None
                _wait(away.ticket)
            self.land()

    # ── asked by the engine ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ticket(self) -> Ticket | None:
        """Of a copy under way."""
        if self._leaving is not None:
            return self._leaving.ticket
        return next((away.ticket for away in self._arriving.values()), None)

    @property
    def arriving(self) -> int:
        return len(self._arriving)

    @property
    def inside(self) -> int:
        """Requests that a step can take up."""
        return len(self.running) + len(self.kv_holding_waiting) + (0 if self._parked else len(self.waiting))

    def blocks_wanted(self) -> int:
        """With so many, the null block included, every request could make its next step."""
        blocks = 1 + self.blocks.used_blocks + len(self.running)
        blocks += sum(len(away.host) + 1 for away in self._parked.values())
        blocks += sum(-(-(request.num_tokens + 1) // self.block_size) for request in self.waiting)
        return min(blocks, len(self.blocks.blocks))

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
        while not self.all_out():
            assert self._leaving is not None
            _wait(self._leaving.ticket)

    # ── asked by vLLM ─────────────────────────────────────────────────────────────────────────────────────────────────

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Blocks of a request are not free for others, here or on the host, while a copy uses them."""
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        ids = set(self.requests if request_ids is None else request_ids)
        if self._leaving is not None and any(away.request.request_id in ids for away in self._leaving.requests):
            self.wait_all_out()
        for id in ids:
            if id in self._arriving and (ticket := self._arriving[id].ticket) is not None:
                _wait(ticket)
            away = self._arriving.pop(id, None) or self._parked.pop(id, None)
            if away is not None:
                self._slabs.free(away.host)
        return super().finish_requests(ids, finished_status)


def _wait(ticket: Ticket) -> None:
    """Until it is over, well or not: who polls it next hears how."""
    try:
        ticket.wait(COPY_WAIT_S)
    except PoolError as error:
        log.warning("engine.copy_failed", error=str(error))
