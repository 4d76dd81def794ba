"""Routes for the audit log: the operator sees the whole log, a tenant sees the entries about itself."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from gateway.http.api import OF_TENANT, Call, Operation, Page, Query, Shown, Time, answered, time_text
from gateway.http.errors import invalid
from store.db import audit
from store.db.audit import Entry, Link

HEAD = r"^\d{1,18}:[0-9a-f]{64}$"
ORDER = Query("order", Literal["oldest", "newest"], "Which comes first; the oldest unless it is said.")
NOTED = Query("head", Annotated[str, Meta(pattern=HEAD)], "A `head` of an earlier answer, through which it must pass.")


class ShownEntry(Shown, frozen=True, kw_only=True):
    """Entry of the audit log. `seq` and `hash` are the entry's place in the shown chain.

    store/db/audit.py says how to compute the hash.
    """

    seq: int
    hash: str
    id: str
    at: Time
    at_us: int
    kind: str
    tenant_id: str | None
    subject_id: str
    by: str  # a key's id, admin or platform
    request_id: str | None
    old: Any
    new: Any


class ShownVerdict(Shown, frozen=True, kw_only=True):
    ok: bool
    rows: int  # rows read
    head: str  # end of the chain: note it elsewhere, and verify against it later
    row: int | None  # first wrong row
    flaw: str | None


@Operation(Page[ShownEntry], query=(OF_TENANT, ORDER), paged=True, operator=("audit:read",))
async def listed(call: Call) -> Response:
    """List what was done."""
    tenant_id, order = await call.tenant_id(), call.query("order", "oldest")
    if order not in ("oldest", "newest"):
        raise invalid("?order", f"{order!r} is neither oldest nor newest")
    async with call.database.read() as connection:
        found = await audit.listed(connection, tenant_id, call.after, call.limit + 1, order == "newest")
    return call.page(found, lambda entry: show(entry, tenant_id))


@Operation(ShownVerdict, query=(OF_TENANT, NOTED), operator=("audit:read",))
async def verify(call: Call) -> Response:
    """Find what was changed, removed, put in or moved in the audit log."""
    tenant_id, noted = await call.tenant_id(), _noted(call.query("head"))
    async with call.database.snapshot() as connection:
        verdict = await audit.verify(connection, tenant_id, noted)
    head = f"{verdict.head.seq}:{verdict.head.hash}"
    ok = verdict.flaw is None
    return answered(ShownVerdict(ok=ok, rows=verdict.rows, head=head, row=verdict.row, flaw=verdict.flaw))


def _noted(said: str | None) -> Link | None:
    """Parse the query's `head`. Raises Problem."""
    if said is None:
        return None
    if not re.fullmatch(HEAD, said):
        raise invalid("?head", f"{said!r} is not a row's number, a colon and its hash, as an earlier answer gave it")
    seq, _, hash = said.partition(":")
    return Link(int(seq), hash)


def show(entry: Entry, tenant_id: str | None) -> ShownEntry:
    """Show an entry in the chain of the tenant `tenant_id`; None: in the whole chain."""
    link = entry.tenant_link if tenant_id else entry.link
    return ShownEntry(
        seq=link.seq,
        hash=link.hash,
        id=entry.id,
        at=time_text(entry.at_us),
        at_us=entry.at_us,
        kind=entry.kind,
        tenant_id=entry.tenant_id,
        subject_id=entry.subject_id,
        by=entry.by,
        request_id=entry.request_id,
        old=msgspec.json.decode(entry.old) if entry.old else None,
        new=msgspec.json.decode(entry.new) if entry.new else None,
    )
