"""The report of a runtime, made from the states of the runtime's models. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.core.device.request import ModelKey, Objective
from runtime.core.fleet.dispatch import LOAD_SHARE
from runtime.core.fleet.headroom import headroom
from runtime.core.ledgers.costs import ModelCosts
from store.contract.reports import Report, Seat
from store.contract.wire import Lease, ModelState, Residency

_DEFAULT = Objective()


def report_of(lease: Lease, seq: int, costs: Mapping[ModelKey, ModelCosts], requests: Mapping[str, int]) -> Report:
    """Return the report of a runtime. `load` and `full` include the headroom of requests of high priority.

    Args:
        lease: the runtime's state; states of models may be some time old.
        seq: number of the report in the runtime's epoch.
        costs: costs of each model of the lease on the runtime.
        requests: open requests by model, now. Models without requests may be left out."""
    page_bytes = lease.page_bytes
    kv_bytes = kv_room_bytes(lease, requests)
    here = frozenset([key for key, state in lease.models.items() if _here(key, state, page_bytes, costs)])
    seats: dict[str, Seat] = {}
    load = free = headroom(sum([state.high for state in lease.models.values()]))
    for key, count in requests.items():
        state = lease.models.get(key)
        if not count or state is None:
            continue
        busy = state.busy or costs[ModelKey(key)].step(count, 0) / (state.tbt_s or _DEFAULT.tbt_s)
        seats[key] = Seat(count, busy, _kv_bytes(state, page_bytes) / kv_bytes)
        load += busy if key in here else busy + LOAD_SHARE * costs[ModelKey(key)].load_s
    return Report(
        runtime=lease.runtime,
        epoch=lease.epoch,
        seq=seq,
        draining=lease.draining,
        role=lease.role,
        loading=any([state.residency is Residency.LOADING for state in lease.models.values()]),
        load=load,
        reload=sum([costs[ModelKey(key)].load_s for key in sorted(here)]) / _DEFAULT.ttft_s,
        full=sum([_kv_bytes(state, page_bytes) for state in lease.models.values()]) / kv_bytes + free,
        seats=seats,
        here=here,
    )


def kv_room_bytes(lease: Lease, requests: Mapping[str, int]) -> int:
    """Return the memory for keys and values, in bytes, at least 1.

    Weights of models without requests, and of parked models, give way to keys and values.

    Args:
        lease: the runtime's state.
        requests: open requests by model. Models without requests may be left out."""
    running = [state for key, state in lease.models.items() if requests.get(key)]
    weights_pages = sum([state.weights_pages for state in running if state.residency is Residency.RESIDENT])
    return max(1, (lease.pages_total - weights_pages) * lease.page_bytes)


def used_pages(state: ModelState) -> int:
    """Return the pages of the KV cache that requests use; pages with prefixes of ended requests alone do not count."""
    return state.kv_pages - state.spare_pages


def needed_pages(state: ModelState) -> int:
    """Return the pages of the KV cache that the running requests of a resident model use or lack for the next steps.

    Of a model that is not resident, only pages used count."""
    used = used_pages(state)
    return max(used, state.wanted_pages) if state.residency is Residency.RESIDENT else used


def _here(key: str, state: ModelState, page_bytes: int, costs: Mapping[ModelKey, ModelCosts]) -> bool:
    """Return whether all weights are on the device or coming in. Weights of a parked model may still all be there."""
    if state.residency in (Residency.RESIDENT, Residency.LOADING):
        return True
    pages_bytes = state.weights_pages * page_bytes
    return pages_bytes > 0 and pages_bytes >= costs[ModelKey(key)].weight_bytes


def _kv_bytes(state: ModelState, page_bytes: int) -> int:
    """Return the memory for keys and values that the model's requests have or wait for."""
    return used_pages(state) * page_bytes + state.head_bytes + state.queued_bytes
