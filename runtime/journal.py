"""What the machine of one device heard and was asked, and what it answered: another, asked the same, must say the same.

A file of records, each after its length. They are written one by one, so that the kernel has them when the process
dies, and appended: a device process that is started anew goes on behind what the last one wrote. Nothing of a prompt
or a completion is in it: payloads, tokens, logprobs, stop reasons and what an engine says of a request it refuses are
left out, and of effects what the machine decided.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, get_args

import msgspec
import structlog
from msgspec.structs import asdict, astuple, replace

from runtime.costs import ModelCosts
from runtime.engine.base import Held, Output
from runtime.events import Add, Arrived, Effect, Event, Lose, Refused, Stepped, Tell
from runtime.instance import Instance
from runtime.request import ModelKey, RequestId
from store.wire import EngineSpec, Finish

log = structlog.get_logger()

VERSION = 1
BYTES_MOST = 256 << 20  # of one file; then nothing more is written
_LENGTH = struct.Struct("<I")


# ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A machine that has heard nothing yet."""

    policy: str  # by its name in runtime/policy/by_name.py
    pages_total: int
    page_bytes: int
    version: int = VERSION


class Heard(msgspec.Struct, frozen=True, array_like=True, tag="heard"):
    now: float
    kind: str  # the event's type
    event: msgspec.Raw


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """What is to be done, the device being free."""

    now: float


class Costed(msgspec.Struct, frozen=True, array_like=True, tag="costed"):
    """Between a question and its answer: what the machine was told when it asked for the costs of a model."""

    model: ModelKey
    costs: dict[str, int | float]  # the fields of ModelCosts, unchecked: the machine took them as they were


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """To the question before; where it is missing the process ended, or the machine raised."""

    effects: msgspec.Raw


Record = Began | Heard | Asked | Costed | Answered

# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Journal:
    """Appends to `file`, unbuffered. When it is full, or can't be written, it says so once and writes no more."""

    def __init__(self, file: BinaryIO, began: Began, bytes_most: int = BYTES_MOST) -> None:
        self._file, self._bytes_most = file, bytes_most
        self._bytes = file.seek(0, os.SEEK_END)
        self._stopped = False
        self.write(began)

    def write(self, record: Record) -> None:
        if self._stopped:
            return
        data = _encoder.encode(record)
        if self._bytes + _LENGTH.size + len(data) > self._bytes_most:
            return self._stop(f"it may have {self._bytes_most} bytes: move it away and start the runtime again")
        try:
            written = self._file.write(_LENGTH.pack(len(data)) + data)
            if written < _LENGTH.size + len(data):
                self._file.truncate(self._bytes)
                return self._stop("the disk is full: free some space and start the runtime again")
        except OSError as error:
            return self._stop(f"{error}: free some space, or name another folder, and start the runtime again")
        self._bytes += written

    def _stop(self, reason: str) -> None:
        self._stopped = True
        log.error("journal.stopped", bytes=self._bytes, reason=reason)

    def noting(self, costs: Callable[[EngineSpec], ModelCosts]) -> Callable[[EngineSpec], ModelCosts]:
        """`costs`, and what they say is written down."""

        def noted(spec: EngineSpec) -> ModelCosts:
            told = costs(spec)
            self.write(Costed(ModelKey(spec.key), asdict(told)))
            return told

        return noted


def appended(path: Path) -> BinaryIO:
    """The file of a journal, for its owner's eyes alone. Raises OSError."""
    return open(path, "ab", buffering=0, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


class Recorded:
    """A machine that is asked through a journal. Questions are written before they are put: it may raise."""

    def __init__(self, instance: Instance, journal: Journal) -> None:
        self._instance, self._journal = instance, journal

    def hear(self, event: Event, now: float) -> list[Effect]:
        self._journal.write(Heard(now, type(event).__name__, _event(event)))
        return self._answer(self._instance.hear(event, now))

    def decide(self, now: float) -> list[Effect]:
        self._journal.write(Asked(now))
        return self._answer(self._instance.decide(now))

    def _answer(self, effects: list[Effect]) -> list[Effect]:
        self._journal.write(Answered(encoded(effects)))
        return effects


# ── events and effects as they are written ────────────────────────────────────────────────────────────────────────────


class _Made(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An Output without what it says."""

    request: RequestId
    tokens: int
    finish: Finish | None = None
    cached_tokens: int = 0


class _Stepped(msgspec.Struct, frozen=True, array_like=True):
    """A Stepped in few bytes: there is one for every step."""

    model: ModelKey
    made: list[_Made]
    busy: bool
    held: tuple[int, int, int, int]
    step_s: float
    steps: int


def _event(event: Event) -> msgspec.Raw:
    match event:
        case Stepped(model, outputs, busy, held, step_s, steps):
            made = [_Made(o.request, len(o.tokens), o.finish, o.cached_tokens) for o in outputs]
            return msgspec.Raw(_encoder.encode(_Stepped(model, made, busy, astuple(held), step_s, steps)))
        case Arrived(request):
            return msgspec.Raw(
                _encoder.encode(Arrived(dataclasses.replace(request, payload=b"", made=[0] * len(request.made))))
            )
        case Refused():
            return msgspec.Raw(_encoder.encode(replace(event, error="")))
    return msgspec.Raw(_encoder.encode(event))


def event_of(heard: Heard) -> Event:
    """With zeros for tokens. Raises ValueError."""
    decoder = _events.get(heard.kind)
    if decoder is None:
        raise ValueError(f"the journal has an event {heard.kind!r}, which this release does not know")
    event = decoder.decode(heard.event)
    if not isinstance(event, _Stepped):
        return event
    outputs = [
        Output(made.request, [0] * made.tokens, made.finish, None, None, made.cached_tokens) for made in event.made
    ]
    return Stepped(event.model, outputs, event.busy, Held(*event.held), event.step_s, event.steps)


def encoded(effects: Sequence[Effect]) -> msgspec.Raw:
    """Equal bytes for equal decisions."""
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
_events: dict[str, msgspec.msgpack.Decoder[Event | _Stepped]] = {
    kind.__name__: msgspec.msgpack.Decoder(_Stepped if kind is Stepped else kind) for kind in get_args(Event)
}

# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(file: BinaryIO) -> Iterator[Record]:
    """In order; a last record that is not whole is left out. Raises ValueError for what is no journal."""
    at = 0
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if length > BYTES_MOST:
            raise ValueError(f"no journal, or a broken one: at byte {at} a record of {length} bytes is announced")
        data = file.read(length)
        if len(data) < length:
            return
        yield _record(data, at)
        at += _LENGTH.size + length


def _record(data: bytes, at: int) -> Record:
    try:
        record: Record = _records.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no journal, or a broken one: the record at byte {at}: {error}") from error
    if at == 0 and not isinstance(record, Began):
        raise ValueError("no journal: it does not say how the machine began")
    if isinstance(record, Began) and record.version != VERSION:
        raise ValueError(f"a journal of version {record.version}, and version {VERSION} is read: use its own release")
    return record
