"""Long work in slices: a call that pauses in its midst, so that the thread can do other work before the call goes on.

A build of an engine takes tens of milliseconds and a check of a model several steps. Requests of other models wait
meanwhile, so the device's loop makes a step of another model between two slices. A second thread would not do: vLLM and
torch keep the settings of a build in variables of the process, and a step must not see these settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Generic, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")


class _Call(greenlet):  # type: ignore[misc]
    until = 0.0  # end of the slice, in seconds on the monotonic clock


class Sliced(Generic[T]):
    """A call under way. The call has a stack and context variables of its own; an error comes out of `go_on`."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._result: T
        self._greenlet = _Call(self._run)
        self._greenlet.gr_context = copy_context()
        self._call = call

    def _run(self) -> None:
        self._result = self._call()

    def go_on(self, slice_s: float) -> bool:
        """Carry out one slice: until the call's first pause after `slice_s` seconds. Returns whether the call is over.

        Raises what the call raises; the call is over then, too."""
        self._greenlet.parent, self._greenlet.until = getcurrent(), time.monotonic() + slice_s
        self._greenlet.switch()
        return self.over

    @property
    def over(self) -> bool:
        return bool(self._greenlet.dead)

    @property
    def result(self) -> T:
        """What the call returned. To be asked once the call is over."""
        return self._result

    def drop(self) -> None:
        """End a call that is not over: the call's `finally` clauses run, out of the pause."""
        self._greenlet.parent = getcurrent()
        self._greenlet.throw()


def pause(aside: Callable[[], Callable[[], None]]) -> None:
    """Pause the call around this line if the call's slice is used up. Does nothing outside of a `Sliced` call.

    `aside` puts away the call's settings of the whole thread, and returns the function that sets the same again."""
    call = getcurrent()
    if isinstance(call, _Call) and time.monotonic() >= call.until:
        back = aside()
        try:
            call.parent.switch()
        finally:
            back()
