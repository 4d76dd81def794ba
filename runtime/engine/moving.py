"""The scheduler of requests that move, while they run, between engines of one model over one host cache.

The source copies a request's blocks out while it goes on, those that are full, for they never change; then the request
leaves the batch between two steps and only its last blocks travel. The target takes blocks for a request that it
expects, copies in what the source has copied out, and goes on with it as with one that was parked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request, RequestStatus

from runtime.engine.base import EngineError
from runtime.engine.scheduler import Away, PooledScheduler
from runtime.engine.transfer import Transfer
from runtime.memory.native import Direction, PoolError, Ticket


@dataclass(slots=True)
class Outgoing:
    """A request that may go on elsewhere. What lies on the host for the target stays there until it has moved or
    stays."""

    request: Request
    staged: list[int] = field(default_factory=list)  # on the host, or on their way: its first blocks
    transfers: list[Transfer] = field(default_factory=list)
    left: Away | None = None  # out of the batch, and where on the host all of its blocks are
    here: bool = True  # it has its blocks on the device
    lost: bool = False  # it has none there, and what is on the host is not all


@dataclass(slots=True)
class Incoming:
    """A request that is expected."""

    request: Request
    received: int = 0  # blocks, that are there or on their way
    transfers: list[Transfer] = field(default_factory=list)
    here: bool = True  # it has its blocks on the device


class MovingScheduler(PooledScheduler):
    """The one that engines are built with. Requests that left, and those that are expected, are in no queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, Incoming] = {}

    @property
    def running_now(self) -> int:
        """Requests in the batch: each may need a block for its next token."""
        return len(self.running)

    @property
    def unfinished(self) -> int:
        """Requests that take part in steps, sooner or later: neither left nor expected."""
        left = sum(going.left is not None for going in self._outgoing.values())
        return len(self.requests) - len(self._incoming) - left

    # ── source ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def stage(self, id: str, first: int, after: Ticket | None) -> list[int] | None:
        """Begin to copy out what is full and not copied yet; where all from block `first` on are. None: not now."""
        request = self.requests.get(id)
        if request is None or not self._runs(request):
            return None
        going = self._outgoing.get(id) or Outgoing(request)
        assert first <= len(going.staged), f"block {first} of {id} is asked for, {len(going.staged)} were before"
        if not self._send(going, request.num_computed_tokens // self.block_size, after):
            return None
        self._outgoing[id] = going
        return going.staged[first:]

    def leave(self, id: str, after: Ticket | None) -> None:
        """Out of the batch, with what is not copied yet on its way. Raises EngineError; all is as before then."""
        if self._leaving is not None and any(away.request.request_id == id for away in self._leaving.requests):
            self.wait_all_out()
        if id in self._arriving:
            self._end_coming(self._arriving[id])
            self.land()
        request = self.requests.get(id)
        if request is None or not (self._runs(request) or (id in self._parked and request.num_output_tokens)):
            raise EngineError(f"request {id} can't leave: it does not run here, or has made no token yet")
        going = self._outgoing.get(id) or Outgoing(request)
        if id in self._parked:
            going.left, going.here = self._parked.pop(id), False
        else:
            assert not request.num_in_flight_tokens, f"{id} has tokens in flight"
            computed = request.num_computed_tokens
            blocks = self._blocks_of(computed)
            if not self._send(going, blocks, after):
                raise EngineError(f"request {id} can't leave: the host cache has no room for its {blocks} blocks")
            self.running = [other for other in self.running if other is not request]
            self.kv_holding_waiting.remove_requests([request])
            self._strike_off(request)
            going.left = Away(request, computed, going.staged[:blocks])
        self._outgoing[id] = going

    def staged(self, id: str) -> bool:
        """Whether the copies out are over. Raises EngineError when one failed for good."""
        going = self._outgoing.get(id)
        if going is None:
            return True
        if going.lost:
            raise EngineError(f"the blocks of request {id} could not be copied out before its model was parked")
        try:
            return all([transfer.over() for transfer in going.transfers])
        except PoolError as error:
            raise EngineError(f"the blocks of request {id} can't be copied out: {error}") from error

    def departure(self, id: str) -> Away:
        """What its blocks on the host are, all there."""
        going = self._outgoing.get(id)
        if going is None or going.left is None:
            raise EngineError(f"request {id} has not left: it ended, or was never told to leave")
        if not self.staged(id):
            raise EngineError(f"request {id} has blocks that are not on the host yet: ask `staged` first")
        return going.left

    def stay(self, id: str) -> None:
        """It does not move: on from where it stopped, or parked if the model was parked meanwhile."""
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
        """It is in, and has said something: before that it is cheaper to ask elsewhere anew."""
        inside = request.status == RequestStatus.RUNNING or any(other is request for other in self.kv_holding_waiting)
        return inside and request.num_output_tokens > 0

    def _send(self, going: Outgoing, blocks: int, after: Ticket | None) -> bool:
        """Begin to copy out the first `blocks` of it as far as they are not; False if the host has no room."""
        have = len(going.staged)
        if blocks <= have:
            return True
        if (host := self._take(blocks - have)) is None:
            return False
        (device,) = self.kv_cache_manager.get_block_ids(going.request.request_id)
        going.transfers.append(self._transfer(device[have:blocks], host, Direction.TO_HOST, after))
        going.staged += host
        return True

    # ── target ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, request: Request, tokens: int, leave: int) -> bool:
        """Blocks for so many tokens, if there are `leave` more."""
        blocks = self._blocks_of(tokens)
        if not self._room(blocks, leave) or not self.kv_cache_manager.allocate_slots(
            request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True
        ):
            return False
        self.kv_cache_manager.take_new_block_ids()  # the next step would zero them
        self.take_up(request)
        self.requests[request.request_id] = request
        self._incoming[request.request_id] = Incoming(request)
        return True

    def receive(self, id: str, first: int, host: list[int], leave: int) -> bool:
        """Begin to copy these in, from its block `first` on. Raises PoolError where there are no such blocks."""
        coming = self._incoming.get(id)
        if coming is None or not coming.here:
            return False
        assert first == coming.received, f"{id} has {coming.received} blocks and is offered those from {first} on"
        blocks = first + len(host)
        if not self._enlarge(coming.request, blocks, leave):
            return False
        (device,) = self.kv_cache_manager.get_block_ids(id)
        if host:
            coming.transfers.append(self._transfer(device[first:blocks], host, Direction.TO_DEVICE))
        coming.received = blocks
        return True

    def received(self, id: str) -> bool:
        """Whether nothing is read from the host for it any more. Raises EngineError when a copy failed for good."""
        coming, arriving = self._incoming.get(id), self._arriving.get(id)
        try:
            if coming is not None:
                return all([transfer.over() for transfer in coming.transfers])
            return arriving is None or all([transfer.over() for transfer in arriving.coming])
        except PoolError as error:
            if coming is None:  # it will be computed again
                self.land()
                return True
            raise EngineError(f"the blocks of request {id} can't be copied in: {error}") from error

    def expected(self, id: str) -> Request:
        """Raises EngineError when it is not, or no longer."""
        coming = self._incoming.get(id)
        if coming is None or not coming.here:
            raise EngineError(f"request {id} is not expected: it was never announced, or its model was parked since")
        return coming.request

    def adopt(self, id: str, computed: int) -> None:
        """From here on it is a request that is on its way in."""
        coming = self._incoming[id]
        if (blocks := self._blocks_of(computed)) > coming.received:
            raise EngineError(f"request {id} needs {blocks} blocks and {coming.received} were handed over")
        del self._incoming[id]
        self._arriving[id] = Away(coming.request, computed, [], coming.transfers)

    def forget(self, id: str) -> None:
        """It can't be adopted. That may have been found when vLLM took its output for an end."""
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

    def take_out(self, after: Ticket | None) -> None:
        """Who has left has its blocks on the host, and gives up those here; so does who is expected, for good."""
        for going in self._outgoing.values():
            if going.left is not None and going.here:
                going.lost = not self._end(going.transfers)
                self.kv_cache_manager.free(going.request)
                going.here = False
        for coming in self._incoming.values():
            if coming.here:
                self._end(coming.transfers)
                self.kv_cache_manager.free(coming.request)
                coming.here = False
        super().take_out(after)

    def _detach(self, request: Request) -> Away | None:
        """Its blocks may be another's soon: what is being copied of them for its move is waited for."""
        if (going := self._outgoing.get(request.request_id)) is not None:
            self._end(going.transfers)
        return super()._detach(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """However it ended: nothing of its move stays behind."""
        if (going := self._outgoing.pop(request.request_id, None)) is not None:
            self._end(going.transfers)
            self._slabs.free(_on_host(going))
        if (coming := self._incoming.pop(request.request_id, None)) is not None:
            self._end(coming.transfers)
        return super()._free_request(request, *args, **kwargs)

    def _end(self, transfers: Sequence[Transfer]) -> bool:
        """Wait until they are over; whether all went well."""
        return all([transfer.went_well() for transfer in transfers])


def _on_host(going: Outgoing) -> list[int]:
    return sorted({*going.staged, *(going.left.host if going.left is not None else ())})
