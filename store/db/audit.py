"""The audit log: changes of tenants, keys, models, deployments and bills, and the authors of the changes.

An entry is written in the transaction of the change. The log can only grow (triggers refuse updates and deletions), and
is a chain: the hash of a row covers the row's content and the hash of the row before. Rows of a tenant form a second
chain, so that a tenant can verify the tenant's own rows without seeing rows of other tenants. The row of `audit_head`
says where the whole chain ends. The chain grows under a lock on the row.

    digest = sha256(JSON of the fields in FIELDS, as a list)
    hash   = sha256("{number}:{hash before}:{digest}"), hex; before the first row: GENESIS
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from sqlalchemy import Column, ColumnElement, Connection, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db.database import AnySelect, new_id, now_us, pages
from store.db.tables import audit, audit_head

GENESIS = "0" * 64
FIELDS = ("id", "at_us", "kind", "tenant_id", "subject_id", "by", "request_id", "old", "new")

Values = Mapping[str, object]  # JSON of changed values, never a secret


class Link(NamedTuple):
    """State of a chain after a row: the row's number and hash."""

    seq: int = 0
    hash: str = GENESIS

    def then(self, digest: str) -> Link:
        seq = self.seq + 1
        return Link(seq, hashlib.sha256(f"{seq}:{self.hash}:{digest}".encode()).hexdigest())


@dataclass(frozen=True)
class Entry:
    """Row of the audit log. `old` and `new` are the JSON texts that were hashed."""

    seq: int
    hash: str
    tenant_seq: int | None
    tenant_hash: str | None
    id: str
    at_us: int
    kind: str  # deployment.created, key.revoked, ...
    tenant_id: str | None
    subject_id: str
    by: str  # a tenant's key's id, operator:ID:NAME, "admin" (the root key) or "platform"
    request_id: str | None
    old: str | None
    new: str | None

    @property
    def link(self) -> Link:
        return Link(self.seq, self.hash)

    @property
    def tenant_link(self) -> Link:
        return Link(self.tenant_seq or 0, self.tenant_hash or GENESIS)


def digest(row: Mapping[str, object]) -> str:
    """Return the digest of a row's content, without the row's place in a chain."""
    return hashlib.sha256(json.dumps([row[name] for name in FIELDS], separators=(",", ":")).encode()).hexdigest()


def canonical(values: object) -> str | None:
    """Return values as canonical JSON: equal values give equal texts."""
    return None if values is None else json.dumps(msgspec.to_builtins(values), sort_keys=True, separators=(",", ":"))


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def record(
    connection: AsyncConnection,
    kind: str,
    subject_id: str,
    tenant_id: str | None,
    by: str,
    request_id: str | None = None,
    old: object = None,
    new: object = None,
) -> None:
    """Add an entry to the audit log. `old` and `new`, written as JSON, are the changed values, and never a secret.

    Call `record` last in a transaction: until the transaction ends, no other transaction can add an entry. A waiting
    transaction with locks that the rest of this transaction needs would make both wait for ever."""
    row = {
        "id": new_id(),
        "at_us": now_us(),
        "kind": kind,
        "tenant_id": tenant_id,
        "subject_id": subject_id,
        "by": by,
        "request_id": request_id,
        "old": canonical(old),
        "new": canonical(new),
    }
    await connection.run_sync(append, row)


def append(connection: Connection, row: dict[str, object]) -> None:
    """Append a row of FIELDS to the whole chain and to the chain of the row's tenant."""
    end = Link(*connection.execute(select(audit_head.c.seq, audit_head.c.hash).with_for_update()).one())
    link = end.then(said := digest(row))
    theirs: dict[str, object] = {}
    if row["tenant_id"] is not None:
        own = connection.execute(_tenant_end(str(row["tenant_id"]))).one_or_none()
        tenant_link = (Link(*own) if own else Link()).then(said)
        theirs = {"tenant_seq": tenant_link.seq, "tenant_hash": tenant_link.hash}
    connection.execute(audit.insert().values(**row, **link._asdict(), **theirs))
    connection.execute(update(audit_head).values(**link._asdict()))


def _tenant_end(tenant_id: str) -> AnySelect:
    columns = (audit.c.tenant_seq, audit.c.tenant_hash)
    return select(*columns).where(audit.c.tenant_id == tenant_id).order_by(audit.c.tenant_seq.desc()).limit(1)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_COLUMNS = tuple(audit.c[name] for name in Entry.__dataclass_fields__)


async def listed(
    connection: AsyncConnection, tenant_id: str | None, after: str, most: int, newest_first: bool = False
) -> list[Entry]:
    """Return at most `most` rows after the row with the id `after`, of a tenant or (None) of the whole log.

    The order is the chain's order, or the reverse order if `newest_first`."""
    place = _place(tenant_id)
    query = select(*_COLUMNS).where(*_of(tenant_id)).order_by(place.desc() if newest_first else place).limit(most)
    if after:
        passed = select(place).where(audit.c.id == after, *_of(tenant_id)).scalar_subquery()
        query = query.where(place < passed if newest_first else place > passed)
    return [Entry(*row) for row in await connection.execute(query)]


async def last(connection: AsyncConnection, tenant_id: str | None) -> str:
    """Return the id of the newest row; empty: no rows."""
    query = select(audit.c.id).where(*_of(tenant_id)).order_by(_place(tenant_id).desc()).limit(1)
    return await connection.scalar(query) or ""


async def known(connection: AsyncConnection, tenant_id: str | None, id: str) -> bool:
    return await connection.scalar(select(audit.c.id).where(audit.c.id == id, *_of(tenant_id))) is not None


async def head(connection: AsyncConnection, tenant_id: str | None) -> Link:
    """Return where the chain ends. A copy of the head proves later that no row up to the head was rewritten."""
    query = _tenant_end(tenant_id) if tenant_id else select(audit_head.c.seq, audit_head.c.hash)
    row = (await connection.execute(query)).one_or_none()
    return Link(*row) if row else Link()


def _place(tenant_id: str | None) -> Column[int]:
    return audit.c.tenant_seq if tenant_id else audit.c.seq


def _of(tenant_id: str | None) -> list[ColumnElement[bool]]:
    return [audit.c.tenant_id == tenant_id] if tenant_id else []


# ── verifying ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a chain: `flaw` is the first flaw, and `row` the flaw's place."""

    rows: int
    head: Link
    row: int | None = None
    flaw: str | None = None


class Chain:
    """Check of rows in their order, up to the first wrong row."""

    def __init__(self) -> None:
        self.end = Link()

    def flaw(self, link: Link, digest: str) -> str | None:
        """Return the flaw of the next row; None: the row is right, and becomes the end."""
        expected = self.end.then(digest)
        if link.seq > expected.seq:
            return f"row {expected.seq} is missing"
        if link != expected:
            return f"row {link.seq} is not what was written there"
        self.end = link
        return None


async def verify(connection: AsyncConnection, tenant_id: str | None, noted: Link | None = None) -> Verdict:
    """Verify every row of a tenant or (None) of the whole log, and that the chain still passes through a `noted` head.

    `connection` must be a snapshot: a row written meanwhile would look like a wrong end."""
    end, chain, theirs, rows = await head(connection, tenant_id), Chain(), dict[str, Chain](), 0
    query = select(*_COLUMNS).where(*_of(tenant_id)).order_by(_place(tenant_id))
    async for page in pages(connection, query):
        for entry in (Entry(*row) for row in page):
            place, rows = chain.end.seq + 1, rows + 1
            if flaw := _flaw(entry, chain, theirs, tenant_id, noted):
                return Verdict(rows, end, place, flaw)
    if chain.end != end:
        return Verdict(rows, end, chain.end.seq + 1, f"{end.seq} rows were written, and {chain.end.seq} are there")
    if noted and noted.seq > end.seq:
        return Verdict(rows, end, end.seq + 1, f"row {noted.seq} was noted, and {end.seq} are there")
    return Verdict(rows, end)


def _flaw(
    entry: Entry, chain: Chain, theirs: dict[str, Chain], tenant_id: str | None, noted: Link | None
) -> str | None:
    said = digest(vars(entry))
    link = entry.tenant_link if tenant_id else entry.link
    found = chain.flaw(link, said)
    if found is None and noted and noted.seq == link.seq and noted != link:
        found = f"row {link.seq} is another one than when it was noted"
    if found or tenant_id:
        return found
    if entry.tenant_id is None:
        nobodys = (entry.tenant_seq, entry.tenant_hash) == (None, None)
        return None if nobodys else f"row {link.seq} is in the chain of a tenant, and of none"
    found = theirs.setdefault(entry.tenant_id, Chain()).flaw(entry.tenant_link, said)
    return f"row {link.seq} is not in its place among those of tenant {entry.tenant_id}" if found else None
