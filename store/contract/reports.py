"""Reports of runtimes to dispatchers, published on plain subjects several times a second. Pure.

Leases say which runtimes live and which models the runtimes serve. Reports are smaller and more frequent, so that
gateways choose runtimes by what is, not by what was.
"""

from __future__ import annotations

import msgspec

from store.contract.wire import Message, Role

PERIOD_S = 0.25  # between two reports of a runtime with requests, in a fleet of at most SMALL_FLEET runtimes
SMALL_FLEET = 256
PERIOD_S_MOST = 1.0


def report_subject(runtime: str) -> str:
    """Subject on which a runtime publishes Report to every dispatcher."""
    return f"report.{runtime}"


def period_s(runtimes: int) -> float:
    """Seconds between two reports of a runtime with requests, in a fleet of `runtimes` runtimes.

    Every gateway reads every report. Runtimes of a large fleet report less often, so that a gateway reads as many
    reports a second, until PERIOD_S_MOST is reached: gateways with reports that old choose nearly as well."""
    return min(PERIOD_S_MOST, PERIOD_S * max(1.0, runtimes / SMALL_FLEET))


class Seat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Requests of a model on a runtime, and the part of the runtime that these requests need."""

    requests: int  # running, waiting, or parked between two turns
    busy: float = 0.0  # share of the device's time
    kv: float = 0.0  # share of the memory for keys and values


class Report(Message, frozen=True, kw_only=True, tag="Report", gc=False):
    """Report of a runtime to dispatchers: how much the runtime has to do, and where requests of each model are.

    Models without requests and without weights on the device are left out. `full` may exceed 1: waiting requests and
    the headroom of high priorities count as memory in use."""

    runtime: str
    epoch: int
    seq: int  # of the reports of the epoch
    draining: bool = False
    role: Role = Role.BOTH
    loading: bool = False  # weights of a model are coming in
    load: float = 0.0  # share of the device's time that the requests need to keep their pace
    reload: float = 0.0  # sum over the models with weights here: load time in TTFTs
    full: float = 0.0  # share of the memory for keys and values that the requests have or wait for
    seats: dict[str, Seat] = {}  # models with requests
    here: frozenset[str] = frozenset()  # models with weights on the device or coming in
