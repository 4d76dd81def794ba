"""Threads of a front, shared by tenants: a tenant has at most one thread at a time, and waiting tenants take turns.

A front renders templates and tokenises for all tenants of an artefact. A text without spaces takes a second per
MiB: with one thread in order of arrival, texts of one tenant would make the next tenant wait, or hear 503.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from gateway.inference.context import TENANT
from runtime.core.fair_queue import FairQueue

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 2  # threads of a front; the second thread starts when two tenants have jobs at a time
WAITING_MOST = 256  # jobs of one tenant


class TooManyWaiting(Exception):
    """A tenant has WAITING_MOST jobs waiting for its turn at a front's threads."""


class TenantThreads(Executor):
    """Runs each job for the tenant named by TENANT when the job was submitted."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = self._free = threads
        self._pool = self._made_pool()
        self._queue: FairQueue[Callable[[], None]] = FairQueue(WAITING_MOST)
        self._lock = threading.Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call of `fn` for a turn of the tenant. Raises TooManyWaiting."""
        future = Future[T]()
        with self._lock:
            if not self._queue.put(TENANT.get(), partial(_done, future, partial(fn, *args, **kwargs))):
                raise TooManyWaiting(f"{WAITING_MOST} texts of this tenant wait to be tokenised, the most")
            self._begin()
        return future

    def rest(self) -> None:
        """Let the threads end after the jobs that the threads have. A later job starts threads anew."""
        with self._lock:
            ending, self._pool = self._pool, self._made_pool()
        ending.shutdown(wait=False)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _made_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, "front")

    def _begin(self) -> None:
        """Give free threads to waiting tenants in turn. Call under the lock."""
        while self._free and (taken := self._queue.take()):
            self._free -= 1
            self._pool.submit(self._serve, *taken)

    def _serve(self, tenant: str, job: Callable[[], None]) -> None:
        try:
            job()
        finally:
            with self._lock:
                self._free += 1
                self._queue.done(tenant)
                self._begin()


def _done(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
