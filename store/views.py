"""The part of the bus's contract that serves people who look: who had a device when, and what is in its pages. Pure."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from store.wire import Message


def timeline_subject(runtime: str) -> str:
    """Request: ShowTimeline → Timeline."""
    return f"rt.{runtime}.timeline"


def pages_subject(runtime: str) -> str:
    """Request: ShowPages → PageMap."""
    return f"rt.{runtime}.pages"


class Use(IntEnum):
    """What a device's time went to: see runtime/account.py."""

    STEPS = 0
    SWITCH = 1
    IDLE = 2
    PLATFORM = 3
    OPEN = 4  # it is not known yet: somebody waits
    AWAY = 5  # there was no device process


class Why(msgspec.Struct, frozen=True, array_like=True):
    """Who a model was brought to its turn for."""

    requests: int
    firsts: int  # of these, without a token yet
    due_ms: int  # until the first of their next tokens was due; less than 0: it was late


class Span(msgspec.Struct, frozen=True, array_like=True):
    """What a device's time went to. Spans join without a gap; those of one bucket begin at the same time and follow
    each other in no order. Times are UNIX microseconds, by the host's clock as it was when the node began."""

    at_us: int
    us: int
    use: Use
    model: str = ""  # whose steps, or to whom it was switched; empty in a bucket: of the last to come
    steps: int = 0  # of a turn; 0 in a bucket
    requests: int = 0  # at most, in one of these steps
    why: Why | None = None  # of a switch


class Stage(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A part of a model's way to the device. Parts of several models may overlap, and steps of others with them."""

    at_us: int
    us: int
    model: str
    name: str  # build | fetch | check


class ShowTimeline(Message, frozen=True, kw_only=True, tag=True):
    """Asks for no more than `most` spans, of the finest detail that is kept of all this time."""

    from_us: int
    to_us: int
    most: int


class Timeline(Message, frozen=True, kw_only=True, tag=True):
    """us of all spans make up to_us - from_us exactly. It may begin later than was asked, and end earlier."""

    from_us: int
    to_us: int
    bucket_us: int = 0  # 0: these are the turns, one by one
    spans: list[Span] = []
    stages: list[Stage] = []


class Content(IntEnum):
    """What is in a page."""

    FREE = 0
    WEIGHTS = 1
    KV = 2
    CACHE = 3  # weights that may go at any time
    LEAVING = 4  # it is free when the copies that touch it are over
    LOADING = 5


class PageRun(msgspec.Struct, frozen=True, array_like=True):
    """Neighbours that are alike."""

    pages: int
    content: Content
    model: str = ""  # empty: nobody's, or not known


class ShowPages(Message, frozen=True, kw_only=True, tag=True):
    """Asks for the map of the pool."""


class PageMap(Message, frozen=True, kw_only=True, tag=True):
    """Every page of the pool, from page 0 on."""

    page_bytes: int = 0
    runs: list[PageRun] = []
    missing: str = ""  # why there is none
