"""Chat templates, rendered in separate processes: the rendered text, and the end of harmful templates."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2 import TemplateError
from transformers import PythonBackend
from transformers.utils import chat_template_utils
from vllm.renderers import hf

from gateway.vllm import rendering, templates
from gateway.vllm.rendering import DEADLINE_S, TEXT_MOST
from tests.conftest import ROOT

MODELS = sorted((ROOT / "deploy" / "demo" / "models").glob("*/chat_template.jinja"))
MESSAGES = [
    {"role": "system", "content": 'be <brief> & "kind"'},
    {"role": "user", "content": "wär' es \U0001f600 \ud800?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"n": 10**30}}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": [None, True, 1.5]}}}]
SAMPLES = [
    "{% for m in messages %}\n  {{ m['role'] }}: {{ m.content or '' }}\n{% endfor %}",
    "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}{{ bos_token }}",
    "{% macro f(x) %}<{{ x | upper }}>{% endmacro %}{{ f('a') }}{{ messages[0].content | e }}{{ missing }}",
    "{{ strftime_now('%Y') }}{% if add_generation_prompt %}\nassistant:{% endif %}",
    "{{ raise_exception('no ' ~ messages[0].role) }}",
    "{{ messages[7].role }}",
    "{{ ''.__class__ }}",
    "{{ messages.append(1) }}",
    "{% include 'x' %}",
]


@pytest.fixture
def alone() -> Iterator[None]:
    """After each test, end the template process of the thread."""
    yield
    if process := getattr(templates._OF_THREAD, "process", None):
        process.end()


pytestmark = pytest.mark.usefixtures("alone")


def said(compiled: Any, **variables: Any) -> str:
    try:
        return str(compiled.render(**variables))
    except Exception as error:
        return f"refused: {error}"


@pytest.mark.parametrize("template", [*SAMPLES, *(path.read_text() for path in MODELS)])
def test_a_template_makes_what_transformers_makes_of_it(template: str) -> None:
    variables = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "documents": None,
        "add_generation_prompt": True,
        "bos_token": "<s>",
    }
    there = chat_template_utils._cached_compile_jinja_template(template)
    assert said(templates.Compiled(template), **variables) == said(there, **variables)


def test_transformers_and_vllm_compile_no_template_here() -> None:
    from gateway.vllm import front  # noqa: F401 - what puts ours in the place of theirs

    text, _ = chat_template_utils.render_jinja_template([MESSAGES[:2]], chat_template="{{ messages | length }}")
    assert text == ["2"] and _pid()
    assert chat_template_utils._compile_jinja_template("{{ a }}").__class__ is templates.Compiled
    bomb = "{{ a }}{{ 'x' * 10000000000 }}{{ b }}"
    assert hf.resolve_chat_template_kwargs(PythonBackend, bomb, {"a": 1, "c": 2}) == {"a": 1}
    assert (
        hf._detect_content_format(
            "{% for m in messages %}{% for c in m.content %}x{% endfor %}{% endfor %}", default="string"
        )
        == "openai"
    )


LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOP, "did not end within 3 s"),
        (
            "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
            "MiB",
        ),
        ("{{ 'a' * (messages | length * 10000000000) }}", "MiB"),
        ("{{ 9 ** (messages | length * 9 ** 9) }}", "did not end within 3 s"),
        ("{{ 'a' | center(999999999) }}", "MiB|did not end"),
        ("{{ ' ' * (20000000 * messages | length) }}", f"at most {TEXT_MOST}"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deep"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
            "did not end within 3 s",
        ),
    ],
)
def test_a_template_that_does_harm_is_ended_and_the_next_one_is_rendered(template: str, why: str) -> None:
    templates.Compiled("").render()  # the process is running now
    began = time.monotonic()
    with pytest.raises(TemplateError, match=why):
        templates.Compiled(template).render(messages=MESSAGES)
    assert time.monotonic() - began < DEADLINE_S + 3
    assert templates.Compiled("{{ messages | length }}").render(messages=MESSAGES) == "3"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 9 ** 200000000 }}", "did not end"),
        ("{% set a = messages %}{% set messages = a[1:] %}", "in no circle"),
        (
            "".join(f"{{% set a{i + 1} = a{i} %}}" * 2 for i in range(30)) + "{% set a0 = messages %}",
            "steps to analyse",
        ),
        ("{% macro f() %}{% endmacro %}" * 2000, "steps to analyse|did not end"),
        ("x" * 200_000, "200000 characters"),
        ("{% for %}", "Expected"),
        ("{{" + "(" * 900 + "1" + ")" * 900 + "}}", "nested too deep"),
    ],
)
def test_a_template_that_would_hold_up_who_reads_it_has_a_fault(template: str, why: str) -> None:
    fault = templates.fault(template)
    assert fault and re.search(why, fault), fault
    with pytest.raises(TemplateError, match=why):
        templates.Compiled(templates.refusing(fault)).render(messages=MESSAGES)


@pytest.mark.parametrize("template", [*SAMPLES[:-1], *(path.read_text() for path in MODELS)])
def test_an_honest_template_has_no_fault(template: str) -> None:
    assert templates.fault(template) is None


def test_vllm_visits_no_more_than_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For random assignments, loops and macros, vLLM visits at most the number of nodes that `visits` counted."""
    rng = random.Random(7)
    names = ["messages", "a", "b", "c", "content"]
    pieces = [
        lambda: f"{{% set {rng.choice(names)} = {rng.choice(names)}{rng.choice(['', '[1:]', '|list', '.x'])} %}}",
        lambda: f"{{% for m in {rng.choice(names)} %}}{{% for c in m.content %}}{{% endfor %}}{{% endfor %}}",
        lambda: (
            f"{{% macro f({rng.choice(names)}) %}}{{% endmacro %}}{{{{ f({rng.choice(names)}, {rng.choice(names)}) }}}}"
        ),
    ]
    visited = 0
    original = jinja2.nodes.Node.iter_child_nodes

    def counted(self: Any, *args: Any) -> Any:
        nonlocal visited
        visited += 1
        assert visited < 10 * rendering.VISITS_MOST, "vLLM goes on without an end"
        return original(self, *args)

    monkeypatch.setattr(jinja2.nodes.Node, "iter_child_nodes", counted)
    bounded = 0
    for _ in range(300):
        template = "".join(rng.choice(pieces)() for _ in range(rng.randrange(1, 8)))
        parsed = rendering.environment().parse(template)
        visits = rendering.visits(parsed)
        if visits > rendering.VISITS_MOST:
            continue
        bounded += 1
        visited = 0
        try:
            list(hf._iter_nodes_assign_content_item(parsed))
        except AssertionError as error:
            assert not str(error)
        assert visited <= visits, template
    assert bounded > 100


def test_a_template_has_none_of_the_platforms_secrets() -> None:
    os.environ["STACCATO_TEST_SECRET"] = "1"
    try:
        templates.Compiled("{{ 1 }}").render()
        environment = Path(f"/proc/{_pid()}/environ").read_bytes()
    finally:
        del os.environ["STACCATO_TEST_SECRET"]
    assert b"STACCATO" not in environment


def test_a_process_that_somebody_else_ended_is_replaced() -> None:
    templates.Compiled("{{ 1 }}").render()
    first = _pid()
    os.kill(first, signal.SIGKILL)
    templates._OF_THREAD.process._child.wait()
    assert templates.Compiled("{{ 2 }}").render() == "2" and _pid() != first


def test_a_process_ends_with_its_thread() -> None:
    seen: list[int] = []

    def render() -> None:
        templates.Compiled("{{ 1 }}").render()
        seen.append(_pid())

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert seen and not os.path.exists(f"/proc/{seen[0]}")


def _pid() -> int:
    pid = templates._OF_THREAD.process._child.pid
    assert isinstance(pid, int)
    return pid
