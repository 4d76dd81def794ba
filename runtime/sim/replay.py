"""Replay of a production journal: an `Instance` in virtual time is fed the journal and must decide as recorded.

Simulations run the code of production: equal events at equal times make equal decisions, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from runtime.core.device.instance import Instance
from runtime.core.device.pages import Pages
from runtime.core.device.request import ModelKey
from runtime.core.fleet.recorded import DispatchReplay, is_dispatch_record, replay_dispatch
from runtime.core.ledgers.costs import ModelCosts
from runtime.core.ledgers.device_time import DeviceTime
from runtime.core.turns.registry import POLICIES
from runtime.core.turns.turn import Turns
from runtime.device.journal import (
    AnswerRecord,
    BeginRecord,
    CostsRecord,
    DecideRecord,
    EventRecord,
    Record,
    encoded,
    event_of,
    read,
)
from store.contract.wire import EngineSpec
from store.files.records import records

NO_ANSWER = "nothing: the journal has no answer"


class CostsMissing(Exception):
    """The replayed `Instance` asks for costs of a model that the journal lacks."""


class Difference(msgspec.Struct, frozen=True):
    """First difference between the recorded and the replayed decisions."""

    record: int  # number of the record in the journal, from 1
    now: float  # seconds on the device's clock
    question: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"record {self.record}, at {self.now:.6f} s: {self.question}\n"
            f"recorded: {self.recorded}\nreplayed: {self.replayed}"
        )


class ReplayReport(msgspec.Struct, frozen=True):
    """Counts of compared items, up to the first difference."""

    runs: int  # device processes, one after another in the file
    heard: int  # events
    asked: int  # decisions of a free device
    difference: Difference | None = None


def replay(path: Path) -> ReplayReport:
    """Replays the journal at `path`. Raises OSError, or ValueError if the file is no journal."""
    with path.open("rb") as file:
        return compare(read(file))


def of_a_dispatcher(path: Path) -> bool:
    """Return whether the file is the journal of a gateway's dispatch, not of a device. Raises OSError, ValueError."""
    with path.open("rb") as file:
        first = next(records(file), None)
    return first is not None and is_dispatch_record(first[1])


def replay_choices(path: Path) -> DispatchReplay:
    """Replays the journal of a gateway's dispatch. Raises OSError, or ValueError if the file is no such journal."""
    with path.open("rb") as file:
        return replay_dispatch(records(file))


def compare(journal: Iterable[Record], policies: Mapping[str, Callable[[], Turns]] = POLICIES) -> ReplayReport:
    """Replays `journal`, stopping at the first difference. `policies`: turn policies by their names in the journal.

    Raises ValueError if `journal` is no journal or name an unknown policy."""
    runs = heard = asked = number = 0
    machine: _Machine | None = None
    question: EventRecord | DecideRecord | None = None
    for number, record in enumerate(journal, 1):
        match record:
            case BeginRecord():
                if machine and question and (found := machine.unanswered(question, number - 1)):
                    return ReplayReport(runs, heard, asked, found)
                runs, machine, question = runs + 1, _Machine(record, policies), None
            case EventRecord() | DecideRecord():
                question = record
            case CostsRecord(model):
                assert machine is not None
                machine.costs[model] = record.told()
            case AnswerRecord(effects):
                assert machine is not None
                if question is None:
                    raise ValueError(f"record {number} of the journal answers nothing")
                heard, asked = heard + isinstance(question, EventRecord), asked + isinstance(question, DecideRecord)
                if found := machine.differs(question, effects, number):
                    return ReplayReport(runs, heard, asked, found)
                question = None
    found = machine.unanswered(question, number) if machine and question else None
    return ReplayReport(runs, heard, asked, found)


class _Machine:
    """The replayed `Instance`, asked only once the recorded answer, and with it the costs of a new model, is known."""

    def __init__(self, began: BeginRecord, policies: Mapping[str, Callable[[], Turns]]) -> None:
        if began.policy not in policies:
            raise ValueError(f"the journal is of turn policy {began.policy!r}, and there are {', '.join(policies)}")
        self.costs: dict[ModelKey, ModelCosts] = {}
        pages = Pages(began.pages_total, began.page_bytes)
        # The start of the account only tells how long the device was idle before the first event.
        self._instance = Instance(policies[began.policy](), pages, self._costs, DeviceTime.open(0.0), began.by_history)

    def _costs(self, spec: EngineSpec) -> ModelCosts:
        if spec.key not in self.costs:
            raise CostsMissing(f"the journal has no costs of {spec.key}")
        return self.costs[ModelKey(spec.key)]

    def differs(self, question: EventRecord | DecideRecord, recorded: msgspec.Raw, number: int) -> Difference | None:
        replayed = self._put(question)
        if isinstance(replayed, msgspec.Raw) and _canonical(replayed) == _canonical(recorded):
            return None
        return Difference(number, question.now, _told(question), _shown(recorded), _shown(replayed))

    def unanswered(self, question: EventRecord | DecideRecord, number: int) -> Difference | None:
        """Difference for a last question without an answer in the journal: the process ended there.

        If the `Instance` was at fault, the replay raises as well. If the journal lacks costs of a model, the process
        ended before the answer was recorded, and the `Instance` was not at fault."""
        replayed = self._put(question)
        if isinstance(replayed, msgspec.Raw | CostsMissing):
            return None
        return Difference(number, question.now, _told(question), NO_ANSWER, _shown(replayed))

    def _put(self, question: EventRecord | DecideRecord) -> msgspec.Raw | Exception:
        """Encoded answer of the `Instance` to a question, or the exception raised."""
        event = event_of(question) if isinstance(question, EventRecord) else None
        try:
            if event is None:
                return encoded(self._instance.decide(question.now))
            return encoded(self._instance.hear(event, question.now))
        except Exception as error:  # an `Instance` led astray may raise anything
            return error


def _canonical(answer: msgspec.Raw) -> bytes:
    """Encode an answer in the one shortest form.

    msgspec chooses the head of a message by the number of the fields that a message may have, also of unset fields. A
    later version has more fields, and equal answers in a longer form."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(answer))


def _told(question: EventRecord | DecideRecord) -> str:
    return f"heard {event_of(question)}" if isinstance(question, EventRecord) else "asked what is to be done"


def _shown(answer: msgspec.Raw | Exception) -> str:
    if isinstance(answer, Exception):
        return f"{type(answer).__name__}: {answer}"
    return str(msgspec.msgpack.decode(answer))
