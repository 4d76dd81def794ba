"""Dispatch of Aegaeon: some devices compute prompts, the other devices decode."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.core.device.request import Request, RequestId
from runtime.core.fleet.cluster import Cluster
from runtime.core.fleet.dispatch import SeenFleet
from runtime.core.turns.groups import Prefill, Queue, choose
from runtime.sim.device import SimulatedDevice
from runtime.sim.dispatch.base import Assigned, Dispatch
from runtime.sim.dispatch.gateways import choose_serving, gateway_of, part_of
from runtime.sim.dispatch.reports import Sightings
from runtime.sim.dispatch.sight import AS_GATEWAYS_SEE, Sight
from runtime.sim.simulation import Simulation
from store.contract.wire import Role


class SeenQueue:
    """A queue of prompts as a gateway sees the queue: as last reported, and the gateway's prompts since."""

    def __init__(self, number: int) -> None:
        self.queue, self.taken_at = Queue(number), -1.0
        self.since: list[tuple[float, Prefill]] = []  # prompts of the gateway, with the times of their choice

    def hear(self, queue: Queue, at: float) -> None:
        """Take the queue as reported at the time `at`, in seconds."""
        if at <= self.taken_at:
            return
        self.queue, self.taken_at = queue.copy(), at
        self.since = [sent for sent in self.since if sent[0] > at]
        for _, prefill in self.since:
            self.queue.add(prefill)

    def add(self, prefill: Prefill, now: float) -> None:
        self.queue.add(prefill)
        self.since.append((now, prefill))


class Roles(Dispatch):
    """Devices for prefill and devices for decode (Aegaeon, §4), chosen by reports as old as the reports of gateways.

    The first `prefill` devices compute prompts in groups. A gateway has a prompt join a group of the prompt's model, or
    sends the prompt to the device where the prompt is done first, by the queues as last reported and the gateway's own
    prompts since. When the first token is made, the device of the prompt chooses the device that decodes, by the rule
    of production. A device of prompts knows when requests that the device handed on end: in production no runtime does.
    """

    def __init__(self, prefill: int, sight: Sight = AS_GATEWAYS_SEE) -> None:
        super().__init__()
        self.sight = sight
        self._queues = [Queue(number) for number in range(prefill)]
        self._seen = [[SeenQueue(number) for number in range(prefill)] for _ in range(sight.gateways)]
        self._waiting: dict[RequestId, tuple[Request, Prefill]] = {}  # requests without their first token
        self._handed: dict[RequestId, int] = {}  # device that computed the prompt of each request that decodes

    def attach(self, world: Simulation, devices: list[SimulatedDevice]) -> None:
        observers = self.sight.gateways + len(self._queues)  # first the gateways, then the devices of prompts
        for device in world.cluster.devices:
            device.role = Role.PREFILL if device.number < len(self._queues) else Role.DECODE
        self._sightings = Sightings(world, devices, self.sight, observers, self._queues)

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        costs = cluster.costs[request.model]
        prefill = Prefill(request.id, request.model, costs.prefill(request.prompt_tokens), costs.load_s)
        number = self._queue(gateway_of(request, self.sight.gateways), prefill, now)
        self._queues[number].add(prefill)
        self._waiting[request.id] = request, prefill
        return [Assigned(part_of(request, 1), number)]

    def _queue(self, gateway: int, prefill: Prefill, now: float) -> int:
        """Return the number of the queue that the gateway chooses for the prompt."""
        if self.sight.exact:
            return choose(self._queues, prefill, now).id
        heard, seen = self._sightings.look(gateway).heard, self._seen[gateway]
        for own in seen:
            sent = heard[own.queue.id]
            if sent is not None and sent.queue is not None:
                own.hear(sent.queue, sent.at)
        number = choose([own.queue for own in seen], prefill, now).id
        seen[number].add(prefill, now)
        return number

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        request, prefill = self._waiting.pop(assigned.request.id, (None, None))
        if request is None or prefill is None:  # the decode part has ended, and with it the request
            sender = self._handed.pop(assigned.request.id)
            self._fleet_of(sender).gave_back(str(assigned.device), assigned.request.model)
            return ()
        self._queues[assigned.device].done(prefill, now)
        if request.sent >= request.max_tokens or not request.sent:
            return ()
        return [Assigned(part_of(request, request.max_tokens), self._decode(request, assigned.device, cluster, now))]

    def _decode(self, request: Request, sender: int, cluster: Cluster, now: float) -> int:
        fleet = self._sightings.look(self.sight.gateways + sender).fleet
        number, refusals = choose_serving(fleet, request, cluster, now, decodes=True)
        self.refusals += refusals
        self._handed[request.id] = sender
        fleet.took(str(number), request.model, request.objective.tbt_s)
        return number

    def _fleet_of(self, sender: int) -> SeenFleet:
        return self._sightings.fleet(self.sight.gateways + sender)
