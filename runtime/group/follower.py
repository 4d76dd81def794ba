"""A follower, any rank of a group but the first: a process with its own device, which repeats the first rank's work."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec
import structlog

from runtime.core.engine import Engine, EngineBuilder
from runtime.group.group import EngineCall, Failed, Rank, digest, end, see_one_device
from store.telemetry import observe

log = structlog.get_logger()


class Follower:
    """Repeats every call of the first rank on this rank's engines."""

    def __init__(self, build: EngineBuilder, calls: Connection) -> None:
        self._build, self._calls = build, calls
        self._engines: dict[str, Engine] = {}
        self._said: dict[str, int] = {}

    def run(self) -> None:
        """Follow calls until the first rank has ended. If the ranks diverge, the process ends."""
        with suppress(EOFError):
            while True:
                call = self._calls.recv()
                if not isinstance(call, EngineCall):
                    _diverged("", f"the first rank failed with {call.kind}, this one did not")
                self._follow(call)

    def _follow(self, call: EngineCall) -> None:
        try:
            self._do(call)
        except Exception as error:
            kind, theirs = type(error).__name__, self._calls.recv()
            if theirs != Failed(kind):
                _diverged(call.model, f"{call.method}: {kind}: {str(error)[:300]}")

    def _do(self, call: EngineCall) -> None:
        model = call.model
        if not call.method:
            (spec,) = call.arguments
            self._engines[model], self._said[model] = self._build(spec, _nobody), 0
            return
        if call.said != self._said[model]:
            _diverged(model, "this rank has made other tokens than the first one")
        engine = self._engines.pop(model) if call.method == "close" else self._engines[model]
        made = getattr(engine, call.method)(*call.arguments)
        if call.method == "step":
            self._said[model] = digest(call.said, made)


def _diverged(model: str, detail: str) -> NoReturn:
    log.error("group.diverged", model=model, detail=detail)
    end()


def _nobody(read_bytes: int, files_bytes: int) -> None:
    """Take reports of bytes read, and ignore the reports: a `Told`."""


def _end_with(pid: int) -> None:
    """End this process when the process `pid`, the first rank, ends, even in a step that waits for the first rank."""
    select.select([os.pidfd_open(pid)], [], [])
    os._exit(0)


def main() -> None:
    """`python -m runtime.group.follower RANK`, started by the first rank."""
    began = msgspec.json.decode(sys.argv[1], type=Rank)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    observe.configure_logs("device")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    first = began.first
    see_one_device(began.rank, first.tensor_parallel)
    from runtime.engine import ranks
    from runtime.engine.builder import Builder
    from runtime.engine.selfcheck import prepare

    ranks.join(began.rank, first.tensor_parallel, began.folder)
    build = Builder(**first.builder)
    prepare(build)
    Follower(build, Connection(began.calls_fd)).run()
    os._exit(0)


if __name__ == "__main__":
    main()
