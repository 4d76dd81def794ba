"""A journal of production heard again: a machine in virtual time is asked what the real one was, and must say the same.

What is simulated is what runs: the same events at the same times make the same decisions, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from runtime.account import Account
from runtime.costs import ModelCosts
from runtime.instance import Instance
from runtime.journal import Answered, Asked, Began, Costed, Heard, Record, encoded, event_of, read
from runtime.pages import Pages
from runtime.policy.by_name import POLICIES
from runtime.policy.turns import Turns
from runtime.request import ModelKey
from store.wire import EngineSpec

NO_ANSWER = "nothing: the journal has no answer"


class CostsMissing(Exception):
    """The machine asks for what the journal does not say."""


class Difference(msgspec.Struct, frozen=True):
    """Where the two machines say something else for the first time."""

    record: int  # of the journal, from 1
    now: float  # seconds on the device's clock
    question: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"record {self.record}, at {self.now:.6f} s: {self.question}\n"
            f"recorded: {self.recorded}\nreplayed: {self.replayed}"
        )


class Report(msgspec.Struct, frozen=True):
    """What was compared, up to the first difference."""

    runs: int  # of device processes, one after the other in the file
    heard: int  # events
    asked: int  # decisions of a free device
    difference: Difference | None = None


def replay(path: Path) -> Report:
    """Raises OSError and ValueError."""
    with path.open("rb") as file:
        return compare(read(file))


def compare(records: Iterable[Record], policies: Mapping[str, Callable[[], Turns]] = POLICIES) -> Report:
    """`policies` by the names that the journal knows them by. Raises ValueError."""
    runs = heard = asked = number = 0
    machine: _Machine | None = None
    question: Heard | Asked | None = None
    for number, record in enumerate(records, 1):
        match record:
            case Began():
                if machine and question and (found := machine.unanswered(question, number - 1)):
                    return Report(runs, heard, asked, found)
                runs, machine, question = runs + 1, _Machine(record, policies), None
            case Heard() | Asked():
                question = record
            case Costed(model, costs):
                assert machine is not None
                machine.costs[model] = ModelCosts(**costs)  # type: ignore[arg-type]  # of what they are
            case Answered(effects):
                assert machine is not None
                if question is None:
                    raise ValueError(f"record {number} of the journal answers nothing")
                heard, asked = heard + isinstance(question, Heard), asked + isinstance(question, Asked)
                if found := machine.differs(question, effects, number):
                    return Report(runs, heard, asked, found)
                question = None
    found = machine.unanswered(question, number) if machine and question else None
    return Report(runs, heard, asked, found)


class _Machine:
    """The one that hears it all again. It is asked when the answer is known, and with it the costs of a new model."""

    def __init__(self, began: Began, policies: Mapping[str, Callable[[], Turns]]) -> None:
        if began.policy not in policies:
            raise ValueError(f"the journal is of turn policy {began.policy!r}, and there are {', '.join(policies)}")
        self.costs: dict[ModelKey, ModelCosts] = {}
        pages = Pages(began.pages_total, began.page_bytes)
        # When it began only says how long the device was idle before it heard anything.
        self._instance = Instance(policies[began.policy](), pages, self._costs, Account.open(0.0))

    def _costs(self, spec: EngineSpec) -> ModelCosts:
        if spec.key not in self.costs:
            raise CostsMissing(f"the journal has no costs of {spec.key}")
        return self.costs[ModelKey(spec.key)]

    def differs(self, question: Heard | Asked, recorded: msgspec.Raw, number: int) -> Difference | None:
        replayed = self._put(question)
        if isinstance(replayed, msgspec.Raw) and bytes(replayed) == bytes(recorded):
            return None
        return Difference(number, question.now, _told(question), _shown(recorded), _shown(replayed))

    def unanswered(self, question: Heard | Asked, number: int) -> Difference | None:
        """The process ended with it. If that was the machine's fault, it happens again; if the costs of the model that
        it hears of are not in the journal, the machine was not to blame."""
        replayed = self._put(question)
        if isinstance(replayed, msgspec.Raw | CostsMissing):
            return None
        return Difference(number, question.now, _told(question), NO_ANSWER, _shown(replayed))

    def _put(self, question: Heard | Asked) -> msgspec.Raw | Exception:
        """What it answers, or raises."""
        event = event_of(question) if isinstance(question, Heard) else None
        try:
            if event is None:
                return encoded(self._instance.decide(question.now))
            return encoded(self._instance.hear(event, question.now))
        except Exception as error:  # a machine that is led astray may trip over anything
            return error


def _told(question: Heard | Asked) -> str:
    return f"heard {event_of(question)}" if isinstance(question, Heard) else "asked what is to be done"


def _shown(answer: msgspec.Raw | Exception) -> str:
    if isinstance(answer, Exception):
        return f"{type(answer).__name__}: {answer}"
    return str(msgspec.msgpack.decode(answer))
