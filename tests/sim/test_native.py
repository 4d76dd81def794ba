"""Sources made for the compiler say the same as their originals."""

from __future__ import annotations

import ast
import pickle
import sys
import types
from typing import Any

import pytest

from runtime.sim.native import enums, fields, native

SOURCE = '''"""Some values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

LEAST, _MOST = 2, 9
START = 5


class Phase(Enum):
    HERE = 1
    AWAY = 2


class Held(msgspec.Struct, frozen=True):
    """Two numbers."""

    weights: int = 0
    kv: int = 0

    @property
    def all(self) -> int:
        return self.weights + self.kv


class Told(msgspec.Struct, frozen=True):
    model: str
    held: Held = Held()


class Closed(msgspec.Struct, frozen=True):
    model: int


class Other(msgspec.Struct, frozen=True):
    pass


@dataclass(slots=True, eq=False)
class Model:
    name: str
    phase: Phase = Phase.HERE
    waiting: list[int] = field(default_factory=list)
    twice: int = field(init=False)
    _seen: int = 3

    def __post_init__(self) -> None:
        self.twice = 2 * self._seen


def heard(event: Told | Closed | Other) -> object:
    match event:
        case Told(model, held):
            return model.upper(), held.all
        case Closed(model):
            return model + 1
        case _:
            return "other"


def large(event: Told | Closed) -> object:
    match event:
        case Closed(model) if model > START:
            return True
        case Told(_, Held(weights)):
            return weights
    return False


def bounded(number: int) -> int:
    return max(LEAST, min(number, _MOST, START))


def closes(event: object) -> bool:
    return isinstance(event, Closed | Other) and any([True])


def there(model: Model) -> bool:
    return model.phase is Phase.HERE


def again(model: Model) -> Model:
    return replace(model, name="again")
'''


def module(name: str, source: str) -> Any:
    made = types.ModuleType(name)
    sys.modules[name] = made
    exec(compile(source, name, "exec"), made.__dict__)
    return made


@pytest.fixture
def plain() -> Any:
    return module("native_plain", SOURCE)


@pytest.fixture
def made() -> Any:
    return module("native_made", native(SOURCE, fields([SOURCE]), enums([SOURCE]), structs=True))


def test_a_struct_becomes_a_class_that_is_made_compared_shown_and_copied_alike(plain: Any, made: Any) -> None:
    assert made.Held.__bases__ == (object,)
    for each in (plain, made):
        told = each.Told("m", each.Held(kv=2))
        assert told == each.Told("m", each.Held(0, 2)) != each.Told("m")
        assert hash(told) == hash(each.Told("m", each.Held(0, 2)))
        assert pickle.loads(pickle.dumps(told)) == told
        assert each.Told("m").held.all == 0
    assert repr(made.Told("m")) == repr(plain.Told("m"))
    assert repr(made.Other()) == repr(plain.Other())


def test_a_dataclass_has_its_own_init_that_takes_the_same(plain: Any, made: Any) -> None:
    assert made.Model.__init__.__code__.co_filename == "native_made"
    for each in (plain, made):
        model, other = each.Model("m", _seen=4), each.Model("m", each.Phase.AWAY, [1])
        model.waiting.append(7)
        assert (model.name, model.phase, model.waiting, model.twice) == ("m", each.Phase.HERE, [7], 8)
        assert (other.phase, other.waiting, other.twice) == (each.Phase.AWAY, [1], 6)
        assert each.Model("m").waiting == [] and model != each.Model("m", _seen=4)
        assert each.again(other).name == "again" and each.again(other).waiting is other.waiting
        with pytest.raises(TypeError):
            each.Model()


def test_match_over_classes_becomes_if_and_other_patterns_stay(plain: Any, made: Any) -> None:
    events = [("Told", "m"), ("Closed", 4), ("Closed", 7), ("Other",)]
    for kind, *values in events:
        both = [getattr(each, kind)(*values) for each in (plain, made)]
        assert plain.heard(both[0]) == made.heard(both[1])
        assert plain.large(both[0]) == made.large(both[1])
        assert plain.closes(both[0]) == made.closes(both[1])
    tree = ast.parse(native(SOURCE, fields([SOURCE]), enums([SOURCE]), structs=True))
    matching = [
        each.name
        for each in tree.body
        if isinstance(each, ast.FunctionDef) and any(isinstance(part, ast.Match) for part in ast.walk(each))
    ]
    assert matching == ["large"]


def test_constants_are_final_and_members_of_enums_are_constants(plain: Any, made: Any) -> None:
    source = native(SOURCE, fields([SOURCE]), enums([SOURCE]), structs=True)
    assert "START: Final = 5" in source and "_PHASE_HERE: Final = Phase.HERE" in source
    assert "return model.phase is _PHASE_HERE" in source
    assert made.there(made.Model("m")) and not made.there(made.Model("m", made.Phase.AWAY))
    assert [made.bounded(n) for n in range(-3, 20)] == [plain.bounded(n) for n in range(-3, 20)]


def test_structs_that_are_written_or_read_stay_structs() -> None:
    assert "class Held(msgspec.Struct, frozen=True):" in native(SOURCE, {}, set(), structs=False)
