"""The world in virtual time: devices that take as long as a profile says, driven by the machines of production."""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from runtime.cluster import Cluster, Join, Migrate, Order, Retire, Rules
from runtime.costs import ModelCosts, Profile
from runtime.policy.dispatch import Assigned, Dispatch
from runtime.policy.turns import Turns
from runtime.request import ModelKey, Objective, Request, RequestId, request_id
from runtime.sim.device import Device
from runtime.sim.faults import RESTART_S, SILENT_S, Fault
from runtime.sim.moves import Moves
from runtime.sim.report import Span
from runtime.sim.workload import Tenant, Workload
from store.wire import EngineSpec

JOIN_S = 20.0  # from when a device is asked for until it is there


class Kept(msgspec.Struct, frozen=True):
    """How requests kept their objective."""

    token_attainment: float
    first_token_attainment: float
    requests: int


class Result(msgspec.Struct, frozen=True):
    """Of the requests that came after the warm-up."""

    token_attainment: float
    first_token_attainment: float
    min: float
    ttft_p50_s: float
    ttft_p99_s: float
    requests: int
    finished: float  # share of all
    events: int
    busy: float  # share of the devices' time in which they stepped
    loading: float  # in which weights were on their way
    fetches_per_s: float  # and device
    gpu_hours: float = 0.0  # while requests came, of devices that were there, restarted or drained
    held_hours: float = 0.0  # of devices whose memory for keys and values were full of what running requests held
    whole_hours: float = 0.0  # of as few whole devices as could hold that from one second to the next
    moves: int = 0  # of requests, to another device
    moves_given_up: int = 0
    resumed: int = 0  # times a request went on elsewhere after its device was gone
    tenants: dict[str, Kept] = {}  # by name, where there are several


class World:
    """Some devices, a workload, and the time."""

    def __init__(
        self,
        workload: Workload,
        profile: Profile,
        turns: Callable[[], Turns],
        dispatch: Dispatch,
        devices: int,
        objective: Objective,
        spans: list[Span] | None = None,
        checks: bool = False,
        rules: Rules | None = None,
        faults: Sequence[Fault] = (),
        join_s: float = JOIN_S,
    ) -> None:
        self.now = 0.0
        self.events = 0
        self.workload, self.profile, self.checks, self.spans = workload, profile, checks, spans
        self.costs = {ModelKey(size.name): profile.costs(size) for size in workload.models}
        self.specs = {ModelKey(size.name): _spec(size.name, profile.costs(size)) for size in workload.models}
        self.cluster = Cluster(devices, self.costs, rules)
        self.devices = [Device(self, number, turns()) for number in range(devices)]
        self.dispatch, self.objective = dispatch, objective
        self.requests: list[Request] = []
        self.moves = Moves(self)
        self.drops: dict[int, int] = {}  # requests that will not get away from a device, by device
        self.open: set[RequestId] = set()
        self.resumed = 0
        self._turns, self._rules, self._faults, self._join_s = turns, rules, faults, join_s
        self._gone: list[Device] = []  # and replaced
        self._since: dict[int, float] = dict.fromkeys(range(devices), 0.0)  # that each device has been paid for
        self._paid_s = 0.0  # of devices that retired
        self._held_s = self._whole_s = 0.0
        self._homeless: list[Request] = []  # nobody serves
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._count = 0

    def at(self, when: float, act: Callable[..., None], what: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, act, what))

    def run(self, drain_s: float) -> None:
        """All requests, and so long after the last came. Makes no cycles, so none are looked for meanwhile."""
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
        rows = zip(times, *(column.tolist() for column in columns), tenants, strict=True)
        names = [ModelKey(size.name) for size in self.workload.models]
        heap, pop, end = self._heap, heapq.heappop, (times[-1] if times else 0.0) + drain_s
        for fault in self._faults:
            self.at(fault.at_s, self._fail, fault)
        if self._rules is not None:
            self.at(0.0, self._tick, self._rules.interval_s)
        for stream, (at, model, prompt, output, tenant) in enumerate(rows):
            while heap and heap[0][0] <= at:
                self.now, _, act, what = pop(heap)
                self.events += 1
                act(what)
            self.now = at
            self.events += 1
            self._arrive(stream, names[model], prompt, output, self.workload.tenants[tenant])
        while heap and heap[0][0] <= end:
            self.now, _, act, what = pop(heap)
            self.events += 1
            act(what)
        self.now = end

    def _arrive(self, stream: int, model: ModelKey, prompt: int, output: int, tenant: Tenant) -> None:
        id, objective = request_id("", stream), self.objective
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
        """A device has done its part of it, or lost it."""
        if request.sent >= self.requests[request.stream].max_tokens:
            self.open.remove(request.id)  # raises for one that has ended before
        self.cluster.ended(request, number)
        more = self.dispatch.ended(Assigned(request, number), self.cluster, self.now)
        if more:  # the device is in the middle of hearing what it made
            self.at(self.now, self._assign, more)

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
        self.moves.order([order for order in orders if isinstance(order, Migrate)])
        for order in orders:
            self._obey(order)
        if self.checks:
            self.check()
        self.at(self.now + interval_s, self._tick, interval_s)

    def _obey(self, order: Order) -> None:
        if isinstance(order, Join):
            leaving = [device.number for device in self.cluster.devices if device.there and device.drains]
            for number in leaving[: order.count]:  # they are there already
                self.cluster.stays(number)
            for _ in range(order.count - len(leaving)):
                self.at(self.now + self._join_s, self._join, None)
        elif isinstance(order, Retire):
            self._paid_s += self._paid_for(self._since.pop(order.device))
            self.devices[order.device].gone = True

    def _join(self, number: int | None) -> None:
        """Another device, or the one that died comes back."""
        if number is None:
            retired = (device.number for device in self.cluster.devices if not device.there and not device.died)
            number = next(retired, len(self.devices))
            self._since[number] = self.now - self._join_s
        fresh = Device(self, number, self._turns())
        if number == len(self.devices):
            self.devices.append(fresh)
        else:
            self._gone.append(self.devices[number])
            self.devices[number] = fresh
        self.cluster.joined(number)
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._dispatch(request)

    def _fail(self, fault: Fault) -> None:
        if fault.device >= len(self.devices) or self.devices[fault.device].gone:
            return
        if fault.kind == "drops":
            self.drops[fault.device] = self.drops.get(fault.device, 0) + 1
            return
        device = self.devices[fault.device]
        device.stop()
        self.at(self.now + (SILENT_S if fault.kind == "hangs" else 0.0), self._give_up, device)

    def _give_up(self, device: Device) -> None:
        """It is known that the device is gone: what it had goes on elsewhere."""
        left = device.left_behind()
        for request in left:
            self.cluster.ended(request, device.number)
        self.cluster.died(device.number)
        self.at(self.now + RESTART_S, self._join, device.number)
        for request in left:
            self.go_on(request)

    def go_on(self, request: Request) -> None:
        """At whatever device, where its keys and values are computed again."""
        again = replace(request, handed=False)
        again.progress = request.progress
        self.resumed += 1
        self._dispatch(again)

    def check(self) -> None:
        """Whoever has not ended is in one place."""
        there = [device for device in self.devices if self.cluster.devices[device.number].there]
        places = [request.id for device in there for request in device.left_behind()]
        places += [*self.moves.paused, *(request.id for request in self._homeless)]
        assert len(places) == len(set(places)), "a request is in two places"
        assert set(places) == self.open, "a request was lost, or is still there after its end"
        assert all(request.sent <= request.max_tokens for request in self.requests), "more tokens than were asked for"

    def _paid_for(self, since: float) -> float:
        return max(0.0, min(self.now, self.workload.duration_s) - since)

    def result(self, warm_s: float) -> Result:
        counted = [request for request in self.requests if request.arrived_at >= warm_s]
        kept = _kept(counted)
        ttfts = sorted(request.progress.first_at - request.arrived_at for request in counted)
        devices, count = [*self.devices, *self._gone], len(self.devices)
        return Result(
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
            tenants=self._kept_by_tenant(counted),
        )

    def _kept_by_tenant(self, counted: list[Request]) -> dict[str, Kept]:
        if len(self.workload.tenants) == 1:
            return {}
        names = [tenant.name for tenant in self.workload.tenants]
        return {name: _kept([request for request in counted if request.tenant == name]) for name in names}


def _kept(requests: list[Request]) -> Kept:
    owed = sum(request.max_tokens for request in requests)
    kept = sum(request.progress.sent - request.progress.late for request in requests)
    on_time = [request.sent > 0 and not request.progress.first_late for request in requests]
    return Kept(kept / max(1, owed), sum(on_time) / max(1, len(requests)), len(requests))


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
    )


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
