"""Where the time of every device process went, as shown by the platform, and whether the bill fits the time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.conftest import Platform

LOOK_PERIOD_S = 0.5
REPORT_AGE_S = 2.0  # most, of a report that a look finds


@dataclass
class Life:
    """The life of one device process."""

    time: Mapping[str, Any]  # as seen last; valid for the moment of the runtime's report, not of the look
    began: float  # latest possible start, monotonic
    earliest: float = float("-inf")  # earliest possible start, monotonic

    def look(self, time_us: Mapping[str, Any], now: float) -> None:
        self.time, self.began = time_us, min(self.began, _began(time_us, now))

    @property
    def follows_from(self) -> float:
        """Earliest possible start of the next process, monotonic."""
        return max(self.began, self.began + float(self.time["wall_us"]) / 1e6 - REPORT_AGE_S)

    def unseen_s(self, later: Life) -> float:
        """Longest time that the process may have lived after the last report, if `later` is the next process."""
        return later.began - self.began - float(self.time["wall_us"]) / 1e6

    def goes_on(self, later: Mapping[str, Any]) -> bool:
        """Whether `later` may be of the same process: no counter has gone back."""
        used = ((spent["gpu_us"] + spent["switch_us"], label) for label, spent in self.time["used"].items())
        counted = all(later[name] >= self.time[name] for name in ("wall_us", "idle_us", "platform_us"))
        return counted and all(us <= sum(later["used"].get(label, {"": 0}).values()) for us, label in used)


class Devices:
    """Looks at every device for as long as `watch` runs."""

    def __init__(self) -> None:
        self._lives: dict[str, list[Life]] = {}
        self._wrong: list[str] = []

    async def watch(self, platform: Platform) -> None:
        """Look at the devices until cancelled. The gateway may be away now and then."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await asyncio.to_thread(platform.get, "/api/v1/gpus")
                if answer.status_code == 200:
                    self.look(answer.json()["data"], time.monotonic())
            await asyncio.sleep(LOOK_PERIOD_S)

    def look(self, gpus: Iterable[Mapping[str, Any]], now: float) -> None:
        for gpu in gpus:
            time_us = gpu["time"]
            self._wrong += (f"{gpu['id']}: {said}" for said in unbalanced(time_us))
            lives = self._lives.setdefault(gpu["id"], [])
            began = _began(time_us, now)
            if not lives:
                lives.append(Life(time_us, began))
            elif began < lives[-1].earliest:
                continue  # the report is old: a killed NATS server has lost the reports written last
            elif lives[-1].goes_on(time_us):
                lives[-1].look(time_us, now)
            elif began >= lives[-1].follows_from:
                lives.append(Life(time_us, began, lives[-1].follows_from))

    @property
    def deaths(self) -> int:
        return sum(len(lives) - 1 for lives in self._lives.values())

    def flaws(self, booked_us: Mapping[str, int]) -> Iterator[str]:
        """Flaws of the time booked: a tenant may be charged at most the time that devices spent on the tenant.

        `booked_us`: microseconds by tenant id. The time that a device process spent after the last look is unknown, and
        at most as long as the process lived unseen.
        """
        yield from self._wrong
        pairs = [pair for lives in self._lives.values() for pair in itertools.pairwise(lives)]
        unseen_us = round(sum(life.unseen_s(later) for life, later in pairs) * 1e6)
        used = used_us(life.time for lives in self._lives.values() for life in lives)
        over = {tenant: us - used[tenant] for tenant, us in booked_us.items() if us > used[tenant]}
        if sum(over.values()) > unseen_us:
            yield f"charged beyond what devices are known to have spent: {over} us; {unseen_us} us passed unseen"


def _began(time_us: Mapping[str, Any], now: float) -> float:
    """Latest possible start of the process: a report seen now may be some time old."""
    return now - float(time_us["wall_us"]) / 1e6


def used_us(times: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Microseconds that devices spent, by tenant id."""
    used: Counter[str] = Counter()
    for time_us in times:
        for label, spent in time_us["used"].items():
            used[label.partition("/")[0]] += spent["gpu_us"] + spent["switch_us"]
    return used


def unbalanced(time_us: Mapping[str, Any]) -> Iterator[str]:
    """Flaws in a device's time: each microsecond is a tenant's, the platform's, idle, or open (owner not known yet)."""
    paid = sum(used_us([time_us]).values())
    known = paid + time_us["idle_us"] + time_us["platform_us"] + time_us["open_us"]
    if known != time_us["wall_us"]:
        yield f"of {time_us['wall_us']} us of the device's time {known} are accounted for"
