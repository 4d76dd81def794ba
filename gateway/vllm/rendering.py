"""Renders chat templates in a process of its own: a program, run by path, that knows Jinja and nothing of the platform.

A template is a program by the artefact's author. Jinja's sandbox bounds what a template can reach, but neither its time
nor its output. Here the kernel bounds both: a late job ends the process, and memory ends at a limit. The process has no
secrets to read and no locks of the gateway to hold. `gateway/vllm/templates.py` starts the processes and asks them.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections import Counter, deque
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEADLINE_S = 3.0  # of one job; a template of ten thousand messages takes some 0.1 s
MEMORY_MOST = 512 << 20  # bytes of address space; the process itself has 30 MiB
TEXT_MOST = 16 << 20  # bytes that a template may make: twice the largest body
TEMPLATE_MOST = 64 << 10  # characters; the longest published templates have some 30 KiB
VISITS_MOST = 1_000_000  # visits of nodes when vLLM looks where a template puts messages: about a second

READY, MADE, REFUSED = b"ready", b"+", b"-"


class JobKind(StrEnum):
    """Kinds of jobs."""

    CHECK = "check"  # tell whether a template is sound
    VARIABLES = "variables"  # tell the names that a template looks up
    RENDER = "render"  # render a template
    KEEP = "keep"  # keep a template and its variables for chats to come
    CHAT = "chat"  # render messages with the kept template


# ── Jinja as chat templates expect it ─────────────────────────────────────────────────────────────────────────────────


class Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here the tag is an ordinary scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment that transformers gives to chat templates; tests compare the two environments."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


# ── what a template must be before anybody else reads it ──────────────────────────────────────────────────────────────


def check(template: str) -> None:
    """Raises TemplateError if a template does not compile or would keep vLLM too long."""
    if len(template) > TEMPLATE_MOST:
        raise TemplateError(f"the chat template has {len(template)} characters, at most {TEMPLATE_MOST}: shorten it")
    _compiled(template)
    if visits(environment().parse(template)) > VISITS_MOST:
        raise TemplateError(
            f"the chat template takes more than {VISITS_MOST} steps to analyse: set fewer names from `messages`, "
            "in no circle"
        )


def visits(parsed: nodes.Template) -> int:
    """Return how many nodes vLLM visits to learn whether messages have parts.

    vLLM walks the whole tree for each way on which a name gets its value from `messages`, and endlessly in a circle.
    The number is a lower bound; above VISITS_MOST the number only tells that the bound is exceeded.
    """
    size = 1 + sum(1 for _ in parsed.find_all(nodes.Node))
    sources: dict[str, list[str]] = {}
    for assign in parsed.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and (source := _source(assign.node)):
            sources.setdefault(source, []).append(assign.target.name)
    names, waiting = 1, deque(["messages"])
    while waiting and names * size <= VISITS_MOST:
        name = waiting.popleft()
        given = sources.get(name, [])
        names += len(given)
        waiting.extend(other for other in given if other != name)
    loops = sum(1 for _ in parsed.find_all(nodes.For))
    calls = Counter[str]()
    for call in parsed.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            calls[call.node.name] += len(call.args) + len(call.kwargs)
    macros = [macro.name for macro in parsed.find_all(nodes.Macro)]
    return size * (names + 3 + 2 * len(macros)) + loops * (names + sum(calls[name] for name in macros))


def _source(node: nodes.Node | None) -> str | None:
    """Return the name whose value, or elements of the value, the node yields; None without a name."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None


# ── the process ───────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return environment().from_string(template)


class RenderingJobs:
    """Answers jobs, and keeps the template of chats between jobs."""

    def __init__(self) -> None:
        self._kept: tuple[str, dict[str, Any]] = "", {}  # template of chats, and its variables besides the messages

    def answer(self, job: bytes) -> bytes:
        """Answer a job: JSON of its kind, and of what the kind needs."""
        try:
            text = self._done(*json.loads(job)).encode("utf-8", "surrogatepass")
        except MemoryError:
            return REFUSED + f"the chat template needs more than {MEMORY_MOST >> 20} MiB: let it make less".encode()
        except RecursionError:
            return REFUSED + b"the chat template is nested too deep: let no macro call itself without an end"
        except Exception as error:
            return REFUSED + (str(error) or type(error).__name__)[:1000].encode("utf-8", "replace")
        if len(text) > TEXT_MOST:
            return REFUSED + f"the chat template made {len(text)} bytes, at most {TEXT_MOST}: let it make less".encode()
        return MADE + text

    def _done(self, kind: str, given: Any, variables: dict[str, Any] | None = None) -> str:
        """Do a job, and return its text. `given`: messages of a chat, else a template."""
        match kind:
            case JobKind.CHECK:
                check(given)
            case JobKind.KEEP:
                _compiled(given)
                self._kept = given, variables or {}
            case JobKind.VARIABLES:  # Jinja computes constants on the way, so only this process may parse the template
                return " ".join(meta.find_undeclared_variables(environment().parse(given)))
            case JobKind.RENDER:
                return _compiled(given).render(**(variables or {}))
            case JobKind.CHAT:
                template, kept = self._kept
                return _compiled(template).render(messages=given, **kept)
        return ""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MOST, MEMORY_MOST))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold prompts
    jobs = RenderingJobs()
    with Connection(int(sys.argv[1])) as asked:
        asked.send_bytes(READY)
        while True:
            try:
                job = asked.recv_bytes()
            except EOFError:  # the gateway is gone
                return
            signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)  # the timer's signal ends the process, even inside C code
            asked.send_bytes(jobs.answer(job))
            signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
