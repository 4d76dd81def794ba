"""How many devices a fleet should have: freeness is kept in a band (Llumnix, §4.4). Pure.

Below the band for some checks in a row devices join, above it one leaves. What is compared with the upper end is the
freeness that the others would have without the one that leaves: so a step down is never followed by a step up under
the same load. All who wait count, for it is a device more that they wait for. To join nobody waits for the last change:
those that were asked for are counted already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from runtime.policy.migration import FULL_STEPS, Load, Total, pooled, total, without


class Band(msgspec.Struct, frozen=True):
    """Of the freeness of all devices together, and of their number."""

    least: int
    most: int
    low_steps: float = 10.0
    high_steps: float = 60.0
    low_checks: int = 3  # in a row, before devices join
    high_checks: int = 6  # before one leaves
    cooldown_s: float = 10.0  # after a change, before one leaves
    leaving_most: int | None = None  # at the same time; None: as many as are not needed

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.most, f"a fleet of {self.least} to {self.most} devices"
        assert self.low_steps < self.high_steps, "the band has no inside"
        assert self.leaving_most is None or self.leaving_most > 0, "a fleet of which nobody may leave"


class Change(msgspec.Struct, frozen=True):
    """So many devices more, or these leave."""

    join: int = 0
    leave: tuple[int, ...] = ()


NOTHING = Change()


class Scaling:
    """Asked once in a while, at intervals that are about equal."""

    def __init__(self, band: Band) -> None:
        self._band = band
        self._low = self._high = 0  # checks in a row
        self._quiet_until = -math.inf

    def check(self, loads: Sequence[Load], joining: int, now: float, leaving: int = 0) -> Change:
        """`loads` of those that serve and do not leave; `joining` devices were asked for and are not there yet."""
        band, count = self._band, len(loads) + joining
        if count < band.least:
            return self._changed(Change(join=band.least - count), now)
        if not loads:
            return NOTHING
        fleet = total(loads)
        victim = min(loads, key=lambda load: (load.running + load.waiting, -load.device))
        may = band.leaving_most is None or leaving < band.leaving_most
        high = may and count > band.least and not joining and without(fleet, victim) > band.high_steps
        low = pooled(fleet, joining) < band.low_steps
        self._low, self._high = (self._low + 1 if low else 0), (self._high + 1 if high else 0)
        if self._low >= band.low_checks and count < band.most:
            return self._changed(Change(join=min(self._short(fleet, joining), band.most - count)), now)
        if self._high >= band.high_checks and now >= self._quiet_until:
            return self._changed(Change(leave=(victim.device,)), now)
        return NOTHING

    def _changed(self, change: Change, now: float) -> Change:
        self._low = self._high = 0
        self._quiet_until = now + self._band.cooldown_s
        return change

    def _short(self, fleet: Total, joining: int) -> int:
        """Devices, each like the mean of those there, that would bring freeness back to the lower end."""
        low, each = self._band.low_steps, fleet.kv_bytes / fleet.devices
        wanted_bytes = fleet.kv_bytes - fleet.free_bytes + low * fleet.step_bytes
        wanted_time = fleet.busy / (1 - min(0.9, low / FULL_STEPS))
        return max(1, math.ceil(max(wanted_bytes / each, wanted_time)) - fleet.devices - joining)
