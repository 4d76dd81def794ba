"""Chat templates of tenants, rendered in a process of `gateway/vllm/rendering.py` for each asking thread.

vLLM has one rendering thread for each front, so an endless template holds up only its own front, for `DEADLINE_S`. Then
the kernel has ended the template's process, the thread is free and the client reads why.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import TemplateError

from gateway.vllm import rendering
from gateway.vllm.rendering import CHECK, DEADLINE_S, MADE, READY, RENDER, TEXT_MOST, VARIABLES

START_S = 20.0  # longest start of a process, on a busy host
# A template that takes longer runs at a lower priority, and its process is replaced afterwards.
PATIENCE_S = 0.5
AFTERWARDS = 10  # niceness of a slow template's process
GRACE_S = 1.0  # time for the kernel to end a late process
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
        return _ask(RENDER, self._template, variables)


@lru_cache(maxsize=256)
def variables(template: str) -> frozenset[str]:
    """Return the names that the template looks up among its variables. Raises TemplateError."""
    return frozenset(_ask(VARIABLES, template, {}).split())


@lru_cache(maxsize=256)
def system_first(template: str | None) -> bool:
    """Whether the template refuses a system message after other messages; True without a template. Raises Harmful."""
    if not template:
        return True
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        _ask(RENDER, template, {"messages": messages, "add_generation_prompt": False})
    except Harmful:
        raise
    except TemplateError:
        return True
    return False


def fault(template: str) -> str | None:
    """Return why vLLM must neither read nor render the template; None if the template is sound."""
    try:
        _ask(CHECK, template, {})
        system_first(template)
    except TemplateError as error:
        return str(error)
    return None


def refusing(fault: str) -> str:
    """Return a template that refuses to chat and tells `fault`, to be used in place of the faulty template."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in "'\"\\{}" else "`" for c in fault)
    return "{{ raise_exception('" + plain + "') }}"


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Process:
    """A rendering process. Ends with the thread that asks it."""

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

    def ask(self, job: bytes) -> bytes:
        """Return the process's answer to a job. Raises Harmful if the process ends instead of answering."""
        try:
            self._asked.send_bytes(job)
            if not self._asked.poll(PATIENCE_S):
                self.slowed = True
                with contextlib.suppress(OSError):  # the process just ended, or priorities can't be changed here
                    os.setpriority(os.PRIO_PROCESS, self._child.pid, AFTERWARDS)
            if self._asked.poll(DEADLINE_S + GRACE_S):
                return self._asked.recv_bytes(len(MADE) + TEXT_MOST)
            late = True
        except (EOFError, OSError):
            late = False
        self.end()
        code = self._child.returncode
        if late or code == -signal.SIGALRM:
            raise Harmful(f"the chat template did not end within {DEADLINE_S:.0f} s: let it loop less")
        raise Harmful(f"the chat template ended its process ({code}): let it make less, nested less deep")


def _end(child: subprocess.Popen[bytes], asked: Connection) -> None:
    child.kill()
    child.wait()
    asked.close()


_ENVIRONMENT = rendering.environment()
_OF_THREAD = threading.local()


def _ask(kind: str, template: str, variables: Mapping[str, Any]) -> str:
    job = json.dumps((kind, template, variables), default=str).encode()
    process: _Process | None = getattr(_OF_THREAD, "process", None)
    if process is None or not process.alive:
        process = _OF_THREAD.process = _Process()
    reply = process.ask(job)
    if process.slowed:
        process.end()
    text = reply[len(MADE) :].decode("utf-8", "surrogatepass")
    if not reply.startswith(MADE):
        raise TemplateError(text)
    return text
