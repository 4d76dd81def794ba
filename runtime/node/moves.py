"""Streams of a node that move to other runtimes: by order, in a drain, or from a prefill runtime to decode runtimes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

from runtime.migration.migrate import AT_ONCE, Migrations
from runtime.migration.peers import Peers
from runtime.migration.transport import NotMoved
from runtime.node.gateways import Gateways
from runtime.node.own import DrainedBy, OwnState
from runtime.node.streams import Streams
from store.contract import wire
from store.contract.wire import Delta, Refusal, Role

HAND_ON_PAUSE_S = 0.25  # least pause between two tries to hand a stream on


class StreamMoves:
    """Orders and reasons to move the node's streams away.

    `hear_reports`: begins to hear the reports of peers. Reports come from every runtime several times a second, so a
    runtime hears reports only from the first time on that the runtime chooses a target."""

    def __init__(
        self,
        own: OwnState,
        gateways: Gateways,
        streams: Streams,
        peers: Peers,
        migrations: Migrations,
        hear_reports: Callable[[], Awaitable[None]],
    ) -> None:
        self._own, self._gateways, self._streams = own, gateways, streams
        self._peers, self._migrations, self._hear_reports = peers, migrations, hear_reports
        self._term = 0  # latest term of a scheduler heard so far
        self.emptying: asyncio.Task[None] | None = None  # moves all streams to other runtimes

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def migrate(self, data: bytes) -> wire.Reply:
        """Begin to move streams to the runtime that the order names."""
        migrate = wire.decode(wire.Migrate, data)
        if refusal := self._late(migrate.term):
            return refusal
        for gateway, number in self.movable(migrate.model)[: migrate.count]:
            self._migrations.spawn(self._move(gateway, number, migrate.target))
        return wire.Reply()

    async def drain(self, data: bytes) -> wire.Reply:
        """Begin or call off a drain by order. Only an operator can call off an operator's drain."""
        drain = wire.decode(wire.Drain, data)
        if refusal := self._late(drain.term):
            return refusal
        if self._own.drained_by is DrainedBy.OPERATOR and drain.term:
            reason = f"runtime {self._own.id} drains by an operator's word"
            return wire.Reply(refusal=Refusal.DRAINING, reason=reason)
        giver = DrainedBy.SCHEDULER if drain.term else DrainedBy.OPERATOR
        self._own.drained_by = giver if drain.on else None
        self.empty()
        return wire.Reply()

    async def set_role(self, data: bytes) -> wire.Reply:
        """Take a role. A scheduler changes no role of an operator."""
        asked, own = wire.decode(wire.SetRole, data), self._own
        if refusal := self._late(asked.term):
            return refusal
        if asked.term and own.role is not Role.BOTH and not own.role_given:
            return wire.Reply(refusal=Refusal.BUSY, reason=f"runtime {own.id} has the role of an operator, {own.role}")
        own.role, own.role_given = asked.role, asked.term > 0 and asked.role is not Role.BOTH
        self._own.lease_due.set()
        self._own.report_due.set()
        return wire.Reply()

    def _late(self, term: int) -> wire.Reply | None:
        """The refusal of an order by a scheduler replaced since, else None. An operator, of term 0, is never late."""
        if 0 < term < self._term:
            reason = f"the scheduler of term {term} was replaced by that of term {self._term}"
            return wire.Reply(refusal=Refusal.BUSY, reason=reason)
        self._term = max(term, self._term)
        return None

    # ── moving ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def empty(self) -> None:
        """Move all streams away while the runtime drains, in one task at a time, and renew the lease."""
        self._own.lease_due.set()
        self._own.report_due.set()
        if self.emptying is None or self.emptying.done():
            self.emptying = self._migrations.spawn(self._move_all())

    async def _move_all(self) -> None:
        """While the runtime drains, move streams to runtimes that can take streams, trying again and again."""
        while self._own.draining:
            await self.move_off_all()

    async def move_off_all(self, model: str = "") -> None:
        """Move up to AT_ONCE streams of `model`, or of any model; other streams wait for the next call."""
        await self._hear_reports()
        movable = [named for named in self.movable(model) if self.target(*named)][:AT_ONCE]
        await asyncio.gather(*(self._move_off(*named) for named in movable), asyncio.sleep(0.05))

    def hand_on(self, gateway: str, deltas: Iterable[Delta]) -> None:
        """Begin to move streams with a first token from this prefill runtime to decode runtimes.

        Does nothing on a runtime with another role, or when the runtime is about to end. A stream that can't move is
        decoded here, and tried again with later tokens, after HAND_ON_PAUSE_S at least."""
        if self._own.role is not Role.PREFILL or self._own.ending:
            return
        now = time.monotonic()
        for delta in deltas:
            stream = self._gateways.wanted(gateway, delta.stream)
            if stream is not None and not stream.moving and now > stream.tried_at + HAND_ON_PAUSE_S:
                stream.tried_at = now
                self._migrations.spawn(self._move_off(gateway, delta.stream))

    def movable(self, model: str = "") -> list[tuple[str, int]]:
        return self._gateways.movable(model)

    def target(self, gateway: str, number: int) -> str | None:
        """The runtime to which the stream should move; None if no runtime can take the stream."""
        stream = self._gateways.wanted(gateway, number)
        handing_on = self._own.role is Role.PREFILL and not self._own.ending
        engine, now = self._own.engine, time.monotonic()
        return self._peers.target(stream.run, engine, now, handing_on) if stream else None

    async def _move_off(self, gateway: str, number: int) -> None:
        await self._hear_reports()
        if target := self.target(gateway, number):
            await self._move(gateway, number, target)

    async def _move(self, gateway: str, number: int, target: str) -> None:
        try:
            await self._migrations.move(gateway, number, target)
        except NotMoved as error:
            stream = self._gateways.wanted(gateway, number)
            if error.waits and stream is not None:  # the stream's gateway finds another runtime
                await self._streams.lose(gateway, number, f"runtime {self._own.id} gives it away")
