"""Keeps the runtimes of `staccato up` at the number that the scheduler wants.

Once a second the keeper reads `GET /api/v1/fleet`, starts missing runtimes, and ends surplus runtimes without requests.
An error of the keeper costs the fleet its size, never the platform.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from msgspec import Struct, json

from gateway.config import Settings
from gateway.ops.asking import get
from gateway.ops.supervise import Child, Say, Tier

PERIOD_S = 1.0  # also the interval between two leases of a runtime
RETRY_S = 60.0  # pause after a runtime that did not get well
PATH = "/api/v1/fleet"


class FleetAnswer(Struct, frozen=True):
    """Answer of the gateway about the fleet; the lists hold names of runtimes."""

    wanted: int | None  # None: no scheduler says a number
    serving: frozenset[str]
    draining: frozenset[str]
    surplus: frozenset[str]  # draining for want of load: the scheduler may ask the runtimes back
    removable: frozenset[str]  # surplus and without a request


@dataclass(frozen=True)
class FleetStep:
    """Names of runtimes to start and to end now. `missing`: how many runtimes lack, also if no name is free."""

    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    missing: int = 0


def step_to(seen: FleetAnswer, present: AbstractSet[str], ending: AbstractSet[str], names: Sequence[str]) -> FleetStep:
    """Return the next step towards the wanted number of runtimes. Pure.

    A surplus runtime counts until it ends, because the scheduler asks surplus runtimes back first. A runtime drained by
    an operator is neither counted nor ended.

    Args:
        present: runtimes with a process here, runtimes in `ending` included.
        ending: runtimes whose process was told to end.
        names: names that runtimes here may have; the first free names are taken."""
    if seen.wanted is None:
        return FleetStep()
    counted = (seen.serving | seen.surplus | (present - seen.draining)) - ending
    missing = max(0, seen.wanted - len(counted))
    free = [name for name in names if name not in present | seen.serving | seen.draining]
    end = tuple(name for name in names if name in seen.removable & present - ending)
    return FleetStep(tuple(free[:missing]), end, missing)


class FleetKeeper:
    """Acts on the number of runtimes that the scheduler wants."""

    def __init__(
        self,
        tier: Tier,
        runtime: Callable[[str], Child],
        names: Sequence[str],
        ask: Callable[[], Awaitable[FleetAnswer]],
        say: Say,
    ) -> None:
        """`tier` holds the runtimes.

        Args:
            runtime: returns the process to start for a name.
            names: names that runtimes may have.
            ask: asks for the state of the fleet.
            say: called with a sentence for each start, end and failure."""
        self._tier, self._runtime, self._names, self._ask, self._say = tier, runtime, names, ask, say
        self._failing: set[str] = set()  # runtimes that did not get well since the runtimes were first wanted
        self._starts_from = 0.0  # time before which no runtime is started
        self._troubled = False  # the last look failed, and the failure was said

    async def keep(self) -> None:
        """Look after the fleet until the task is cancelled. No error ends the task: the next look is a new chance."""
        while True:
            try:
                self._follow(await self._ask())
                self._troubled = False
            except Exception as error:
                self._trouble(error)
            await asyncio.sleep(PERIOD_S)

    def _trouble(self, error: Exception) -> None:
        if not self._troubled:
            what = str(error) or type(error).__name__
            self._say(f"the number of runtimes stays as it is, and is looked at again each {PERIOD_S:g} s: {what}")
        self._troubled = True

    def _follow(self, seen: FleetAnswer) -> None:
        self._failing -= seen.serving
        step = step_to(seen, self._tier.names, self._tier.ending, self._names)
        for name in step.end:
            self._say(f"{name} ends: the load needs fewer runtimes")
            self._tier.end(name)
        if not step.missing:
            self._forget_failing()
        elif time.monotonic() >= self._starts_from:
            for name in step.start:
                self._start(name, seen)

    def _start(self, name: str, seen: FleetAnswer) -> None:
        again = name in self._failing
        child = replace(self._runtime(name), needed=False)
        self._tier.start(child, self._lost, _say_nothing if again else None)
        if not again:
            self._say(f"{name} starts: the load needs {seen.wanted} runtimes")

    def _lost(self, name: str, error: BaseException) -> None:
        self._starts_from = time.monotonic() + RETRY_S
        if name not in self._failing:
            self._say(f"{name} does not get well, and is tried again every {RETRY_S:g} s while wanted: {error}")
        self._failing.add(name)

    def _forget_failing(self) -> None:
        for name in self._failing - self._tier.names:
            self._tier.forget(name)
            self._failing.discard(name)


def _say_nothing(sentence: str) -> None:
    """Say nothing of a runtime whose failure was said."""


async def ask(settings: Settings, key: str) -> FleetAnswer:
    """Ask the gateway of `settings` for the state of the fleet, with an operator's key. Raises OSError or
    msgspec.DecodeError."""
    status, body = await get(settings, PATH, key)
    if status != 200:
        raise OSError(f"{settings.url}{PATH} answers {status}, see the gateway's log")
    return json.decode(body, type=FleetAnswer)
