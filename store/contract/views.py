"""Messages of the bus for people who watch a device: the timeline of models, and the map of pages. Pure."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from store.contract.wire import Message


def timeline_subject(runtime: str) -> str:
    """Subject on which a runtime takes requests of ShowTimeline and answers Timeline."""
    return f"rt.{runtime}.timeline"


def pages_subject(runtime: str) -> str:
    """Subject on which a runtime takes requests of ShowPages and answers PageMap."""
    return f"rt.{runtime}.pages"


class Use(IntEnum):
    """Use of a device's time: see runtime/core/ledgers/device_time.py."""

    STEPS = 0
    SWITCH = 1
    IDLE = 2
    PLATFORM = 3
    OPEN = 4  # not known yet: a request waits
    AWAY = 5  # no device process existed


class Why(msgspec.Struct, frozen=True, array_like=True):
    """Requests for which a model got the turn."""

    requests: int
    firsts: int  # requests without a token yet
    due_ms: int  # time until the earliest next token was due; less than 0: the token was late


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Span of a device's time with one use. Spans join without a gap.

    Spans of a bucket begin at the same time and have no order. Times are UNIX microseconds, by the host's clock as the
    clock was when the node began."""

    at_us: int
    us: int
    use: Use
    model: str = ""  # model that stepped or was switched to; empty in a bucket: the models beyond the bucket's limit
    steps: int = 0  # steps of a turn; 0 in a bucket
    requests: int = 0  # the most requests in a step
    why: Why | None = None  # reason of a switch


class Stage(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Stage of a model's way to the device. Stages of several models may overlap each other and steps of models."""

    at_us: int
    us: int
    model: str
    name: str  # build | fetch | check


class ShowTimeline(Message, frozen=True, kw_only=True, tag="ShowTimeline"):
    """Request for at most `most` spans, in the finest detail kept for the whole time."""

    from_us: int
    to_us: int
    most: int


class Timeline(Message, frozen=True, kw_only=True, tag="Timeline"):
    """Spans of a device's time: the `us` of the spans add up to to_us - from_us exactly.

    The timeline may begin later than requested, and end earlier."""

    from_us: int
    to_us: int
    bucket_us: int = 0  # 0: a span for each turn
    spans: list[Span] = []
    stages: list[Stage] = []


class Content(IntEnum):
    """Content of a page."""

    FREE = 0
    WEIGHTS = 1
    KV = 2
    CACHE = 3  # weights that may go at any time
    LEAVING = 4  # free once the copies that touch the page are over
    LOADING = 5


class PageRun(msgspec.Struct, frozen=True, array_like=True):
    """Run of neighbouring pages with equal content."""

    pages: int
    content: Content
    model: str = ""  # empty: no model, or not known


class ShowPages(Message, frozen=True, kw_only=True, tag="ShowPages"):
    """Request for the map of the device pool."""


class PageMap(Message, frozen=True, kw_only=True, tag="PageMap"):
    """Map of every page of the device pool, from page 0 on."""

    page_bytes: int = 0
    runs: list[PageRun] = []
    missing: str = ""  # why there is no map; empty: the map is complete
