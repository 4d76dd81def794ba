"""JetStream's streams and buckets: their configuration, and the making of streams and buckets that the servers lack.

In a cluster several servers keep replicas of a stream. The stream survives the loss of servers while most replicas
live. The ledger alone may change an existing stream, and sets the stream's number of replicas.
"""

from __future__ import annotations

import contextlib
from datetime import datetime

import structlog
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue

from store.contract import grants, wire
from store.contract.leases import BASE_S

log = structlog.get_logger()

LEASE_TTL_S = 3.0
QUOTA_TTL_S = 35 * 86_400.0  # longer than a month, the period of a budget

LEASED = (wire.LEASES, wire.LEADER)  # buckets whose keys are put each second, and go LEASE_TTL_S after the last put

_USAGE = StreamConfig(
    name=wire.USAGE_STREAM,
    subjects=[wire.usage_subject(">")],
    retention=RetentionPolicy.LIMITS,
    storage=StorageType.FILE,
    duplicate_window=120,
)
_TTL_S = {  # by bucket
    **dict.fromkeys(LEASED, LEASE_TTL_S),
    wire.LEASE_BASES: 3 * BASE_S,
    wire.QUOTAS: QUOTA_TTL_S,
}


def stream_of(bucket: str) -> str:
    """Return the name of the stream in which JetStream keeps the bucket."""
    return f"KV_{bucket}"


class StoredStreams:
    """The streams and buckets that a process uses.

    `replicas`: servers that keep a stream; None: a new stream has a single replica, and no replica count is changed.
    `buckets`: the buckets that the process reads, by name. `made`: time of each stream's making, by servers' clocks."""

    def __init__(self, js: JetStreamContext, user: grants.User, replicas: int | None) -> None:
        self._js, self._user, self.replicas = js, user, replicas
        self.buckets: dict[str, KeyValue] = {}
        self.made: dict[str, datetime | None] = {}

    async def make_missing(self) -> set[str]:
        """Make the streams and buckets of this process that the servers lack, and set the replicas of the streams that
        the user of this process keeps.

        Returns the names of streams and buckets made again since the last call, by any process."""
        names = {stream_of(bucket): bucket for bucket in self._user.reads}
        if self._user.meters or self._user.books:
            names[wire.USAGE_STREAM] = wire.USAGE_STREAM
        again = set()
        for stream, name in names.items():
            found = await self._found(stream)
            if found is None:
                await self._make(name)
                found = await self._found(stream)
            if name != wire.USAGE_STREAM and name not in self.buckets:
                self.buckets[name] = await self._js.key_value(name)
            made = found.created if found else None
            if self.made.get(stream, made) != made:
                again.add(name)
            self.made[stream] = made
        for stream in self._user.keeps if self.replicas else ():
            await self._set_replicas(stream)
        return again

    async def _found(self, stream: str) -> StreamInfo | None:
        """Return the servers' account of the stream; None: the servers do not have the stream."""
        with contextlib.suppress(NotFoundError):
            return await self._js.stream_info(stream)
        return None

    async def _make(self, name: str) -> None:
        if name == wire.USAGE_STREAM:
            await self._js.add_stream(_USAGE, num_replicas=self.replicas or 1)
        else:
            await self._js.create_key_value(bucket=name, ttl=_TTL_S.get(name), history=1, replicas=self.replicas or 1)

    async def _set_replicas(self, stream: str) -> None:
        """Give an existing stream the number of replicas of this process."""
        found = await self._found(stream)
        if found is not None and found.config.num_replicas != self.replicas:
            log.warning("bus.replicas", bucket=stream, last=found.config.num_replicas, now=self.replicas)
            await self._js.update_stream(found.config, num_replicas=self.replicas)

    async def limit_usage(self, age_s: float) -> bool:
        """Have the servers delete usage older than `age_s` seconds; 0: no usage grows too old.

        Returns whether the limit was another limit before. Raises TimeoutError and errors of nats-py."""
        config = (await self._js.stream_info(wire.USAGE_STREAM)).config
        before = config.max_age or 0.0
        if before != age_s:
            await self._js.update_stream(config, max_age=age_s)
        return before != age_s

    async def replay_usage(self, consumer: str) -> int:
        """Have all usage delivered to the consumer's readers again, from the first message of the stream on.

        Returns the number of messages. Raises TimeoutError and errors of nats-py."""
        with contextlib.suppress(NotFoundError):  # no ledger has begun to read the stream
            await self._js.delete_consumer(wire.USAGE_STREAM, consumer)
        return (await self._js.stream_info(wire.USAGE_STREAM)).state.messages
