"""What the runtime asks of an engine: one model, built once, moved one step at a time, its memory taken and given back
while it lives. Pure; vllm.py carries it out.

Memory is counted in pages of the device's pool. An engine is built off the pool and holds no pages then. `fetch`
brings it in, `park` takes its requests out, `evict` gives back what of its weights is left as clean cache; between
those it may `grow` and `shrink` its KV cache. None of these waits for a transfer: `arrived` and `parked` say how far it
is, and `wait` is for who has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from runtime.request import RequestId
from store.views import PageRun
from store.wire import Departure, EngineSpec, Finish, KvForm


class EngineError(Exception):
    """The engine refused or failed; the message names what, the number and the remedy."""


class BadRequest(EngineError):
    """This request can't be served by this engine; the engine is unharmed."""


class Output(msgspec.Struct, frozen=True):
    """What one step made for one request. `logprobs` is the engine's own encoding, for its own front half."""

    request: RequestId
    tokens: list[int]
    finish: Finish | None = None
    stop_reason: int | str | None = None
    logprobs: bytes | None = None
    cached_tokens: int = 0


AHEAD = 64  # tokens of each request for which pages are kept before they are needed


class Held(msgspec.Struct, frozen=True):
    """What an engine has of the pool, in pages, and what it could use."""

    weights: int = 0  # mapped, or clean cache
    kv: int = 0  # mapped
    kv_wanted: int = 0  # that the requests it has, parked ones too, need for their next step; `kv` may be more or less
    kv_spare: int = 0  # of `kv`, what holds nothing but prefixes of requests that ended, and is not needed soon


class Engine(Protocol):
    """One model. Not thread-safe, and steps of two engines of one process must never overlap."""

    weights_pages: int  # all of its weights
    kv_pages_least: int  # with so many, one request of the longest length can be served to its end
    owners: tuple[int, int]  # of its weights and of its KV cache, in the map of the pool
    kv_form: KvForm  # blocks of an engine with another one are not for this one

    def held(self) -> Held:
        """Cheap: asked after every step."""

    def kv_fragmentation(self) -> float:
        """Of the pages of KV cache that are in use, the share that holds nothing of a request."""

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = ()) -> None:
        """Queue a request written by the engine's front half; touches no device memory. Raises BadRequest.

        `made` are the first tokens of its output, made by an engine of the same model that is no more. Keys and values
        of them are computed again, and what comes next is what that engine would have said next."""

    def abort(self, requests: list[RequestId]) -> None:
        """Forget these requests, parked ones too; ids the engine does not know are ignored. No output follows."""

    def busy(self) -> bool:
        """Whether any request is unfinished, parked or on its way in; those that left or are expected do not count."""

    def step(self) -> list[Output]:
        """One iteration of the batch, with the requests that are in; waits for the first of them if none is yet.

        With too little KV cache it computes what it can, and nothing when that is nothing. Needs `arrived`. Any
        exception leaves the engine unfit: close it."""

    def fetch(self, kv_pages: int) -> None:
        """Begin to bring in the missing weights, and the parked requests as far as `kv_pages` suffice.

        `kv_pages` are all it has then. Raises EngineError when the pool has too little; all is as before."""

    def arrived(self) -> bool:
        """Whether a step can be made: all weights are in and a request, if there is any. Raises EngineError when the
        transfer failed: the weights are as before `fetch`, the requests parked."""

    def check(self) -> str | None:
        """Compare what it says now with what it said when its weights were read from their files; what is wrong, or
        None. Takes a few steps; needs `arrived`. A model with something wrong must not serve: close it."""

    def park(self) -> None:
        """Take all requests out, beginning their copies to the host, and leave the weights as clean cache.

        A request that left is as parked as the others: it may still depart, and is parked if it stays. What is expected
        loses its blocks: no more is received for it, adopting it fails, and it is for the caller to forget it."""

    def parked(self) -> bool:
        """Whether all requests are safe on the host and all of the KV cache's pages are given back."""

    def wait(self, timeout_s: float) -> None:
        """Until a transfer that `fetch` or `park` began is over, well or not, or the time is up."""

    def grow(self, kv_pages: int) -> None:
        """Take so many pages more for the KV cache; fewer if the pool has too few or refuses: see `held`."""

    def shrink(self, kv_pages: int) -> None:
        """Give so many pages of the KV cache back, of those that are spare."""

    def evict(self, weights_pages: int) -> None:
        """Give so many pages of clean weights back."""

    # A request moves to an engine of the same model while it runs. Source: `stage` as often as there are new full
    # blocks, `leave`, `departure` when all is `staged`, and at last `abort`, or `stay`. Target: `expect`, `receive` of
    # its host cache what the source has staged, `adopt`, or `abort`. Both may be told to abort at any time.

    def stage(self, request: RequestId, first: int) -> list[int] | None:
        """Begin to copy to the host what is full of its blocks, while it goes on; where those from index `first` on
        are, [] if there are none yet. They are there when `staged` says so, and stay until `abort`, `stay` or its end.

        None if the host has no room, or if it does not run just now: it waits, is parked, made no token yet, or ended.
        Those from before `first`, which were given out before, are not told again."""

    def staged(self, request: RequestId) -> bool:
        """Whether every copy that `stage` or `leave` began for it is over; also true of a request that is not here.

        Raises EngineError when one failed for good: it can't move then, but stay."""

    def leave(self, request: RequestId) -> None:
        """Take it out of the batch, between two steps, and begin to copy out the rest of its blocks: it makes no token
        here until it stays. One that is parked may leave too. What is under way with it is waited for.

        Raises EngineError if it is not here, made no token yet, or the host has no room; all is as before then."""

    def departure(self, request: RequestId) -> Departure:
        """What the other engine needs to go on with it. It must have left, and `staged`. Raises EngineError."""

    def stay(self, request: RequestId) -> None:
        """It does not move after all: it goes on here where it stopped, nothing is computed again, and what was staged
        is free. Does nothing for one that is not about to move."""

    def expect(self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False) -> bool:
        """It will come and have about so many tokens: take blocks for them. It takes no part in steps yet. One that is
        `admitted` may have the last ones; of others some are kept, for the next steps and a check.

        False if there are not enough blocks now, or the model is parked: nothing is kept. Raises BadRequest."""

    def receive(self, request: RequestId, first: int, host: list[int], admitted: bool = False) -> bool:
        """Begin to copy these blocks of the host's cache, which are not its own, into blocks of the request from index
        `first` on, the number of those received so far. `admitted`: as with `expect`.

        False if there is no room for them, or if the model was parked since it was expected: it is expected still.
        Raises EngineError if the cache has no such blocks."""

    def received(self, request: RequestId) -> bool:
        """Whether every copy that `receive` began is over, and the other side may free what it has on the host.

        Raises EngineError when one failed for good and the request was not adopted yet: abort it here, let it stay
        there. One that was adopted is computed again."""

    def adopt(self, request: RequestId, departure: Departure) -> None:
        """All its blocks were received, or are being received: it is this engine's, and steps when they are there.

        Raises EngineError, or BadRequest, when that can't be; it is forgotten here then, and let it stay there."""

    def close(self) -> None:
        """Give everything back without harming the other engines of the process."""


class Hold(Protocol):
    """On blocks in the host cache that another runtime wrote."""

    def release(self) -> None:
        """They may go; again does no harm."""


Told = Callable[[int, int], None]


class Build(Protocol):
    """Makes engines; the only thing the device process knows of vLLM."""

    version: str
    life: int  # names this process among those that have the host cache, now and before; from 1
    pages_total: int  # of the device's pool
    page_bytes: int

    def __call__(self, spec: EngineSpec, told: Told, /) -> Engine:
        """Build the engine and put its weights into the host's cache; takes no pages. `told` hears how many bytes of
        its files were read, of how many. Raises EngineError."""

    def hold(self, blocks: list[int], block_bytes: int, life: int) -> Hold | None:
        """What the process with that life keeps there stays, also when it dies. None if it is dead already."""

    def pages_used(self) -> int:
        """Of the pool, by its own count: what all engines hold, when nothing moves."""

    def page_map(self, models: Mapping[int, str], caches: Mapping[int, str]) -> list[PageRun]:
        """Every page of the pool, by its own count. Arguments: whose weights, and whose KV cache, an owner is."""
