"""Live migration in virtual time: requests go from one device to another while their tokens go on.

In stages: keys and values are copied while the source makes tokens, then those of these tokens, and when few are left
the request pauses, the last are copied, and the target goes on. The target must have room and the model; where it lacks
the model it fetches it meanwhile. What waits for its first step has nothing to copy. A move is given up, and leaves all
as it was, when the request ends, when either device is gone, or when the target is not ready in time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runtime.cluster import Migrate
from runtime.events import Departed
from runtime.model import Phase
from runtime.policy.migration import freeness, helps, pick
from runtime.request import ModelKey, Request, RequestId

if TYPE_CHECKING:
    from runtime.sim.device import Device
    from runtime.sim.world import World

PAUSE_S = 0.02  # of a request in the last stage, besides its last copy (Llumnix, §6.2)
STAGES_MOST = 3
TAIL_TOKENS = 16  # so few are copied in the pause
READY_S = 0.1  # between two looks whether the target has the model
READY_S_MOST = 10.0  # then it is given up


@dataclass(slots=True, eq=False)
class Move:
    request: Request
    source: Device
    target: Device
    began_at: float
    stages: int = 0
    copied: int = 0  # tokens whose keys and values are at the target


class Moves:
    """All that are under way."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.by_request: dict[RequestId, Move] = {}
        self.paused: dict[RequestId, Move] = {}  # at neither device
        self.pairs: dict[int, int] = {}  # by source, as long as the orders of this interval hold
        self.done = self.given_up = 0

    def order(self, orders: list[Migrate]) -> None:
        """Those of this interval; those of the one before no longer hold."""
        world = self.world
        self.pairs = {order.source: order.target for order in orders if order.model is None}
        for order in orders:
            if order.model is None:
                self._give(order.source)
            else:
                self._give_all(world.devices[order.source], world.devices[order.target], order.model)

    def _give(self, number: int) -> None:
        """The next request of this source, if none is on its way and the pair still helps."""
        other = self.pairs.get(number)
        if other is None:
            return
        source, target = self.world.devices[number], self.world.devices[other]
        if source.gone or target.gone or self._gives(source):
            return
        drains, low = self.world.cluster.devices[number].drains, self.world.cluster.rules.low_steps
        load, there = source.load(), target.load()
        if not (load.requests and (drains or freeness(load) < low)):
            return
        usage = pick(source.usages(), there.kv_bytes - there.used_bytes)
        if usage is not None and helps(load, there, drains, low, usage.kv_bytes):
            self._begin(source.request(usage.model, usage.request), source, target)

    def _gives(self, source: Device) -> bool:
        return any(move.source is source for move in self.by_request.values())

    def _give_all(self, source: Device, target: Device, key: ModelKey) -> None:
        model = source.instance.models[key]
        for request in [*model.waiting.values(), *model.running.values()]:
            if request.id not in self.by_request:
                self._begin(request, source, target)
        self._settle(source)

    def _begin(self, request: Request, source: Device, target: Device) -> None:
        move = self.by_request[request.id] = Move(request, source, target, self.world.now)
        if request.computed:
            target.wake(request.model)
            self._copy(move)
        else:
            self._leave(move)

    def _copy(self, move: Move) -> None:
        tokens = move.request.context - move.copied
        move.copied += tokens
        move.stages += 1
        self.world.at(self.world.now + self._copy_s(move, tokens), self._copied, move)

    def _copy_s(self, move: Move, tokens: int) -> float:
        costs = self.world.costs[move.request.model]
        return tokens * costs.kv_bytes_per_token * costs.copy_s_per_byte

    def _copied(self, move: Move) -> None:
        if not self._possible(move):
            self._end(move, given_up=True)
        elif move.request.context - move.copied > TAIL_TOKENS and move.stages < STAGES_MOST:
            self._copy(move)
        elif move.target.instance.models[move.request.model].phase is not Phase.RESIDENT:
            if self.world.now - move.began_at > READY_S_MOST:
                self._end(move, given_up=True)
            else:
                self.world.at(self.world.now + READY_S, self._copied, move)
        elif self.world.drops.get(move.source.number):
            self.world.drops[move.source.number] -= 1
            self._end(move, given_up=True)
        else:
            move.source.between_steps(move.request.model, self._leave, move)

    def _possible(self, move: Move) -> bool:
        request, source, target = move.request, move.source, move.target
        if source.gone or target.gone or not source.has(request):
            return False
        there = target.load()
        needed = request.context * self.world.costs[request.model].kv_bytes_per_token
        return needed <= there.kv_bytes - there.used_bytes

    def _leave(self, move: Move) -> None:
        """Between two steps of the source: from here on the request is the target's."""
        world, source, request = self.world, move.source, move.request
        if source.gone or move.target.gone or not source.has(request):
            self._end(move, given_up=True)
            return
        self.paused[request.id] = move
        source.happen(Departed([request.id]))
        world.cluster.ended(request, source.number)
        pause_s = PAUSE_S + self._copy_s(move, request.context - move.copied) if request.computed else 0.0
        world.at(world.now + pause_s, self._land, move)

    def _land(self, move: Move) -> None:
        world, target, request = self.world, move.target, move.request
        del self.paused[request.id]
        if target.gone:
            world.go_on(request)
        else:
            moved = replace(request, handed=request.computed)
            moved.progress = request.progress
            world.cluster.assigned(moved, target.number)
            target.arrive(moved)
        self._end(move, given_up=target.gone)

    def _end(self, move: Move, given_up: bool) -> None:
        del self.by_request[move.request.id]
        self.done += not given_up
        self.given_up += given_up
        self._settle(move.source)
        if not given_up:
            self._give(move.source.number)

    def _settle(self, source: Device) -> None:
        if not self._gives(source):
            self.world.cluster.settled(source.number)
