"""The journal of a device's Instance machine: events, questions and answers, for a replay with equal answers.

A journal is a file of records, each record after the record's length. Records are written one by one, so that the
kernel has every record when the process dies. Records are appended: a restarted device process continues the file. A
journal holds no text of a prompt or completion. Payloads, grammars, tokens, logprobs, stop reasons and an engine's
sentence on a refused request are left out. An effect is kept as the machine's decision, without contents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Literal, get_args

import msgspec
from msgspec.structs import asdict, astuple, replace

from runtime.core.device.events import Add, Arrived, Effect, Event, Lose, MoveStep, Refused, Stepped, Tell
from runtime.core.device.instance import Instance
from runtime.core.device.request import ModelKey, RequestId
from runtime.core.engine import Held, Output
from runtime.core.ledgers.costs import ModelCosts
from store.contract.kv_curve import KeptLayers
from store.contract.wire import EngineSpec, Finish
from store.files.records import BYTES_MOST, RecordFile, records

VERSION = 1


# ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class BeginRecord(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """The start of a new machine, before any event."""

    policy: str  # the policy's name in runtime/core/turns/registry.py
    pages_total: int
    page_bytes: int
    version: int = VERSION
    by_history: bool = False  # whether the machine stages models by the history of their requests


class EventRecord(msgspec.Struct, frozen=True, array_like=True, tag="heard"):
    now: float
    kind: str  # name of the event: see `recorded`
    event: msgspec.Raw


class DecideRecord(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """A question to the machine for the next work, the device being free."""

    now: float


# Types of the fields of ModelCosts that are no numbers.
_STRUCTURED: dict[str, Any] = {
    "kv_layers": tuple[KeptLayers, ...],
    "step_s_of_windows": tuple[tuple[int, float], ...],
}


class CostsRecord(msgspec.Struct, frozen=True, array_like=True, tag="costed"):
    """The costs of a model, as told to the machine between a question and the answer."""

    model: ModelKey
    costs: dict[str, Any]  # the fields of ModelCosts that are set, unchecked, as the machine took the fields

    @classmethod
    def of(cls, model: ModelKey, costs: ModelCosts) -> CostsRecord:
        return cls(model, {name: value for name, value in asdict(costs).items() if value is not msgspec.UNSET})

    def told(self) -> ModelCosts:
        """The costs as the machine took them."""
        structured = {name: kind for name, kind in _STRUCTURED.items() if name in self.costs}
        return ModelCosts(
            **self.costs | {name: msgspec.convert(self.costs[name], kind) for name, kind in structured.items()}
        )


class AnswerRecord(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """The machine's answer to the last event or question; missing if the process ended or the machine raised."""

    effects: msgspec.Raw


Record = BeginRecord | EventRecord | DecideRecord | CostsRecord | AnswerRecord

# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class DecisionJournal:
    """Appends records to `file`, unbuffered. If the file is full or can't be written, logs the reason and stops."""

    def __init__(self, file: BinaryIO, began: BeginRecord, bytes_most: int = BYTES_MOST) -> None:
        self._file = RecordFile(file, bytes_most=bytes_most)
        self.write(began)

    def write(self, record: Record) -> None:
        self._file.write(_encoder.encode(record))

    def noting(self, costs: Callable[[EngineSpec], ModelCosts]) -> Callable[[EngineSpec], ModelCosts]:
        """A function with the result of `costs` that also writes the result to the journal."""

        def noted(spec: EngineSpec) -> ModelCosts:
            told = costs(spec)
            self.write(CostsRecord.of(ModelKey(spec.key), told))
            return told

        return noted


class Recorded:
    """An Instance machine behind a journal. Questions are written before the machine answers: the machine may raise."""

    def __init__(self, instance: Instance, journal: DecisionJournal) -> None:
        self._instance, self._journal = instance, journal

    def hear(self, event: Event, now: float) -> list[Effect]:
        self._journal.write(recorded(event, now))
        return self._answer(self._instance.hear(event, now))

    def decide(self, now: float) -> list[Effect]:
        self._journal.write(DecideRecord(now))
        return self._answer(self._instance.decide(now))

    def _answer(self, effects: list[Effect]) -> list[Effect]:
        self._journal.write(AnswerRecord(encoded(effects)))
        return effects


# ── events and effects as they are written ────────────────────────────────────────────────────────────────────────────


class _Made(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An Output with the number of tokens instead of tokens and text."""

    request: RequestId
    tokens: int
    finish: Finish | None = None
    cached_tokens: int = 0


class _Stepped(msgspec.Struct, frozen=True, array_like=True):
    """A Stepped event in few bytes: every step writes a Stepped."""

    model: ModelKey
    made: list[_Made]
    busy: bool
    held: tuple[int, int, int, int]
    step_s: float
    steps: int
    ahead: bool = False


class _Prepared(msgspec.Struct, frozen=True):
    """A MoveStep "prepare" as written."""

    model: ModelKey
    tokens: int


class _Moved(msgspec.Struct, frozen=True):
    """A MoveStep "commit" or "abort" as written."""

    request: RequestId


class _Released(msgspec.Struct, frozen=True):
    """A MoveStep "release" as written: always with a single request."""

    requests: list[RequestId]


MovePart = Literal["prepare", "commit", "abort", "release"]

# Written names of the steps of a migration; every other event is written by the name of its class. Journals keep these
# names and fields for ever: a class or a step may be renamed, a written name may not.
MOVE_STEPS: dict[MovePart, tuple[str, type[_Prepared | _Moved | _Released]]] = {
    "prepare": ("Expected", _Prepared),
    "commit": ("Leaving", _Moved),
    "abort": ("Stayed", _Moved),
    "release": ("Departed", _Released),
}
STEPS: dict[str, MovePart] = {name: step for step, (name, _) in MOVE_STEPS.items()}


def recorded(event: Event, now: float) -> EventRecord:
    """The record of an event, without texts and contents."""
    kind = MOVE_STEPS[event.step][0] if isinstance(event, MoveStep) else type(event).__name__
    return EventRecord(now, kind, _event(event))


def _event(event: Event) -> msgspec.Raw:
    match event:
        case MoveStep("prepare", model, _, tokens):
            return msgspec.Raw(_encoder.encode(_Prepared(model, tokens)))
        case MoveStep("release", _, id):
            return msgspec.Raw(_encoder.encode(_Released([id])))
        case MoveStep(_, _, id):
            return msgspec.Raw(_encoder.encode(_Moved(id)))
        case Stepped(model, outputs, busy, held, step_s, steps, ahead):
            made = [_Made(o.request, len(o.tokens), o.finish, o.cached_tokens) for o in outputs]
            return msgspec.Raw(_encoder.encode(_Stepped(model, made, busy, astuple(held), step_s, steps, ahead)))
        case Arrived(request):
            shown = dataclasses.replace(request, payload=b"", grammar=b"", made=[0] * len(request.made))
            return msgspec.Raw(_encoder.encode(Arrived(shown)))
        case Refused():
            return msgspec.Raw(_encoder.encode(replace(event, error="")))
    return msgspec.Raw(_encoder.encode(event))


def event_of(heard: EventRecord) -> Event:
    """The event of a record, with zeros for tokens, and without a request or model that the journal left out.

    Raises ValueError if this release does not know the event."""
    decoder = _events.get(heard.kind)
    if decoder is None:
        raise ValueError(f"the journal has an event {heard.kind!r}, which this release does not know")
    event: Event | _Stepped | _Prepared | _Moved | _Released = decoder.decode(heard.event)
    match event:
        case _Prepared(model, tokens):
            return MoveStep("prepare", model, RequestId(""), tokens)
        case _Moved(request):
            return MoveStep(STEPS[heard.kind], ModelKey(""), request)
        case _Released(requests):
            (request,) = requests
            return MoveStep("release", ModelKey(""), request)
    if not isinstance(event, _Stepped):
        return event
    outputs = [
        Output(made.request, [0] * made.tokens, made.finish, None, None, made.cached_tokens) for made in event.made
    ]
    return Stepped(event.model, outputs, event.busy, Held(*event.held), event.step_s, event.steps, event.ahead)


def encoded(effects: Sequence[Effect]) -> msgspec.Raw:
    """The decisions in effects as bytes: equal decisions give equal bytes."""
    return msgspec.Raw(_encoder.encode([_decision(effect) for effect in effects]))


def _decision(effect: Effect) -> tuple[object, ...]:
    match effect:
        case Tell(request, at, output):
            return "Tell", request.id, at, len(output.tokens), output.finish
        case Add(request):
            return "Add", request.id
        case Lose(request, _, finish):
            return "Lose", request.id, finish
    return type(effect).__name__, *astuple(effect)


_encoder = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(Record)
_events: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(_Stepped if kind is Stepped else kind)
    for kind in get_args(Event)
    if kind is not MoveStep
} | {name: msgspec.msgpack.Decoder(kind) for name, kind in MOVE_STEPS.values()}

# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(file: BinaryIO) -> Iterator[Record]:
    """The records of a journal, in order; an incomplete last record is left out. Raises ValueError if not a journal."""
    for at, data in records(file):
        yield _record(data, at)


def _record(data: bytes, at: int) -> Record:
    try:
        record: Record = _records.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no journal, or a broken one: the record at byte {at}: {error}") from error
    if at == 0 and not isinstance(record, BeginRecord):
        raise ValueError("no journal: it does not say how the machine began")
    if isinstance(record, BeginRecord) and record.version != VERSION:
        raise ValueError(f"a journal of version {record.version}, and version {VERSION} is read: use its own release")
    return record
