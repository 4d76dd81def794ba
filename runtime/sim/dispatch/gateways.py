"""Dispatch as gateways choose in production, with equally old knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.core.device.request import ModelKey, Request, RequestId
from runtime.core.fleet.cluster import Cluster
from runtime.core.fleet.dispatch import SeenFleet, SeenRuntime
from runtime.sim.device import SimulatedDevice
from runtime.sim.dispatch.base import Assigned, Dispatch
from runtime.sim.dispatch.reports import Sightings
from runtime.sim.dispatch.sight import AS_GATEWAYS_SEE, Sight
from runtime.sim.simulation import Simulation
from store.contract.wire import Role


class GatewayDispatch(Dispatch):
    """Gateways that choose devices by the rule of production, each gateway by the reports that reached the gateway.

    The stream number of a request names the gateway. A gateway counts its own open requests, and hears of requests of
    the remaining gateways by reports only.

    `roles`: of the first devices, at the beginning; further devices have both roles. A device of prompts hands a
    request on as soon as the request has its first token. The request's gateway chooses the next device, as in
    production the device would: both know the fleet by the same reports."""

    def __init__(self, sight: Sight = AS_GATEWAYS_SEE, roles: Sequence[Role] = ()) -> None:
        super().__init__()
        self.sight, self._roles = sight, roles  # at the beginning
        self._prompts: dict[RequestId, Request] = {}  # whole requests whose prompt is at a device of prompts
        self._count = 1 if sight.exact else sight.gateways
        self._placed: dict[RequestId, int] = {}  # device of each open request
        self._there: dict[ModelKey, dict[int, int]] = {}  # open requests by model and device

    def attach(self, world: Simulation, devices: list[SimulatedDevice]) -> None:
        for device, role in zip(world.cluster.devices, self._roles, strict=False):
            device.role = role
        self._sightings = Sightings(world, devices, self.sight, self._count)

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        fleet = self._sightings.look(gateway_of(request, self._count)).fleet
        self._give_back(fleet, request)
        number, refusals = choose_serving(fleet, request, cluster, now)
        self.refusals += refusals
        self._note_place(request, number)
        self._take(fleet, request, number)
        if cluster.devices[number].role is Role.PREFILL and not request.sent and request.max_tokens > 1:
            self._prompts[request.id] = request
            return [Assigned(part_of(request, 1), number)]
        return [Assigned(request, number)]

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        self._give_back(self._own(assigned.request), assigned.request)
        request = self._prompts.pop(assigned.request.id, None)
        if request is None or not 0 < request.sent < request.max_tokens:
            return ()
        fleet = self._sightings.look(gateway_of(request, self._count)).fleet
        number, refusals = choose_serving(fleet, request, cluster, now, decodes=True)
        self.refusals += refusals
        self._take(fleet, request, number)
        return [Assigned(part_of(request, request.max_tokens), number)]

    def target(self, request: Request, cluster: Cluster, now: float) -> int | None:
        fleet = self._sightings.look(gateway_of(request, self._count)).fleet
        return choose_serving(fleet, request, cluster, now, decodes=True)[0]

    def moved(self, request: Request, number: int) -> None:
        fleet = self._own(request)
        self._give_back(fleet, request)
        self._take(fleet, request, number)

    def _own(self, request: Request) -> SeenFleet:
        return self._sightings.fleet(gateway_of(request, self._count))

    def _take(self, fleet: SeenFleet, request: Request, number: int) -> None:
        fleet.took(str(number), request.model, request.objective.tbt_s)
        self._placed[request.id] = number
        there = self._there.setdefault(request.model, {})
        there[number] = there.get(number, 0) + 1

    def _give_back(self, fleet: SeenFleet, request: Request) -> None:
        number = self._placed.pop(request.id, None)
        if number is not None:
            fleet.gave_back(str(number), request.model)
            there = self._there[request.model]
            there[number] -= 1
            if not there[number]:
                del there[number]

    def _note_place(self, request: Request, number: int) -> None:
        """Count the placement of a model, or a split of a model, by what is true."""
        there = self._there.get(request.model)
        if not there:
            self.placements += 1
        elif number not in there and not all([self._hot(holder, request) for holder in there]):
            self.splits += 1

    def _hot(self, number: int, request: Request) -> bool:
        seen = SeenRuntime(str(number))
        seen.report = self._sightings.report(number)
        return seen.hot(request.model)


def part_of(request: Request, max_tokens: int) -> Request:
    """Return a part of the request that ends after `max_tokens` tokens; the parts share the request's progress."""
    part = replace(request, max_tokens=max_tokens, handed=request.sent > 0)
    part.progress = request.progress
    return part


def gateway_of(request: Request, gateways: int) -> int:
    """Return the number of the gateway that the request's client asked; neighbouring streams are mixed."""
    return (request.stream * 0x9E3779B1 >> 9) % gateways


def choose_serving(
    fleet: SeenFleet, request: Request, cluster: Cluster, now: float, decodes: bool = False
) -> tuple[int, int]:
    """Return the device that takes the request, and the number of devices that refused the request before.

    A device that is gone or takes no more requests refuses at once; until the next report, the dispatcher leaves the
    device out. If no report has come, the first serving device in the model's order takes the request.

    Args:
        fleet: the fleet as the dispatcher sees the fleet.
        request: the request.
        cluster: the books of the fleet, in which at least one device of the dispatcher serves.
        now: seconds.
        decodes: the request's prompt is computed."""
    refusals = 0
    while True:
        id = fleet.choose(request.model, request.objective, now, decodes)
        if id is None:
            break
        if cluster.devices[int(id)].serves:
            return int(id), refusals
        fleet.refused(id)
        refusals += 1
    numbers = [int(runtime.id) for runtime in fleet.in_order(request.model)]
    return next(number for number in numbers if cluster.devices[number].serves), refusals
