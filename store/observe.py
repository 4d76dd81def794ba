"""What a process says of itself: structured logs. Prompts and completions are never in them."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure_logs(process: str) -> None:
    """JSON lines on stderr, or readable lines on a terminal; level from STACCATO_LOG_LEVEL (default info)."""
    level = logging.getLevelNamesMapping().get(os.environ.get("STACCATO_LOG_LEVEL", "info").upper(), logging.INFO)
    readable = sys.stderr.isatty()
    render = structlog.dev.ConsoleRenderer() if readable else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(process=process)
