"""Structured logs of a process, and no core file after a crash: no prompt or completion leaves the process this way.

store/contract/series.py declares the process's metrics.
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

_ROOT = Path(__file__).parents[2]

# Fields that a line may have: ids and numbers, names given by operators and tenants, and sentences of Staccato's own
# errors. Add a field only if the field can hold no text of a prompt or an answer.
FIELDS = frozenset(
    {
        # structlog's own fields, and the process
        *("event", "level", "timestamp", "process"),
        # names and ids
        *("attempt", "bucket", "database", "deployment", "engine", "gateway", "image", "model", "move", "name"),
        *("public_key", "request", "revision", "runtime", "source", "subject", "target", "tenant", "user"),
        # numbers and durations
        *("after_s", "blocks", "bytes", "calls", "first", "image_bytes", "in_s", "lacks_bytes", "last", "limit_bytes"),
        *("largest", "messages", "of", "offset", "output_tokens", "pages", "parcels", "patience_s", "period", "pieces"),
        *("requests", "restart_in_s", "retry_in_s"),
        *("revisions", "runtimes", "silent_s", "streams", "term", "tokens", "took_ms", "tries"),
        # results
        *("complete", "detail", "drain", "error", "folder", "format", "full", "leaving", "now", "path", "reason"),
        *("refusal", "refused", "wrong"),
    }
)


def only_known(logger: WrappedLogger, method: str, said: EventDict) -> EventDict:
    """Drop fields outside FIELDS; the line then names the dropped fields."""
    unknown = said.keys() - FIELDS
    if not unknown:
        return said
    return {name: value for name, value in said.items() if name in FIELDS} | {"dropped": sorted(unknown)}


def configure_logs(process: str) -> None:
    """Log JSON lines on stderr, or readable lines on a terminal; level from STACCATO_LOG_LEVEL (default info)."""
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
    """Describe an unexpected error by class and place: the lines of the traceback from Staccato's last line on.

    The error's message is left out, since the message may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if Path(frame.filename).parent.parent == _ROOT]
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[ours[-1] if ours else -1 :]]
    return " ".join([type(error).__name__, *lines])


def no_core_files() -> None:
    """Forbid core files of this process and its children: the memory of these processes holds prompts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
