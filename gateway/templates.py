"""Chat templates of strangers, rendered elsewhere: for each thread that asks, one process of `gateway/rendering.py`.

vLLM has one rendering thread for each front, so a template that never ends holds up its own front alone, and that for
`DEADLINE_S`: then its process is gone, the thread is free and the client reads why.
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

from gateway import rendering
from gateway.rendering import CHECK, DEADLINE_S, MADE, READY, RENDER, TEXT_MOST, VARIABLES

START_S = 20.0  # until a process is there, on a machine that has much else to do
PATIENCE_S = 0.5  # what takes longer lets others go first, and a new process follows it
AFTERWARDS = 10  # its niceness then
GRACE_S = 1.0  # for the kernel to end what is late
PASSED = ("PATH", "LD_LIBRARY_PATH", "TZ")  # what a Python needs of our environment, and what `strftime_now` shows


class Harmful(TemplateError):
    """The template ended its process."""


class Compiled:
    """What transformers and vLLM use of a compiled template, without one here."""

    def __init__(self, template: str) -> None:
        self.environment = _ENVIRONMENT
        self._template = template

    def render(self, **variables: Any) -> str:
        """Raises TemplateError, with a sentence for the client."""
        return _ask(RENDER, self._template, variables)


@lru_cache(maxsize=256)
def variables(template: str) -> frozenset[str]:
    """The names that it looks for among what it is given. Raises TemplateError."""
    return frozenset(_ask(VARIABLES, template, {}).split())


@lru_cache(maxsize=256)
def system_first(template: str | None) -> bool:
    """It refuses system messages after others, or there is none. Raises Harmful."""
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
    """Why nobody should read it, let alone render it; None: it is as it should be."""
    try:
        _ask(CHECK, template, {})
        system_first(template)
    except TemplateError as error:
        return str(error)
    return None


def refusing(fault: str) -> str:
    """A template in the place of one with this fault: it says so to whoever chats."""
    plain = "".join(c if c.isascii() and c.isprintable() and c not in "'\"\\{}" else "`" for c in fault)
    return "{{ raise_exception('" + plain + "') }}"


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Process:
    """Ends with the thread that has it."""

    def __init__(self) -> None:
        """Raises TemplateError when it does not start."""
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
        self.slowed = False  # nothing makes it quick again
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
        """Raises Harmful when it ends instead of answering."""
        try:
            self._asked.send_bytes(job)
            if not self._asked.poll(PATIENCE_S):
                self.slowed = True
                with contextlib.suppress(OSError):  # it just ended, or nobody may say who goes first
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
