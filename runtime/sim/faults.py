"""What goes wrong in a simulation, and when: drawn from a seed."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

Kind = Literal["dies", "hangs", "drops"]

SILENT_S = 2.0  # a device that hangs is given up when nothing was heard of it for so long
RESTART_S = 20.0  # until a device that died or was given up is there again, with nothing on it


class Fault(NamedTuple):
    at_s: float
    device: int
    kind: Kind  # of a device; "drops": the next request that was to go from it to another does not arrive there


def drawn(count: int, devices: int, duration_s: float, seed: int) -> list[Fault]:
    """So many, at any time and of any device."""
    rng = np.random.default_rng([seed, count])
    kinds: tuple[Kind, ...] = get_args(Kind)
    at_s = np.sort(rng.random(count) * duration_s).tolist()
    rows = zip(at_s, rng.integers(devices, size=count).tolist(), rng.integers(len(kinds), size=count), strict=True)
    return [Fault(at, device, kinds[kind]) for at, device, kind in rows]
