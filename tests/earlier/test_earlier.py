"""Messages and journals written by earlier versions are read by this version.

`messages-71e32b0.json` holds an example of every tagged message of the bus and of the transfer of blocks, in
hexadecimal digits of msgpack, encoded by the tree at 71e32b0. The journals hold what the machine of a device heard and
answered in the tree that the file names. Classes may be renamed; tags, fields and meanings of messages may not.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.core.device.events import MoveStep
from runtime.core.device.request import ModelKey, RequestId
from runtime.core.turns.turn import RoundRobin
from runtime.device.journal import EventRecord, event_of, read, recorded
from runtime.migration import transport
from runtime.sim.replay import compare
from store.contract import limits, views, wire

FOLDER = Path(__file__).parent
MESSAGES: dict[str, str] = json.loads((FOLDER / "messages-71e32b0.json").read_text())


def tagged() -> dict[str, type[msgspec.Struct]]:
    """Classes of messages by their tag on the wire."""
    found: dict[str, type[msgspec.Struct]] = {}
    for module in (wire, views, limits, transport):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__:
                tag = value.__struct_config__.tag
                if tag is not None:
                    assert found.setdefault(str(tag), value) is value, f"two messages have the tag {tag}"
    return found


def holds(now: Any, then: Any) -> bool:
    """Whether `now` has every value of `then`. A struct may have gained fields; an array gains fields at its end."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and holds(now[key], value) for key, value in then.items())
    if isinstance(then, list):
        return isinstance(now, list) and len(now) >= len(then) and all(map(holds, now, then))
    return bool(now == then)


def plain(value: Any) -> Any:
    """The value as on the wire, with every field of every struct, also fields that are left out when sent."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        fields = {each.encode_name: plain(getattr(value, each.name)) for each in msgspec.structs.fields(value)}
        if config.array_like:
            return [*([] if config.tag is None else [config.tag]), *fields.values()]
        return fields if config.tag is None else {config.tag_field: config.tag} | fields
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Decimal) else value


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_of_71e32b0_is_read_with_all_of_its_fields(name: str) -> None:
    data = bytes.fromhex(MESSAGES[name])
    then: dict[str, Any] = msgspec.msgpack.decode(data)
    kind = tagged()[then["type"]]
    message = msgspec.msgpack.decode(data, type=kind)
    assert holds(plain(message), then)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message


def test_a_drained_runtime_of_71e32b0_is_no_surplus_runtime() -> None:
    lease = msgspec.msgpack.decode(bytes.fromhex(MESSAGES["Lease"]), type=wire.Lease)
    assert lease.draining and not lease.surplus


def test_a_message_that_lost_or_renamed_a_field_is_found() -> None:
    assert not holds({"type": "Run", "gateway": "g"}, {"type": "Run", "gateway": "g", "stream": 7})
    assert not holds([1, [2]], [1, [2, 3]]) and holds({"a": [1, 2], "b": 0}, {"a": [1]})


def test_every_event_of_a_journal_of_71e32b0_is_read() -> None:
    with (FOLDER / "journal-71e32b0").open("rb") as file:
        records = list(read(file))
    heard = [event_of(record) for record in records if isinstance(record, EventRecord)]
    assert len(heard) > 50 and {type(event).__name__ for event in heard} >= {
        "Arrived",
        "Placed",
        "Stepped",
        "Cancelled",
    }


M, Q = ModelKey("m"), RequestId("q")


@pytest.mark.parametrize(
    ("name", "fields", "step"),
    [
        ("Expected", {"model": "m", "tokens": 7}, MoveStep("prepare", M, RequestId(""), 7)),
        ("Leaving", {"request": "q"}, MoveStep("commit", ModelKey(""), Q)),
        ("Stayed", {"request": "q"}, MoveStep("abort", ModelKey(""), Q)),
        ("Departed", {"requests": ["q"]}, MoveStep("release", ModelKey(""), Q)),
    ],
)
def test_a_step_of_a_migration_is_read_and_written_as_in_71e32b0(
    name: str, fields: dict[str, Any], step: MoveStep
) -> None:
    written = msgspec.Raw(msgspec.msgpack.encode(fields))
    assert event_of(EventRecord(1.0, name, written)) == step
    now = recorded(step, 1.0)
    assert now.kind == name and bytes(now.event) == bytes(written)


def test_a_journal_of_f5b24f9_is_decided_again_byte_for_byte() -> None:
    with (FOLDER / "journal-f5b24f9").open("rb") as file:
        report = compare(read(file), {"short": lambda: RoundRobin(2)})
    assert report.difference is None and report.heard > 50 and report.asked > 50
