"""The fleet as gateways and nodes see the fleet: by leases, reports, and specs of models. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from runtime.core.device.request import ModelKey
from runtime.core.fleet.dispatch import COLDNESS, Coldness, SeenFleet
from runtime.core.fleet.report import report_of
from runtime.core.ledgers.costs import Law, LawCosts
from store.contract.wire import EngineSpec, Lease, ModelState, Residency


class ColdnessBy(Mapping[ModelKey, Coldness]):
    """Where the weights of each model lie, by the states of models; failed models are left out.

    A lease of thousands of models comes each second, and a dispatcher asks for a few of the models."""

    def __init__(self, states: Mapping[str, ModelState]) -> None:
        self._states = states

    def __contains__(self, key: object) -> bool:
        state = self._states.get(key) if isinstance(key, str) else None
        return state is not None and state.residency is not Residency.FAILED

    def __getitem__(self, key: ModelKey) -> Coldness:
        return COLDNESS[self._states[key].residency]

    def __iter__(self) -> Iterator[ModelKey]:
        return (ModelKey(key) for key in self._states if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class WatchedFleet(SeenFleet):
    """Dispatch over runtimes that leases announce. A lease stands in for the reports of a runtime that sends none."""

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[str, EngineSpec] = {}
        self._costs: dict[str, tuple[dict[str, float], LawCosts]] = {}  # by runtime: the lease's law, the costs by it

    def lease_changed(self, id: str, lease: Lease | None, now: float) -> None:
        """Take the lease of a runtime; None: the lease was given back. `now`: seconds."""
        if lease is None:
            self._costs.pop(id, None)
            self.gone(id)
            return
        costs = self._costs_on(lease)
        seen = self.hosts(id, ColdnessBy(lease.models), costs)
        if seen.report.epoch != lease.epoch or not seen.report.seq:
            requests = {key: state.running + state.waiting for key, state in lease.models.items()}
            self.hear(report_of(lease, 0, costs, requests), now)

    def spec_changed(self, key: str, spec: EngineSpec | None) -> None:
        """Take the spec of a model; None: no runtime is to serve the model any more."""
        if spec is None:
            self._specs.pop(key, None)
            for _, costs in self._costs.values():
                costs.pop(ModelKey(key), None)
        else:
            self._specs[key] = spec

    def _costs_on(self, lease: Lease) -> LawCosts:
        law, costs = self._costs.get(lease.runtime, (None, None))
        if costs is None or law != lease.law:
            costs = LawCosts(msgspec.convert(lease.law, Law) if lease.law else None, self._specs)
            self._costs[lease.runtime] = lease.law, costs
        return costs
