"""Live migration in virtual time: requests move between devices while their tokens go on.

A migration has stages: keys and values are copied while the source makes tokens, then the keys and values of the new
tokens. When few are left, the request pauses, the last keys and values are copied, and the target goes on. The target
must have room and the model; a target without the model fetches the model meanwhile. A request that waits for its first
step has no keys and values to copy. A move is given up, and changes nothing, if the request ends, if a device is gone,
or if the target is not ready in time. If the target is lost during the pause, the request is dispatched again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.core.device.events import MoveStep
from runtime.core.device.model import Phase
from runtime.core.device.request import ModelKey, Request, RequestId
from runtime.core.fleet.cluster import MigrateOrder
from runtime.core.fleet.rebalance import freeness, helps, pick
from runtime.sim.device import SimulatedDevice
from runtime.sim.simulation import Simulation

PAUSE_S = 0.02  # pause of a request in the last stage, besides the last copy (Llumnix, §6.2)
STAGES_MOST = 3
TAIL_TOKENS = 16  # at most so many tokens left: the request pauses for the last copy
READY_S = 0.1  # interval of checks whether the target has the model
READY_S_MOST = 10.0  # time after which a move to a target without the model is given up


@dataclass(slots=True, eq=False)
class SimulatedMove:
    request: Request
    source: SimulatedDevice
    target: SimulatedDevice
    began_at: float
    stages: int = 0
    copied: int = 0  # tokens whose keys and values are at the target


class Moves:
    """Migrations under way in the world."""

    def __init__(self, world: Simulation, devices: list[SimulatedDevice]) -> None:
        """`devices`: the world's list by number, which grows while the simulation runs."""
        self.world, self.devices = world, devices
        self.by_request: dict[RequestId, SimulatedMove] = {}
        self.paused: dict[RequestId, SimulatedMove] = {}  # moves whose request is at neither device
        self.pairs: dict[int, int] = {}  # source → target, by the orders of the present interval
        self.done = self.given_up = 0

    def order(self, orders: list[MigrateOrder]) -> None:
        """Obeys the orders of a new interval; earlier orders no longer hold."""
        self.pairs = {order.source: order.target for order in orders if order.model is None}
        for order in orders:
            if order.model is None:
                self._give(order.source)
            else:
                self._give_of(self.devices[order.source], self.devices[order.target], order.model, order.count)

    def _give(self, number: int) -> None:
        """Begins the move of the source's next request, if no request is on the way and the pair still helps."""
        other = self.pairs.get(number)
        if other is None:
            return
        source, target = self.devices[number], self.devices[other]
        if source.gone or target.gone or self._gives(source):
            return
        drains, low = self.world.cluster.devices[number].drains, self.world.cluster.rules.low_steps
        load, there = source.load(), target.load()
        if not (load.requests and (drains or freeness(load) < low)):
            return
        usage = pick(source.usages(), there.kv_bytes - there.used_bytes)
        if usage is not None and helps(load, there, drains, low, usage.kv_bytes):
            self.begin(source.request(usage.model, usage.request), source, target)

    def _gives(self, source: SimulatedDevice) -> bool:
        return any(move.source is source for move in self.by_request.values())

    def _give_of(self, source: SimulatedDevice, target: SimulatedDevice, key: ModelKey, count: int | None) -> None:
        """Begins the moves of `count` requests of the model, or of all; the order is a node's (`Gateways.movable`)."""
        queues = source.instance.models[key].queues
        requests = [*queues.waiting.values(), *queues.running.values()]
        if count is not None:
            requests.sort(key=_leaves_first)
        for request in [request for request in requests if request.id not in self.by_request][:count]:
            self.begin(request, source, target)
        self._settle(source)

    def begin(self, request: Request, source: SimulatedDevice, target: SimulatedDevice) -> None:
        """Begin the move of a request of the source that is not on its way."""
        move = self.by_request[request.id] = SimulatedMove(request, source, target, self.world.now)
        self.world.moving.add(request.id)
        if request.computed:
            target.wake(request.model)
            self._copy(move)
        else:
            self._leave(move)

    def _copy(self, move: SimulatedMove) -> None:
        tokens = move.request.context - move.copied
        move.copied += tokens
        move.stages += 1
        self.world.at(self.world.now + self._copy_s(move, tokens), self._copied, move)

    def _copy_s(self, move: SimulatedMove, tokens: int) -> float:
        """Seconds to copy `tokens` tokens of the layers that keep every token."""
        costs = move.source.costs[move.request.model]
        return tokens * costs.kv.token_bytes * costs.copy_s_per_byte

    def _last_s(self, move: SimulatedMove) -> float:
        """Seconds to copy windows and states, which move at the end alone."""
        costs = move.source.costs[move.request.model]
        return costs.kv.last(move.request.context) * costs.copy_s_per_byte

    def _copied(self, move: SimulatedMove) -> None:
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

    def _possible(self, move: SimulatedMove) -> bool:
        request, source, target = move.request, move.source, move.target
        if source.gone or target.gone or not source.has(request):
            return False
        there = target.load()
        needed = self.world.costs[request.model].kv.bytes(request.context)
        return needed <= there.kv_bytes - there.used_bytes

    def _leave(self, move: SimulatedMove) -> None:
        """Takes the request off the source, between two steps; from here on the request belongs to the target."""
        world, source, request = self.world, move.source, move.request
        if source.gone or move.target.gone or not source.has(request):
            self._end(move, given_up=True)
            return
        self.paused[request.id] = move
        source.happen(MoveStep("release", request.model, request.id))
        world.cluster.ended(request, source.number)
        pause_s = 0.0
        if request.computed:
            pause_s = PAUSE_S + self._copy_s(move, request.context - move.copied) + self._last_s(move)
        world.at(world.now + pause_s, self._land, move)

    def _land(self, move: SimulatedMove) -> None:
        world, target, request = self.world, move.target, move.request
        del self.paused[request.id]
        if target.gone:
            world.go_on(request)
        else:
            moved = replace(request, handed=request.computed)
            moved.progress = request.progress
            world.moved(moved, target.number)
            target.arrive(moved)
        self._end(move, given_up=target.gone)

    def _end(self, move: SimulatedMove, given_up: bool) -> None:
        del self.by_request[move.request.id]
        self.world.moving.remove(move.request.id)
        self.done += not given_up
        self.given_up += given_up
        self._settle(move.source)
        if not given_up:
            self._give(move.source.number)

    def _settle(self, source: SimulatedDevice) -> None:
        if not self._gives(source):
            self.world.cluster.settled(source.number)


def _leaves_first(request: Request) -> tuple[int, float, bool, int]:
    return request.objective.priority, request.objective.patience_s, request.sent == 0, request.context
