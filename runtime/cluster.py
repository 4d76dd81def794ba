"""The machine of a fleet of devices: who works for which model where, how loaded each is, and what should change. Pure.

What it is told comes from the devices, what it is asked comes from a dispatch policy. A device's load is the share of
its time that it needs to keep all its streams at their pace, from its costs; more than 1 is too much.

Each device reports its load at intervals, in sums; `tick` answers with orders: who gives requests to whom, and which
devices leave or come. A device whose report is old is given nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import msgspec

from runtime.costs import ModelCosts
from runtime.policy.migration import HIGH_STEPS, LOW_STEPS, Load, pairs, pick_model, steps
from runtime.policy.scaling import Band, Scaling
from runtime.request import ModelKey, Objective, Request

LOAD_SHARE = 0.5 / 8.0  # of a device's time for each second that a model takes to come in: half, once in a lead of 8 s
TTFT_S = Objective().ttft_s  # of a model that nobody asked for yet
RELOAD_SHARE = 0.15  # of a device's time, that a model without work there counts for if it takes its TTFT to load
STALE = 2.5  # intervals: a report that is older says nothing
MOVE_S_MOST = 30.0  # a model's move that was not heard of for so long has failed
JOIN_S_MOST = 600.0  # a device that was asked for comes within that time, or is asked for again


class Rules(msgspec.Struct, frozen=True):
    """What a fleet does of itself."""

    migrate: bool = False
    whole: bool = True  # each model has one place, and moves with all its requests; else requests move one by one
    low_steps: float = LOW_STEPS
    high_steps: float = HIGH_STEPS
    band: Band | None = None
    interval_s: float = 1.0  # between two reports of a device


# ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Migrate(msgspec.Struct, frozen=True):
    """The source gives requests to the target: all of that model, or one after the other until the next orders."""

    source: int
    target: int
    model: ModelKey | None = None


class Join(msgspec.Struct, frozen=True):
    """So many devices more are wanted."""

    count: int


class Drain(msgspec.Struct, frozen=True):
    """The device gets no more requests; those that it has go on elsewhere."""

    device: int


class Retire(msgspec.Struct, frozen=True):
    """The device has drained and is no longer wanted."""

    device: int


Order = Migrate | Join | Drain | Retire

# ── books ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    resident: dict[ModelKey, float] = field(default_factory=dict)  # there, or on their way: load / TTFT of each
    work: dict[ModelKey, Share] = field(default_factory=dict)
    loading: bool = False
    load: float = 0.0
    reload: float = 0.0  # to bring in what is resident, should it be pushed out: the sum
    version: int = 0  # of what stands in the heaps
    there: bool = True
    died: bool = False  # it is not there, and comes back of itself
    drains: bool = False
    report: Load | None = None
    given: list[Load] = field(default_factory=list)  # requests that its report does not know of yet
    free: float = -float("inf")  # by its report, with those

    @property
    def cost(self) -> float:
        """For a model that is not there: it pushes others out, sooner where there are many."""
        return self.load + RELOAD_SHARE * self.reload

    @property
    def serves(self) -> bool:
        return self.there and not self.drains


class Cluster:
    """Devices 0 to `count` - 1, and those that join. What is told or asked of one of them costs at most the logarithm
    of their number; `freest` and `tick` look at all."""

    def __init__(self, count: int, costs: dict[ModelKey, ModelCosts], rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.devices = [Device(number) for number in range(count)]
        self.costs = costs
        self.where: dict[ModelKey, int] = {}  # the device that has requests for the model
        self.residents: dict[ModelKey, set[int]] = {}
        self._ttfts_s: dict[ModelKey, float] = {}  # of the last request for each
        self._heaps: tuple[list[tuple[float, int, int]], ...] = ([], [])  # loading or not: load, number, version
        self._scaling = Scaling(self.rules.band) if self.rules.band else None
        self._moves: dict[int, tuple[int, ModelKey, float]] = {}  # by source: target, model, since when
        self._joining: list[float] = []  # until when each device that was asked for is waited for
        for device in self.devices:
            self._note(device)

    # ── told ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def assigned(self, request: Request, number: int) -> None:
        self.where[request.model] = number
        self._ttfts_s[request.model] = request.objective.ttft_s
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
        device.resident[model] = self.costs[model].load_s / self._ttfts_s.get(model, TTFT_S)
        self._reloads(device)
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
        device.resident.pop(model, None)
        self._reloads(device)
        self.residents[model].discard(number)
        self._weigh(device, model)

    # ── told of devices ───────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, load: Load) -> None:
        """What a device reports. One that is not there, or an older report, is not heard."""
        device = self.devices[load.device]
        if not device.there or (device.report is not None and load.at < device.report.at):
            return
        device.report = load
        device.given = [given for given in device.given if given.at > load.at]
        self._weigh_report(device)

    def joined(self, number: int) -> None:
        """A device is there, idle: another, or one that had died or had left."""
        if number == len(self.devices):
            self.devices.append(Device(number))
            self._joining[:1] = []
        else:
            was = self.devices[number]
            assert not was.there, f"device {number} is there already"
            self.devices[number] = Device(number, version=was.version)
            if not was.died:
                self._joining[:1] = []
        self._note(self.devices[number])

    def died(self, number: int) -> None:
        """A device is gone, and what it had with it. Its requests have ended, as far as it had any."""
        self.devices[number].died = True
        self._gone(self.devices[number])

    def leaves(self, number: int) -> None:
        """A device takes no more requests, by somebody's word."""
        if not self.devices[number].drains:
            self._drain(self.devices[number])

    def stays(self, number: int) -> None:
        """A device that was to leave takes requests again; it stands for one that was asked for."""
        device = self.devices[number]
        assert device.there and device.drains, f"device {number} was not to leave"
        device.drains = False
        for model in device.work:
            self.where.setdefault(model, number)
        self._joining[:1] = []
        self._note(device)

    def forgotten(self, number: int) -> None:
        """A device that died does not come back."""
        self.devices[number].died = False

    def settled(self, source: int) -> None:
        """The move of a model from there has ended, well or not."""
        self._moves.pop(source, None)

    def _gone(self, device: Device) -> None:
        assert not device.work, f"device {device.number} goes with requests of {', '.join(device.work)}"
        device.there = device.loading = False
        for model in device.resident:
            self.residents[model].discard(device.number)
        device.resident.clear()
        device.reload = 0.0
        device.report, device.free = None, -float("inf")
        self._moves = {source: move for source, move in self._moves.items() if device.number not in (source, move[0])}
        self._note(device)

    @property
    def wanted(self) -> int:
        """Devices that there should be: those that serve, that come back, and that were asked for."""
        return sum([device.serves or device.died for device in self.devices]) + len(self._joining)

    # ── asked ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def cheapest(self, model: ModelKey, idle_cost: float, loading_cost: float) -> int:
        """The device with the least load, to which a device without the model adds what its own models count for, and
        `idle_cost`, or `loading_cost` if others are on their way to it; of equals the first."""
        devices = [self.devices[number] for number in self.residents.get(model, ())]
        best = min(((device.load, device.number) for device in devices if device.serves), default=None)
        for loading, cost in ((False, idle_cost), (True, loading_cost)):
            least = self._least(loading)
            if least is not None and (best is None or (least.cost + cost, least.number) < best):
                best = (least.cost + cost, least.number)
        assert best is not None, "there is no device"
        return best[1]

    def _least(self, loading: bool) -> Device | None:
        heap = self._heaps[loading]
        while heap:
            _, number, version = heap[0]
            device = self.devices[number]
            if version == device.version and device.loading == loading and device.serves:
                return device
            heapq.heappop(heap)
        return None

    def freest(self, request: Request, now: float) -> int | None:
        """The device whose batch can go on longest, by its report and what it was given since; of equals the one with
        the fewest requests. It is given the request. None if no device has reported lately."""
        oldest = now - STALE * self.rules.interval_s
        best: Device | None = None
        for device in self.devices:
            report = device.report
            if report is None or report.at < oldest or not device.serves:
                continue
            if best is None or device.free > best.free or (device.free == best.free and _fewer(device, best)):
                best = device
        if best is None:
            return None
        token_bytes = self.costs[request.model].kv_bytes_per_token
        best.given.append(Load(best.number, now, 0.0, token_bytes * (request.context + 1), token_bytes, running=1))
        self._weigh_report(best)
        return best.number

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> list[Order]:
        """What should change; to be asked once in each interval."""
        oldest = now - STALE * self.rules.interval_s
        loads = [device.report for device in self.devices if device.report is not None and device.report.at >= oldest]
        orders: list[Order] = []
        if self.rules.migrate:
            orders += self._migrations(loads, now)
        if self._scaling is not None:
            orders += self._scale(loads, now)
        return orders

    def _migrations(self, loads: list[Load], now: float) -> list[Order]:
        self._moves = {source: move for source, move in self._moves.items() if not self._over(source, move, now)}
        moving = {*self._moves, *(target for target, _, _ in self._moves.values())}
        still = [load for load in loads if load.device not in moving]
        draining = frozenset([device.number for device in self.devices if device.drains])
        found = pairs(still, draining, self.rules.low_steps, self.rules.high_steps)
        if not self.rules.whole:
            return [Migrate(source, target) for source, target in found]
        orders: list[Order] = []
        by_device = {load.device: load for load in still}
        for source, target in found:
            model = pick_model(by_device[source], by_device[target], source in draining)
            if model is not None:
                self._moves[source] = target, model, now
                self.where[model] = target
                orders.append(Migrate(source, target, model))
        return orders

    def _over(self, source: int, move: tuple[int, ModelKey, float], now: float) -> bool:
        """The source has no requests for the model any more, and what it had the target counts, or they ended."""
        target, model, since = move
        left, there = self.devices[source].report, self.devices[target].report
        if left is None or there is None or model in left.shares:
            return now >= since + MOVE_S_MOST
        return model in there.shares or now >= since + STALE * self.rules.interval_s

    def _scale(self, loads: list[Load], now: float) -> list[Order]:
        assert self._scaling is not None
        orders: list[Order] = []
        unheard = leaving = 0
        for device in self.devices:
            report = device.report
            if device.drains and device.there and not device.work and report is not None and not report.requests:
                self._gone(device)
                orders.append(Retire(device.number))
            unheard += device.died or (report is None and device.serves)
            leaving += device.there and device.drains
        self._joining = [until for until in self._joining if now < until]
        serving = [load for load in loads if not self.devices[load.device].drains]
        change = self._scaling.check(serving, len(self._joining) + unheard, now, leaving)
        if change.join:
            self._joining += [now + JOIN_S_MOST] * change.join
            orders.append(Join(change.join))
        for number in change.leave:
            self._drain(self.devices[number])
            orders.append(Drain(number))
        return orders

    def _drain(self, device: Device) -> None:
        device.drains = True
        for model in device.work:
            if self.where.get(model) == device.number:
                del self.where[model]
        self._note(device)

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

    def _reloads(self, device: Device) -> None:
        device.reload = sum(device.resident.values())
        self._note(device)

    def _note(self, device: Device) -> None:
        """Its place among the others changed."""
        device.version += 1
        if not device.serves:
            return
        heapq.heappush(self._heaps[device.loading], (device.cost, device.number, device.version))

    def _weigh_report(self, device: Device) -> None:
        assert device.report is not None
        report = device.report
        used, step = report.used_bytes + report.queued_bytes, report.step_bytes
        for given in device.given:
            used += given.used_bytes
            step += given.step_bytes
        device.free = steps(report.kv_bytes - used, step, report.busy)


def _fewer(device: Device, other: Device) -> bool:
    """Requests."""
    assert device.report is not None and other.report is not None
    return device.report.requests + len(device.given) < other.report.requests + len(other.given)
