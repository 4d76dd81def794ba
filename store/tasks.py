"""Ends of asyncio's tasks that swallow a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

CANCEL_AGAIN_S = 0.5

T = TypeVar("T")


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks until each has ended: wait_for of Python 3.11, used by nats-py, can swallow a cancellation."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


async def within(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Return the result of the work.

    Raises TimeoutError after `limit_s` seconds, also where the work swallows a cancellation."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task], timeout=limit_s)
    finally:
        await ended(task)
    if task.cancelled():
        raise TimeoutError(f"not done after {limit_s:g} s")
    return task.result()
