"""The books of a fleet of devices: who works for which model where, and how loaded each is. Pure.

What it is told comes from the devices, what it is asked comes from a dispatch policy. A device's load is the share of
its time that it needs to keep all its streams at their pace, from its costs; more than 1 is too much.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from runtime.costs import ModelCosts
from runtime.request import ModelKey, Request

LOAD_SHARE = 0.5 / 8.0  # of a device's time for each second that a model takes to come in: half, once in a lead of 8 s


@dataclass(slots=True)
class Share:
    """Of a device's load, by one model."""

    tbt_s: float
    requests: int = 0
    load: float = 0.0


@dataclass(slots=True)
class Device:
    """One device as the fleet sees it."""

    number: int
    resident: set[ModelKey] = field(default_factory=set)  # there, or on their way
    work: dict[ModelKey, Share] = field(default_factory=dict)
    loading: bool = False
    load: float = 0.0
    version: int = 0  # of what stands in the heaps


class Cluster:
    """Devices 0 to `count` - 1. Each question and each report costs at most the logarithm of their number."""

    def __init__(self, count: int, costs: dict[ModelKey, ModelCosts]) -> None:
        self.devices = [Device(number) for number in range(count)]
        self.costs = costs
        self.where: dict[ModelKey, int] = {}  # the device that has requests for the model
        self.residents: dict[ModelKey, set[int]] = {}
        self._heaps: tuple[list[tuple[float, int, int]], ...] = ([], [])  # loading or not: load, number, version
        for device in self.devices:
            self._note(device)

    # ── told ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def assigned(self, request: Request, number: int) -> None:
        self.where[request.model] = number
        self._count(self.devices[number], request, 1)

    def ended(self, request: Request, number: int) -> None:
        device = self.devices[number]
        self._count(device, request, -1)
        if request.model not in device.work and self.where.get(request.model) == number:
            del self.where[request.model]

    def loads(self, number: int, model: ModelKey) -> None:
        """The model's weights are on their way to the device."""
        device = self.devices[number]
        device.loading = True
        self._note(device)
        device.resident.add(model)
        self.residents.setdefault(model, set()).add(number)
        self._weigh(device, model)

    def loaded(self, number: int) -> None:
        """What was on its way has arrived, or failed to."""
        device = self.devices[number]
        device.loading = False
        self._note(device)

    def left(self, number: int, model: ModelKey) -> None:
        """Some of the model's weights are gone."""
        device = self.devices[number]
        device.resident.discard(model)
        self.residents[model].discard(number)
        self._weigh(device, model)

    # ── asked ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def cheapest(self, model: ModelKey, idle_cost: float, loading_cost: float) -> int:
        """The device with the least load, to which a device without the model adds `idle_cost`, or `loading_cost` if
        others are on their way to it; of equals the first."""
        best = min(((self.devices[number].load, number) for number in self.residents.get(model, ())), default=None)
        for loading, cost in ((False, idle_cost), (True, loading_cost)):
            least = self._least(loading)
            if least is not None and (best is None or (least.load + cost, least.number) < best):
                best = (least.load + cost, least.number)
        assert best is not None, "there is no device"
        return best[1]

    def _least(self, loading: bool) -> Device | None:
        heap = self._heaps[loading]
        while heap:
            _, number, version = heap[0]
            device = self.devices[number]
            if version == device.version and device.loading == loading:
                return device
            heapq.heappop(heap)
        return None

    # ── books ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _count(self, device: Device, request: Request, by: int) -> None:
        share = device.work.get(request.model)
        if share is None:
            share = device.work[request.model] = Share(request.objective.tbt_s)
        share.requests += by
        self._weigh(device, request.model)

    def _weigh(self, device: Device, model: ModelKey) -> None:
        share = device.work.get(model)
        if share is None:
            return
        device.load -= share.load
        if share.requests:
            costs = self.costs[model]
            away_s = 0.0 if model in device.resident else costs.load_s
            share.load = costs.step(share.requests, 0) / share.tbt_s + LOAD_SHARE * away_s
            device.load += share.load
        else:
            del device.work[model]
            if not device.work:
                device.load = 0.0  # without what rounding left
        self._note(device)

    def _note(self, device: Device) -> None:
        """Its place among the others changed."""
        device.version += 1
        heapq.heappush(self._heaps[device.loading], (device.load, device.number, device.version))
