"""Requests kept for clients that lost the connection: every token since the start, within bounds for each tenant. Pure.

An open request is kept as long as the request's stream is open. An ended request is kept for `keep_s` seconds more: the
client may not have the last tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from store.contract.wire import NOTHING_SPENT, Delta, Run, Spent

# Bounds on ended requests of a tenant. A token takes 4 bytes.
REQUESTS_MOST = 256
TOKENS_MOST = 1 << 18


@dataclass(slots=True)
class KeptRequest:
    """A request with its tokens."""

    run: Run
    tokens: array[int]
    at: tuple[str, int]  # gateway and number of the stream that has the request now
    spent: Spent = NOTHING_SPENT
    end: Delta | None = None  # the last delta; None: the stream is open
    ended_at: float = 0.0  # monotonic

    def made(self, stream: int) -> Delta:
        """Return everything made so far as a delta of the stream `stream`."""
        mark = self.run.resumable
        assert mark is not None
        end = self.end or Delta(stream, [], 0)
        return structs.replace(
            end,
            stream=stream,
            tokens=list(self.tokens),
            at=0,
            cached_tokens=mark.cached_tokens,
            written_tokens=mark.written_tokens,
            spent=self.spent,
        )


@dataclass(slots=True)
class EndedRequests:
    """The ended requests of a tenant, oldest first."""

    by_id: dict[str, KeptRequest] = field(default_factory=dict)
    tokens: int = 0  # sum over the requests

    @property
    def too_many(self) -> bool:
        return len(self.by_id) > REQUESTS_MOST or self.tokens > TOKENS_MOST


@dataclass(slots=True)
class KeptRequests:
    """The kept requests of a runtime."""

    _kept: dict[str, KeptRequest] = field(default_factory=dict)  # by request id
    _ended: dict[str, EndedRequests] = field(default_factory=dict)  # by tenant

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, run: Run, at: tuple[str, int], made: Sequence[int]) -> None:
        """Keep a request from now on, if the request is resumable. `made`: tokens that other runtimes made."""
        if run.resumable is not None:
            self._drop(run.request)  # kept for an earlier attempt
            self._kept[run.request] = KeptRequest(run, array("I", made), at)

    def hear(self, run: Run, at: tuple[str, int], delta: Delta) -> Run:
        """Take a delta of the stream `at`. Returns the run, with what the delta says of the prompt."""
        kept = self._of(run, at)
        if kept is None:
            return run
        mark = kept.run.resumable
        if mark is not None and delta.at == 0 and (delta.cached_tokens or delta.written_tokens):
            found = {"cached_tokens": delta.cached_tokens, "written_tokens": delta.written_tokens}
            kept.run = structs.replace(kept.run, resumable=structs.replace(mark, **found))
        kept.tokens.extend(delta.tokens)
        kept.spent = kept.spent.most(delta.spent)
        return kept.run

    def end(self, run: Run, at: tuple[str, int], delta: Delta, now: float) -> None:
        """Take the last delta of the stream `at`, and keep the request for some seconds more."""
        kept = self._of(run, at)
        if kept is None:
            return
        self.hear(run, at, delta)
        kept.end, kept.ended_at = delta, now
        ended = self._ended.setdefault(run.tenant, EndedRequests())
        ended.by_id[run.request] = kept
        ended.tokens += len(kept.tokens)
        while ended.too_many:
            self._drop(next(iter(ended.by_id)))

    def take(self, request: str, to: tuple[str, int]) -> KeptRequest:
        """Note that the stream `to` has the request from now on."""
        kept = self._kept[request]
        mark = kept.run.resumable
        assert mark is not None
        kept.run = structs.replace(kept.run, resumable=structs.replace(mark, taken=mark.taken + 1))
        kept.at = to
        return kept

    def find(self, request: str, owner: bytes, model: str) -> KeptRequest | None:
        """Return a request of an owner and a model; None if there is none, whatever the reason is."""
        kept = self._kept.get(request)
        if kept is None or kept.run.resumable is None:
            return None
        return kept if kept.run.resumable.owner == owner and kept.run.model == model else None

    def forget(self, run: Run, at: tuple[str, int]) -> None:
        """Forget the request of the open stream `at`: no client will ask again, or another runtime has it."""
        if self._of(run, at) is not None:
            self._drop(run.request)

    def sweep(self, now: float) -> None:
        """Forget ended requests whose time is up."""
        for ended in list(self._ended.values()):
            for request, kept in list(ended.by_id.items()):
                mark = kept.run.resumable
                if mark is None or now - kept.ended_at > mark.keep_s:
                    self._drop(request)

    def _of(self, run: Run, at: tuple[str, int]) -> KeptRequest | None:
        """Return the open request of the stream `at`; None if a later attempt at the request has taken the place."""
        kept = self._kept.get(run.request)
        return kept if kept is not None and kept.at == at and kept.end is None else None

    def _drop(self, request: str) -> None:
        kept = self._kept.pop(request, None)
        if kept is None or kept.end is None:
            return
        ended = self._ended[kept.run.tenant]
        del ended.by_id[request]
        ended.tokens -= len(kept.tokens)
        if not ended.by_id:
            del self._ended[kept.run.tenant]
