"""World in virtual time: devices with the durations of a profile, driven by the decision code of production."""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from runtime.core.device.request import ModelKey, Objective, Request, RequestId, request_id
from runtime.core.fleet.cluster import Join, MigrateOrder, Order, Retire, RoleOrder, Rules
from runtime.core.ledgers.costs import Profile
from runtime.core.turns.turn import Turns
from runtime.sim.device import SimulatedDevice
from runtime.sim.dispatch.base import Assigned, Dispatch
from runtime.sim.moves import Moves
from runtime.sim.report import LaneSpan
from runtime.sim.simulation import Simulation
from runtime.sim.workload import RESTART_S, SILENT_S, InjectedFault, Workload, WorkloadTenant
from store.contract.priorities import PATIENCE_S, Priority
from store.contract.wire import Role

JOIN_S = 20.0  # time from the order of a device to its arrival


class Kept(msgspec.Struct, frozen=True):
    """Attainment of a set of requests."""

    token_attainment: float
    first_token_attainment: float
    requests: int


class SimulationResult(msgspec.Struct, frozen=True):
    """Result of a simulation. Attainment, TTFT and `requests` count requests that came after the warm-up."""

    token_attainment: float
    first_token_attainment: float
    min: float
    ttft_p50_s: float
    ttft_p99_s: float
    requests: int
    finished: float  # share of the requests, warm-up included
    events: int
    busy: float  # share of the devices' time spent in steps
    loading: float  # share of the devices' time with weights on the way
    fetches_per_s: float  # per device
    gpu_hours: float = 0.0  # paid while requests came: devices present, restarting or draining
    held_hours: float = 0.0  # hours of devices whose KV memory the running requests would fill completely
    whole_hours: float = 0.0  # `held_hours` rounded up to whole devices at each report
    moves: int = 0  # migrations of requests
    moves_given_up: int = 0
    resumed: int = 0  # times that a request went on at a new device after the loss of its device
    placements: int = 0  # requests sent when no device had requests of their model
    splits: int = 0  # requests sent away from their model, though one of the devices with the model was not hot
    refusals: int = 0  # choices of a device that was gone or leaving
    tenants: dict[str, Kept] = {}  # by name, if the workload has several tenants
    priorities: dict[str, Kept] = {}  # by word, if some requests have high priority
    disk_loads_per_min: float | msgspec.UnsetType = (
        msgspec.UNSET
    )  # of all devices, while requests came, if images lie on disk
    staged: int | msgspec.UnsetType = msgspec.UNSET  # images that came up by the history of requests, if allowed
    staged_unused: int | msgspec.UnsetType = msgspec.UNSET  # images that left again before a request asked


class World(Simulation):
    """Simulated devices, a workload, the virtual time, and the queue of events.

    `profile`: of every device, or one of several in turns, by the devices' numbers."""

    def __init__(
        self,
        workload: Workload,
        profile: Profile | Sequence[Profile],
        turns: Callable[[], Turns],
        dispatch: Dispatch,
        devices: int,
        objective: Objective,
        spans: list[LaneSpan] | None = None,
        checks: bool = False,
        rules: Rules | None = None,
        faults: Sequence[InjectedFault] = (),
        join_s: float = JOIN_S,
    ) -> None:
        super().__init__(workload, profile, devices, spans, checks, rules)
        self.events = 0
        self.devices = [SimulatedDevice(self, number, turns()) for number in range(devices)]
        self.dispatch, self.objective = dispatch, objective
        self._high = Objective(objective.ttft_s, objective.tbt_s, PATIENCE_S[Priority.HIGH], Priority.HIGH)
        self.requests: list[Request] = []
        self.moves = Moves(self, self.devices)
        self.open: set[RequestId] = set()
        self.resumed = 0
        self.role_changes = 0
        self._turns, self._rules, self._faults, self._join_s = turns, rules, faults, join_s
        self._gone: list[SimulatedDevice] = []  # devices gone and replaced
        self._since: dict[int, float] = dict.fromkeys(range(devices), 0.0)  # start of payment, by device
        self._paid_s = 0.0  # paid time of retired devices
        self._held_s = self._whole_s = 0.0
        self._homeless: list[Request] = []  # requests that came while no device served
        dispatch.attach(self, self.devices)

    def run(self, drain_s: float) -> None:
        """Simulates the workload, and `drain_s` after the last arrival.

        A simulation makes no reference cycles, so garbage collection is off meanwhile."""
        collects = gc.isenabled()
        gc.disable()
        try:
            self._run(drain_s)
        finally:
            if collects:
                gc.enable()

    def _run(self, drain_s: float) -> None:
        times = self.workload.at_s.tolist()
        columns = (self.workload.model, self.workload.prompt_tokens, self.workload.output_tokens)
        tenants = [0] * len(times) if self.workload.tenant is None else self.workload.tenant.tolist()
        ranks = [False] * len(times) if self.workload.high is None else self.workload.high.tolist()
        rows = zip(times, *(column.tolist() for column in columns), tenants, ranks, strict=True)
        names = [ModelKey(size.name) for size in self.workload.models]
        heap, pop, end = self._heap, heapq.heappop, (times[-1] if times else 0.0) + drain_s
        for fault in self._faults:
            self.at(fault.at_s, self._fail, fault)
        if self._rules is not None:
            self.at(0.0, self._tick, self._rules.interval_s)
        for stream, (at, model, prompt, output, tenant, high) in enumerate(rows):
            while heap and heap[0][0] <= at:
                self.now, _, act, what = pop(heap)
                self.events += 1
                act(what)
            self.now = at
            self.events += 1
            objective = self._high if high else self.objective
            self._arrive(stream, names[model], prompt, output, self.workload.tenants[tenant], objective)
        while heap and heap[0][0] <= end:
            self.now, _, act, what = pop(heap)
            self.events += 1
            act(what)
        self.now = end

    def _arrive(
        self, stream: int, model: ModelKey, prompt: int, output: int, tenant: WorkloadTenant, objective: Objective
    ) -> None:
        id = request_id("", stream)
        request = Request(
            id, "", stream, model, b"", self.now, prompt, output, objective, model, tenant.name, tenant.weight
        )
        self.requests.append(request)
        self.open.add(request.id)
        self._dispatch(request)

    def _dispatch(self, request: Request) -> None:
        if self._faults and not any([device.serves for device in self.cluster.devices]):
            self._homeless.append(request)
        else:
            self._assign(self.dispatch.arrived(request, self.cluster, self.now))

    def _assign(self, all_assigned: Sequence[Assigned]) -> None:
        for request, number in all_assigned:
            self.cluster.assigned(request, number)
        for request, number in all_assigned:
            self.devices[number].arrive(request)

    def ended(self, request: Request, number: int) -> None:
        """Notes that a device finished its part of a request, or lost the request."""
        if request.sent >= self.requests[request.stream].max_tokens:
            self.open.remove(request.id)  # raises if the request ended before
        self.cluster.ended(request, number)
        more = self.dispatch.ended(Assigned(request, number), self.cluster, self.now)
        if more:  # later, as the device is in the middle of hearing the outputs of its step
            self.at(self.now, self._assign, more)

    def moved(self, request: Request, number: int) -> None:
        self.cluster.assigned(request, number)
        self.dispatch.moved(request, number)

    # ── the fleet ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, interval_s: float) -> None:
        held = 0.0
        for device in self.devices:
            if device.gone:
                continue
            load = device.load()
            self.cluster.hear(load)
            if load.kv_bytes > 0:
                held += device.held_bytes() / load.kv_bytes
        if self.now <= self.workload.duration_s:
            self._held_s += interval_s * held
            self._whole_s += interval_s * math.ceil(held)
        orders = self.cluster.tick(self.now)
        self.moves.order([order for order in orders if isinstance(order, MigrateOrder)])
        for order in orders:
            self._obey(order)
        if self.cluster.rules.roles is not None:
            self._hand_on()
        if self.checks:
            self.check()
        self.at(self.now + interval_s, self._tick, interval_s)

    def _obey(self, order: Order) -> None:
        if isinstance(order, Join):
            leaving = [device.number for device in self.cluster.devices if device.there and device.drains]
            for number in leaving[: order.count]:  # draining devices are still present
                self.cluster.stays(number)
            for _ in range(order.count - len(leaving)):
                self.at(self.now + self._join_s, self._join, None)
        elif isinstance(order, Retire):
            self._paid_s += self._paid_for(self._since.pop(order.device))
            self.devices[order.device].gone = True
        elif isinstance(order, RoleOrder):
            self.cluster.devices[order.device].role = order.role
            self.role_changes += 1

    def _hand_on(self) -> None:
        """Begin to move requests with a first token away from devices that compute prompts alone."""
        for device in self.cluster.devices:
            if device.role is not Role.PREFILL or not device.serves:
                continue
            source = self.devices[device.number]
            for usage in source.usages():
                request = source.request(usage.model, usage.request)
                number = self.dispatch.target(request, self.cluster, self.now) if request.sent else None
                if number is not None and number != device.number and not usage.moves:
                    self.moves.begin(request, source, self.devices[number])

    def _join(self, number: int | None) -> None:
        """Adds a device: a new device if `number` is None, else the restarted device of the number."""
        if number is None:
            retired = (device.number for device in self.cluster.devices if not device.there and not device.died)
            number = next(retired, len(self.devices))
            self._since[number] = self.now - self._join_s
        fresh = SimulatedDevice(self, number, self._turns())
        if number == len(self.devices):
            self.devices.append(fresh)
        else:
            self._gone.append(self.devices[number])
            self.devices[number] = fresh
        self.cluster.joined(number)
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._dispatch(request)

    def _fail(self, fault: InjectedFault) -> None:
        if fault.device >= len(self.devices) or self.devices[fault.device].gone:
            return
        if fault.kind == "drops":
            self.drops[fault.device] = self.drops.get(fault.device, 0) + 1
            return
        device = self.devices[fault.device]
        device.stop()
        self.at(self.now + (SILENT_S if fault.kind == "hangs" else 0.0), self._give_up, device)

    def _give_up(self, device: SimulatedDevice) -> None:
        """Notes the loss of a device. Open requests of the device go on at live devices, and the device restarts."""
        left = device.left_behind()
        for request in left:
            self.cluster.ended(request, device.number)
        self.cluster.died(device.number)
        self.at(self.now + RESTART_S, self._join, device.number)
        for request in left:
            self.go_on(request)

    def go_on(self, request: Request) -> None:
        """Dispatches a request again; the new device computes the keys and values again."""
        again = replace(request, handed=False)
        again.progress = request.progress
        self.resumed += 1
        self._dispatch(again)

    def check(self) -> None:
        """Asserts that each open request is in exactly one place."""
        there = [device for device in self.devices if self.cluster.devices[device.number].there]
        places = [request.id for device in there for request in device.left_behind()]
        places += [*self.moves.paused, *(request.id for request in self._homeless)]
        assert len(places) == len(set(places)), "a request is in two places"
        assert set(places) == self.open, "a request was lost, or is still there after its end"
        assert all(request.sent <= request.max_tokens for request in self.requests), "more tokens than were asked for"

    def _paid_for(self, since: float) -> float:
        return max(0.0, min(self.now, self.workload.duration_s) - since)

    def result(self, warm_s: float) -> SimulationResult:
        counted = [request for request in self.requests if request.arrived_at >= warm_s]
        kept = kept_of(counted)
        ttfts = sorted(request.progress.first_at - request.arrived_at for request in counted)
        devices, count = [*self.devices, *self._gone], len(self.devices)
        return SimulationResult(
            token_attainment=kept.token_attainment,
            first_token_attainment=kept.first_token_attainment,
            min=min(kept.token_attainment, kept.first_token_attainment),
            ttft_p50_s=_quantile(ttfts, 0.5),
            ttft_p99_s=_quantile(ttfts, 0.99),
            requests=len(counted),
            finished=sum(request.sent >= request.max_tokens for request in self.requests) / max(1, len(self.requests)),
            events=self.events,
            busy=sum(device.busy_s for device in devices) / count / self.now,
            loading=sum(device.loading_s for device in devices) / count / self.now,
            fetches_per_s=sum(device.fetches for device in devices) / count / self.now,
            gpu_hours=(self._paid_s + sum(map(self._paid_for, self._since.values()))) / 3600,
            held_hours=self._held_s / 3600,
            whole_hours=self._whole_s / 3600,
            moves=self.moves.done,
            moves_given_up=self.moves.given_up,
            resumed=self.resumed,
            placements=self.dispatch.placements,
            splits=self.dispatch.splits,
            refusals=self.dispatch.refusals,
            tenants=self._kept_by_tenant(counted),
            priorities=self._kept_by_priority(counted),
            **self._by_tier(devices),
        )

    def _by_tier(self, devices: list[SimulatedDevice]) -> dict[str, Any]:
        """Results about images on disk; empty if every image is in the host cache."""
        tiers = devices[0].profile.tiers
        if tiers is None:
            return {}
        loads, asked_s = sum(device.disk_loads for device in devices), min(self.now, self.workload.duration_s)
        found: dict[str, Any] = {"disk_loads_per_min": 60 * loads / asked_s}
        if tiers.by_history:
            staging = [model.staging for device in devices for model in device.instance.models.values()]
            found |= {"staged": sum(each.staged for each in staging)}
            found |= {"staged_unused": sum(each.unused for each in staging)}
        return found

    def _kept_by_tenant(self, counted: list[Request]) -> dict[str, Kept]:
        if len(self.workload.tenants) == 1:
            return {}
        names = [tenant.name for tenant in self.workload.tenants]
        return {name: kept_of([request for request in counted if request.tenant == name]) for name in names}

    def _kept_by_priority(self, counted: list[Request]) -> dict[str, Kept]:
        if self.workload.high is None:
            return {}
        ranks = [Priority.HIGH, Priority.NORMAL]
        return {rank.word: kept_of([each for each in counted if each.objective.priority is rank]) for rank in ranks}


def kept_of(requests: list[Request]) -> Kept:
    """Return the attainment of requests. Tokens that were not made count as late."""
    owed = sum(request.max_tokens for request in requests)
    kept = sum(request.progress.sent - request.progress.late for request in requests)
    on_time = [request.sent > 0 and not request.progress.first_late for request in requests]
    return Kept(kept / max(1, owed), sum(on_time) / max(1, len(requests)), len(requests))


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
