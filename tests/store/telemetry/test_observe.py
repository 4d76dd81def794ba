"""Lines of the log: permitted words are a closed set, and every call in the tree keeps to the set."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator

import pytest
import structlog

from store.contract import wire
from store.telemetry import observe
from store.telemetry.observe import FIELDS, only_known
from tests.conftest import ROOT

LEVELS = ("debug", "info", "warning", "error", "critical", "msg", "log")
# Files with a call that passes on its callers' words, checked by eye: an event's name, an order's numbers.
PASSED_ON = {("runtime/device/building.py", "what"), ("runtime/scheduler/controller.py", "**_shown(order)")}


def calls() -> Iterator[tuple[str, ast.Call]]:
    for folder in ("gateway", "runtime", "store", "migrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = ast.unparse(node.func.value)
                    binds = owner == "structlog.contextvars" and node.func.attr == "bind_contextvars"
                    assert owner != "log" or node.func.attr != "exception", f"{path}: say error=place_of(error)"
                    if binds or (owner == "log" and node.func.attr in LEVELS):
                        yield str(path.relative_to(ROOT)), node


def test_no_call_says_a_field_that_is_not_allowed() -> None:
    found = list(calls())
    assert len(found) > 50
    said = {"event", "level", "timestamp", "drain"}
    for path, call in found:
        where = f"{path}:{call.lineno}"
        for event in call.args:
            fixed = isinstance(event, ast.Constant)
            assert fixed or (path, ast.unparse(event)) in PASSED_ON, f"{where}: an event is a name, not a text"
        for keyword in call.keywords:
            if keyword.arg is None:
                assert (path, f"**{ast.unparse(keyword.value)}") in PASSED_ON, f"{where}: which fields are these?"
            else:
                assert keyword.arg in FIELDS, f"{where}: {keyword.arg} is not in store.telemetry.observe.FIELDS"
                said.add(keyword.arg)
    assert said == FIELDS, "a field that nobody says any more is not allowed any more"


def test_what_is_not_allowed_is_dropped_by_name() -> None:
    said = only_known(None, "info", {"event": "relay.lost", "model": "m", "prompt": "secret", "messages_text": "x"})
    assert said == {"event": "relay.lost", "model": "m", "dropped": ["messages_text", "prompt"]}


def test_the_configured_log_drops_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    observe.configure_logs("test")
    try:
        structlog.get_logger().warning("node.ready", engine="vllm", prompt="secret")
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    said = json.loads(capsys.readouterr().err)
    assert said.pop("timestamp")
    assert said == {
        "event": "node.ready",
        "level": "warning",
        "process": "test",
        "engine": "vllm",
        "dropped": ["prompt"],
    }


def test_an_error_that_nobody_expected_is_told_by_its_kind_and_place_and_not_by_its_words() -> None:
    def broken() -> None:
        json.loads("a prompt")

    with pytest.raises(ValueError) as raised:
        broken()
    said = observe.place_of(raised.value)
    assert said.startswith("JSONDecodeError ") and "decoder.py:" in said and "prompt" not in said
    with pytest.raises(wire.WireError) as ours:
        wire.decode(wire.Reply, b"a prompt")
    assert "wire.py:" in observe.place_of(ours.value) and "prompt" not in observe.place_of(ours.value)
    assert observe.place_of(KeyError("a prompt")) == "KeyError"
