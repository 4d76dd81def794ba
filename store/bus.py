"""The only door to NATS: commands and frames over core subjects, leases and specs in KV buckets, usage in JetStream.

Core NATS is at most once: what may not be lost carries a sequence (frames), an answer (requests) or is kept by
JetStream (usage). Nothing here retries silently except the publishing of usage, which is money.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import Error as JetStreamError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KeyValue

from store import grants, wire

log = structlog.get_logger()

CANCEL_AGAIN_S = 0.5
LEASE_TTL_S = 3.0
QUOTA_TTL_S = 35 * 86_400.0  # longer than a month, for which budgets are
REQUEST_TIMEOUT_S = 5.0
USAGE_AGAIN_S = 30  # after which usage that was not acknowledged is delivered again
FETCH_S = 2.0  # of one pull: a restarted server has forgotten it, so a longer one would wait for nothing
CONNECT_TIMEOUT_S = 5.0  # to connect first; later the connection is mended for ever
PAYLOAD_LEAST = 1 << 20  # bytes: a server that carries less is refused at start
PENDING_MOST = 64 << 20  # bytes buffered per connection while the server is away
GETS_MOST = 32  # keys of a bucket that are asked for at a time

_TTL_S = {wire.LEASES: LEASE_TTL_S, wire.LEADER: LEASE_TTL_S, wire.QUOTAS: QUOTA_TTL_S}  # of buckets

Callback = Callable[[bytes], Awaitable[None]]
Responder = Callable[[bytes], Awaitable[wire.Message]]
Watcher = Callable[[str, bytes | None], None]


class BusError(Exception):
    """The bus could not do what was asked; the message names the address or subject and the remedy."""


class NoAnswer(BusError):
    """Nobody listens on the subject, or nobody answered in time."""


class TooLarge(BusError):
    """A message over the server's max_payload; `size` and `most` in bytes."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(
            f"the message has {size} bytes, the bus carries {most}: shorten it or raise max_payload of NATS"
        )
        self.size, self.most = size, most


@dataclass(frozen=True)
class UsageBatch:
    """Usage taken from the stream and not yet acknowledged: call `ack` once it is committed."""

    usages: list[wire.Usage]
    messages: list[Msg]

    async def ack(self) -> None:
        """Raises BusError: then they come again."""
        try:
            for message in self.messages:
                await message.ack()
        except nats.errors.Error as error:
            raise BusError(f"{len(self.messages)} usage messages not acknowledged: {error}") from error


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancels them until they have: wait_for of Python 3.11, with which the client waits, can swallow that."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


class Bus:
    """One connection to NATS. Reconnects for ever; `on_reconnect` callbacks run after each time it came back."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._js: JetStreamContext = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        self._buckets: dict[str, KeyValue] = {}
        self._on_reconnect: list[Callable[[], Awaitable[None]]] = []

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, url: str, name: str, user: grants.User = grants.ANYBODY, credentials: Path | None = None
    ) -> AsyncIterator[Bus]:
        """`credentials`: a file with an nkey's seed, or a `.creds` file with a JWT; None: those in the URL, or none.

        Raises BusError when the server is not reachable, refuses the user, has no JetStream or carries less than 1 MiB
        a message."""
        buses: list[Bus] = []
        refused = False

        async def reconnected() -> None:
            log.warning("bus.reconnected", name=name)
            for bus in buses:
                for callback in bus._on_reconnect:
                    await callback()

        async def failed(error: Exception) -> None:
            nonlocal refused
            refused |= "authorization violation" in str(error).lower()
            if "permissions violation" in str(error).lower():  # what was asked for gets no other answer
                log.error("bus.forbidden", name=name, user=user.name, error=str(error))
            else:
                log.warning("bus.error", name=name, error=f"{type(error).__name__}: {error}")

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):  # it would try for ever, as it is to do later
                client = await nats.connect(
                    url,
                    name=name,
                    connect_timeout=2,
                    reconnect_time_wait=0.1,
                    max_reconnect_attempts=-1,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    pending_size=PENDING_MOST,
                    allow_reconnect=True,
                    inbox_prefix=user.inbox,
                    error_cb=failed,
                    reconnected_cb=reconnected,
                    **_identity(credentials),
                )
        except (OSError, nats.errors.Error, TimeoutError) as error:
            shown = redacted(url)
            if refused:
                raise BusError(
                    f"NATS at {shown} refuses the user {user.name}: set STACCATO_NATS_CREDENTIALS to a file with the "
                    "seed of an nkey that it knows"
                ) from error
            raise BusError(f"NATS at {shown} is not reachable: start it or set STACCATO_NATS_URL") from error
        bus = cls(client)
        buses.append(bus)
        try:
            await bus._prepare(redacted(url), user)
            yield bus
        finally:
            with contextlib.suppress(Exception):  # close() while reconnecting raises TypeError in nats-py 2.16
                await client.close()

    async def _prepare(self, url: str, user: grants.User) -> None:
        if self._client.max_payload < PAYLOAD_LEAST:
            raise BusError(
                f"NATS at {url} has max_payload {self._client.max_payload}, at least {PAYLOAD_LEAST} are needed"
            )
        try:
            for name in user.reads:
                self._buckets[name] = await self._bucket(name, _TTL_S.get(name))
            if user.meters or user.books:
                await self._js.add_stream(
                    StreamConfig(
                        name=wire.USAGE_STREAM,
                        subjects=[wire.usage_subject(">")],
                        retention=RetentionPolicy.LIMITS,
                        storage=StorageType.FILE,
                        duplicate_window=120,
                    )
                )
        except (JetStreamError, nats.errors.Error) as error:
            raise BusError(
                f"NATS at {url} has no usable JetStream ({error}): enable it with `jetstream {{}}`"
            ) from error

    async def _bucket(self, name: str, ttl_s: float | None) -> KeyValue:
        with contextlib.suppress(NotFoundError):
            return await self._js.key_value(name)
        return await self._js.create_key_value(bucket=name, ttl=ttl_s, history=1)

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def max_payload(self) -> int:
        """Bytes of the largest message."""
        return self._client.max_payload

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._on_reconnect.append(callback)

    # ── core subjects ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def publish(self, subject: str, data: bytes) -> None:
        """At most once. Raises BusError when the connection's buffer is full."""
        try:
            await self._client.publish(subject, data)
        except nats.errors.MaxPayloadError:
            raise TooLarge(len(data), self.max_payload) from None
        except nats.errors.Error as error:
            raise BusError(f"{subject}: not published: {error}") from error

    async def request(self, subject: str, message: wire.Message, timeout_s: float = REQUEST_TIMEOUT_S) -> bytes:
        """Raises NoAnswer (nobody there, or too late), TooLarge, BusError."""
        data = wire.encode(message)
        if len(data) > self.max_payload:
            raise TooLarge(len(data), self.max_payload)
        try:
            return (await self._client.request(subject, data, timeout=timeout_s)).data
        except (TimeoutError, nats.errors.NoRespondersError, nats.errors.TimeoutError) as error:
            raise NoAnswer(f"{subject}: no answer within {timeout_s} s") from error
        except nats.errors.Error as error:
            raise BusError(f"{subject}: {error}") from error

    async def subscribe(self, subject: str, callback: Callback) -> None:
        async def receive(message: Msg) -> None:
            try:
                await callback(message.data)
            except wire.WireError as error:
                log.warning("bus.bad_message", subject=message.subject, error=str(error))

        await self._client.subscribe(subject, cb=receive)

    async def respond(self, subject: str, responder: Responder) -> None:
        """Answer each request on `subject`; one that does not decode is answered with a refusal."""

        async def receive(message: Msg) -> None:
            try:
                answer = await responder(message.data)
            except wire.WireError as error:
                answer = wire.Reply(refusal=wire.Refusal.BAD_MESSAGE, reason=str(error))
            if message.reply:
                await message.respond(wire.encode(answer))

        await self._client.subscribe(subject, cb=receive)

    # ── KV buckets ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def put(self, bucket: str, key: str, message: wire.Message) -> None:
        try:
            await self._buckets[bucket].put(key, wire.encode(message))
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise BusError(f"{bucket}/{key}: not stored: {error}") from error

    async def delete(self, bucket: str, key: str, last: int | None = None) -> None:
        """If `last` is still the key's revision; None: in any case. Raises BusError."""
        try:
            await self._buckets[bucket].delete(key, last)
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise BusError(f"{bucket}/{key}: not deleted: {error}") from error

    async def take_lead(self, role: str, holder: str) -> int | None:
        """The term, higher than any before, if nobody has the role; to be kept by `keep_lead`. None if somebody has.

        Raises BusError."""
        leader = wire.encode(wire.Leader(holder=holder))
        try:
            return await self._buckets[wire.LEADER].create(role, leader)
        except (KeyWrongLastSequenceError, KeyNotFoundError):  # the latter where it ran out in the middle of asking
            return None
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise BusError(f"{wire.LEADER}/{role}: not asked: {error}") from error

    async def keep_lead(self, role: str, leader: wire.Leader, last: int) -> int | None:
        """What to say as `last` the next time; None if it ran out, or another has it. Raises BusError."""
        try:
            return await self._buckets[wire.LEADER].update(role, wire.encode(leader), last)
        except KeyWrongLastSequenceError:
            return None
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise BusError(f"{wire.LEADER}/{role}: not kept: {error}") from error

    async def read(self, bucket: str, key: str, kind: type[wire.M]) -> tuple[wire.M | None, int]:
        """The value, None where there is none, and its revision, to be said to `swap`. Raises BusError, WireError."""
        try:
            entry = await self._buckets[bucket].get(key)
        except KeyNotFoundError as error:  # where it was deleted, the mark of that has a revision
            return None, error.entry.revision if error.entry else 0
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise BusError(f"{bucket}/{key}: not read: {error}") from error
        return wire.decode(kind, entry.value or b""), entry.revision or 0

    async def swap(self, bucket: str, key: str, message: wire.Message, last: int) -> int | None:
        """Store it if `last` is still the key's revision; the new revision, None if it is not.

        Raises BusError: whether it was stored is not known then."""
        try:
            return await self._buckets[bucket].update(key, wire.encode(message), last)
        except KeyWrongLastSequenceError:
            return None
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise BusError(f"{bucket}/{key}: not known to be stored: {error}") from error

    async def entries(self, bucket: str) -> dict[str, bytes]:
        """All there is. Asked for key by key: the client's own way takes a consumer. Raises BusError."""
        subject = grants.key(bucket, "")
        turns = asyncio.Semaphore(GETS_MOST)

        async def value(key: str) -> bytes | None:
            async with turns:
                with contextlib.suppress(KeyNotFoundError):  # deleted, perhaps since it was listed
                    return (await self._buckets[bucket].get(key)).value or b""
            return None

        try:
            listed = await self._js.stream_info(f"KV_{bucket}", subjects_filter=">")
            names = sorted(name.removeprefix(subject) for name in listed.state.subjects or ())
            values = await asyncio.gather(*map(value, names))
        except (JetStreamError, nats.errors.Error, TimeoutError) as error:
            raise BusError(f"{bucket}: not listed: {error}") from error
        return {name: found for name, found in zip(names, values, strict=True) if found is not None}

    async def keys(self, bucket: str) -> list[str]:
        """Raises BusError."""
        return list(await self.entries(bucket))

    async def watch(self, bucket: str, watcher: Watcher) -> None:
        """Tell `watcher` (key, value or None when deleted) all there is and every change, also after reconnects.

        A put is a publish on the bucket's subject, so a plain subscription sees every change without a server-side
        consumer that a restart of the server would lose; the snapshot fills what happened while we were away. It sees
        those also that are refused for what they expected, so a value that was only asked for must say so.
        """
        prefix = grants.key(bucket, "")
        known: set[str] = set()
        changed_since: set[str] = set()  # the snapshot began: it may say less of them

        def tell(key: str, value: bytes | None) -> None:
            (known.discard if value is None else known.add)(key)
            watcher(key, value)

        async def changed(message: Msg) -> None:
            key = message.subject.removeprefix(prefix)
            changed_since.add(key)
            gone = bool(message.headers and message.headers.get("KV-Operation"))
            tell(key, None if gone else message.data)

        async def snapshot() -> None:
            changed_since.clear()
            found = await self.entries(bucket)
            for key in sorted((known | found.keys()) - changed_since):
                tell(key, found.get(key))

        async def catch_up() -> None:
            try:
                await snapshot()
            except BusError as error:  # away again: the next reconnect repeats it
                log.warning("bus.snapshot_failed", bucket=bucket, error=str(error))

        await self._client.subscribe(prefix + ">", cb=changed)
        await snapshot()
        self.on_reconnect(catch_up)

    # ── usage ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def publish_usage(self, usage: wire.Usage) -> None:
        """Returns once JetStream has stored it. Raises BusError; the caller keeps the usage and tries again."""
        subject = wire.usage_subject(usage.tenant_id)
        message_id = f"{usage.request}:{usage.attempt}:{usage.seq}"
        try:
            await self._js.publish(subject, wire.encode(usage), headers={"Nats-Msg-Id": message_id})
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise BusError(f"usage of {usage.request} not stored: {error}") from error

    async def usage_batches(self, consumer: str, most: int) -> AsyncIterator[UsageBatch]:
        """Endless: batches in the order of the stream, redelivered after 30 s unless acknowledged.

        What no reader will ever understand is logged and, with its batch, acknowledged. What another version of this
        process wrote stays in the stream, and is offered every 30 s, until a process that understands it reads it."""
        config = ConsumerConfig(ack_wait=USAGE_AGAIN_S, max_ack_pending=10_000)
        subscription = await self._js.pull_subscribe(
            wire.usage_subject(">"), durable=consumer, stream=wire.USAGE_STREAM, config=config
        )
        while True:
            try:
                messages = await subscription.fetch(most, timeout=FETCH_S)
            except (TimeoutError, nats.errors.TimeoutError):
                continue
            except (JetStreamError, nats.errors.Error) as error:
                log.warning("usage.fetch_failed", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
                continue
            usages, read = [], []
            for message in messages:
                try:
                    usages.append(wire.decode(wire.Usage, message.data))
                except wire.OtherVersion as error:
                    log.error("usage.other_version", subject=message.subject, error=str(error))
                    continue
                except wire.WireError as error:
                    log.error("usage.unreadable", subject=message.subject, error=str(error))
                read.append(message)
            yield UsageBatch(usages, read)


def _identity(credentials: Path | None) -> dict[str, str]:
    """Raises BusError."""
    if credentials is None:
        return {}
    try:
        kind = "user_credentials" if "NATS USER JWT" in credentials.read_text() else "nkeys_seed"
    except OSError as error:
        raise BusError(f"STACCATO_NATS_CREDENTIALS={credentials}: {error.strerror}: name a file with a seed") from error
    return {kind: str(credentials)}


def redacted(url: str) -> str:
    """The URL without the password or token in it."""
    scheme, _, rest = url.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
