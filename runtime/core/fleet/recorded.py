"""The decisions of a dispatcher, recorded with everything that the dispatcher heard, for a replay with equal decisions.

Pure: records are handed to a function. A record holds no text of a prompt or a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

import msgspec

from runtime.core.device.request import ModelKey, Objective
from runtime.core.fleet.dispatch import NO_RUNTIMES
from runtime.core.fleet.watched import WatchedFleet
from store.contract.reports import Report
from store.contract.wire import EngineSpec, Lease


class LeaseHeard(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    runtime: str
    lease: Lease | None
    now: float


class ReportHeard(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    report: Report
    now: float


class SpecHeard(msgspec.Struct, frozen=True, array_like=True, tag="spec"):
    model: str
    spec: EngineSpec | None


class RequestTaken(msgspec.Struct, frozen=True, array_like=True, tag="took"):
    runtime: str
    model: ModelKey
    tbt_s: float


class RequestGivenBack(msgspec.Struct, frozen=True, array_like=True, tag="gave back"):
    runtime: str
    model: ModelKey


class NoReply(msgspec.Struct, frozen=True, array_like=True, tag="silent"):
    runtime: str


class Choice(msgspec.Struct, frozen=True, array_like=True, tag="choice"):
    """A decision: the runtime `chosen` for a request of the model; None if no runtime could take the request."""

    model: ModelKey
    objective: Objective
    now: float
    decodes: bool
    avoid: list[str]
    chosen: str | None


DispatchRecord = LeaseHeard | ReportHeard | SpecHeard | RequestTaken | RequestGivenBack | NoReply | Choice
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(DispatchRecord)


class RecordedFleet(WatchedFleet):
    """A fleet that hands `write` a record of everything heard and decided."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._write = write
        self._nested = False  # a call by the class below is no event

    def _record(self, record: DispatchRecord) -> None:
        if not self._nested:
            self._write(_encoder.encode(record))

    def lease_changed(self, id: str, lease: Lease | None, now: float) -> None:
        self._record(LeaseHeard(id, lease, now))
        self._nested = True
        try:
            super().lease_changed(id, lease, now)
        finally:
            self._nested = False

    def hear(self, report: Report, now: float) -> bool:
        self._record(ReportHeard(report, now))
        return super().hear(report, now)

    def spec_changed(self, key: str, spec: EngineSpec | None) -> None:
        self._record(SpecHeard(key, spec))
        super().spec_changed(key, spec)

    def took(self, id: str, model: ModelKey, tbt_s: float) -> None:
        self._record(RequestTaken(id, model, tbt_s))
        super().took(id, model, tbt_s)

    def gave_back(self, id: str, model: ModelKey) -> None:
        self._record(RequestGivenBack(id, model))
        super().gave_back(id, model)

    def refused(self, id: str) -> None:
        self._record(NoReply(id))
        super().refused(id)

    def choose(
        self,
        model: ModelKey,
        objective: Objective,
        now: float,
        decodes: bool = False,
        avoid: Set[str] = NO_RUNTIMES,
    ) -> str | None:
        chosen = super().choose(model, objective, now, decodes, avoid)
        self._record(Choice(model, objective, now, decodes, sorted(avoid), chosen))
        return chosen


class DispatchReplay(msgspec.Struct, frozen=True):
    """Result of a replay, up to the first difference."""

    heard: int  # records that are no decisions
    chosen: int  # decisions
    difference: str = ""  # empty: the replay decided as recorded


def is_dispatch_record(data: bytes) -> bool:
    """Return whether the bytes are a record of a dispatcher."""
    try:
        _decoder.decode(data)
    except msgspec.DecodeError:
        return False
    return True


def replay_dispatch(records: Iterable[tuple[int, bytes]]) -> DispatchReplay:
    """Feed a new dispatcher what the recorded dispatcher heard, and compare the decisions.

    Args:
        records: records with their places in bytes.

    Raises ValueError if a record is no record of a dispatcher."""
    fleet, heard, chosen = WatchedFleet(), 0, 0
    for at, data in records:
        try:
            record = _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ValueError(f"no journal of a gateway, or a broken one: the record at byte {at}: {error}") from error
        if not isinstance(record, Choice):
            _tell(fleet, record)
            heard += 1
            continue
        chosen += 1
        again = fleet.choose(record.model, record.objective, record.now, record.decodes, set(record.avoid))
        if again != record.chosen:
            said = f"at byte {at}, at {record.now:.6f} s, model {record.model}: recorded {record.chosen}, now {again}"
            return DispatchReplay(heard, chosen, said)
    return DispatchReplay(heard, chosen)


def _tell(fleet: WatchedFleet, record: DispatchRecord) -> None:
    match record:
        case LeaseHeard(runtime, lease, now):
            fleet.lease_changed(runtime, lease, now)
        case ReportHeard(report, now):
            fleet.hear(report, now)
        case SpecHeard(model, spec):
            fleet.spec_changed(model, spec)
        case RequestTaken(runtime, model, tbt_s):
            fleet.took(runtime, model, tbt_s)
        case RequestGivenBack(runtime, model):
            fleet.gave_back(runtime, model)
        case NoReply(runtime):
            fleet.refused(runtime)
