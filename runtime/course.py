"""Where the time of a request goes on one device, and how long models take to come in. Pure.

*queue*    others have the device, or the batch is full, before its first token
*wake*     its model is built or brought in, before its first token
*switch*   nobody steps: others are parked, pages are given away; after its first token also its model's way back
*prefill*  its model has the device, until its first token
*decode*   the same after it
*wait*     others have the device after it

Clocks run for the device and its models, and say how much of each there was so far; what a request had is the
difference of two readings. So a step costs next to nothing, and the parts of a request add up to its time here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from runtime.request import ModelKey, Request, RequestId
from store.series import WAIT_S
from store.wire import Course, Spread


class Reading(msgspec.Struct, frozen=True):
    """Seconds that the clocks show to one model."""

    at: float
    turns: float = 0.0  # of anybody
    own: float = 0.0  # among them, of this model
    wake: float = 0.0  # this model was on its way in
    wake_turns: float = 0.0  # while others had their turns


@dataclass(slots=True)
class Way:
    """A model's turns, and its ways in."""

    own_s: float = 0.0
    wake_s: float = 0.0
    wake_turns_s: float = 0.0
    waking: tuple[float, float] | None = None  # since when, and the turns until then
    built: bool = False  # from its files, since it last was resident


@dataclass(slots=True)
class Passage:
    """A request on its way. `joined` and `first`: when it was given to its engine, and had its first token."""

    model: ModelKey
    arrived: Reading
    joined: Reading | None = None
    first: Reading | None = None
    told: bool = False  # what its first token waited for

    def parts(self, now: Reading) -> Course:
        joined, first = self.joined or now, self.first or now
        waited, computed, decoded = _Parts(self.arrived, joined), _Parts(joined, first), _Parts(first, now)
        return Course(
            queue_us=_us(waited.own + waited.others + computed.others),
            wake_us=_us(waited.wake + computed.wake),
            switch_us=_us(waited.none + computed.none + decoded.none + decoded.wake),
            prefill_us=_us(computed.own),
            decode_us=_us(decoded.own),
            wait_us=_us(decoded.others),
        )


class _Parts:
    """The time between two readings."""

    def __init__(self, before: Reading, after: Reading) -> None:
        turns, wake_turns = after.turns - before.turns, after.wake_turns - before.wake_turns
        self.own = after.own - before.own
        self.wake = after.wake - before.wake
        self.others = max(0.0, turns - self.own - wake_turns)
        self.none = max(0.0, after.at - before.at - turns - (self.wake - wake_turns))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


class Times:
    """A histogram over the bounds of WAIT_S."""

    def __init__(self) -> None:
        self.counts = [0] * (len(WAIT_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(WAIT_S, seconds)] += 1
        self.sum_s += seconds

    def shown(self) -> Spread:
        return Spread(list(self.counts), round(self.sum_s, 6))


@dataclass(slots=True)
class Clocks:
    """Of one device. Times are seconds on its clock, and never go back."""

    now: float  # begin
    holder: ModelKey | None = None  # whose turn it is; None: nobody steps
    wakes: dict[str, Times] = field(default_factory=lambda: {"host": Times(), "disk": Times()})
    switches: Times = field(default_factory=Times)
    _since: float = field(init=False)  # it is the holder's turn, or nobody's
    _turns_s: float = 0.0
    _last: ModelKey | None = None  # the holder before
    _ways: defaultdict[ModelKey, Way] = field(default_factory=lambda: defaultdict(Way))
    _passages: dict[RequestId, Passage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._since = self.now

    # ── the device ────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self, model: ModelKey, now: float) -> None:
        """It steps, and pauses between its steps are its own."""
        if self.holder == model:
            return
        if self.holder is not None:
            self.nobody(now)
        if self._last != model:
            self.switches.add(now - self._since)
        self.holder = self._last = model
        self._since = now

    def nobody(self, now: float) -> None:
        """No step follows the last one at once."""
        if self.holder is not None:
            self._turns_s += now - self._since
            self._ways[self.holder].own_s += now - self._since
            self.holder, self._since = None, now

    # ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def wakes_up(self, model: ModelKey, now: float, built: bool = False) -> None:
        """It is built, or brought in."""
        way = self._ways[model]
        way.built = way.built or built
        if way.waking is None:
            way.waking = (now, self._turns(now))

    def pauses(self, model: ModelKey, now: float) -> None:
        """It no longer is, for the time being."""
        way = self._ways[model]
        if way.waking is not None:
            since, turns = way.waking
            way.wake_s += now - since
            way.wake_turns_s += self._turns(now) - turns
            way.waking = None

    def is_in(self, model: ModelKey, took_s: float, now: float) -> None:
        """It is resident, after `took_s` on its way."""
        self.pauses(model, now)
        way = self._ways[model]
        self.wakes["disk" if way.built else "host"].add(took_s)
        way.built = False

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrived(self, request: Request, now: float) -> None:
        if not self._passages and self.holder is None:
            self._since = now  # until then nobody waited
        self._passages[request.id] = Passage(request.model, self._read(request.model, now))

    def joined(self, request: Request, now: float) -> None:
        if passage := self._passages.get(request.id):
            passage.joined = self._read(request.model, now)
            if request.computed:  # elsewhere: no prompt is computed here
                passage.first = passage.joined

    def made(self, id: RequestId, clock: Callable[[], float]) -> Course | None:
        """It has tokens. What its first one here waited for; None when that was told."""
        passage = self._passages.get(id)
        if passage is None or passage.told:
            return None
        passage.told = True
        reading = self._read(passage.model, clock())
        passage.first = passage.first or reading
        return passage.parts(reading)

    def so_far(self, id: RequestId, now: float) -> Course | None:
        passage = self._passages.get(id)
        return None if passage is None else passage.parts(self._read(passage.model, now))

    def ended(self, id: RequestId, now: float) -> Course | None:
        parts = self.so_far(id, now)
        self._passages.pop(id, None)
        return parts

    def _turns(self, now: float) -> float:
        return self._turns_s + (now - self._since if self.holder is not None else 0.0)

    def _read(self, model: ModelKey, now: float) -> Reading:
        way, turns = self._ways[model], self._turns(now)
        since, before = way.waking or (now, turns)
        return Reading(
            now,
            turns,
            way.own_s + (now - self._since if self.holder == model else 0.0),
            way.wake_s + now - since,
            way.wake_turns_s + turns - before,
        )

    def forget(self, model: ModelKey) -> None:
        """It is no longer here."""
        self._ways.pop(model, None)
