"""Facts that a device keeps about a model: page demand, failures, loads and turns; and the turn under way. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.core.device.request import ModelKey

RETRY_S_FIRST, RETRY_S_MOST = 30.0, 3600.0
CHECKED_FIRST, CHECKED_EVERY = 3, 16  # a model is checked after each of its first 3 fetches, then after every 16th
_NEVER = float("inf")


@dataclass(slots=True, eq=False)
class PageDemand:
    """Pages that a model needs, and what the model lacks."""

    build_pages: int = 0  # pages of the pool that a build takes while the build lasts
    weights_pages: int = 0  # pages of the complete weights; known once the engine was built
    missing_bytes: int = 0  # weights missing on the device at the last fetch
    stuck: bool = False  # the model cannot make a token without more pages
    cramped: bool = False  # the model makes tokens, but lacks pages for some running or waiting requests
    lacks_room: bool = False  # the host cache has no room for the model's image: the build waits
    retires: bool = False  # no request joins any more: the image leaves the host cache once the running ones have ended
    fresh: bool = False  # the model got pages for its next step and has not made the step yet

    def moved(self) -> None:
        """Note that the model has changed its phase."""
        self.stuck = self.fresh = self.cramped = self.lacks_room = False


@dataclass(slots=True, eq=False)
class ModelFailures:
    """Failures of a model, and the time of the next try."""

    error: str = ""  # why the model cannot serve; empty: it can
    fetches: int = 0  # failed fetches in a row
    count: int = 0  # how often the model became FAILED since the model was last resident
    retry_at: float | None = None  # in FAILED: when to try again; None: never, the fault does not mend itself

    def note(self, error: str, now: float, mends: bool) -> None:
        """Note that the model cannot serve because of `error`.

        If the fault may mend, the model is tried again after a pause. Tries cost every model of the device time, so
        pauses double from RETRY_S_FIRST up to RETRY_S_MOST."""
        self.error, self.fetches = error, 0
        self.count += 1
        pause_s = min(RETRY_S_MOST, RETRY_S_FIRST * (1 << min(10, self.count - 1)))
        self.retry_at = now + pause_s if mends else None


@dataclass(slots=True, eq=False)
class LoadRecord:
    """Ways of a model to the device and away from the device."""

    load_s: float = 0.0  # estimated time to load the model if the device has no part of the weights
    proved: bool = False  # other devices have checked the model: the first fetches need no check here
    image_due: bool = False  # the build waits for the model's image, which another process makes
    proving: bool = False  # the model is to become resident to prove that the device can serve the model
    noted: bool = False  # an earlier process of the device has served the model
    ever_resident: bool = False
    loading_s: float = 0.0  # duration so far of the way to RESIDENT
    from_host: bool = True  # the last build found the image in the host cache
    return_s: float = 0.0  # duration of the last way to RESIDENT that began at disk or files; 0: there was none
    staged: bool = False  # the last build was for staging, ahead of any request
    load_ms: float = 0.0  # duration of the last completed way to RESIDENT
    fetches: int = 0
    fetch_ms: float = 0.0
    came_at: float = -_NEVER  # when the model became resident; -inf once it has stepped
    left_at: float | None = None  # when the model was told to leave the device; None: it is back, or never left
    away_us: int = 0  # sum of the times away from the device

    @property
    def check_due(self) -> bool:
        """Whether the model must pass a check after its last fetch: always while the model is new, rarely later."""
        checked = self.fetches + CHECKED_FIRST if self.proved else self.fetches
        return checked <= CHECKED_FIRST or checked % CHECKED_EVERY == 0

    def placed(self, prove: bool, noted: bool) -> None:
        """Note that the model was placed on the device; see the event `Placed`."""
        self.proving, self.noted = prove, noted
        self.proved = not (prove or noted)

    def built(self, took_s: float, from_host: bool) -> None:
        """Note a build of `took_s` seconds. Time of a build for staging is no part of the next way to RESIDENT."""
        self.loading_s, self.from_host = 0.0 if self.staged else took_s, from_host

    def fetched(self, took_s: float) -> None:
        self.fetches += 1
        self.fetch_ms = took_s * 1e3
        self.loading_s += took_s

    def came(self, now: float) -> None:
        """Note that the model became resident."""
        self.came_at, self.ever_resident, self.proving = now, True, False
        if self.left_at is not None:
            self.away_us, self.left_at = self.away_us + round((now - self.left_at) * 1e6), None
        if not (self.from_host or self.staged):
            self.return_s = self.loading_s
        self.from_host, self.staged = True, False
        self.load_ms, self.loading_s = self.loading_s * 1e3, 0.0


@dataclass(slots=True, eq=False)
class Staging:
    """Staging of a model: the engine is built around the model's image before a request asks for the model."""

    warm: bool = False  # the image stays in the host cache, by order
    under_way: bool = False  # the build under way, or the next build, is for staging
    # Of staging by the history of requests: models whose images may go for the room. None: of staging by order.
    later: tuple[ModelKey, ...] | None = None
    unasked: bool = False  # the model was staged by history, and no request has come since
    tried_of: float | None = None  # end of the last request, at the last try to stage the model by history
    staged: int = 0  # times that the model was staged by history
    unused: int = 0  # times that such an image left the host cache before a request asked for the model


@dataclass(slots=True, eq=False)
class TurnRecord:
    """Turns that a model had on the device."""

    turn_no: int = 0  # number of the model's last turn among the device's turns
    turns: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Turn:
    """The turn under way: the model holding the device, the start time, and the number of steps made."""

    holder: ModelKey
    began_at: float
    steps: int = 0
    left: int = 0  # steps to make before the policy is asked again, if nothing changes
    ahead: bool = False  # whether the engine has begun a step beyond the steps made
    until: float = float("inf")  # time at which the policy is asked in any case: steps may take longer than predicted
