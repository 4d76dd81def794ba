"""Parts of a request's time on a device, and times that models take to come in. Pure.

*queue*    before the first token: different models have the device, or the batch is full
*wake*     before the first token: the model is built or brought in
*switch*   no model steps: models are parked, pages change hands; after the first token also the way back of the model
*prefill*  the model has the device and its engine has the request, until the first token
*decode*   the model has the device, after the first token
*wait*     different models have the device, after the first token

Clocks run for the device and for each model and count the time of each kind so far. A request's time of a kind is the
difference of two readings. A step therefore costs next to nothing, and the parts of a request add up to its time on the
device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from runtime.core.device.request import ModelKey, Request, RequestId
from store.contract.series import WAIT_S
from store.contract.wire import Course, Spread


class ClockReading(msgspec.Struct, frozen=True):
    """Clocks as read for one model, in seconds."""

    at: float
    turns: float = 0.0  # turns of every model
    own: float = 0.0  # turns of this model
    wake: float = 0.0  # time that this model was on the way in
    wake_turns: float = 0.0  # part of `wake` in which models had turns


@dataclass(slots=True)
class Way:
    """Clocks of a model: its turns, and its ways to the device."""

    own_s: float = 0.0
    wake_s: float = 0.0
    wake_turns_s: float = 0.0
    waking: tuple[float, float] | None = None  # start of the present way in, and the device's turns until then
    built: bool = False  # built from files since the model last was resident


@dataclass(slots=True)
class Passage:
    """Readings of a request's stations: arrived, joined the engine (`joined`), first token (`first`)."""

    model: ModelKey
    arrived: ClockReading
    joined: ClockReading | None = None
    first: ClockReading | None = None
    told: bool = False  # the parts of the first token's time were reported

    def parts(self, now: ClockReading) -> Course:
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
    """Seconds between two readings, by kind."""

    def __init__(self, before: ClockReading, after: ClockReading) -> None:
        turns, wake_turns = after.turns - before.turns, after.wake_turns - before.wake_turns
        self.own = after.own - before.own
        self.wake = after.wake - before.wake
        self.others = max(0.0, turns - self.own - wake_turns)
        self.none = max(0.0, after.at - before.at - turns - (self.wake - wake_turns))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


class WaitHistogram:
    """Histogram of durations over the bounds of WAIT_S."""

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
    """Clocks of a device, its models and its requests. `now` is seconds on the device's clock, and never goes back."""

    now: float  # start of the clocks
    holder: ModelKey | None = None  # model with the present turn; None: no model steps
    wakes: dict[str, WaitHistogram] = field(default_factory=lambda: {"host": WaitHistogram(), "disk": WaitHistogram()})
    switches: WaitHistogram = field(default_factory=WaitHistogram)
    _since: float = field(init=False)  # start of the holder's turn, or of the time without a turn
    _turns_s: float = 0.0
    _last: ModelKey | None = None  # the last holder
    _ways: defaultdict[ModelKey, Way] = field(default_factory=lambda: defaultdict(Way))
    _passages: dict[RequestId, Passage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._since = self.now

    # ── the device ────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self, model: ModelKey, now: float) -> None:
        """Begins a turn of `model`, if not under way. Pauses between steps belong to the turn."""
        if self.holder == model:
            return
        if self.holder is not None:
            self.nobody(now)
        if self._last != model:
            self.switches.add(now - self._since)
        self.holder = self._last = model
        self._since = now

    def nobody(self, now: float) -> None:
        """Ends the turn: no step follows the last step at once."""
        if self.holder is not None:
            self._turns_s += now - self._since
            self._ways[self.holder].own_s += now - self._since
            self.holder, self._since = None, now

    # ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def wakes_up(self, model: ModelKey, now: float, built: bool = False) -> None:
        """Starts the wake clock of a model about to be built or brought in."""
        way = self._ways[model]
        way.built = way.built or built
        if way.waking is None:
            way.waking = (now, self._turns(now))

    def pauses(self, model: ModelKey, now: float) -> None:
        """Stops the wake clock of a model no longer being built or brought in."""
        way = self._ways[model]
        if way.waking is not None:
            since, turns = way.waking
            way.wake_s += now - since
            way.wake_turns_s += self._turns(now) - turns
            way.waking = None

    def is_in(self, model: ModelKey, took_s: float, now: float) -> None:
        """Stops the wake clock of a model now resident and counts `took_s`, the time of the whole way in."""
        self.pauses(model, now)
        way = self._ways[model]
        self.wakes["disk" if way.built else "host"].add(took_s)
        way.built = False

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrived(self, request: Request, now: float) -> None:
        if not self._passages and self.holder is None:
            self._since = now  # until now no request waited
        self._passages[request.id] = Passage(request.model, self._read(request.model, now))

    def joined(self, request: Request, now: float) -> None:
        if passage := self._passages.get(request.id):
            passage.joined = self._read(request.model, now)
            if request.computed:  # on a different device: no prompt is computed here
                passage.first = passage.joined

    def made(self, id: RequestId, clock: Callable[[], float]) -> Course | None:
        """Parts of the wait for a request's first token on this device, at its first tokens; None later."""
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

    def _read(self, model: ModelKey, now: float) -> ClockReading:
        way, turns = self._ways[model], self._turns(now)
        since, before = way.waking or (now, turns)
        return ClockReading(
            now,
            turns,
            way.own_s + (now - self._since if self.holder == model else 0.0),
            way.wake_s + now - since,
            way.wake_turns_s + turns - before,
        )

    def forget(self, model: ModelKey) -> None:
        """Drops the clocks of a withdrawn model."""
        self._ways.pop(model, None)
