"""Python's garbage in processes that serve streams: full collections when memory has grown, and rarely otherwise.

A full collection walks all objects of a process, and no stream gets a token meanwhile: 0.1 s with 1,000 streams. Python
begins a full collection after ten collections of younger objects, and each step of many streams brings some of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
from collections.abc import AsyncIterator

from store.tasks import ended

YOUNG_MOST = 700  # objects, as by Python's default
MIDDLE_EVERY = 10  # collections of young objects, as by default
FULL_EVERY = 1000  # collections of the middle generation; 10 by default
GROWN_BYTES = 128 << 20  # growth of private memory that a full collection may end
PERIOD_S = 2.0


@contextlib.asynccontextmanager
async def rarely_collected() -> AsyncIterator[None]:
    """Leave all present objects out of later collections, and keep full collections rare until the end.

    Garbage in cycles is freed late, so memory that has grown by GROWN_BYTES is an occasion to collect."""
    defaults = gc.get_threshold()
    gc.collect()
    gc.freeze()  # vLLM's modules alone are hundreds of thousands of objects
    gc.set_threshold(YOUNG_MOST, MIDDLE_EVERY, FULL_EVERY)
    watching = asyncio.create_task(_collect_after_growth())
    try:
        yield
    finally:
        await ended(watching)
        gc.set_threshold(*defaults)


async def _collect_after_growth() -> None:
    settled = private_bytes()
    while True:
        await asyncio.sleep(PERIOD_S)
        now = private_bytes()
        if now > settled + GROWN_BYTES:
            gc.collect()
            settled = private_bytes()
        else:
            settled = min(settled, now)


def private_bytes() -> int:
    """The resident memory of this process, without files and memory shared with other processes: a node maps the host
    cache."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * resource.getpagesize()
