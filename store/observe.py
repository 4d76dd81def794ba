"""What a process says of itself: structured logs, and nothing when it crashes. No prompt or completion is in either.

What it counts stands in store/series.py.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import traceback
from pathlib import Path

import structlog
from structlog.typing import EventDict, WrappedLogger

_ROOT = Path(__file__).parents[1]

# Everything that a line may say: ids and numbers, names that operators and tenants gave to things, and sentences of our
# own errors. A new field is thought about here.
FIELDS = frozenset(
    {
        # structlog's own, and whose line it is
        *("event", "level", "timestamp", "process"),
        # who and what
        *("attempt", "bucket", "database", "deployment", "engine", "gateway", "model", "move", "name", "request"),
        *("revision", "runtime", "subject", "target", "tenant", "user"),
        # how many, how long, where it stands
        *("after_s", "blocks", "bytes", "calls", "first", "in_s", "last", "messages", "of"),
        *("output_tokens", "pages", "parcels", "period", "pieces", "requests", "restart_in_s", "retry_in_s"),
        *("revisions", "runtimes", "silent_s", "streams", "term", "tokens", "took_ms", "tries", "weights_pages"),
        # what came of it
        *("complete", "detail", "drain", "error", "format", "leaving", "now", "path", "reason", "refusal", "refused"),
        *("wrong",),
    }
)


def only_known(logger: WrappedLogger, method: str, said: EventDict) -> EventDict:
    """A field that nobody thought about is not written, and the line says so."""
    unknown = said.keys() - FIELDS
    if not unknown:
        return said
    return {name: value for name, value in said.items() if name in FIELDS} | {"dropped": sorted(unknown)}


def configure_logs(process: str) -> None:
    """JSON lines on stderr, or readable lines on a terminal; level from STACCATO_LOG_LEVEL (default info)."""
    no_core_files()
    level = logging.getLevelNamesMapping().get(os.environ.get("STACCATO_LOG_LEVEL", "info").upper(), logging.INFO)
    readable = sys.stderr.isatty()
    render = structlog.dev.ConsoleRenderer() if readable else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            only_known,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(process=process)


def place_of(error: BaseException) -> str:
    """What to say of an error that nobody expected: its kind, and where it was raised, from our last line on. Not its
    message, which may have a prompt in it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if Path(frame.filename).parent.parent == _ROOT]
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[ours[-1] if ours else -1 :]]
    return " ".join([type(error).__name__, *lines])


def no_core_files() -> None:
    """From this process and its children: the memory of both has prompts in it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
