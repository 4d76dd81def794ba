"""Roles of a fleet's devices: some compute prompts alone while prompts make the tokens of other requests late. Pure.

Devices with both roles use their time and memory best, so a fleet begins with devices of both roles, and returns to
them. A step with a part of a long prompt may take longer than the time between two tokens. If many tokens are late
while prompts take much of the fleet's time, prompts get devices of their own. Each model then needs its weights twice,
on a device for prompts and on a device that decodes: roles are given only where the weights of all models with requests
fit beside each other, and where the remaining devices can bear the decoding.

Given roles are a trial for as long as they last: where the share of late tokens does not fall, or rises again, all
devices get both roles again, and the next trial waits, after each failed trial twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from runtime.core.device.request import ModelKey
from store.contract.wire import Role


class RoleRule(msgspec.Struct, frozen=True):
    """Bounds for giving roles and for taking roles back. Times are seconds."""

    late: float = 0.02  # share of late tokens from which on prompts are to have devices of their own
    tokens: int = 100  # fewer tokens in the window say nothing
    prompts: float = 0.3  # devices that prompts must keep busy for roles to be given; below half, roles are taken back
    full: float = 0.85  # share of a device's time that prompts may take
    decodes: float = 0.75  # share of a device's time that decoding may need where prompts leave
    weights: float = 0.8  # share of a device's memory that weights may take
    window_s: float = 15.0  # over which rates and shares are taken
    checks: int = 5  # in a row that must ask for a change
    settle_s: float = 3.0  # after a change, until reports tell of the new roles
    hold_s: float = 30.0  # least time between two changes
    falls_to: float = 0.5  # a trial fails if the share of late tokens stays above this part of the share before
    pause_s: float = 120.0  # after a trial without success; then twice as long each time
    pause_s_most: float = 3600.0


class RoleView(msgspec.Struct, frozen=True):
    """Report of a device for the choice of roles. Counters are cumulative since the start of the device process."""

    device: int
    at: float  # seconds
    role: Role
    memory_bytes: int
    prompt_s: float = 0.0  # counter: time of the device that the prompts of arrived requests take
    tokens: int = 0  # counter: tokens due in ended requests
    late: int = 0  # counter: part of `tokens` that was late
    busy: float = 0.0  # share of the device's time that decoding needs
    weights: Mapping[ModelKey, int] = {}  # bytes of each model with requests
    given: bool = False  # the role was given by this policy, not by an operator


class RolesNeeded(msgspec.Struct, frozen=True):
    """Needs of the fleet in the last window."""

    late: float | None  # share of late tokens; None: too few tokens
    prompts: float  # devices that prompts keep busy
    fits: bool  # a device has room for the weights of all models with requests
    most: int  # devices that may be for prompts alone


class RolePolicy:
    """Gives roles to devices and takes roles back; `check` is to be called at about equal intervals."""

    def __init__(self, rule: RoleRule) -> None:
        self._rule = rule
        self._seen: dict[int, list[RoleView]] = {}  # reports of each device in the window, oldest first
        self._asked = 0  # checks in a row that ask for a change
        self._changed_at = -math.inf
        self._before = 0.0  # share of late tokens before the trial; 0: not known
        self._pause_s, self._paused_until = rule.pause_s, -math.inf

    def check(self, views: Sequence[RoleView], now: float) -> dict[int, Role]:
        """Return the new roles of the devices whose role is to change.

        Args:
            views: last reports of the devices that take requests. Devices that drain or died are left out.
            now: seconds."""
        self._note(views, now)
        if now < self._changed_at + self._rule.settle_s:
            return {}
        roles = {view.device: view.role for view in views}
        if any([view.role is not Role.BOTH and not view.given for view in views]):  # an operator's choice stands
            return {view.device: Role.BOTH for view in views if view.given and view.role is not Role.BOTH}
        prompts = [number for number, role in roles.items() if role is Role.PREFILL]
        if not prompts or len(prompts) == len(views):
            if any([role is not Role.BOTH for role in roles.values()]):  # the devices of the other role are gone
                return self._all_both(roles, now)
            return self._maybe_give(views, now)
        new = {number: Role.DECODE for number, role in roles.items() if role is Role.BOTH}
        return self._maybe_take_back(views, len(prompts), now) or new

    # ── decisions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _maybe_give(self, views: Sequence[RoleView], now: float) -> dict[int, Role]:
        rule, needed = self._rule, self._needed(views)
        starve = needed.late is not None and needed.late >= rule.late and needed.prompts >= rule.prompts
        count = math.ceil(needed.prompts / rule.full)
        if not self._insists(starve and needed.fits and count <= needed.most, now) or now < self._paused_until:
            return {}
        self._before = needed.late or 0.0
        self._changed(now)
        return self._split(views, count)

    def _maybe_take_back(self, views: Sequence[RoleView], prompts: int, now: float) -> dict[int, Role]:
        rule, needed = self._rule, self._needed(views)
        late = needed.late is not None and needed.late >= max(rule.late, self._before * rule.falls_to)
        over = needed.prompts < rule.prompts / 2 or not needed.fits
        if not self._insists(late or over, now):
            return {}
        count = math.ceil(needed.prompts / rule.full)
        if not over and prompts < count <= needed.most:
            self._changed(now)
            return self._split(views, count)
        if over:
            self._pause_s = rule.pause_s
        else:
            self._paused_until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, rule.pause_s_most)
        return self._all_both({view.device: view.role for view in views}, now)

    def _insists(self, asked: bool, now: float) -> bool:
        """Return whether a change was asked for often enough in a row, and the last change is long enough ago."""
        self._asked = self._asked + 1 if asked else 0
        return self._asked >= self._rule.checks and now >= self._changed_at + self._rule.hold_s

    def _all_both(self, roles: Mapping[int, Role], now: float) -> dict[int, Role]:
        self._before = 0.0
        self._changed(now)
        return {number: Role.BOTH for number, role in roles.items() if role is not Role.BOTH}

    def _changed(self, now: float) -> None:
        self._asked, self._changed_at = 0, now

    def _split(self, views: Sequence[RoleView], count: int) -> dict[int, Role]:
        """Return the changes after which `count` devices compute prompts: first those that do, then the least busy."""
        ranked = sorted(views, key=lambda view: (view.role is not Role.PREFILL, view.busy, view.device))
        chosen = {view.device for view in ranked[:count]}
        wanted = {view.device: Role.PREFILL if view.device in chosen else Role.DECODE for view in views}
        return {view.device: wanted[view.device] for view in views if wanted[view.device] is not view.role}

    # ── what the reports say ──────────────────────────────────────────────────────────────────────────────────────────

    def _note(self, views: Sequence[RoleView], now: float) -> None:
        """Keep the reports of the window, of present devices. A counter that fell is of a process started again."""
        seen = {}
        for view in views:
            known = self._seen.get(view.device, [])
            if known and (view.prompt_s < known[-1].prompt_s or view.tokens < known[-1].tokens):
                known = []
            if not known or view.at > known[-1].at:
                known = [*known, view]
            seen[view.device] = [each for each in known if each.at >= now - self._rule.window_s] or known[-1:]
        self._seen = seen

    def _needed(self, views: Sequence[RoleView]) -> RolesNeeded:
        rule, weights = self._rule, dict[ModelKey, int]()
        tokens = late = 0
        prompts = busy = 0.0
        for known in self._seen.values():
            first, last = known[0], known[-1]
            tokens += last.tokens - first.tokens
            late += last.late - first.late
            busy += sum([view.busy for view in known]) / len(known)
            if last.at > first.at:
                share = (last.prompt_s - first.prompt_s) / (last.at - first.at)
                prompts += min(share, rule.full)  # a device computes no more, and costs may be guessed too high
        for view in views:
            weights.update(view.weights)
        least_bytes = min([view.memory_bytes for view in views], default=0)
        return RolesNeeded(
            late=late / tokens if tokens >= rule.tokens else None,
            prompts=prompts,
            fits=sum(weights.values()) <= rule.weights * least_bytes,
            most=max(0, len(views) - max(1, math.ceil(busy / rule.decodes))),
        )
