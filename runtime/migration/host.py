"""Part of a node that the node's migrations use: its streams, its models and its host cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime import ipc
from runtime.migration.host_blocks import HostBlocks
from runtime.migration.receiver import BlockReceiver
from store.contract import wire


@dataclass(slots=True)
class OpenStream:
    """Stream that is open on this runtime."""

    run: wire.Run
    began_at: float  # monotonic
    at: int  # index of the next token
    moving: bool = False
    tried_at: float = 0.0  # monotonic; last try to hand the request to a runtime that decodes
    compiling: asyncio.Task[None] | None = None  # of the grammar: the device has not heard of the stream yet
    left_at: float | None = None  # monotonic; the gateway cancelled the stream: see runtime/node/parting.py

    @property
    def kept_s(self) -> float:
        """Seconds for which the stream goes on without a gateway; negative: not at all."""
        return self.run.resumable.keep_s if self.run.resumable is not None else -1.0

    def taken_up(self, gateway: str, number: int) -> bool:
        """Whether the stream `number` of `gateway` was another stream before: the device knows the first name."""
        return (self.run.gateway, self.run.stream) != (gateway, number)

    def end(self) -> None:
        """Stop the compiling of the grammar, since the stream is no longer open here."""
        if self.compiling is not None and self.compiling is not asyncio.current_task():
            self.compiling.cancel()


class Host(Protocol):
    """Part of a node that the node's migrations use."""

    host_cache_id: str
    blocks: HostBlocks
    door: BlockReceiver

    @property
    def id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def life(self) -> int:
        """Number of the device process in the host cache."""

    def device(self) -> ipc.NodeEnd | None: ...

    def lease(self, runtime: str) -> wire.Lease | None:
        """Return the last lease of a runtime."""

    def form(self, model: str) -> wire.KvForm | None:
        """Return the form of the model's blocks here; None if the engine was not built."""

    def tokens_most(self, model: str) -> int:
        """Return the longest context, in tokens, of a model placed on this runtime."""

    async def grammar(self, run: wire.Run) -> bytes:
        """Return the compiled grammar of the run, empty without a grammar. Raises NotCompiled."""

    def refusal(self, run: wire.Run) -> wire.Reply | None:
        """Return why this runtime would not take the run now; None: the runtime would take the run."""

    def stream(self, gateway: str, number: int) -> OpenStream | None: ...

    def take_over(self, run: wire.Run, at: int, made: Sequence[int] = ()) -> int:
        """Open the stream on this runtime; return the number of the last frame to the gateway.

        `made`: the tokens made so far, `at` in number; needed for a resumable request."""

    def give_back(self, run: wire.Run) -> None:
        """Close the stream again after a failed take-over."""

    async def hand_over(self, gateway: str, number: int, moved: wire.Moved) -> None:
        """Close the stream on this runtime and tell the gateway where the stream goes on."""
