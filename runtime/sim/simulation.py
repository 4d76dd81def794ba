"""State shared by devices and moves of a simulation: virtual time, planned events, costs, books of the fleet."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from runtime.core.device.request import ModelKey, Request, RequestId
from runtime.core.fleet.cluster import Cluster, Rules
from runtime.core.ledgers.costs import ModelCosts, Profile
from runtime.sim.report import LaneSpan
from runtime.sim.workload import Workload
from store.contract.wire import EngineSpec


class Simulation:
    """Base of `World`, without the devices: devices and moves know a world only as a simulation.

    `World` implements `ended`, `moved` and `go_on`. `profile`: of every device, or several profiles, which devices have
    in turns. Books of the whole fleet have the costs of the first profile.
    """

    def __init__(
        self,
        workload: Workload,
        profile: Profile | Sequence[Profile],
        devices: int,
        spans: list[LaneSpan] | None,
        checks: bool,
        rules: Rules | None,
    ) -> None:
        self.now = 0.0
        self.workload, self.checks, self.spans = workload, checks, spans
        self._profiles = [profile] if isinstance(profile, Profile) else list(profile)
        self._costs = [{ModelKey(size.name): each.costs(size) for size in workload.models} for each in self._profiles]
        self.costs = self._costs[0]
        self.specs = {model: _spec(model, costs) for model, costs in self.costs.items()}
        self.cluster = Cluster(devices, self.costs, rules)
        self.drops: dict[int, int] = {}  # moves still to fail, by source device
        self.moving: set[RequestId] = set()  # requests on the way from one device to another
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._count = 0

    def profile_of(self, number: int) -> Profile:
        """Return the profile of the device `number`."""
        return self._profiles[number % len(self._profiles)]

    def costs_on(self, number: int) -> dict[ModelKey, ModelCosts]:
        """Return the costs of the models on the device `number`."""
        return self._costs[number % len(self._costs)]

    def at(self, when: float, act: Callable[..., None], what: Any) -> None:
        """Plan `act(what)` for the time `when` (s). Acts of equal times run in the order of these calls."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, act, what))

    def ended(self, request: Request, number: int) -> None:
        """Note that the device `number` has finished a part of the request, or has lost the request."""
        raise NotImplementedError

    def moved(self, request: Request, number: int) -> None:
        """Note that a request has moved to the device `number`."""
        raise NotImplementedError  # `World` implements the method, as the two methods beside

    def go_on(self, request: Request) -> None:
        """Send the request to any device; the device computes the request's keys and values again."""
        raise NotImplementedError


def _spec(name: str, costs: ModelCosts) -> EngineSpec:
    return EngineSpec(
        key=name,
        path=name,
        digest="",
        architecture="",
        dtype="bfloat16",
        max_model_len=1 << 20,
        weight_bytes=costs.weight_bytes,
        kv_bytes_per_token=round(costs.kv_bytes_per_token),
        kv_layers=costs.kv_layers or msgspec.UNSET,
    )
