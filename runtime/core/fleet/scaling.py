"""Number of devices that a fleet should have: freeness is kept in a band (Llumnix, §4.4). Pure.

If freeness is below the band for some checks in a row, devices join; above the band, a device leaves. The upper end is
compared with the freeness of the fleet without the leaving device, so a step down is never followed by a step up under
equal load. Every waiting request counts, since more devices would serve waiting requests. Devices may join without a
pause after the last change: devices asked for are counted already.

Devices may come and go by nodes, whole machines of several devices. The node with the highest number leaves, whatever
its load, because a program that runs nodes under numbers ends the highest number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from runtime.core.fleet.rebalance import FULL_STEPS, DevicesTotal, Load, pooled, total, without


class Band(msgspec.Struct, frozen=True):
    """Band for the freeness of the fleet as a whole, and bounds on the number of devices."""

    least: int  # devices
    most: int  # devices
    low_steps: float = 10.0  # freeness
    high_steps: float = 60.0  # freeness
    low_checks: int = 3  # checks in a row below the band before devices join
    high_checks: int = 6  # checks in a row above the band before a device leaves
    cooldown_s: float = 10.0  # pause after a change before a device leaves
    leaving_most: int | None = None  # devices leaving at a time; None: any number
    node_devices: int | None = None  # devices of a node, which join and leave together; None: each device by itself

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.most, f"a fleet of {self.least} to {self.most} devices"
        assert self.low_steps < self.high_steps, "the band has no inside"
        assert self.node_devices is None or self.node_devices > 0, "a node without devices"
        assert self.leaving_most is None or self.leaving_most > 0, "a fleet of which nobody may leave"


class FleetChange(msgspec.Struct, frozen=True):
    """Decision: `join` more devices are wanted, or the devices `leave` are to leave."""

    join: int = 0
    leave: tuple[int, ...] = ()


NOTHING = FleetChange()


class FleetScaling:
    """Decides on the number of devices; `check` is to be called at about equal intervals."""

    def __init__(self, band: Band) -> None:
        self._band = band
        self._low = self._high = 0  # checks in a row
        self._quiet_until = -math.inf

    def check(self, loads: Sequence[Load], joining: int, now: float, leaving: int = 0) -> FleetChange:
        """Return the change that the fleet needs now.

        Args:
            loads: latest loads of serving devices; leaving devices are not among them.
            joining: number of devices asked for and not there yet.
            now: seconds.
            leaving: number of devices that are leaving."""
        band, count = self._band, len(loads) + joining
        if count < band.least:
            return self._changed(FleetChange(join=band.least - count), now)
        if not loads:
            return NOTHING
        fleet = total(loads)
        victims = self._victims(loads)
        may = bool(victims) and (band.leaving_most is None or leaving < band.leaving_most)
        may = may and count - len(victims) >= band.least and not joining
        high = may and without(fleet, victims) > band.high_steps
        low = pooled(fleet, joining) < band.low_steps
        self._low, self._high = (self._low + 1 if low else 0), (self._high + 1 if high else 0)
        if self._low >= band.low_checks and count < band.most:
            short = whole_nodes(self._short(fleet, joining), band.node_devices)
            return self._changed(FleetChange(join=min(short, band.most - count)), now)
        if self._high >= band.high_checks and now >= self._quiet_until:
            return self._changed(FleetChange(leave=tuple([load.device for load in victims])), now)
        return NOTHING

    def _victims(self, loads: Sequence[Load]) -> list[Load]:
        """Devices that would leave next: the device with the fewest requests, or all devices of the last node."""
        if self._band.node_devices is None:
            return [min(loads, key=lambda load: (load.running + load.waiting, -load.device))]
        last = max([load.node for load in loads if load.node is not None], default=None)
        return [] if last is None else [load for load in loads if load.node == last]

    def _changed(self, change: FleetChange, now: float) -> FleetChange:
        self._low = self._high = 0
        self._quiet_until = now + self._band.cooldown_s
        return change

    def _short(self, fleet: DevicesTotal, joining: int) -> int:
        """Number of devices, of mean size, that would bring freeness back to the lower end of the band; at least 1."""
        low, each = self._band.low_steps, fleet.kv_bytes / fleet.devices
        wanted_bytes = fleet.kv_bytes - fleet.free_bytes + low * fleet.step_bytes
        wanted_time = fleet.busy / (1 - min(0.9, low / FULL_STEPS))
        return max(1, math.ceil(max(wanted_bytes / each, wanted_time)) - fleet.devices - joining)


def whole_nodes(devices: int, node_devices: int | None) -> int:
    """Number of devices of so many whole nodes that `devices` devices are among them."""
    each = node_devices or 1
    return math.ceil(devices / each) * each
