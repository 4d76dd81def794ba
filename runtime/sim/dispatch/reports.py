"""What dispatchers of a simulated fleet see of the devices: reports, some time old, as the runtimes of production send.

Every device is reported every `period_s` seconds, a fifth more or less. A report needs half a period, again a half more
or less and differently for each dispatcher, to arrive. A dispatcher therefore sees a device as the device was a quarter
of a period to nearly two periods ago, one period ago in the mean.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from runtime.core.device.model import Model, Phase
from runtime.core.device.request import ModelKey, Objective
from runtime.core.fleet.cluster import FleetDevice
from runtime.core.fleet.dispatch import FRESH_S, LOAD_SHARE, Coldness, SeenFleet
from runtime.core.fleet.headroom import headroom
from runtime.core.turns.groups import Queue
from runtime.sim.device import SimulatedDevice
from runtime.sim.dispatch.sight import Sight
from runtime.sim.simulation import Simulation
from store.contract.reports import Report, Seat

JITTER = 0.2  # share of the period by which the time between two reports varies
PERIODS_FRESH = 3.0  # reports are used for so many periods, and for FRESH_S at least
_DEFAULT = Objective()


class SentReport:
    """A report on its way to every observer.

    `at`: when the report was taken, in seconds. `queue`: the prompts that the device was to compute, if the device only
    computes prompts."""

    def __init__(self, at: float, device: int, report: Report, queue: Queue | None) -> None:
        self.at, self.device, self.report, self.queue = at, device, report, queue


class Observer:
    """A dispatcher's fleet, with the last report heard of each device."""

    def __init__(self, fresh_s: float) -> None:
        self.fleet = SeenFleet(fresh_s)
        self.heard: list[SentReport | None] = []  # by device
        self.coming: list[tuple[float, int, SentReport]] = []  # heap of reports on their way: arrival, number, report


class Sightings:
    """Reports of the world's devices, on their way to the observers.

    Args:
        world: the world, before its first event.
        devices: the world's devices by number; the list grows while the simulation runs.
        sight: period and seed of the reports.
        observers: number of dispatchers that hear the reports.
        queues: the prompts of the first devices, if these devices only compute prompts and no dispatcher is to choose
            them for a request."""

    def __init__(
        self,
        world: Simulation,
        devices: list[SimulatedDevice],
        sight: Sight,
        observers: int,
        queues: Sequence[Queue] = (),
    ) -> None:
        self._world, self._devices, self._sight, self._queues = world, devices, sight, queues
        self._observers = [Observer(max(FRESH_S, PERIODS_FRESH * sight.period_s)) for _ in range(observers)]
        self._rng = random.Random(sight.seed)
        self._known = self._seq = 0  # devices; reports
        self._hosted = {model: Coldness.HOST for model in world.costs}
        self._find_devices()

    def look(self, number: int) -> Observer:
        """Return an observer, by number, after the reports that have arrived by now."""
        self._find_devices()
        observer, now = self._observers[number], self._world.now
        if self._sight.exact:
            for device in self._world.cluster.devices:
                if device.serves:
                    observer.fleet.hear(self.report(device.number), now)
            return observer
        coming, newest = observer.coming, dict[int, tuple[float, SentReport]]()
        while coming and coming[0][0] <= now:
            arrived_at, _, sent = heapq.heappop(coming)
            newest[sent.device] = arrived_at, sent  # reports of a device never overtake each other
        for arrived_at, sent in newest.values():
            observer.heard[sent.device] = sent
            observer.fleet.hear(sent.report, arrived_at)
        return observer

    def fleet(self, number: int) -> SeenFleet:
        """Return the fleet as an observer, by number, saw the fleet at the last look."""
        return self._observers[number].fleet

    def report(self, number: int) -> Report:
        """Return a report of the device as the device is now."""
        self._seq += 1
        return device_report(self._devices[number], self._world.cluster.devices[number], self._seq)

    def _find_devices(self) -> None:
        """Announce new devices to the observers, and plan the first reports of these devices."""
        while self._known < len(self._devices):
            number = self._known
            self._known += 1
            for observer in self._observers:
                observer.heard.append(None)
                if number >= len(self._queues):
                    observer.fleet.hosts(str(number), self._hosted, self._devices[number].costs)
            if not self._sight.exact:
                first = self.report(number)  # a runtime reports as soon as the runtime starts
                for observer in self._observers:
                    observer.fleet.hear(first, self._world.now)
                self._world.at(self._world.now + self._rng.random() * self._sight.period_s, self._send, number)

    def _send(self, number: int) -> None:
        period_s, now = self._sight.period_s, self._world.now
        if self._world.cluster.devices[number].there and not self._devices[number].gone:
            queue = self._queues[number].copy() if number < len(self._queues) else None
            sent = SentReport(now, number, self.report(number), queue)
            for observer in self._observers:
                arrives_at = now + period_s * (0.25 + 0.5 * self._rng.random())
                heapq.heappush(observer.coming, (arrives_at, self._seq, sent))
        self._world.at(now + period_s * (1 - JITTER + 2 * JITTER * self._rng.random()), self._send, number)


def device_report(device: SimulatedDevice, booked: FleetDevice, seq: int) -> Report:
    """Return the report that the runtime of the device would send, as `runtime.core.fleet.report.report_of` makes one.

    Args:
        device: the device.
        booked: the fleet's books of the device, with the number of open requests by model.
        seq: number of the report."""
    pages, costs = device.instance.pages, device.costs
    here: list[ModelKey] = []
    weights, kv, reload_s = 0, 0, 0.0
    for key, held in pages.held.items():
        kv += held.kv - held.kv_spare
        if key in booked.work and device.instance.models[key].phase is Phase.RESIDENT:
            weights += held.weights
        if held.weights and held.weights * pages.page_bytes >= costs[key].weight_bytes:
            here.append(key)
            reload_s += costs[key].load_s
    kv_bytes = max(1, (pages.total - weights) * pages.page_bytes)
    load = free = headroom(sum([model.queues.high for model in device.instance.models.values()]))
    needed = float(kv * pages.page_bytes) + free * kv_bytes
    seats: dict[str, Seat] = {}
    for key, count in booked.work.items():
        model = device.instance.models.get(key)
        if model is not None and model.has_requests:
            queued = _waiting_bytes(model)
            needed += queued
            busy = _busy(model)
        else:
            queued, busy = 0.0, costs[key].step(count, 0) / _DEFAULT.tbt_s
        held = pages.of(key)
        used = (held.kv - held.kv_spare) * pages.page_bytes
        seats[key] = Seat(count, busy, (used + queued) / kv_bytes)
        load += busy if key in here else busy + LOAD_SHARE * costs[key].load_s
    return Report(
        runtime=str(device.number),
        epoch=0,
        seq=seq,
        draining=booked.drains,
        role=booked.role,
        loading=booked.loading,
        load=load,
        reload=reload_s / _DEFAULT.ttft_s,
        full=needed / kv_bytes,
        seats=seats,
        here=frozenset(here),
    )


def _waiting_bytes(model: Model) -> float:
    """Return the memory for keys and values that the model's waiting requests wait for."""
    return float(model.kv.each([request.context + 1 for request in model.queues.waiting.values()]))


def _busy(model: Model) -> float:
    """Return `model.busy`, with less work: the requests of a model have equal objectives in a simulation."""
    queues, tbt_s, context = model.queues, 0.0, model.queues.context
    for request in queues.waiting.values():
        context += request.context
        tbt_s = request.objective.tbt_s
    if not tbt_s:
        tbt_s = next(iter(queues.running.values())).objective.tbt_s
    return model.costs.step(len(queues.running) + len(queues.waiting), context) / tbt_s
