"""Requests that a client takes up again, at this gateway or another, after the connection or the gateway was lost.

The device goes on with a request whose gateway is dead, and the node keeps every token (`KeptRequests`). A gateway
that names a stream in Resume gets all tokens in the answer, and further tokens in frames.
"""

from __future__ import annotations

import structlog

from runtime.core.ledgers.kept_requests import KeptRequest, KeptRequests
from runtime.node.gateways import Gateways
from runtime.node.own import OwnState
from runtime.node.streams import Streams
from store.contract import wire
from store.contract.resumable import TAKEN_MOST
from store.contract.resumption import Kept, Resume

log = structlog.get_logger()


class Resuming:
    """Answers gateways that ask for kept requests."""

    def __init__(self, own: OwnState, gateways: Gateways, streams: Streams, kept: KeptRequests) -> None:
        self._own, self._gateways, self._streams, self._kept = own, gateways, streams, kept

    async def resume(self, data: bytes) -> Kept:
        """Say what is kept of a request, or give the request to a stream of the asking gateway."""
        ask = wire.decode(Resume, data)
        kept = self._kept.find(ask.request, ask.owner, ask.model)
        if kept is None or not self._parts(kept):
            return Kept()
        if not ask.stream:
            return self._answer(kept)
        old, new = kept.at, (ask.gateway, ask.stream)
        asking = self._gateways.known(ask.gateway)
        self._gateways.heard(ask.gateway)
        kept = self._kept.take(ask.request, new)
        answer = wire.replace(self._answer(kept), seq=asking.ring.last, made=kept.made(ask.stream))
        log.info("node.resumed", request=ask.request, gateway=ask.gateway, tokens=answer.tokens, ended=answer.ended)
        if (stream := self._gateways.take_up(old, new)) is not None:
            stream.run = kept.run
            await self._streams.gone(*old, stream.at)
        return answer

    def _parts(self, kept: KeptRequest) -> bool:
        """Whether the request can be taken up here and now. A request on the move is soon at another runtime."""
        mark = kept.run.resumable
        if mark is None or mark.taken >= TAKEN_MOST:
            return False
        gateway, number = kept.at
        stream = self._gateways[gateway].streams.get(number) if gateway in self._gateways else None
        return kept.end is not None or (stream is not None and not stream.moving)

    def _answer(self, kept: KeptRequest) -> Kept:
        return Kept(
            resumable=kept.run.resumable,
            attempt=kept.run.attempt,
            tokens=len(kept.tokens),
            ended=kept.end is not None,
            epoch=self._own.epoch,
        )
