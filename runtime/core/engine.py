"""Contract between the runtime and an engine: what the runtime may ask of an engine, and in which order. Pure.

An engine holds a single model. The device process builds the engine once, moves it step by step, and takes and gives
memory while the engine lives. `runtime/engine/vllm.py` implements the contract.

Memory is counted in pages of the device pool. A new engine holds no pages. `fetch` brings the weights and the parked
requests onto the device. `park` takes the requests out and leaves the weights on the device as clean cache. `evict`
gives pages of clean weights back. Between `fetch` and `park`, `grow` and `shrink` change the KV cache. None of these
calls waits for a transfer: ask `arrived` and `parked` for progress. A caller with no other work may `wait`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from runtime.core.device.request import RequestId
from store.contract.device_bytes import DeviceBytes
from store.contract.views import PageRun
from store.contract.wire import Departure, EngineSpec, Finish, KvForm


class EngineError(Exception):
    """The engine refused an order or failed. The message names the thing, the number and the remedy."""


class BadRequest(EngineError):
    """The engine cannot serve the request. The engine itself is unharmed."""


class NoHostRoom(EngineError):
    """The host cache has no room for the model's image while the images of built engines stay."""

    def __init__(self, message: str, lacks_bytes: int) -> None:
        super().__init__(message)
        self.lacks_bytes = lacks_bytes


class ImageLost(EngineError):
    """The model's image was damaged on the way in: the caller must close the engine, and may build the engine anew."""


class WeightSource(enum.StrEnum):
    """Where a build took the weights from."""

    HOST = enum.auto()  # an image in the host cache
    DISK = enum.auto()  # an image on disk, perhaps still being read
    FILES = enum.auto()  # the files of the model


class Output(msgspec.Struct, frozen=True):
    """Result of a step for a single request.

    `logprobs` are in the engine's own encoding; the engine's front half, in the gateway, decodes the bytes."""

    request: RequestId
    tokens: list[int]
    finish: Finish | None = None
    stop_reason: int | str | None = None
    logprobs: bytes | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    written_tokens: int = 0  # prompt tokens computed and kept in the prefix cache
    brought_s: float = 0.0  # seconds of the step in which prefixes came back to the device; said by one output


AHEAD = 64  # tokens: pages for the next 64 tokens of a request are kept in advance


class Held(msgspec.Struct, frozen=True):
    """Pages of the pool held by an engine, and pages that the engine could use."""

    weights: int = 0  # mapped weights and clean cache
    kv: int = 0  # mapped
    kv_wanted: int = 0  # KV pages that running, waiting and parked requests need for a step; above or below `kv`
    kv_spare: int = 0  # part of `kv` that holds only prefixes of ended requests and is not needed soon


class ServingEngine(Protocol):
    """Requests of an engine: from `add` to the last output of `step`."""

    sequential: bool  # requests run one at a time and share no prefix blocks: in a batch the model answers otherwise

    @property
    def ahead(self) -> bool:
        """Whether a step has begun whose outputs no call has returned yet."""

    def read(self, grammar: bytes) -> None:
        """Begin to read a compiled grammar in the background: `add` and `prepare` need not wait for the reading then.

        Ask `has_read` before handing the grammar to `add` or `prepare`."""

    def has_read(self, grammar: bytes) -> bool:
        """Whether the reading of the grammar has ended, well or badly. `add` or `prepare` raises the error if any."""

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = (), grammar: bytes = b"") -> None:
        """Queue a request for the next steps. Touches no device memory.

        Args:
            request: an id that no request of the engine has.
            payload: the request as written by the engine's front half in the gateway.
            made: first tokens of the output if an engine of the same model began the request and is gone. Their keys
                and values are computed again; the next token is the token that the earlier engine would have made.
            grammar: compiled grammar of the output; empty if the output is free. If the grammar has not been read
                yet, the call waits for the reading.

        Raises BadRequest if the request is invalid, if the id is taken, or if `made` is the complete output. The
        request is not queued then."""

    def abort(self, requests: list[RequestId]) -> None:
        """Forget the requests at any time: waiting, running, parked, leaving or expected. No output follows.

        Unknown ids are ignored."""

    def busy(self) -> bool:
        """Whether a request is unfinished: waiting, running, parked or arriving. Leaving and expected requests do not
        count."""

    def step(self, ahead: bool = False) -> list[Output]:
        """Run an iteration of the batch and return the outputs of the requests in the batch.

        With `ahead` the engine may begin the next iteration before the outputs of this iteration are known: the device
        has work while the caller reads outputs. If the engine has, `self.ahead` is true, and the next call returns the
        outputs of the iteration begun; without `ahead` that call begins no further iteration. While `self.ahead` is
        true, do not call `fetch`, `check`, `park` or `evict`, nor `commit` for a request that leaves.

        If no request is on the device yet, waits for the first arriving request. If KV pages are short, steps the
        requests that fit; returns [] if none fits. Call only after `arrived` returned True. After any exception the
        engine is unfit: the caller must `close` the engine."""

    def wait(self, timeout_s: float) -> None:
        """Wait until a transfer begun by `fetch` or `park` has ended, well or badly, or until `timeout_s` seconds have
        passed."""

    def close(self) -> None:
        """Give all memory of the engine back without harming other engines of the process."""


class ResidentEngine(Protocol):
    """Pages of an engine: weights and KV cache on the device, from `fetch` to `evict`."""

    weights_pages: int  # pages of the complete weights
    kv_pages_least: int  # KV pages that let a request of the model's longest length run to its end
    source: WeightSource  # of the build
    owners: tuple[int, int]  # numbers of the weights and of the KV cache in the map of the pool

    def held(self) -> Held:
        """Return the pages held and wanted now. Cheap: the device process asks after every step."""

    def kv_fragmentation(self) -> float:
        """Return the share, 0 to 1, of the used KV pages' memory that no used block occupies."""

    def fetch(self, kv_pages: int) -> None:
        """Begin to copy missing weights and parked requests to the device. Ask `arrived` until the transfer has ended.

        `kv_pages` is the size of the whole KV cache afterwards, in pages, not an increase. Parked requests arrive as
        far as the pages suffice. Raises EngineError if the pool has too few free pages. Requests are parked then, and
        the weights are as before, but an engine on several devices gives all pages of its weights back."""

    def arrived(self) -> bool:
        """Whether the engine can step: the weights are complete, and a request is ready or no request is arriving.

        Raises EngineError if the transfer failed; `fetch` may be called again. Requests are parked then, and the
        weights are as before `fetch`, but an engine on several devices gives all pages of its weights back. Raises
        ImageLost, as `fetch` does, if the weights can't come from the image any more."""

    def check(self) -> str | None:
        """Compare the model's answer to a fixed question with the answer given when the weights were read from files.

        Takes a few steps; call only after `arrived` returned True. Returns None if the answers agree, else a sentence
        about the difference. After a difference the model must not serve: the caller must `close` the engine."""

    def park(self) -> None:
        """Take every request out of the batch, begin to copy KV blocks to the host, and leave the weights as clean
        cache. Ask `parked` until the copies have ended.

        A request that left may still move; after `abort_move` the request is parked. An expected request loses its
        blocks: `copy` returns None and `commit` fails, so the caller must `abort` the request."""

    def parked(self) -> bool:
        """Whether the copies begun by `park` have ended and the KV cache holds no pages.

        The first call after the last copy gives the pages back. A request whose copy failed is computed again."""

    def grow(self, kv_pages: int) -> None:
        """Add `kv_pages` pages to the KV cache. If the pool has too few pages or refuses, adds fewer or none: read
        `held` afterwards."""

    def shrink(self, kv_pages: int) -> None:
        """Give up to `kv_pages` spare pages of the KV cache back."""

    def evict(self, weights_pages: int) -> None:
        """Give `weights_pages` pages of clean weights back. Call only after `park`."""

    def forget_prefixes(self, salt: str) -> None:
        """Forget the prefixes that ended requests under the cache salt have left, on the device and in the host cache.

        Blocks whose salt is not known go as well. Running requests leave their prefixes at their end."""


class MovingEngine(Protocol):
    """Running requests of an engine on the way to or from another engine of the model, in this order.

    Source: `copy` while new full blocks appear, each time until `copied`; `commit` until the call returns a departure;
    then `abort`, or `abort_move`.
    Target: `prepare`; `copy` for blocks copied by the source and present in the target's host cache; `commit`, or
    `abort`. Source and target may be told to abort at any time.
    """

    kv_form: KvForm  # blocks can be exchanged only with engines of equal form

    def prepare(
        self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False, grammar: bytes = b""
    ) -> bool:
        """Reserve KV blocks for a request that may come from another engine. The request takes no part in steps yet.

        Args:
            request: an id that no request of the engine has.
            payload: the request as written by the engine's front half.
            tokens: approximate number of tokens, prompt and output, at the arrival.
            admitted: whether the request may take the last free blocks. If not, some blocks stay free for the next
                steps and for a check.
            grammar: as in `add`.

        Returns False, and reserves nothing, if too few blocks are free or the model is parked. Raises BadRequest as
        `add` does."""

    def copy(
        self, request: RequestId, first: int, host: list[int] | None = None, admitted: bool = False
    ) -> list[int] | None:
        """Begin to copy blocks of a moving request, from index `first` on, between the device and the host cache.

        Source, without `host`: full KV blocks of a running request are copied to the host. The request goes on
        running. `first` is at most the number of blocks copied before. Returns the host blocks from `first` on; [] if
        there is no new full block. The host blocks are valid once `copied` returns True and stay until `abort`,
        `abort_move` or the end of the request. Returns None if the host cache has no room, or if the request does not
        run now: the request waits, is parked, has made no token yet, or has ended.

        Target: the source's blocks `host` are copied into the blocks of an expected request. `first` must be the
        number of blocks copied in so far. The host blocks are not this engine's own and must stay until `copied`
        returns True. `admitted` is as in `prepare`. Returns `host`; None, and copies nothing, if there is no room or
        if the model was parked after `prepare`: the request is still expected. Raises EngineError if the host cache
        has no such blocks."""

    def copied(self, request: RequestId) -> bool:
        """Whether every copy begun by `copy` or `commit` for the request has ended. True for an unknown request.

        Raises EngineError if a copy failed for good. The request cannot move then: the caller must `abort_move` at
        the source, and `abort` at a target before `commit`. After the target's `commit`, a request with a failed copy
        is computed again instead."""

    def commit(self, request: RequestId, departure: Departure | None = None) -> Departure | None:
        """Hand a request over at the source, or take the request over at the target.

        Source, without `departure`: the first call, between two steps, takes the request out of the batch, begins to
        copy the remaining blocks to the host, and returns None. The request makes no token in this engine before
        `abort_move`. A parked request may leave as well. Copies of the request under way are waited for. Later calls
        return None until the copies have ended, then everything that the target engine needs to go on with the
        request. The first call raises EngineError if the engine does not have the request, if the request has made
        no token yet, or if the host has no room: the request is as before then. Later calls raise as `copied` does.

        Target: the request steps once its blocks have arrived; every block must have been passed to `copy` before.
        Raises EngineError or BadRequest if the request can't be taken over. This engine forgets the request then; the
        caller must let the request stay at the source, or `add` the request anew."""

    def abort_move(self, request: RequestId) -> None:
        """Call the move of the request off at the source: the request goes on in this engine where it stopped.

        Copied blocks on the host become free. If the model was parked meanwhile, the request is parked; if the copy
        of its blocks had failed, the request is computed again. Does nothing for a request that is not moving."""


class Engine(ServingEngine, ResidentEngine, MovingEngine, Protocol):
    """A single model in the device process.

    An engine is not thread-safe. Steps of two engines in a process must never overlap. An exception other than a
    documented EngineError or BadRequest leaves the engine unfit: the caller must `close` the engine."""


class Hold(Protocol):
    """Hold on host cache blocks written by another runtime: the blocks stay until `release`."""

    def release(self) -> None:
        """Let the held blocks go. A second call does no harm."""


Told = Callable[[int, int], None]


class EngineBuilder(Protocol):
    """Builder of engines; the only part of vLLM that the device process knows."""

    version: str
    life: int  # number of this process among all past and present users of the host cache; from 1
    pages_total: int  # pages of the device pool
    page_bytes: int
    block_tokens: int  # tokens of a block of attention, as the self-check found; 0: there was no self-check

    def __call__(self, spec: EngineSpec, told: Told, /) -> Engine:
        """Build an engine and put the weights into the host cache. The new engine holds no pages.

        While weight files are read, calls `told(read_bytes, files_bytes)`: bytes read so far, and bytes of all files.
        Raises EngineError if the build fails; the caller may build again. Raises NoHostRoom if images of built
        engines take the room: the caller may close other engines first."""

    def on_disk(self, spec: EngineSpec, /) -> bool:
        """Whether the disk has an image of the model, as of a few seconds ago."""

    def proved(self, spec: EngineSpec, /) -> bool:
        """Whether a note beside the image on disk says that a device with such a pool has served the model."""

    def note_proof(self, spec: EngineSpec, /) -> bool:
        """Note beside the image on disk that this device serves the model.

        Returns whether the note need not be tried again: False while the disk has no image of the model."""

    def drop_proof(self, spec: EngineSpec, /) -> None:
        """Take the note back, if any: the model has failed a check."""

    def spare_room(self, spec: EngineSpec, later: Sequence[EngineSpec], /) -> int | None:
        """Make room in the host cache for the model's image on disk, from room that costs nothing.

        Such room is free, or has unused images of the models in `later`. Returns the bytes that lack, 0 if there is
        room or the host cache has the image; None if the disk has no image of the model."""

    def hold(self, blocks: list[int], block_bytes: int, life: int) -> Hold | None:
        """Keep host cache blocks that the process numbered `life` parked, even after the death of the process.

        `block_bytes` is the size of a block. Returns None if the process is dead already or has not parked the blocks:
        the memory may then belong to any process and must not be read. The caller must `release` the hold."""

    def pages_used(self) -> int:
        """Return the pages in use by the pool's own count: while no page moves, the sum of the engines' `held`."""

    def device_bytes(self) -> DeviceBytes:
        """Memory of the GPU outside the pool, memory registered with the GPU's driver, and kept prefixes."""

    def page_map(self, models: Mapping[int, str], caches: Mapping[int, str]) -> list[PageRun]:
        """Return runs of equal pages that cover the pool from page 0 on, by the pool's own count.

        `models` maps an owner of weights to its model, `caches` an owner of KV cache to its model: see `owners`."""
