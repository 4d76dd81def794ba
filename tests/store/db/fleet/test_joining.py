"""Join tokens and joined runtimes in the database: a token is used once, whoever comes at the same time."""

from __future__ import annotations

import asyncio

import pytest

from store.contract.joining.proofs import AlreadyBound, JoinProof, JoinsNow, NotAdmitted
from store.db import audit
from store.db.database import Database, now_us
from store.db.fleet import joining
from store.db.tenants import key_mac

PEPPER = b"pepper"
HOUR_US = 3600 * 1_000_000


async def made(database: Database, runtime: str | None = None) -> str:
    """Make a token, and return the HMAC of the token."""
    async with database.write() as connection:
        now = now_us()
        _, secret = await joining.create_token(connection, PEPPER, runtime, now + HOUR_US, now)
    return key_mac(PEPPER, secret)


async def revoke(database: Database, id: str) -> None:
    async with database.write() as connection:
        found = await joining.runtime(connection, id)
        assert found is not None
        await joining.revoke_runtime(connection, found, now_us())


async def test_a_runtime_is_bound_once_and_known_from_then_on(database: Database) -> None:
    mac, proof = await made(database), JoinProof("r1", "U1", True)
    assert isinstance(await joining.admit(database, proof, mac), JoinsNow)
    assert await joining.admit(database, proof, mac) == AlreadyBound()
    assert await joining.admit(database, JoinProof("r1", "U1", False), None) == AlreadyBound()
    async with database.read() as connection:
        (token,) = await joining.tokens(connection, "", 10)
        (entry,) = await audit.listed(connection, None, 0, 10)
    assert token.used_by == "r1" and token.used_us is not None
    assert (entry.kind, entry.subject_id, entry.by) == ("runtime.joined", "r1", "platform")


async def test_of_runtimes_that_use_a_token_at_the_same_time_a_single_runtime_joins(database: Database) -> None:
    mac = await made(database)
    came = [JoinProof(f"r{number}", f"U{number}", True) for number in range(6)]
    said = await asyncio.gather(*(joining.admit(database, proof, mac) for proof in came))
    assert sum(isinstance(each, JoinsNow) for each in said) == 1
    assert sum(isinstance(each, NotAdmitted) for each in said) == 5
    async with database.read() as connection:
        assert len(await joining.runtimes(connection)) == 1


@pytest.mark.parametrize("same", ("id", "key"))
async def test_of_runtimes_that_take_an_id_or_a_key_at_the_same_time_a_single_runtime_joins(
    database: Database, same: str
) -> None:
    macs = [await made(database) for _ in range(4)]
    came = [
        JoinProof("r" if same == "id" else f"r{number}", "U" if same == "key" else f"U{number}", True)
        for number in range(4)
    ]
    pairs = zip(came, macs, strict=True)
    said = await asyncio.gather(*(joining.admit(database, proof, mac) for proof, mac in pairs))
    assert sum(isinstance(each, JoinsNow) for each in said) == 1
    async with database.read() as connection:
        tokens = await joining.tokens(connection, "", 10)
        assert len(await joining.runtimes(connection)) == 1
    assert sum(token.used_us is not None for token in tokens) == 1, "refused runtimes use no token"


async def test_a_revoked_runtime_needs_a_new_token_and_may_have_the_old_key(database: Database) -> None:
    proof = JoinProof("r1", "U1", True)
    old = await made(database)
    await joining.admit(database, proof, old)
    async with database.read() as connection:
        before = await joining.revocations(connection)
    await revoke(database, "r1")
    async with database.read() as connection:
        assert await joining.revocations(connection) != before
    assert await joining.admit(database, JoinProof("r1", "U1", False), None) == NotAdmitted("the runtime was revoked")
    assert isinstance(await joining.admit(database, proof, old), NotAdmitted)
    assert isinstance(await joining.admit(database, proof, await made(database)), JoinsNow)
    assert await joining.admit(database, JoinProof("r1", "U1", False), None) == AlreadyBound()


async def test_a_revoked_key_may_join_under_another_id(database: Database) -> None:
    await joining.admit(database, JoinProof("r1", "U1", True), await made(database))
    await revoke(database, "r1")
    assert isinstance(await joining.admit(database, JoinProof("r2", "U1", True), await made(database)), JoinsNow)
    taken = await joining.admit(database, JoinProof("r1", "U1", True), await made(database))
    assert taken == NotAdmitted("the key is bound to the runtime r2")


async def test_a_revoked_token_is_refused(database: Database) -> None:
    mac = await made(database)
    async with database.write() as connection:
        (token,) = await joining.tokens(connection, "", 10)
        await joining.revoke_token(connection, token, now_us())
    refused = await joining.admit(database, JoinProof("r1", "U1", True), mac)
    assert refused == NotAdmitted("the join token was revoked")
