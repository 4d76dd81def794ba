"""Fleet policies by name: the dispatch of requests to devices, the turns of models on each device, and the actions of
the fleet: moving requests, growing and shrinking."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from runtime.core.device.request import ModelKey, Objective
from runtime.core.fleet.cluster import Rules
from runtime.core.fleet.scaling import Band
from runtime.core.ledgers.costs import Law, Profile
from runtime.core.turns.aegaeon import Aegaeon
from runtime.core.turns.fixed import RequestLevel, Resident
from runtime.core.turns.prism import Prism
from runtime.core.turns.slack import Slack
from runtime.core.turns.turn import RoundRobin, Turns
from runtime.sim.dispatch.base import Dispatch
from runtime.sim.dispatch.baselines import FirstFree, Fixed, Freest, InTurns, Pressure
from runtime.sim.dispatch.gateways import GatewayDispatch
from runtime.sim.dispatch.roles import Roles
from runtime.sim.dispatch.sight import AS_GATEWAYS_SEE, Sight
from runtime.sim.report import LaneSpan
from runtime.sim.workload import Workload, drawn
from runtime.sim.world import SimulationResult, World

KV_LEAST = 1 / 6  # part of a device's memory left for KV cache by models that share the device without giving way


@dataclass(frozen=True)
class Setting:
    """Workload, device profile, number of devices and sight of gateways for which a fleet is made."""

    workload: Workload
    profile: Profile
    devices: int
    sight: Sight = AS_GATEWAYS_SEE

    @property
    def rates(self) -> dict[ModelKey, float]:
        sizes, rates = self.workload.models, self.workload.rates
        return {ModelKey(size.name): rate for size, rate in zip(sizes, rates, strict=True)}


@dataclass(frozen=True)
class Fleet:
    """Policies of a fleet; `turns` makes the turn policy of each device, called in the order of device numbers."""

    turns: Callable[[], Turns]
    dispatch: Dispatch
    shares: bool = False  # resident models share the device, and switches between models take no time


def _aegaeon(setting: Setting, prefill: int = 0, quota: float = 0.0) -> Fleet:
    """Fleet of Aegaeon with `prefill` devices for prefill (0: 3 in 8), the rest for decode; a single device does both.

    `quota`: longest quota in seconds; 0: quotas without a knob. Raises ValueError if no device is left for decode."""
    if setting.devices == 1:
        return Fleet(lambda: Aegaeon(quota or None), GatewayDispatch(setting.sight))
    count = round(prefill) or max(1, round(setting.devices * 3 / 8))
    if count >= setting.devices:
        raise ValueError(f"{count} devices for prefill leave none of {setting.devices} for decode")
    return Fleet(lambda: Aegaeon(quota or None), Roles(count, setting.sight))


def _fixed(setting: Setting, models_most: int) -> Fleet:
    kv_bytes = round(setting.profile.memory_bytes * KV_LEAST / models_most)
    return Fleet(Resident, Fixed(setting.rates, setting.profile.memory_bytes, kv_bytes, models_most), shares=True)


def _prism(setting: Setting) -> Fleet:
    memory_bytes = setting.profile.memory_bytes
    return Fleet(Prism, Pressure(memory_bytes, round(memory_bytes * KV_LEAST / 4)), shares=True)


# A function of the setting makes each fleet; tuned values are passed by name.
FLEETS: dict[str, Callable[..., Fleet]] = {
    "slack": lambda setting: Fleet(Slack, GatewayDispatch(setting.sight)),
    "aegaeon": _aegaeon,
    "aegaeon-paper": lambda setting: _aegaeon(setting, quota=4.0),
    "aegaeon-unified": lambda setting, quota=0.0: Fleet(lambda: Aegaeon(quota or None), GatewayDispatch(setting.sight)),
    "request": lambda setting: Fleet(RequestLevel, FirstFree()),
    "request-shortest": lambda setting: Fleet(RequestLevel, FirstFree(shortest=True)),
    "prism": _prism,
    "resident": lambda setting, models=3: _fixed(setting, models),
    "dedicated": lambda setting: _fixed(setting, 1),
    "round-robin": lambda setting, quota=8: Fleet(lambda: RoundRobin(quota), GatewayDispatch(setting.sight)),
}

# Dispatches for fleets whose devices come and go or whose requests move. Under `freest` and `in-turns` any device may
# serve any model.
DISPATCHES: dict[str, Callable[[Sight], Dispatch]] = {
    "gateways": GatewayDispatch,
    "freest": lambda sight: Freest(),
    "in-turns": lambda sight: InTurns(),
}
# Freeness of a scaling fleet, by whether each model has a single place: then time gets short, not memory.
BANDS = {True: (150.0, 400.0), False: (10.0, 60.0)}


class Changes(msgspec.Struct, frozen=True):
    """Dispatch of a fleet, sight of its gateways, and changes while serving: migration, scaling and faults."""

    dispatch: str = ""  # a name in DISPATCHES, to replace the policy's dispatch
    migrate: bool = False
    scale: tuple[int, int] | None = None  # the fewest devices and the most
    faults: int = 0
    seed: int = 0  # of the faults
    sight: Sight = AS_GATEWAYS_SEE


AS_IT_IS = Changes()


def check(policy: str, **tuning: float) -> None:
    """Raises ValueError if no policy has the name, or if the policy has no such settings."""
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
    spans: list[LaneSpan] | None = None,
    checks: bool = False,
    warm_s: float = 60.0,
    drain_s: float = 120.0,
    changes: Changes = AS_IT_IS,
    **tuning: float,
) -> SimulationResult:
    """Simulates a workload and returns the result for requests after the warm-up.

    The warm-up is at most a quarter of the workload. Raises ValueError if the policy, the tuning and the changes do not
    fit together."""
    check(policy, **tuning)
    fleet = FLEETS[policy](Setting(workload, profile, devices, changes.sight), **tuning)
    dispatch = DISPATCHES[changes.dispatch](changes.sight) if changes.dispatch else fleet.dispatch
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
    """Rules of the cluster; None if devices need not report.

    Raises ValueError if the dispatch can't migrate requests, scale or survive faults."""
    if (changes.migrate or changes.scale or changes.faults) and not isinstance(
        dispatch, (GatewayDispatch, Freest, InTurns)
    ):
        raise ValueError(
            f"devices of policy {policy!r} have fixed parts, so requests do not move and devices do not come or go: "
            f"name one of {', '.join(DISPATCHES)} as its dispatch"
        )
    if not (changes.migrate or changes.scale or isinstance(dispatch, Freest)):
        return None
    whole = isinstance(dispatch, GatewayDispatch)
    band = Band(*changes.scale, *BANDS[whole]) if changes.scale else None
    return Rules(migrate=changes.migrate, whole=whole, band=band)


def _shared(profile: Profile) -> Profile:
    models = {name: msgspec.structs.replace(costs, switch_s=0.0) for name, costs in profile.models.items()}
    law: Law | None = profile.law and msgspec.structs.replace(profile.law, switch_s=0.0)
    return msgspec.structs.replace(profile, law=law, models=models)
