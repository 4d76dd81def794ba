"""Which device takes a request: asked when one comes and when one ends, answered from the cluster's books. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from runtime.cluster import Cluster
from runtime.costs import ModelCosts
from runtime.policy.groups import Prefill, Queue, choose
from runtime.policy.kvpr import Candidate, Room, demand, score
from runtime.request import ModelKey, Request, RequestId


class Assigned(NamedTuple):
    """A request, or a part of one, is for this device."""

    request: Request
    device: int


class Dispatch(Protocol):
    """A dispatch policy. It may hold requests back; what it hands out is booked at once."""

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        """One came, from a client."""

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        """What was assigned has ended."""


class LeastLoaded:
    """Where the model has work already, else where the request costs least: load, and the way in if it is long."""

    LOAD_LEAST = 0.08  # of a device that has not the model, however soon it is there
    LOADING = 1.6  # times the cost where another model is on its way in

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        where = cluster.where.get(request.model)
        if where is None:
            cost = max(self.LOAD_LEAST, cluster.costs[request.model].load_s / request.objective.ttft_s)
            where = cluster.cheapest(request.model, cost, cost * self.LOADING)
        return [Assigned(request, where)]

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        return ()


class FirstFree:
    """One queue for all: a device that is free takes the oldest request, and all that wait for the same model
    (ServerlessLLM). `shortest`: not the oldest but the shortest, as an oracle knows it."""

    def __init__(self, shortest: bool = False) -> None:
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


class Fixed:
    """Each model has its device for good, `models_most` on each, as far as their weights fit: the ones that are asked
    most first, each where the pressure on memory stays least (MuxServe). Others are not served.

    `rates`: requests per second, known beforehand."""

    def __init__(self, rates: dict[ModelKey, float], memory_bytes: int, kv_bytes_least: int, models_most: int) -> None:
        self._rates, self._models_most = rates, models_most
        self._memory_bytes, self._kv_bytes_least = memory_bytes, kv_bytes_least
        self._placed: dict[ModelKey, int] = {}

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        if not self._placed:
            self._place(cluster)
        number = self._placed.get(request.model)
        return () if number is None else [Assigned(request, number)]

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        return ()

    def _place(self, cluster: Cluster) -> None:
        rooms = [Room(self._memory_bytes, self._kv_bytes_least) for _ in cluster.devices]
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


class Pressure:
    """A model that has weights somewhere stays; else it goes where the pressure on memory would be least (Prism, §6.1),
    to a device with room for it after its idle models left, and with the fewest others on their way in; if it can be
    to one where no idle model must leave."""

    MEAN_S = 60.0  # over which demand is taken

    def __init__(self, memory_bytes: int, kv_bytes_least: int) -> None:
        self._memory_bytes, self._kv_bytes_least = memory_bytes, kv_bytes_least
        # Requests per second, and when it was so: how many tokens they will be is not known when they come.
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

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        return ()

    def _activate(self, request: Request, cluster: Cluster) -> int:
        model = self._candidate(request.model, request, cluster.costs[request.model])
        scores = []
        for device in cluster.devices:
            room = Room(self._memory_bytes, self._kv_bytes_least)
            for key in device.work:  # idle models leave when others need their room
                room.add(self._candidate(key, request, cluster.costs[key]))
            coming = sum(key not in device.resident for key in device.work) + device.loading
            pressure = score(room, model)
            there = sum([cluster.costs[key].weight_bytes for key in device.resident])
            pushes_out = there + model.weight_bytes + self._kv_bytes_least > self._memory_bytes
            scores.append((pressure == float("inf"), coming, pushes_out, pressure, device.number))
        return min(scores)[-1]

    def _candidate(self, model: ModelKey, request: Request, costs: ModelCosts) -> Candidate:
        rate = self._rates.get(model, (0.0, 0.0))[0]
        return Candidate(
            model, demand(rate, costs.kv_bytes_per_token, request.objective.tbt_s), costs.weight_bytes, 0, 0.0
        )


class Freest:
    """Any device may serve any model: the one whose batch can go on longest takes the request (Llumnix, §4.4). Without
    fresh reports devices take turns, so that nobody waits for the reports to come back."""

    def __init__(self) -> None:
        self._turns = InTurns()

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        number = cluster.freest(request, now)
        return self._turns.arrived(request, cluster, now) if number is None else [Assigned(request, number)]

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        return ()


class InTurns:
    """Any device may serve any model, and each gets the next request."""

    def __init__(self) -> None:
        self._next = 0

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        numbers = [device.number for device in cluster.devices if device.serves]
        number = next((number for number in numbers if number >= self._next), numbers[0])
        self._next = number + 1
        return [Assigned(request, number)]

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        return ()


class Roles:
    """Devices for prefill and devices for decode (Aegaeon, §4): the first `prefill` of them compute prompts in groups,
    each where it is done first; then a request goes where its model decodes, else where there is least to do."""

    BATCH_MOST = 64

    def __init__(self, prefill: int) -> None:
        self._queues = [Queue(number) for number in range(prefill)]
        self._waiting: dict[RequestId, tuple[Request, Prefill]] = {}  # for their first token

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        costs = cluster.costs[request.model]
        prefill = Prefill(request.id, request.model, costs.prefill(request.prompt_tokens), costs.load_s)
        queue = choose(self._queues, prefill, now)
        queue.add(prefill)
        self._waiting[request.id] = request, prefill
        return [Assigned(_part(request, 1), queue.id)]

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        request, prefill = self._waiting.pop(assigned.request.id, (None, None))
        if request is None or prefill is None:  # all of it has
            return ()
        self._queues[assigned.device].done(prefill, now)
        if request.sent >= request.max_tokens or not request.sent:
            return ()
        return [Assigned(_part(request, request.max_tokens), self._decode(request.model, cluster))]

    def _decode(self, model: ModelKey, cluster: Cluster) -> int:
        devices = cluster.devices[len(self._queues) :]
        for device in devices:
            if model in device.work and device.work[model].requests < self.BATCH_MOST:
                return device.number
        return min(devices, key=lambda device: (device.load, device.number)).number


def _part(request: Request, max_tokens: int) -> Request:
    """The same stream up to there, whichever device makes it."""
    part = replace(request, max_tokens=max_tokens, handed=request.sent > 0)
    part.progress = request.progress
    return part
