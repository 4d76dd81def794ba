"""The scheduler of requests that move, while running, between engines of one model over the host cache.

The source copies a running request's full blocks to the host: full blocks never change. Then the request leaves the
batch between two steps, and only the last blocks are left to copy. The target allocates blocks for an expected request,
copies the source's blocks from the host, and continues the request like a request parked at the target.

Layers that forget (`runtime/engine/groups.py`) have their blocks copied at the end alone: earlier, the blocks would be
others. A target learns with the last blocks where the request stopped. Until then the target of a model with such
layers only keeps blocks free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from runtime.core.engine import EngineError
from runtime.engine.blocks import Transfer
from runtime.engine.scheduler import Away, PooledScheduler
from runtime.memory.native import Direction, PoolError, TransferTicket


@dataclass(slots=True)
class MovingRequest:
    """A request at the source or at the target of a migration.

    At the source, the blocks on the host belong to the engine until the request has moved, or stays. At the target the
    blocks on the host are the source's."""

    request: Request
    host: list[int] = field(default_factory=list)  # host blocks of the first blocks, copied, being copied or named
    reserved: list[KVCacheBlock] = field(default_factory=list)  # target: blocks kept free for the request
    transfers: list[Transfer] = field(default_factory=list)
    here: bool = True  # the request has blocks on the device
    left: Away | None = None  # source: set when out of the batch; names the host blocks of the whole request
    lost: bool = False  # source: the request has no blocks on the device, and the host blocks are incomplete


class MovingScheduler(PooledScheduler):
    """The scheduler of every engine. Requests that left, and expected requests, are in no queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outgoing: dict[str, MovingRequest] = {}
        self._incoming: dict[str, MovingRequest] = {}

    @property
    def next_blocks(self) -> int:
        """The most blocks that the batch may need for the next token of every request."""
        return len(self.running) * len(self.groups.groups)

    @property
    def unfinished(self) -> int:
        """Number of requests that will take part in steps: requests that neither left nor are expected."""
        left = sum(going.left is not None for going in self._outgoing.values())
        return len(self.requests) - len(self._incoming) - left

    # ── source ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def copy_out(self, id: str, first: int, after: TransferTicket | None) -> list[int] | None:
        """Begin to copy to the host the request's full blocks that are not copied yet.

        `after`: a ticket that is over when the device has written the blocks. Returns the host blocks from the
        request's block `first` on; None if the request does not run, has made no token, or the host has no
        room."""
        request = self.requests.get(id)
        if request is None or not self._runs(request):
            return None
        going = self._outgoing.get(id) or MovingRequest(request)
        assert first <= len(going.host), f"block {first} of {id} is asked for, {len(going.host)} were before"
        computed = request.num_computed_tokens
        if not self._send(going, self.groups.live(computed)[: self.groups.settled(computed)], after):
            return None
        self._outgoing[id] = going
        return going.host[first:]

    def commit_out(self, id: str, after: Callable[[], TransferTicket | None]) -> Away | None:
        """Take the request out of the batch, and copy the rest of the blocks to the host.

        Returns None at the first call and until every block is copied, then the request with the blocks on the host.
        `after` gives a ticket as in `copy_out`. Raises EngineError if the request can't leave, or if a copy failed."""
        going = self._outgoing.get(id)
        if going is None or going.left is None:
            self._leave(id, after())
            return None
        return going.left if self._copied_out(going) else None

    def _leave(self, id: str, after: TransferTicket | None) -> None:
        """Take the request out of the batch, and begin to copy the rest of the blocks to the host.

        Raises EngineError if the request can't leave; then the request stays as before."""
        if self._leaving is not None and any(away.request.request_id == id for away in self._leaving.requests):
            self.wait_all_out()
        if id in self._arriving:
            self._end_coming(self._arriving[id])
            self.land()
        request = self.requests.get(id)
        if request is None or not (self._runs(request) or (id in self._parked and request.num_output_tokens)):
            raise EngineError(f"request {id} can't leave: it does not run here, or has made no token yet")
        going = self._outgoing.get(id) or MovingRequest(request)
        if id in self._parked:
            going.left, going.here = self._parked.pop(id), False
        else:
            assert not request.num_in_flight_tokens, f"{id} has tokens in flight"
            computed = request.num_computed_tokens
            places = self.groups.live(computed)
            if not self._send(going, places, after):
                raise EngineError(f"request {id} can't leave: the host cache has no room for its {len(places)} blocks")
            self.running = [other for other in self.running if other is not request]
            self.kv_holding_waiting.remove_requests([request])
            self._strike_off(request)
            going.left = Away(request, computed, going.host[: len(places)])
        self._outgoing[id] = going

    def _copied_out(self, going: MovingRequest) -> bool:
        id = going.request.request_id
        if going.lost:
            raise EngineError(f"the blocks of request {id} could not be copied out before its model was parked")
        try:
            return all([transfer.over() for transfer in going.transfers])
        except PoolError as error:
            raise EngineError(f"the blocks of request {id} can't be copied out: {error}") from error

    def abort_move(self, id: str) -> None:
        """Keep a request that was about to move: the request continues where the request stopped.

        If the model was parked meanwhile, the request is parked, or computed again if the host blocks are incomplete.
        Does nothing if the request is not about to move."""
        if (going := self._outgoing.pop(id, None)) is None:
            return
        self._end(going.transfers)
        left = going.left
        if left is None or going.here:
            self._slabs.free(_on_host(going))
            if left is not None:
                self.kv_holding_waiting.add_request(left.request)
            return
        self._slabs.free(sorted(set(_on_host(going)) - set(left.host)))
        if going.lost:
            self._recompute(left)
        else:
            self._parked[id] = left

    def _runs(self, request: Request) -> bool:
        """Whether the request is in the batch and has made a token: before a token, a fresh start is cheaper."""
        inside = request.status == RequestStatus.RUNNING or any(other is request for other in self.kv_holding_waiting)
        return inside and request.num_output_tokens > 0

    def _send(self, going: MovingRequest, places: list[tuple[int, int]], after: TransferTicket | None) -> bool:
        """Begin to copy the blocks at `places` to the host, as far as not staged; False if the host has no room."""
        have = len(going.host)
        if len(places) <= have:
            return True
        if (host := self._take(len(places) - have)) is None:
            return False
        device = self._at(going.request, places[have:])
        going.transfers.append(self._transfer(device, host, Direction.TO_HOST, after))
        going.host += host
        return True

    # ── target ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare_move(self, request: Request, tokens: int, leave: int) -> bool:
        """Allocate blocks for `tokens` tokens of an expected request.

        Returns False, and allocates none, if fewer than `leave` free blocks would be left."""
        coming, blocks = MovingRequest(request), len(self.groups.live(tokens))
        if not self._room(blocks, leave):
            return False
        if not self.groups.plain:
            coming.reserved = self.blocks.get_new_blocks(blocks)
        elif not self._allocate(request, tokens):
            return False
        self.take_up(request)
        self.requests[request.request_id] = request
        self._incoming[request.request_id] = coming
        return True

    def copy_in(self, id: str, first: int, host: list[int], leave: int) -> bool:
        """Begin to copy the host blocks `host` into the request's blocks from block `first` on.

        Returns False if the request is not expected, or fewer than `leave` free blocks would be left. Raises PoolError
        if the host cache has no such blocks."""
        coming = self._incoming.get(id)
        if coming is None or not coming.here:
            return False
        assert first == len(coming.host), f"{id} has {len(coming.host)} blocks and is offered those from {first} on"
        blocks = first + len(host)
        if not self.groups.plain:
            return self._name(coming, host, leave)
        if not self._enlarge(coming.request, blocks, leave):
            return False
        (device,) = self.kv_cache_manager.get_block_ids(id)
        if host:
            coming.transfers.append(self._transfer(device[first:blocks], host, Direction.TO_DEVICE))
        coming.host += host
        return True

    def _name(self, coming: MovingRequest, host: list[int], leave: int) -> bool:
        """Note host blocks to be copied at the commit, and keep as many blocks free; False if there is no room."""
        missing = len(coming.host) + len(host) - len(coming.reserved)
        if missing > 0 and not self._room(missing, leave):
            return False
        coming.reserved += self.blocks.get_new_blocks(max(0, missing))
        coming.host += host
        return True

    def copied(self, id: str) -> bool:
        """Whether every copy to or from the host is over for the request. Raises EngineError if a copy failed for
        good."""
        if (going := self._outgoing.get(id)) is not None:
            return self._copied_out(going)
        coming, arriving = self._incoming.get(id), self._arriving.get(id)
        try:
            if coming is not None:
                return all([transfer.over() for transfer in coming.transfers])
            return arriving is None or all([transfer.over() for transfer in arriving.coming])
        except PoolError as error:
            if coming is None:  # a request taken over: `land` has the request computed again
                self.land()
                return True
            raise EngineError(f"the blocks of request {id} can't be copied in: {error}") from error

    def expected(self, id: str) -> Request:
        """The expected request `id`. Raises EngineError if the request is not expected, or no longer."""
        coming = self._incoming.get(id)
        if coming is None or not coming.here:
            raise EngineError(f"request {id} is not expected: it was never announced, or its model was parked since")
        return coming.request

    def commit_in(self, id: str, computed: int) -> None:
        """Turn an expected request, of which `computed` tokens are computed, into an arriving request.

        Raises EngineError if too few blocks were received, or if the blocks can't be copied."""
        coming, places = self._incoming[id], self.groups.live(computed)
        if len(places) > len(coming.host) or (len(places) < len(coming.host) and not self.groups.plain):
            raise EngineError(f"request {id} needs {len(places)} blocks and {len(coming.host)} were handed over")
        if not self.groups.plain:
            self._copy_named(coming, computed, places)
        del self._incoming[id]
        self._arriving[id] = Away(coming.request, computed, [], coming.transfers)

    def _copy_named(self, coming: MovingRequest, computed: int, places: list[tuple[int, int]]) -> None:
        """Give the request its blocks, now that the places are known, and begin to copy."""
        self._give_up(coming)
        if not self._allocate(coming.request, computed):
            raise EngineError(f"request {coming.request.request_id} finds no room for its {len(places)} blocks")
        try:
            copy = self._transfer(self._at(coming.request, places), coming.host, Direction.TO_DEVICE)
        except PoolError as error:
            raise EngineError(f"request {coming.request.request_id} can't be received: {error}") from error
        coming.transfers.append(copy)

    def _give_up(self, coming: MovingRequest) -> None:
        """Give the blocks kept free for an expected request back."""
        self.blocks.free_blocks(coming.reserved)
        coming.reserved = []

    def forget(self, id: str) -> None:
        """End an expected request that can't be taken over; does nothing if the request is not expected.

        vLLM may have taken the request's output for an end already, so the status is set back first."""
        if (coming := self._incoming.get(id)) is not None:
            coming.request.status = RequestStatus.PREEMPTED
            self.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    def _room(self, blocks: int, leave: int) -> bool:
        return blocks + leave <= self.blocks.get_num_free_blocks()

    def _enlarge(self, request: Request, blocks: int, leave: int) -> bool:
        (device,) = self.kv_cache_manager.get_block_ids(request.request_id)
        if blocks <= len(device):
            return True
        if not self._room(blocks - len(device), leave):
            return False
        request.num_computed_tokens = len(device) * self.block_size
        more = self.kv_cache_manager.allocate_slots(
            request, (blocks - len(device)) * self.block_size, delay_cache_blocks=True
        )
        request.num_computed_tokens = 0
        self.kv_cache_manager.take_new_block_ids()
        return more is not None

    # ── parking and ends ──────────────────────────────────────────────────────────────────────────────────────────────

    def take_out(self, after: TransferTicket | None) -> None:
        """Take every request out, as `PooledScheduler.take_out` does, when the model is parked.

        A request that left has the blocks on the host, and gives up the device blocks. An expected request gives up
        the device blocks for good."""
        for going in self._outgoing.values():
            if going.left is not None and going.here:
                going.lost = not self._end(going.transfers)
                self.kv_cache_manager.free(going.request)
                going.here = False
        for coming in self._incoming.values():
            if coming.here:
                self._end(coming.transfers)
                self.kv_cache_manager.free(coming.request)
                self._give_up(coming)
                coming.here = False
        super().take_out(after)

    def _detach(self, request: Request) -> Away | None:
        """Wait for copies of the request's migration first: the blocks may soon be another request's."""
        if (going := self._outgoing.get(request.request_id)) is not None:
            self._end(going.transfers)
        return super()._detach(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Free what a migration holds for the request as well, however the request ended."""
        if (going := self._outgoing.pop(request.request_id, None)) is not None:
            self._end(going.transfers)
            self._slabs.free(_on_host(going))
        if (coming := self._incoming.pop(request.request_id, None)) is not None:
            self._end(coming.transfers)
            self._give_up(coming)
        return super()._free_request(request, *args, **kwargs)

    def _end(self, transfers: Sequence[Transfer]) -> bool:
        """Wait until the transfers are over. Returns whether every transfer succeeded."""
        return all([transfer.went_well() for transfer in transfers])


def _on_host(going: MovingRequest) -> list[int]:
    return sorted({*going.host, *(going.left.host if going.left is not None else ())})
