"""A policy by name, as a fleet runs it: who takes a request, whose turn it is on each device, and what the fleet does
of itself: move requests, grow and shrink."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from runtime.cluster import Rules
from runtime.costs import Law, Profile
from runtime.policy.aegaeon import Aegaeon
from runtime.policy.dispatch import Dispatch, FirstFree, Fixed, Freest, InTurns, LeastLoaded, Pressure, Roles
from runtime.policy.fixed import RequestLevel, Resident
from runtime.policy.prism import Prism
from runtime.policy.scaling import Band
from runtime.policy.slack import Slack
from runtime.policy.turns import RoundRobin, Turns
from runtime.request import ModelKey, Objective
from runtime.sim.faults import drawn
from runtime.sim.report import Span
from runtime.sim.workload import Workload
from runtime.sim.world import Result, World

KV_LEAST = 1 / 6  # of a device's memory: what is left of it by models that share it without giving way


@dataclass(frozen=True)
class Setting:
    """What a fleet is made for."""

    workload: Workload
    profile: Profile
    devices: int

    @property
    def rates(self) -> dict[ModelKey, float]:
        sizes, rates = self.workload.models, self.workload.rates
        return {ModelKey(size.name): rate for size, rate in zip(sizes, rates, strict=True)}


@dataclass(frozen=True)
class Fleet:
    """`turns` makes the policy of each device, in the order of their numbers."""

    turns: Callable[[], Turns]
    dispatch: Dispatch
    shares: bool = False  # resident models share the device, and no time goes where one steps after another


def _aegaeon(setting: Setting, prefill: int = 0, quota: float = 0.0) -> Fleet:
    """`prefill` devices, or 3 of 8; quotas of at most so many seconds, or without a knob."""
    if setting.devices == 1:
        return Fleet(lambda: Aegaeon(quota or None), LeastLoaded())
    count = round(prefill) or max(1, round(setting.devices * 3 / 8))
    if count >= setting.devices:
        raise ValueError(f"{count} devices for prefill leave none of {setting.devices} for decode")
    return Fleet(lambda: Aegaeon(quota or None), Roles(count))


def _fixed(setting: Setting, models_most: int) -> Fleet:
    kv_bytes = round(setting.profile.memory_bytes * KV_LEAST / models_most)
    return Fleet(Resident, Fixed(setting.rates, setting.profile.memory_bytes, kv_bytes, models_most), shares=True)


def _prism(setting: Setting) -> Fleet:
    memory_bytes = setting.profile.memory_bytes
    return Fleet(Prism, Pressure(memory_bytes, round(memory_bytes * KV_LEAST / 4)), shares=True)


# Each is given the setting, and what is tuned by name.
FLEETS: dict[str, Callable[..., Fleet]] = {
    "slack": lambda setting: Fleet(Slack, LeastLoaded()),
    "aegaeon": _aegaeon,
    "aegaeon-paper": lambda setting: _aegaeon(setting, quota=4.0),
    "aegaeon-unified": lambda setting, quota=0.0: Fleet(lambda: Aegaeon(quota or None), LeastLoaded()),
    "request": lambda setting: Fleet(RequestLevel, FirstFree()),
    "request-shortest": lambda setting: Fleet(RequestLevel, FirstFree(shortest=True)),
    "prism": _prism,
    "resident": lambda setting, models=3: _fixed(setting, models),
    "dedicated": lambda setting: _fixed(setting, 1),
    "round-robin": lambda setting, quota=8: Fleet(lambda: RoundRobin(quota), LeastLoaded()),
}

# Where devices come and go, or requests move. In the last two any device may serve any model.
DISPATCHES: dict[str, Callable[[], Dispatch]] = {"least-loaded": LeastLoaded, "freest": Freest, "in-turns": InTurns}
# Freeness of a fleet that scales, by whether each model has one place: then it is time that gets short, not memory.
BANDS = {True: (150.0, 400.0), False: (10.0, 60.0)}


class Changes(msgspec.Struct, frozen=True):
    """What happens to a fleet while it serves."""

    dispatch: str = ""  # one of DISPATCHES instead of the policy's own
    migrate: bool = False
    scale: tuple[int, int] | None = None  # the fewest devices and the most
    faults: int = 0
    seed: int = 0  # of the faults


AS_IT_IS = Changes()


def check(policy: str, **tuning: float) -> None:
    """Raises ValueError where there is no such policy, or it can't be tuned so."""
    make = FLEETS.get(policy)
    if make is None:
        raise ValueError(f"policy is {policy!r}: one of {', '.join(FLEETS)}")
    try:
        inspect.signature(make).bind(None, **tuning)
    except TypeError as error:
        raise ValueError(f"policy {policy!r} cannot be tuned so: {error}") from error


def simulate(
    workload: Workload,
    profile: Profile,
    policy: str,
    devices: int,
    objective: Objective,
    spans: list[Span] | None = None,
    checks: bool = False,
    warm_s: float = 60.0,
    drain_s: float = 120.0,
    changes: Changes = AS_IT_IS,
    **tuning: float,
) -> Result:
    """What became of the requests after the warm-up, which is at most a quarter of the workload. Raises ValueError."""
    check(policy, **tuning)
    fleet = FLEETS[policy](Setting(workload, profile, devices), **tuning)
    dispatch = DISPATCHES[changes.dispatch]() if changes.dispatch else fleet.dispatch
    world = World(
        workload,
        _shared(profile) if fleet.shares else profile,
        fleet.turns,
        dispatch,
        devices,
        objective,
        spans,
        checks,
        _rules(changes, policy, dispatch),
        drawn(changes.faults, devices, workload.duration_s, changes.seed),
    )
    world.run(drain_s)
    return world.result(min(warm_s, workload.duration_s / 4))


def _rules(changes: Changes, policy: str, dispatch: Dispatch) -> Rules | None:
    """None where devices need not report. Raises ValueError where the dispatch can't do what is asked."""
    if (changes.migrate or changes.scale or changes.faults) and not isinstance(
        dispatch, (LeastLoaded, Freest, InTurns)
    ):
        raise ValueError(
            f"devices of policy {policy!r} have fixed parts, so requests do not move and devices do not come or go: "
            f"name one of {', '.join(DISPATCHES)} as its dispatch"
        )
    if not (changes.migrate or changes.scale or isinstance(dispatch, Freest)):
        return None
    whole = isinstance(dispatch, LeastLoaded)
    band = Band(*changes.scale, *BANDS[whole]) if changes.scale else None
    return Rules(migrate=changes.migrate, whole=whole, band=band)


def _shared(profile: Profile) -> Profile:
    models = {name: msgspec.structs.replace(costs, switch_s=0.0) for name, costs in profile.models.items()}
    law: Law | None = profile.law and msgspec.structs.replace(profile.law, switch_s=0.0)
    return msgspec.structs.replace(profile, law=law, models=models)
