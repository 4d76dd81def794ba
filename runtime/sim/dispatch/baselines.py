"""Dispatch of the compared policies: devices are chosen by the fleet's own books.

`FirstFree`, `Fixed` and `Pressure` are central: each knows the whole fleet as the fleet is, at once, unlike gateways,
which see reports. Exact knowledge favours the compared policies."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.core.device.request import ModelKey, Request
from runtime.core.fleet.cluster import Cluster
from runtime.core.fleet.kvpr import Candidate, DeviceRoom, demand, score
from runtime.core.ledgers.costs import ModelCosts
from runtime.sim.dispatch.base import Assigned, Dispatch


class FirstFree(Dispatch):
    """Single queue for the fleet: a free device takes the oldest request and every request waiting for its model
    (ServerlessLLM).

    With `shortest`, a free device takes the shortest request, as an oracle knows lengths. The queue knows of every
    device at once, which favours the policy over policies with gateways."""

    def __init__(self, shortest: bool = False) -> None:
        super().__init__()
        self._shortest = shortest
        self._queue: list[Request] = []

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        where = cluster.where.get(request.model)
        if where is not None:
            return [Assigned(request, where)]
        self._queue.append(request)
        free = [device.number for device in cluster.devices if not device.work]
        return self._next(free, cluster) if free else ()

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        number = assigned.device
        return () if cluster.devices[number].work else self._next([number], cluster)

    def _next(self, free: Sequence[int], cluster: Cluster) -> list[Assigned]:
        if not self._queue:
            return []
        head = self._queue[0]
        if self._shortest:
            head = min(
                self._queue, key=lambda request: (request.max_tokens * cluster.costs[request.model].step_s, request.id)
            )
        here = [number for number in free if head.model in cluster.devices[number].resident]
        number = min(here or free)
        taken = [request for request in self._queue if request.model == head.model]
        self._queue = [request for request in self._queue if request.model != head.model]
        return [Assigned(request, number) for request in taken]


class Fixed(Dispatch):
    """Every model keeps its device for good, with at most `models_most` models on a device, as far as weights fit.

    Models are placed busiest first, on the device where the pressure on memory stays least (MuxServe). Models without a
    place are not served. `rates` are requests per second, known beforehand; exact rates favour the policy over policies
    with gateways."""

    def __init__(self, rates: dict[ModelKey, float], memory_bytes: int, kv_bytes_least: int, models_most: int) -> None:
        super().__init__()
        self._rates, self._models_most = rates, models_most
        self._memory_bytes, self._kv_bytes_least = memory_bytes, kv_bytes_least
        self._placed: dict[ModelKey, int] = {}

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        if not self._placed:
            self._place(cluster)
        number = self._placed.get(request.model)
        return () if number is None else [Assigned(request, number)]

    def _place(self, cluster: Cluster) -> None:
        rooms = [DeviceRoom(self._memory_bytes, self._kv_bytes_least) for _ in cluster.devices]
        counts = [0] * len(rooms)
        busiest = sorted(self._rates, key=lambda model: (-self._rates[model] * cluster.costs[model].step_s, model))
        for model in busiest:
            candidate = Candidate(model, self._rates[model], cluster.costs[model].weight_bytes, 0, 0.0)
            free = [number for number, count in enumerate(counts) if count < self._models_most]
            number = min(free, key=lambda number: (score(rooms[number], candidate), number), default=None)
            if number is None or score(rooms[number], candidate) == float("inf"):
                continue
            rooms[number].add(candidate)
            counts[number] += 1
            self._placed[model] = number


class Pressure(Dispatch):
    """Keeps a model on a device with its weights; else loads the model where pressure on memory is least (Prism, §6.1).

    Devices with room for the model after their idle models have left are preferred, then devices with the fewest models
    on their way in, then devices where no idle model must leave, then devices with the least pressure. Every device is
    seen as the device is, which favours the policy over policies with gateways."""

    MEAN_S = 60.0  # window of the mean demand

    def __init__(self, memory_bytes: int, kv_bytes_least: int) -> None:
        super().__init__()
        self._memory_bytes, self._kv_bytes_least = memory_bytes, kv_bytes_least
        # Requests per second, and the time of the mean. Tokens are not counted: their number is unknown at arrival.
        self._rates: dict[ModelKey, tuple[float, float]] = {}

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        rate, at = self._rates.get(request.model, (0.0, now))
        self._rates[request.model] = (rate * 2.0 ** ((at - now) / self.MEAN_S) + 1 / self.MEAN_S, now)
        number = cluster.where.get(request.model)
        if number is None:
            number = min(cluster.residents.get(request.model, ()), default=None)
        if number is None:
            number = self._activate(request, cluster)
        return [Assigned(request, number)]

    def _activate(self, request: Request, cluster: Cluster) -> int:
        model = self._candidate(request.model, request, cluster.costs[request.model])
        scores = []
        for device in cluster.devices:
            room = DeviceRoom(self._memory_bytes, self._kv_bytes_least)
            for key in device.work:  # idle models leave when a working model needs their room
                room.add(self._candidate(key, request, cluster.costs[key]))
            coming = sum(key not in device.resident for key in device.work) + device.loading
            pressure = score(room, model)
            there = sum([cluster.costs[key].weight_bytes for key in device.resident])
            pushes_out = there + model.weight_bytes + self._kv_bytes_least > self._memory_bytes
            scores.append((pressure == float("inf"), coming, pushes_out, pressure, device.number))
        return min(scores)[-1]

    def _candidate(self, model: ModelKey, request: Request, costs: ModelCosts) -> Candidate:
        rate = self._rates.get(model, (0.0, 0.0))[0]
        token_bytes = costs.kv.growth(request.context)
        return Candidate(model, demand(rate, token_bytes, request.objective.tbt_s), costs.weight_bytes, 0, 0.0)


class Freest(Dispatch):
    """Any device may serve any model: the device whose batch can go on longest takes the request (Llumnix, §4.4).

    Without fresh reports devices take turns, so that no request waits for the reports to come back."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = InTurns()

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        number = cluster.freest(request, now)
        return self._turns.arrived(request, cluster, now) if number is None else [Assigned(request, number)]


class InTurns(Dispatch):
    """Any device may serve any model: requests go to the serving devices in turns."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        numbers = [device.number for device in cluster.devices if device.serves]
        number = next((number for number in numbers if number >= self._next), numbers[0])
        self._next = number + 1
        return [Assigned(request, number)]
