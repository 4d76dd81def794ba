"""Finds the runtime that keeps a request for a client that lost the connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.streams.runtimes import RuntimesView
from store.bus import Bus, BusError
from store.contract import wire
from store.contract.resumption import Resume, ResumeAnswer, resume_subject

ASK_S = 1.0  # longest wait for the answer of a runtime
ROUNDS, PAUSE_S = 3, 0.2  # a request that moves between runtimes is at no runtime for a moment


@dataclass(frozen=True)
class FoundRequest:
    """A kept request, and the runtime that keeps the request."""

    runtime: str
    ask: Resume
    kept: ResumeAnswer


class RequestFinder:
    """Asks all runtimes for kept requests."""

    def __init__(self, bus: Bus, fleet: RuntimesView, gateway: str) -> None:
        self._bus, self._fleet, self._gateway = bus, fleet, gateway

    async def find(self, request: str, owner: bytes, model: str) -> FoundRequest | None:
        """Return the kept request of an owner; None if no runtime keeps such a request."""
        ask = Resume(gateway=self._gateway, request=request, owner=owner, model=model)
        for round in range(ROUNDS):
            if round:
                await asyncio.sleep(PAUSE_S)
            asked = await asyncio.gather(*(self._asked(runtime, ask) for runtime in self._fleet.leases))
            found = [each for each in asked if each is not None]
            if found:  # a runtime that lost the request keeps the tokens of the earlier attempt
                return max(found, key=lambda each: (each.kept.attempt, not each.kept.ended, each.kept.tokens))
        return None

    async def _asked(self, runtime: str, ask: Resume) -> FoundRequest | None:
        try:
            kept = wire.decode(ResumeAnswer, await self._bus.request(resume_subject(runtime), ask, ASK_S))
        except (BusError, wire.WireError):  # dead, or of an earlier version
            return None
        return FoundRequest(runtime, ask, kept) if kept.resumable is not None else None
