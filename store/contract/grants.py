"""Rights of processes on the bus: a process is a user of NATS, with no more rights than the process needs.

Pure. Replies come to a prefix of the user's own, so no user hears replies to a different user. An answering user may
answer each request once. Only the ledger may make a consumer or change a stream: a consumer can be told to deliver to
any subject, and a stream to keep any subject. The ledger takes nothing but usage, and listens on no port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from store.contract import reports, resumption, views, wire

ANY = "*"  # matches a word of a subject
ANSWERS_MOST, ANSWER_MINUTES = 1, 2  # to a request, and the time for the answer
BOOKS = "ledger"  # durable consumer of the usage


@dataclass(frozen=True)
class User:
    """User of NATS and the parts of the bus that the process uses: core subjects, buckets and the usage stream."""

    name: str
    says: tuple[str, ...] = ()
    hears: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()  # buckets
    writes: tuple[str, ...] = ()  # subjects of keys in these buckets
    answers: bool = False  # requests
    meters: bool = False  # writes usage
    books: bool = False  # reads usage
    keeps: tuple[str, ...] = ()  # streams whose number of replicas the user sets

    @property
    def inbox(self) -> str:
        """Prefix of the subjects to which replies to the user come."""
        return f"_INBOX.{self.name}"

    @property
    def publishes(self) -> list[str]:
        """Subjects on which the user may publish, with subjects of JetStream's API."""
        streams = [_stream(bucket) for bucket in self.reads]
        usage = [wire.USAGE_STREAM] if self.meters or self.books else []
        api = [f"STREAM.{verb}.{stream}" for stream in streams for verb in ("INFO", "CREATE", "MSG.GET")]
        api += [f"STREAM.{verb}.{stream}" for stream in usage for verb in ("INFO", "CREATE")]
        api += [f"STREAM.{verb}.{stream}" for stream in self.keeps for verb in ("INFO", "UPDATE")]
        if self.books:
            own = f"{wire.USAGE_STREAM}.{BOOKS}"
            api += [f"CONSUMER.{verb}.{own}" for verb in ("INFO", "DURABLE.CREATE", "MSG.NEXT", "DELETE")]
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
    """Return the subject under which JetStream keeps the key `name` of a bucket."""
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
                resumption.resume_subject,
                views.timeline_subject,
                views.pages_subject,
            )
        ),
        wire.GATEWAY_ALIVE,
    ),
    hears=(wire.frame_subject(ANY), reports.report_subject(ANY)),
    reads=(wire.LEASES, wire.LEASE_BASES, wire.MODELS, wire.LEADER, wire.QUOTAS),
    writes=(key(wire.MODELS, ANY), key(wire.QUOTAS, ANY)),
    meters=True,
)
SCHEDULER = User(
    "scheduler",
    says=(wire.migrate_subject(ANY), wire.drain_subject(ANY), wire.role_subject(ANY)),
    reads=(wire.LEASES, wire.LEASE_BASES, wire.MODELS, wire.PLACES, wire.LEADER),
    writes=(key(wire.PLACES, ANY), key(wire.LEADER, ANY)),
)
BUCKETS = (wire.LEASES, wire.LEASE_BASES, wire.MODELS, wire.PLACES, wire.LEADER, wire.QUOTAS)
KEPT = (*map(_stream, BUCKETS), wire.USAGE_STREAM)
LEDGER = User("ledger", books=True, keeps=KEPT)
SYSTEM_ACCOUNT = "$SYS"  # of nats-server: logins and connections of every account
LOGINS = "$SYS.REQ.USER.AUTH"  # questions of servers: who is the client that connects?
CONNECTIONS = "$SYS.REQ.SERVER.PING.CONNZ"  # asks every server for the server's connections
CALLOUT_S = 1.8  # longest wait of a server for the answer of a join service; clients wait 2 s for the server
JOIN = User("join", says=(CONNECTIONS, "$SYS.REQ.SERVER.*.KICK"), hears=(LOGINS,), answers=True)
# User of a server that asks for no credentials.
ANYBODY = User(
    "anybody",
    reads=BUCKETS,
    meters=True,
    books=True,
)


def kick_subject(server: str) -> str:
    """Return the subject of orders to end a connection of the server with the id `server`."""
    return f"$SYS.REQ.SERVER.{server}.KICK"


def runtime(id: str) -> User:
    """Return the user of a runtime.

    A runtime hears the runtime's own commands and writes the runtime's own lease. Frames may go to any gateway, and the
    messages of a migration to any runtime."""
    moves = (
        wire.prepare_subject,
        wire.copy_subject,
        wire.commit_subject,
        wire.abort_move_subject,
        wire.release_subject,
    )
    return User(
        f"runtime-{id}",
        says=(*(subject(ANY) for subject in moves), wire.frame_subject(ANY), reports.report_subject(id)),
        hears=(f"rt.{id}.{ANY}", wire.GATEWAY_ALIVE, reports.report_subject(ANY)),
        reads=(wire.LEASES, wire.LEASE_BASES, wire.MODELS, wire.PLACES),
        writes=(key(wire.LEASES, id), key(wire.LEASE_BASES, id)),
        answers=True,
    )


def authorization(users: Iterable[User], keys: Mapping[str, str]) -> str:
    """Return the users as a block of nats-server's configuration. `keys`: public nkey by user name."""
    return f"authorization {{\n{_users(users, keys)}}}\n"


def joining(users: Iterable[User], keys: Mapping[str, str], issuer: str) -> str:
    """Return blocks of nats-server's configuration in which runtimes join by proof, and `users` as ever.

    Every other client is shown to the join service, which is a user of the system account: the service alone may hear
    who connects, and end connections. `issuer`: public key of the account whose seed the service has."""
    users = list(users)
    known = ", ".join(keys[user.name] for user in (*users, JOIN))
    callout = f"""\
  timeout: {CALLOUT_S}
  auth_callout {{
    issuer: {issuer}
    account: "{SYSTEM_ACCOUNT}"
    auth_users: [{known}]
  }}
"""
    accounts = f"accounts {{\n  {SYSTEM_ACCOUNT} {{\n{_users([JOIN], keys)}  }}\n}}\n"
    return f"{accounts}authorization {{\n{_users(users, keys)}{callout}}}\n"


def _users(users: Iterable[User], keys: Mapping[str, str]) -> str:
    blocks = "\n".join(_block(user, keys[user.name]) for user in users)
    return f"  users: [\n{blocks}\n  ]\n"


def _block(user: User, public_key: str) -> str:
    allowed = f'{{ max: {ANSWERS_MOST}, expires: "{ANSWER_MINUTES}m" }}'
    answers = f"\n        allow_responses: {allowed}" if user.answers else ""
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
