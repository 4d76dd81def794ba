"""The door to NATS: commands and frames over core subjects, leases and specs in KV buckets, usage in JetStream.

Core NATS delivers at most once. A message that may not be lost carries a sequence number (frames), gets an answer
(requests) or is kept by JetStream (usage). Only the publishing of usage is retried silently, since usage is money.

A restarted server may have lost its streams and buckets. Each process then makes the streams and buckets it uses again
(`store/streams.py`), and tells the parts of the process that fill the buckets. A cluster of servers loses nothing with
a server: the connection goes on at the next server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig
from nats.js.errors import Error as JetStreamError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

from store.contract import grants, wire
from store.contract.joining.proofs import NAME_PREFIX
from store.parts import PART_BYTES, REQUEST_MOST, Joiner, TooManyParts, WrongPart, ask_in_parts
from store.settings import addresses
from store.streams import LEASE_TTL_S, LEASED, StoredStreams, stream_of
from store.tasks import ended, within

log = structlog.get_logger()

REQUEST_TIMEOUT_S = 5.0
USAGE_AGAIN_S = 30  # seconds until JetStream delivers unacknowledged usage again
FETCH_AGAIN_S = 0.5  # pause after a failed pull
FETCH_S = 2.0  # duration of a pull: a restarted server has forgotten the pull, so a longer pull would wait in vain
CONNECT_TIMEOUT_S = 5.0  # for the first connection; later the client reconnects for ever
ELECT_S = 30.0  # at the first connection: a cluster that starts elects a leader of each stream
PING_S, PING_OF_MANY_S = 5.0, 1.0  # between two pings of a server; a silent server of a cluster is left sooner
PINGS_MOST = 2  # pings without an answer, before the server counts as away
PAYLOAD_LEAST = 1 << 20  # bytes: a server with a smaller max_payload is refused at start
PENDING_MOST = 64 << 20  # bytes buffered per connection while the server is away
GETS_MOST = 32  # keys of a bucket read at a time
MEND_PAUSE_S = 0.5  # between two looks at the server's streams
REFILL_S = 60.0  # time to fill a bucket that was made again: until then a missing key does not count as deleted
TERMS_PER_S = 16  # the most revisions a second of the bucket of leaders: later terms are higher, in a new bucket too

Callback = Callable[[bytes], Awaitable[None]]
T = TypeVar("T")
Responder = Callable[[bytes], Awaitable[wire.Message]]
Watcher = Callable[[str, bytes | None], None]


class BusError(Exception):
    """Error of a bus that could not do the task; the message names the address or subject and the remedy."""


class NoAnswer(BusError):
    """Error of a request without an answer: no process listens on the subject, or the answer came too late."""


class TooLarge(BusError):
    """Error of a message over the server's max_payload, or of a request over REQUEST_MOST. Sizes are in bytes."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"the message has {size} bytes, the bus carries {most}: shorten it")
        self.size, self.most = size, most


@dataclass(frozen=True)
class Lead:
    """Role that this process took: a term higher than any earlier term, and the revision to pass to `keep_lead`."""

    term: int
    last: int


@dataclass(frozen=True)
class UsageBatch:
    """Usage taken from the stream and not yet acknowledged: call `ack` once it is committed."""

    usages: list[wire.Usage]
    messages: list[Msg]

    async def ack(self) -> None:
        """Acknowledge the messages of the batch. Raises BusError: then JetStream delivers the messages again."""
        try:
            for message in self.messages:
                await message.ack()
        except nats.errors.Error as error:
            raise BusError(f"{len(self.messages)} usage messages not acknowledged: {error}") from error


class Bus:
    """Connection to NATS. Reconnects for ever, and makes streams and buckets again that the server has lost."""

    def __init__(self, client: Client, user: grants.User, replicas: int | None = None) -> None:
        self._client, self._user = client, user
        self._js: JetStreamContext = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        self._streams = StoredStreams(self._js, user, replicas)
        self._buckets = self._streams.buckets
        self._doubt = asyncio.Event()  # the server may have lost a stream
        self._joiner = Joiner()
        self._behind = False  # watchers may have missed changes
        self._lost: set[str] = set()  # streams and buckets made again, until the watchers have looked
        self._catch_ups: list[Callable[[frozenset[str]], Awaitable[None]]] = []
        self._on_lost: list[Callable[[frozenset[str]], None]] = []

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        url: str,
        name: str,
        user: grants.User = grants.ANYBODY,
        credentials: Path | None = None,
        authority: Path | None = None,
        replicas: int | None = None,
        token: str | None = None,
    ) -> AsyncIterator[Bus]:
        """Connect to a NATS server at `url`, which names the servers of a cluster with commas between; the connection
        closes at the end of the context.

        `credentials`: a file with an nkey's seed, or a `.creds` file with a JWT; None: credentials in the URL, or none.
        `authority`: for tls://, PEM file of the server's certificate authority; None: the machine's authorities.
        `replicas`: servers that keep each stream and bucket; None: 1, and streams that are there stay as they are.
        `token`: a join token, shown beside the credentials.

        Raises BusError when the server is not reachable, refuses the user, has no JetStream or carries less than 1 MiB
        a message."""
        buses: list[Bus] = []

        async def reconnected() -> None:
            log.warning("bus.reconnected", name=name)
            for bus in buses:
                bus._behind = True
                bus._doubt.set()

        client = await opened(url, name, user, credentials, authority, token, reconnected)
        bus = cls(client, user, replicas)
        buses.append(bus)
        mending: list[asyncio.Task[None]] = []
        try:
            await bus._prepare(redacted(url), ELECT_S if len(addresses(url)) > 1 else 0.0)
            mending.append(asyncio.create_task(bus._mend()))
            yield bus
        finally:
            await ended(*mending)
            await close(client)

    async def _prepare(self, url: str, wait_s: float) -> None:
        """Make the streams and buckets of this process, within `wait_s` seconds. Raises BusError."""
        if self._client.max_payload < PAYLOAD_LEAST:
            raise BusError(
                f"NATS at {url} has max_payload {self._client.max_payload}, at least {PAYLOAD_LEAST} are needed"
            )
        until = asyncio.get_running_loop().time() + wait_s
        while True:
            try:
                await self._streams.make_missing()
                return
            except (TimeoutError, JetStreamError, nats.errors.Error) as error:
                if asyncio.get_running_loop().time() >= until:
                    remedy = "enable it with `jetstream {}`"
                    if (self._streams.replicas or 1) > 1:
                        remedy = f"STACCATO_NATS_REPLICAS={self._streams.replicas} needs as many servers in a cluster"
                    raise BusError(f"NATS at {url} has no usable JetStream ({error}): {remedy}") from error
            await asyncio.sleep(MEND_PAUSE_S)

    async def _mend(self) -> None:
        """Endless: on doubt, make lost streams and buckets again, and bring watchers up to date."""
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            try:
                await self._mend_once()
            except (TimeoutError, JetStreamError, nats.errors.Error, BusError) as error:
                log.warning("bus.not_mended", retry_in_s=MEND_PAUSE_S, error=f"{type(error).__name__}: {error}")
                self._doubt.set()
            await asyncio.sleep(MEND_PAUSE_S)

    async def _mend_once(self) -> None:
        again = await self._streams.make_missing()
        if again:
            log.warning("bus.made_again", bucket=sorted(again))
            self._lost |= again
            for callback in self._on_lost:
                callback(frozenset(again))
        if self._behind or self._lost:
            lost = frozenset(self._lost)
            for catch_up in self._catch_ups:
                await catch_up(lost)
            self._behind = False
            self._lost -= lost

    def on_lost(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Call `callback` with the names of lost streams and buckets, after each was made again, empty. The callback
        must fill the buckets again."""
        self._on_lost.append(callback)

    def _failed(self, what: str, error: Exception) -> BusError:
        """Return the error to raise. If the connection is up, also check whether the server still has the stream."""
        if self.connected:
            self._doubt.set()
        return BusError(f"{what}: {error}")

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def max_payload(self) -> int:
        """Size of the largest message that the server carries, in bytes."""
        return self._client.max_payload

    # ── core subjects ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish a message, delivered at most once. Raises TooLarge; BusError when the connection's buffer is full."""
        try:
            await self._client.publish(subject, data)
        except nats.errors.MaxPayloadError:
            raise TooLarge(len(data), self.max_payload) from None
        except nats.errors.Error as error:
            raise BusError(f"{subject}: not published: {error}") from error

    async def request(self, subject: str, message: wire.Message, timeout_s: float = REQUEST_TIMEOUT_S) -> bytes:
        """Return the answer to a request. `timeout_s`: the longest wait for the answer; in parts, to each part.

        Raises NoAnswer (no process listens, or an answer is late), TooLarge, BusError."""
        data = wire.encode(message)
        if len(data) > REQUEST_MOST:
            raise TooLarge(len(data), REQUEST_MOST)
        try:
            if len(data) <= PART_BYTES:
                return (await self._client.request(subject, data, timeout=timeout_s)).data
            return await ask_in_parts(
                lambda part, headers: self._client.request(subject, part, timeout=timeout_s, headers=headers), data
            )
        except (TimeoutError, nats.errors.NoRespondersError, nats.errors.TimeoutError) as error:
            raise NoAnswer(f"{subject}: no answer within {timeout_s} s") from error
        except nats.errors.Error as error:
            raise BusError(f"{subject}: {error}") from error

    async def catch_up(self, timeout_s: float) -> None:
        """Return once the server knows all that this connection said, and callbacks have every message that
        the server had for this connection.

        Raises BusError if the server does not answer within `timeout_s` seconds, or is away."""
        try:
            for _ in range(2):  # nats-py's ping overtakes what waits to be sent: the second ping comes after
                await self._client.flush(timeout_s / 2)  # type: ignore[arg-type]  # any number will do
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BusError(f"the bus did not answer within {timeout_s:g} s: {error}") from error
        await asyncio.sleep(0)  # callbacks of messages from before the answer run first

    async def subscribe(self, subject: str, callback: Callback) -> None:
        async def receive(message: Msg) -> None:
            try:
                await callback(message.data)
            except wire.WireError as error:
                log.warning("bus.bad_message", subject=message.subject, error=str(error))

        await self._client.subscribe(subject, cb=receive)

    async def respond(self, subject: str, responder: Responder) -> None:
        """Answer requests on `subject` with `responder`. A request that does not decode gets a refusal."""

        async def receive(message: Msg) -> None:
            answer = b""  # to a part that is not the last
            try:
                if (data := self._joiner.whole(message.headers, message.data)) is not None:
                    answer = wire.encode(await responder(data))
            except (wire.WireError, WrongPart) as error:
                answer = wire.encode(wire.Reply(refusal=wire.Refusal.BAD_MESSAGE, reason=str(error)))
            except TooManyParts as error:
                answer = wire.encode(wire.Reply(refusal=wire.Refusal.BUSY, reason=str(error)))
            if message.reply:
                await message.respond(answer)

        await self._client.subscribe(subject, cb=receive)

    # ── KV buckets ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def put(self, bucket: str, key: str, message: wire.Message, wait_s: float = REQUEST_TIMEOUT_S) -> None:
        """Return once the message is stored. Raises BusError if the server has not confirmed within `wait_s` seconds;
        watchers may hear the message even then."""
        try:
            await self._js.publish(grants.key(bucket, key), wire.encode(message), timeout=wait_s)
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise self._failed(f"{bucket}/{key}: not stored", error) from error

    async def delete(self, bucket: str, key: str, last: int | None = None) -> None:
        """Delete the key if the key's revision is still `last`; None: in any case. Raises BusError."""
        try:
            await self._buckets[bucket].delete(key, last)
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise self._failed(f"{bucket}/{key}: not deleted", error) from error

    async def take_lead(self, role: str, holder: str) -> Lead | None:
        """Take a role; return None if another process has the role. The term is made of the time of the bucket's making
        and the revision in the bucket: a term is higher than any earlier term even if the server lost the bucket.

        Raises BusError."""
        leader = wire.encode(wire.Leader(holder=holder))
        try:
            last = await self._buckets[wire.LEADER].create(role, leader)
            made = (await self._js.stream_info(stream_of(wire.LEADER))).created
        except (KeyWrongLastSequenceError, KeyNotFoundError):  # KeyNotFoundError: the old lead ran out during the call
            return None
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise self._failed(f"{wire.LEADER}/{role}: not asked", error) from error
        assert made is not None, "the server says of each stream when it was made"
        return Lead(int(made.timestamp()) * TERMS_PER_S + last, last)

    async def keep_lead(self, role: str, leader: wire.Leader, last: int) -> int | None:
        """Renew a role. Return the revision to pass as `last` the next time; None if the lead ran out or another
        process has the role. Raises BusError."""
        try:
            return await self._buckets[wire.LEADER].update(role, wire.encode(leader), last)
        except KeyWrongLastSequenceError:
            return None
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise self._failed(f"{wire.LEADER}/{role}: not kept", error) from error

    async def read(self, bucket: str, key: str, kind: type[wire.M]) -> tuple[wire.M | None, int]:
        """Return a key's value (None if missing) and the revision to pass to `swap`. Raises BusError, WireError."""
        try:
            entry = await self._buckets[bucket].get(key)
        except KeyNotFoundError as error:  # a deleted key has a revision: the revision of the mark of deletion
            return None, error.entry.revision if error.entry else 0
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise self._failed(f"{bucket}/{key}: not read", error) from error
        return wire.decode(kind, entry.value or b""), entry.revision or 0

    async def swap(self, bucket: str, key: str, message: wire.Message, last: int) -> int | None:
        """Store the message if the key's revision is still `last`. Return the new revision, or None if not stored.

        Raises BusError: then the caller does not know whether the message was stored."""
        try:
            return await self._buckets[bucket].update(key, wire.encode(message), last)
        except KeyWrongLastSequenceError:
            return None
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise self._failed(f"{bucket}/{key}: not known to be stored", error) from error

    async def entries(self, bucket: str) -> dict[str, bytes]:
        """Return the bucket's entries. Raises BusError. Key by key: the client's listing needs a server's consumer."""
        subject = grants.key(bucket, "")
        turns = asyncio.Semaphore(GETS_MOST)

        async def value(key: str) -> bytes | None:
            async with turns:
                with contextlib.suppress(KeyNotFoundError):  # deleted, perhaps since the listing
                    return (await self._buckets[bucket].get(key)).value or b""
            return None

        try:
            listed = await self._js.stream_info(stream_of(bucket), subjects_filter=">")
            names = sorted(name.removeprefix(subject) for name in listed.state.subjects or ())
            values = await asyncio.gather(*map(value, names))
        except (JetStreamError, nats.errors.Error, TimeoutError) as error:
            raise self._failed(f"{bucket}: not listed", error) from error
        return {name: found for name, found in zip(names, values, strict=True) if found is not None}

    async def keys(self, bucket: str) -> list[str]:
        """Return the keys of the bucket. Raises BusError."""
        return list(await self.entries(bucket))

    async def watch(self, bucket: str, watcher: Watcher) -> None:
        """Call `watcher` (key, value or None when deleted) with every entry and every change, also after reconnects.

        A put is a publish on the bucket's subject. A plain subscription therefore sees every change, without a consumer
        on the server, which a restart would lose. A snapshot fills in the changes during a lost connection. The
        subscription also sees a put with a wrong revision, refused by the server: a value that merely asks for a role
        must say so. If the server has lost the bucket, old keys are told as deleted only REFILL_S seconds later. Leases
        heard within LEASE_TTL_S count as there: a cluster that elects a leader passes leases on and stores none.
        """
        prefix = grants.key(bucket, "")
        loop = asyncio.get_running_loop()
        known: dict[str, float] = {}  # key → loop time of the last value
        ttl_s = LEASE_TTL_S if bucket in LEASED else 0.0
        changed_since: set[str] = set()  # keys changed since the snapshot began: the snapshot may be older
        filled_at = 0.0  # loop time until which a missing key does not count as deleted

        def tell(key: str, value: bytes | None) -> None:
            if value is None:
                known.pop(key, None)
            else:
                known[key] = loop.time()
            watcher(key, value)

        async def changed(message: Msg) -> None:
            key = message.subject.removeprefix(prefix)
            changed_since.add(key)
            gone = bool(message.headers and message.headers.get("KV-Operation"))
            tell(key, None if gone else message.data)

        async def snapshot() -> None:
            changed_since.clear()
            found = await self.entries(bucket)
            old = {key for key, at in known.items() if loop.time() >= max(filled_at, at + ttl_s)}
            gone = old - found.keys()
            for key in sorted((gone | found.keys()) - changed_since):
                tell(key, found.get(key))

        def look_again() -> None:
            self._behind = True
            self._doubt.set()

        async def catch_up(lost: frozenset[str]) -> None:
            nonlocal filled_at
            if bucket in lost:
                filled_at = loop.time() + REFILL_S
                loop.call_later(REFILL_S, look_again)
            await snapshot()

        await self._client.subscribe(prefix + ">", cb=changed)
        await snapshot()
        self._catch_ups.append(catch_up)

    # ── usage ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def publish_usage(self, usage: wire.Usage) -> None:
        """Return once JetStream has stored the usage. Raises BusError: the caller keeps the usage and tries again."""
        subject = wire.usage_subject(usage.tenant_id)
        message_id = f"{usage.request}:{usage.attempt}:{usage.seq}"
        try:
            await self._js.publish(subject, wire.encode(usage), headers={"Nats-Msg-Id": message_id})
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise self._failed(f"usage of {usage.request} not stored", error) from error

    async def limit_usage(self, age_s: float) -> bool:
        """Have usage older than `age_s` seconds deleted; 0: none. Return whether that is new. Raises BusError."""
        return await self._on_usage("not limited", self._streams.limit_usage(age_s))

    async def replay_usage(self, consumer: str) -> int:
        """Have all usage delivered to the consumer again; return the number of messages. Raises BusError."""
        return await self._on_usage("not replayed", self._streams.replay_usage(consumer))

    async def _on_usage(self, failure: str, work: Awaitable[T]) -> T:
        try:
            return await work
        except (TimeoutError, JetStreamError, nats.errors.Error) as error:
            raise self._failed(f"usage {failure}", error) from error

    async def usage_batches(self, consumer: str, most: int) -> AsyncIterator[UsageBatch]:
        """Endless: yield batches in the order of the stream, redelivered after 30 s unless acknowledged.

        A message that no reader will ever understand is logged, and acknowledged with its batch. A message of a foreign
        version stays in the stream and is offered every 30 s until a process of the message's version reads it."""
        subscription: JetStreamContext.PullSubscription | None = None
        made: datetime | None = None
        while True:
            try:
                if subscription is None or made != self._streams.made[wire.USAGE_STREAM]:
                    before, subscription = subscription, None  # even if the new subscription fails
                    subscription = await self._subscribed(consumer, before)
                    made = self._streams.made[wire.USAGE_STREAM]
                messages = await subscription.fetch(most, timeout=FETCH_S)
            except (TimeoutError, nats.errors.TimeoutError):
                continue
            except (JetStreamError, nats.errors.Error) as error:
                log.warning("usage.fetch_failed", error=f"{type(error).__name__}: {error}")
                self._doubt.set()
                made = None  # the consumer may be lost as well
                await asyncio.sleep(FETCH_AGAIN_S)
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

    async def _subscribed(
        self, consumer: str, before: JetStreamContext.PullSubscription | None
    ) -> JetStreamContext.PullSubscription:
        """Subscribe to the consumer, and make the consumer if the server lacks it; the subscription `before` ends."""
        if before is not None:
            with contextlib.suppress(nats.errors.Error):
                await before.unsubscribe()
        config = ConsumerConfig(ack_wait=USAGE_AGAIN_S, max_ack_pending=10_000)
        return await self._js.pull_subscribe(
            wire.usage_subject(">"), durable=consumer, stream=wire.USAGE_STREAM, config=config
        )


async def opened(
    url: str,
    name: str,
    user: grants.User,
    credentials: Path | None,
    authority: Path | None,
    token: str | None,
    reconnected: Callable[[], Awaitable[None]],
) -> Client:
    """Return a connection, which reconnects for ever, and which the caller must close.

    `reconnected` is called after each reconnection; `Bus.connect` explains the other arguments. Raises BusError when
    the server is not reachable, or refuses the user."""
    servers = addresses(url)
    refused, distrusted = False, ""

    async def failed(error: Exception) -> None:
        nonlocal refused, distrusted
        if isinstance(error, ssl.SSLError):
            distrusted = error.reason
        refused |= "authorization violation" in str(error).lower()
        if "permissions violation" in str(error).lower():  # the forbidden request gets no answer but this error
            log.error("bus.forbidden", name=name, user=user.name, error=str(error))
        else:
            log.warning("bus.error", name=name, error=f"{type(error).__name__}: {error}")

    options = dict(
        name=name,
        connect_timeout=2,
        reconnect_time_wait=0.1,
        max_reconnect_attempts=-1,
        ping_interval=PING_OF_MANY_S if len(servers) > 1 else PING_S,
        max_outstanding_pings=PINGS_MOST,
        pending_size=PENDING_MOST,
        allow_reconnect=True,
        inbox_prefix=user.inbox,
        error_cb=failed,
        reconnected_cb=reconnected,
        **_identity(credentials),
        **_trust(url, authority),
        **({"token": token} if token else {}),
    )
    try:
        return await within(nats.connect(servers, **options), CONNECT_TIMEOUT_S)  # the client would try for ever
    except (OSError, nats.errors.Error, TimeoutError) as error:
        shown = redacted(url)
        if refused:
            said = "; if runtimes join by token, `staccato join-service` runs and logs the reason"
            joins = said if user.name.startswith(NAME_PREFIX) else ""
            raise BusError(
                f"NATS at {shown} refuses the user {user.name}: set STACCATO_NATS_CREDENTIALS to a file with the "
                f"seed of an nkey that it knows{joins}"
            ) from error
        if distrusted:
            raise BusError(
                f"NATS at {shown} shows a certificate that is not believed ({distrusted}): name its "
                "authority with STACCATO_NATS_CA"
            ) from error
        raise BusError(f"NATS at {shown} is not reachable: start it or set STACCATO_NATS_URL") from error


async def close(client: Client) -> None:
    """Close a connection that `opened` returned, also a connection that is looking for a server."""
    # The client's search for a server may swallow the cancellation by close(), and then ends for want of servers.
    client.options["max_reconnect_attempts"] = 1
    with contextlib.suppress(Exception):  # close() while reconnecting raises TypeError in nats-py 2.16
        await client.close()


def _identity(credentials: Path | None) -> dict[str, str]:
    """Return the client's options for the credentials. Raises BusError if the file cannot be read."""
    if credentials is None:
        return {}
    try:
        kind = "user_credentials" if "NATS USER JWT" in credentials.read_text() else "nkeys_seed"
    except OSError as error:
        raise BusError(f"STACCATO_NATS_CREDENTIALS={credentials}: {error.strerror}: name a file with a seed") from error
    return {kind: str(credentials)}


def _trust(url: str, authority: Path | None) -> dict[str, ssl.SSLContext]:
    """Return the client's options for TLS. Raises BusError if the authority's file cannot be used."""
    if authority is None or not url.startswith("tls://"):
        return {}
    try:
        return {"tls": ssl.create_default_context(cafile=authority)}
    except OSError as error:
        raise BusError(
            f"STACCATO_NATS_CA={authority}: {error.strerror or error}: name ca.crt, as `staccato nats-users` makes it"
        ) from error


def redacted(url: str) -> str:
    """Return the URL, or the URLs with commas between, without passwords and tokens."""
    parts = [address.rpartition("://") for address in addresses(url)]
    return ",".join(f"{scheme}://{rest.rpartition('@')[2]}" for scheme, _, rest in parts)
