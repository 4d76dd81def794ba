"""State machine of a fleet of devices: where models have work, the load of each device, and orders for changes. Pure.

Devices tell the machine what happened. Dispatch policies read the books, and may ask for the freest device.

Each device reports sums of its load at intervals. `tick` returns orders to move requests between devices, to ask for
devices and to let devices go. A device whose report is old gets no requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from runtime.core.device.request import ModelKey, Request
from runtime.core.fleet.rebalance import HIGH_STEPS, LOW_STEPS, Load, pairs, pick_model, pick_part, steps
from runtime.core.fleet.roles import RolePolicy, RoleRule
from runtime.core.fleet.scaling import Band, FleetScaling
from runtime.core.ledgers.costs import ModelCosts
from store.contract.wire import Role

STALE = 2.5  # intervals: older reports count for nothing
MOVE_S_MOST = 30.0  # a model's move that is not over after 30 s has failed
JOIN_S_MOST = 600.0  # a device asked for comes within 600 s, or is asked for again


class Rules(msgspec.Struct, frozen=True):
    """Rules for changes that a fleet makes without an operator."""

    migrate: bool = False  # requests move between devices
    whole: bool = True  # a model has a single place and moves with all its requests; False: requests move one by one
    low_steps: float = LOW_STEPS
    high_steps: float = HIGH_STEPS
    band: Band | None = None  # None: the number of devices does not change
    roles: RoleRule | None = None  # None: roles of devices do not change
    interval_s: float = 1.0  # between two reports of a device


# ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class MigrateOrder(msgspec.Struct, frozen=True):
    """The source gives requests to the target: every request of `model`, or `count` requests of `model`; without a
    model, single requests until the next orders."""

    source: int
    target: int
    model: ModelKey | None = None
    count: int | None = None  # None: all


class Join(msgspec.Struct, frozen=True):
    """The fleet wants `count` more devices."""

    count: int


class DrainOrder(msgspec.Struct, frozen=True):
    """The device gets no more requests, and the running requests move to other devices."""

    device: int


class Retire(msgspec.Struct, frozen=True):
    """The device has drained; the fleet no longer wants the device."""

    device: int


class RoleOrder(msgspec.Struct, frozen=True):
    """The device computes prompts alone, or decodes alone, or does both, from now on."""

    device: int
    role: Role


Order = MigrateOrder | Join | DrainOrder | Retire | RoleOrder


class MoveOrdered(NamedTuple):
    """An ordered move of a model's requests that may still be under way."""

    target: int
    model: ModelKey
    since: float  # seconds
    part: int | None  # number of requests; None: all


# ── books ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class FleetDevice:
    """A device as the fleet sees the device."""

    number: int
    resident: set[ModelKey] = field(default_factory=set)  # models with weights present or on their way
    work: dict[ModelKey, int] = field(default_factory=dict)  # number of requests of each model with requests
    loading: bool = False  # weights of a model are on their way
    there: bool = True
    died: bool = False  # the device is not there, but comes back by itself
    drains: bool = False
    role: Role = Role.BOTH
    report: Load | None = None
    given: list[Load] = field(default_factory=list)  # requests given since the last report
    free: float = -float("inf")  # freeness by the last report, less the requests given since

    @property
    def serves(self) -> bool:
        return self.there and not self.drains


class Cluster:
    """Fleet of devices, numbered 0 to `count` - 1; joining devices get the next numbers.

    `freest` and `tick` look at every device; any other call looks at one device."""

    def __init__(self, count: int, costs: dict[ModelKey, ModelCosts], rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.devices = [FleetDevice(number) for number in range(count)]
        self.costs = costs
        self.where: dict[ModelKey, int] = {}  # device with the model's requests
        self.residents: dict[ModelKey, set[int]] = {}  # devices with the model's weights
        self._scaling = FleetScaling(self.rules.band) if self.rules.band else None
        self._roles = RolePolicy(self.rules.roles) if self.rules.roles else None
        self._moves: dict[int, MoveOrdered] = {}  # by source
        self._joining: list[float] = []  # for each device asked for: until when the fleet waits for the device

    # ── told ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def assigned(self, request: Request, number: int) -> None:
        """A request was given to the device."""
        self.where[request.model] = number
        work = self.devices[number].work
        work[request.model] = work.get(request.model, 0) + 1

    def ended(self, request: Request, number: int) -> None:
        """A request of the device has ended, or has moved to another device."""
        work = self.devices[number].work
        work[request.model] -= 1
        if not work[request.model]:
            del work[request.model]
            if self.where.get(request.model) == number:
                del self.where[request.model]

    def loads(self, number: int, model: ModelKey) -> None:
        """The model's weights are on their way to the device."""
        device = self.devices[number]
        device.loading = True
        device.resident.add(model)
        self.residents.setdefault(model, set()).add(number)

    def loaded(self, number: int) -> None:
        """The weights on their way to the device have arrived, or failed to arrive."""
        self.devices[number].loading = False

    def left(self, number: int, model: ModelKey) -> None:
        """Some of the model's weights on the device are gone."""
        self.devices[number].resident.discard(model)
        self.residents[model].discard(number)

    # ── told of devices ───────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, load: Load) -> None:
        """Take a device's report. Reports of absent devices, and reports older than the last report, are ignored."""
        device = self.devices[load.device]
        if not device.there or (device.report is not None and load.at < device.report.at):
            return
        device.report = load
        device.given = [given for given in device.given if given.at > load.at]
        self._weigh_report(device)

    def joined(self, number: int) -> None:
        """An idle device is there: a new device, with the next number, or a device that had died or left."""
        if number == len(self.devices):
            self.devices.append(FleetDevice(number))
            self._joining[:1] = []
        else:
            was = self.devices[number]
            assert not was.there, f"device {number} is there already"
            self.devices[number] = FleetDevice(number)
            if not was.died:
                self._joining[:1] = []

    def died(self, number: int) -> None:
        """A device is gone, with everything on it. The caller must have told the end of its requests before."""
        self.devices[number].died = True
        self._gone(self.devices[number])

    def leaves(self, number: int) -> None:
        """A device has announced that it takes no more requests."""
        if not self.devices[number].drains:
            self._drain(self.devices[number])

    def stays(self, number: int) -> None:
        """A device that was to leave takes requests again, and counts for a device that was asked for."""
        device = self.devices[number]
        assert device.there and device.drains, f"device {number} was not to leave"
        device.drains = False
        for model in device.work:
            self.where.setdefault(model, number)
        self._joining[:1] = []

    def forgotten(self, number: int) -> None:
        """A device that died will not come back."""
        self.devices[number].died = False

    def settled(self, source: int) -> None:
        """The move of a model from the source has ended, well or badly. A part's move ends by the reports alone."""
        if source in self._moves and self._moves[source].part is None:
            del self._moves[source]

    def _gone(self, device: FleetDevice) -> None:
        assert not device.work, f"device {device.number} goes with requests of {', '.join(device.work)}"
        device.there = device.loading = False
        for model in device.resident:
            self.residents[model].discard(device.number)
        device.resident.clear()
        device.report, device.free = None, -float("inf")
        self._moves = {
            source: move for source, move in self._moves.items() if device.number not in (source, move.target)
        }

    @property
    def wanted(self) -> int:
        """Number of devices that the fleet should have: serving devices, dead devices that come back, and devices asked
        for."""
        return sum([device.serves or device.died for device in self.devices]) + len(self._joining)

    # ── asked ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def freest(self, request: Request, now: float) -> int | None:
        """Number of the device whose batch can go on longest, by its report and the requests given since.

        Among equally free devices, the device with the fewest requests is taken. The request is booked to the device.
        Returns None if no serving device has reported lately."""
        oldest = now - STALE * self.rules.interval_s
        best: FleetDevice | None = None
        for device in self.devices:
            report = device.report
            if report is None or report.at < oldest or not device.serves:
                continue
            if best is None or device.free > best.free or (device.free == best.free and _fewer(device, best)):
                best = device
        if best is None:
            return None
        kv = self.costs[request.model].kv
        used_bytes, step_bytes = kv.bytes(request.context + 1), kv.growth(request.context)
        best.given.append(Load(best.number, now, 0.0, used_bytes, step_bytes, running=1))
        self._weigh_report(best)
        return best.number

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> list[Order]:
        """Orders for changes of the fleet. Call once in each interval."""
        oldest = now - STALE * self.rules.interval_s
        loads = [device.report for device in self.devices if device.report is not None and device.report.at >= oldest]
        orders: list[Order] = []
        if self.rules.migrate:
            orders += self._migrations(loads, now)
        if self._scaling is not None:
            orders += self._scale(loads, now)
        if self._roles is not None:
            views = [load.roles for load in loads if load.roles is not None and self.devices[load.device].serves]
            orders += [RoleOrder(device, role) for device, role in self._roles.check(views, now).items()]
        return orders

    def _migrations(self, loads: list[Load], now: float) -> list[Order]:
        self._moves = {source: move for source, move in self._moves.items() if not self._over(source, move, now)}
        moving = {*self._moves, *(move.target for move in self._moves.values())}
        prompts = {device.number for device in self.devices if device.role is Role.PREFILL}
        still = [load for load in loads if load.device not in moving and load.device not in prompts]
        draining = frozenset([device.number for device in self.devices if device.drains])
        found = pairs(still, draining, self.rules.low_steps, self.rules.high_steps)
        if not self.rules.whole:
            return [MigrateOrder(source, target) for source, target in found]
        orders: list[Order] = []
        by_device = {load.device: load for load in still}
        for source, target in found:
            order = self._model_order(by_device[source], by_device[target], source in draining)
            if order is not None and order.model is not None:
                self._moves[source] = MoveOrdered(target, order.model, now, order.count)
                orders.append(order)
        return orders

    def _model_order(self, source: Load, target: Load, drains: bool) -> MigrateOrder | None:
        """Order to move a model with all its requests, or a part of the requests of a model that lacks memory by
        itself; None if neither helps."""
        model = pick_model(source, target, drains)
        if model is not None:
            self.where[model] = target.device
            return MigrateOrder(source.device, target.device, model)
        part = pick_part(source, target)
        return None if part is None else MigrateOrder(source.device, target.device, *part)

    def _over(self, source: int, move: MoveOrdered, now: float) -> bool:
        """Whether a move of requests of a model is over.

        A whole move is over when the source reports no work for the model, and the target reports work or has had time
        to report. A part's move is over once both devices have had time to report. A move that does not end by the
        reports is given up after MOVE_S_MOST."""
        left, there = self.devices[source].report, self.devices[move.target].report
        reported = now >= move.since + STALE * self.rules.interval_s
        if left is None or there is None or (move.part is None and move.model in left.shares):
            return now >= move.since + MOVE_S_MOST
        return reported or (move.part is None and move.model in there.shares)

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
            orders.append(DrainOrder(number))
        return orders

    def _drain(self, device: FleetDevice) -> None:
        device.drains = True
        for model in device.work:
            if self.where.get(model) == device.number:
                del self.where[model]

    # ── books ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _weigh_report(self, device: FleetDevice) -> None:
        assert device.report is not None
        report = device.report
        used, step = report.used_bytes + report.queued_bytes, report.step_bytes
        for given in device.given:
            used += given.used_bytes
            step += given.step_bytes
        device.free = steps(report.kv_bytes - used, step, report.busy)


def _fewer(device: FleetDevice, other: FleetDevice) -> bool:
    """Whether `device` has fewer requests than `other`, requests given since the reports included."""
    assert device.report is not None and other.report is not None
    return device.report.requests + len(device.given) < other.report.requests + len(other.given)
