"""Chat templates of tenants, rendered in processes of `gateway/vllm/rendering.py`.

A thread that asks has a process of its own and waits for the answer. An endless template holds up only its own front,
for `DEADLINE_S`. Then the kernel has ended the template's process, the thread is free and the client reads why. For the
event loop, `gateway/vllm/chats.py` asks processes without a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from jinja2 import TemplateError

from gateway.vllm import rendering
from gateway.vllm.rendering import DEADLINE_S, MADE, READY, TEXT_MOST, JobKind

START_S = 20.0  # longest start of a process, on a busy host
# A template that takes longer runs at a lower priority, and its process is replaced afterwards.
PATIENCE_S = 0.5
AFTERWARDS = 10  # niceness of a slow template's process
GRACE_S = 1.0  # time for the kernel to end a late process
NOTED = "noted, not rendered"
LENGTH = struct.Struct("!i")  # precedes each message to and from a process, as multiprocessing's Connection has it
ANSWER_MOST = len(MADE) + TEXT_MOST
# Variables that Python needs from the gateway's environment; `strftime_now` shows TZ.
PASSED = ("PATH", "LD_LIBRARY_PATH", "TZ")


class Harmful(TemplateError):
    """The template ended its process."""


class Compiled:
    """Stands for a compiled template: has the attributes used by transformers and vLLM, and renders elsewhere."""

    def __init__(self, template: str) -> None:
        self.environment = _ENVIRONMENT
        self._template = template

    def render(self, **variables: Any) -> str:
        """Render the template. Raises TemplateError with a sentence for the client."""
        noted: list[NotedTemplate] | None = getattr(_OF_THREAD, "noted", None)
        if noted is not None:
            noted.append(NotedTemplate(self._template, variables))
            return NOTED
        return _ask(JobKind.RENDER, self._template, variables)


class NotedTemplate(NamedTuple):
    """A template, and the variables with which the template was to be rendered."""

    template: str
    variables: dict[str, Any]


@contextlib.contextmanager
def noting() -> Iterator[list[NotedTemplate]]:
    """Note templates that this thread is to render, in place of rendering; the text of each is NOTED meanwhile."""
    noted = _OF_THREAD.noted = list[NotedTemplate]()
    try:
        yield noted
    finally:
        _OF_THREAD.noted = None


@lru_cache(maxsize=256)
def variables(template: str) -> frozenset[str]:
    """Return the names that the template looks up among its variables. Raises TemplateError."""
    return frozenset(_ask(JobKind.VARIABLES, template, {}).split())


@lru_cache(maxsize=256)
def system_first(template: str | None) -> bool:
    """Whether the template refuses a system message after other messages; True without a template. Raises Harmful."""
    if not template:
        return True
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        _ask(JobKind.RENDER, template, {"messages": messages, "add_generation_prompt": False})
    except Harmful:
        raise
    except TemplateError:
        return True
    return False


def fault(template: str) -> str | None:
    """Return why vLLM must neither read nor render the template; None if the template is sound."""
    try:
        _check(template)
        system_first(template)
    except TemplateError as error:
        return str(error)
    return None


@lru_cache(maxsize=256)
def _check(template: str) -> None:
    """Check the template in a process, unless the template was found sound before. Raises TemplateError."""
    _ask(JobKind.CHECK, template, {})


def refusing(fault: str) -> str:
    """Return a template that refuses to chat and tells `fault`, to be used in place of the faulty template."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in "'\"\\{}" else "`" for c in fault)
    return "{{ raise_exception('" + plain + "') }}"


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class RenderingProcess:
    """A rendering process. Ends with the thread, or the object, that holds this object."""

    def __init__(self) -> None:
        """Start the process. Raises TemplateError if the process does not start."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-I", rendering.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={name: os.environ[name] for name in PASSED if name in os.environ},
                cwd="/",
            )
        self._asked = Connection(ours.detach())
        self.end = weakref.finalize(self, _end, self._child, self._asked)
        self.slowed = False  # a slow process never becomes quick again
        try:
            started = self._asked.poll(START_S) and self._asked.recv_bytes() == READY
        except (EOFError, OSError):
            started = False
        if not started:
            self.end()
            raise TemplateError(f"the chat template was not rendered: no process for it within {START_S:.0f} s")

    @property
    def alive(self) -> bool:
        return self.end.alive and self._child.poll() is None

    def keep(self, noted: NotedTemplate) -> None:
        """Let the process keep a template and variables for chats. Raises TemplateError."""
        text_of(self.ask(_job(JobKind.KEEP, *noted)))

    def loop_end(self) -> socket.socket:
        """Return a socket to the process, for an event loop. Messages of both sides follow a length: see LENGTH."""
        return socket.socket(fileno=os.dup(self._asked.fileno()))

    def slow_down(self) -> None:
        """Lower the priority of the process for good: the template takes long."""
        self.slowed = True
        with contextlib.suppress(OSError):  # the process just ended, or priorities can't be changed here
            os.setpriority(os.PRIO_PROCESS, self._child.pid, AFTERWARDS)

    def ask(self, job: bytes) -> bytes:
        """Return the process's answer to a job. Raises Harmful if the process ends instead of answering."""
        try:
            self._asked.send_bytes(job)
            if not self._asked.poll(PATIENCE_S):
                self.slow_down()
            if self._asked.poll(DEADLINE_S + GRACE_S):
                return self._asked.recv_bytes(ANSWER_MOST)
            late = True
        except (EOFError, OSError):
            late = False
        raise self.harm(late)

    def harm(self, late: bool) -> Harmful:
        """End the process, which did not answer. Returns the reason. `late`: the kernel did not end the process."""
        self.end()
        code = self._child.returncode
        if late or code == -signal.SIGALRM:
            return Harmful(f"the chat template did not end within {DEADLINE_S:.0f} s: let it loop less")
        return Harmful(f"the chat template ended its process ({code}): let it make less, nested less deep")


def _end(child: subprocess.Popen[bytes], asked: Connection) -> None:
    child.kill()
    child.wait()
    asked.close()


_ENVIRONMENT = rendering.environment()
_OF_THREAD = threading.local()


def process_of_thread() -> RenderingProcess | None:
    """Return the process of this thread, which is the thread's no longer; None if the thread has no living process."""
    process: RenderingProcess | None = getattr(_OF_THREAD, "process", None)
    _OF_THREAD.process = None
    return process if process is not None and process.alive else None


def chat_job(messages: list[dict[str, Any]]) -> bytes:
    """Return the job of rendering a chat with the kept template."""
    return _job(JobKind.CHAT, messages)


def text_of(answer: bytes) -> str:
    """Return the text of a process's answer. Raises TemplateError with the reason if the answer has no text."""
    text = answer[len(MADE) :].decode("utf-8", "surrogatepass")
    if not answer.startswith(MADE):
        raise TemplateError(text)
    return text


def _job(kind: JobKind, *given: Any) -> bytes:
    return json.dumps((kind, *given), default=str).encode()


def _ask(kind: JobKind, template: str, variables: Mapping[str, Any]) -> str:
    process: RenderingProcess | None = getattr(_OF_THREAD, "process", None)
    if process is None or not process.alive:
        process = _OF_THREAD.process = RenderingProcess()
    answer = process.ask(_job(kind, template, variables))
    if process.slowed:
        process.end()
    return text_of(answer)
