"""Interface between the simulated world and the policies that dispatch requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.core.device.request import Request
from runtime.core.fleet.cluster import Cluster
from runtime.sim.device import SimulatedDevice
from runtime.sim.simulation import Simulation


class Assigned(NamedTuple):
    """Request, or part of a request, with the device chosen."""

    request: Request
    device: int


class Dispatch:
    """Base of dispatch policies. A policy chooses the device of a request, and may hold requests back.

    `arrived` and `ended` return requests with devices; the caller must book the assignments at once."""

    def __init__(self) -> None:
        self.placements = 0  # requests of a model that had no request on any device
        self.splits = 0  # requests sent away from their model, though a device with the model was not hot
        self.refusals = 0  # choices of a device that was gone, or took no more requests

    def attach(self, world: Simulation, devices: list[SimulatedDevice]) -> None:
        """Take the world before its first event. `devices`: the world's list by number, which grows."""

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        """Return assignments after a request came from a client, or lost its device."""
        raise NotImplementedError  # each policy has a rule; mypyc compiles no abstract base

    def ended(self, assigned: Assigned, cluster: Cluster, now: float) -> Sequence[Assigned]:
        """Return assignments after the end of an assigned request, or of an assigned part."""
        return ()

    def target(self, request: Request, cluster: Cluster, now: float) -> int | None:
        """Return the device at which a request with a first token should go on; None: where the request is."""
        return None

    def moved(self, request: Request, number: int) -> None:
        """Note that an assigned request goes on at the device `number`."""
