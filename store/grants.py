"""Who may say and hear what on the bus: each process is a user of NATS that may do what it does, and nothing else.

Pure. Replies come to a prefix of the user's own, so nobody hears those of others; who answers may do so once for each
request that came. No user may make a consumer but the ledger: one can be told to deliver to any subject.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from store import views, wire

ANY = "*"  # one word of a subject
BOOKS = "ledger"  # durable consumer of the usage


@dataclass(frozen=True)
class User:
    """What a process uses of the bus: core subjects, and what JetStream keeps."""

    name: str
    says: tuple[str, ...] = ()
    hears: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()  # buckets
    writes: tuple[str, ...] = ()  # subjects of keys in these buckets
    answers: bool = False  # requests
    meters: bool = False  # writes usage
    books: bool = False  # reads usage

    @property
    def inbox(self) -> str:
        """Prefix of the subjects to which its replies come."""
        return f"_INBOX.{self.name}"

    @property
    def publishes(self) -> list[str]:
        """All subjects, those of JetStream's API too."""
        streams = [_stream(bucket) for bucket in self.reads]
        usage = [wire.USAGE_STREAM] if self.meters or self.books else []
        api = [f"STREAM.{verb}.{stream}" for stream in streams for verb in ("INFO", "CREATE", "MSG.GET")]
        api += [f"STREAM.{verb}.{stream}" for stream in usage for verb in ("INFO", "CREATE")]
        if self.books:
            own = f"{wire.USAGE_STREAM}.{BOOKS}"
            api += [f"CONSUMER.{verb}.{own}" for verb in ("INFO", "DURABLE.CREATE", "MSG.NEXT")]
            api.append(f"CONSUMER.CREATE.{own}.{wire.usage_subject('>')}")
        acks = [f"$JS.ACK.{wire.USAGE_STREAM}.{BOOKS}.>"] if self.books else []
        metered = [wire.usage_subject(ANY)] if self.meters else []
        return [*self.says, *self.writes, *metered, *(f"$JS.API.{call}" for call in api), *acks]

    @property
    def subscribes(self) -> list[str]:
        return [*self.hears, *(key(bucket, ">") for bucket in self.reads), f"{self.inbox}.>"]


def _stream(bucket: str) -> str:
    return f"KV_{bucket}"


def key(bucket: str, name: str) -> str:
    """The subject under which JetStream keeps it."""
    return f"$KV.{bucket}.{name}"


GATEWAY = User(
    "gateway",
    says=(
        *(
            subject(ANY)
            for subject in (
                wire.run_subject,
                wire.cancel_subject,
                wire.repair_subject,
                wire.control_subject,
                wire.migrate_subject,
                wire.drain_subject,
                wire.role_subject,
                views.timeline_subject,
                views.pages_subject,
            )
        ),
        wire.GATEWAY_ALIVE,
    ),
    hears=(wire.frame_subject(ANY),),
    reads=(wire.LEASES, wire.MODELS, wire.LEADER, wire.QUOTAS),
    writes=(key(wire.MODELS, ANY), key(wire.QUOTAS, ANY)),
    meters=True,
)
SCHEDULER = User(
    "scheduler",
    says=(wire.migrate_subject(ANY), wire.drain_subject(ANY)),
    reads=(wire.LEASES, wire.MODELS, wire.PLACES, wire.LEADER),
    writes=(key(wire.PLACES, ANY), key(wire.LEADER, ANY)),
)
LEDGER = User("ledger", books=True)
# Of a server that asks nobody for credentials.
ANYBODY = User(
    "anybody", reads=(wire.LEASES, wire.MODELS, wire.PLACES, wire.LEADER, wire.QUOTAS), meters=True, books=True
)


def runtime(id: str) -> User:
    """Its own commands and its own lease; frames to any gateway; to other runtimes what moves a request."""
    moves = (
        wire.offer_subject,
        wire.blocks_subject,
        wire.commit_subject,
        wire.call_off_subject,
        wire.landed_subject,
    )
    return User(
        f"runtime-{id}",
        says=(*(subject(ANY) for subject in moves), wire.frame_subject(ANY)),
        hears=(f"rt.{id}.{ANY}", wire.GATEWAY_ALIVE),
        reads=(wire.LEASES, wire.MODELS, wire.PLACES),
        writes=(key(wire.LEASES, id),),
        answers=True,
    )


def authorization(users: Iterable[User], keys: Mapping[str, str]) -> str:
    """The block of nats-server's configuration: `keys` are their public nkeys, by name."""
    blocks = "\n".join(_block(user, keys[user.name]) for user in users)
    return f"authorization {{\n  users: [\n{blocks}\n  ]\n}}\n"


def _block(user: User, public_key: str) -> str:
    answers = '\n        allow_responses: { max: 1, expires: "2m" }' if user.answers else ""
    return f"""\
    {{ # {user.name}
      nkey: {public_key}
      permissions: {{
        publish: {{ allow: [{_quoted(user.publishes)}] }}
        subscribe: {{ allow: [{_quoted(user.subscribes)}] }}{answers}
      }}
    }}"""


def _quoted(subjects: list[str]) -> str:
    return "".join(f'\n          "{subject}"' for subject in subjects) + "\n        "
