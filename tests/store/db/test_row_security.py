"""PostgreSQL's policies: in a tenant's transaction, a query without a tenant sees and changes only the tenant's
rows.
"""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, Table, delete, insert, select, text, update
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db.database import Database, NotMigrated
from store.db.tables import metadata
from tests.databases import Postgres

pytestmark = pytest.mark.postgres

OF_NOBODY = {"audit_head"}  # a single row about the whole log
OF_OPERATORS = {"operator_keys", "join_tokens", "joined_runtimes"}  # the tenants' role may not even look
OWNED = [table for table in metadata.sorted_tables if table.name not in OF_NOBODY | OF_OPERATORS]
SHARED = {"models", "prices"}  # rows without a tenant are visible to every tenant
# The role may only do what tenants' keys do somewhere: otherwise the server refuses before a look at rows.
MAY = {
    "tenants": {update},
    "keys": {update, insert},
    "models": {update, insert},
    "deployments": {update, insert},
    "revisions": {update, insert},
    "audit": {insert},
    "idempotency": {update, insert, delete},
}
IDS = {"artefacts": "digest"}


@pytest.fixture
async def database(postgres_url: str) -> object:
    async with Database.open(postgres_url) as database:
        async with database.write() as connection:
            for tenant in ("acme", "globex"):
                await _fill(connection, tenant)
            for name in sorted(SHARED):
                table = metadata.tables[name]
                row = _row(table, "nobody") | {"tenant_id": None}
                row |= {"digest": None} if name == "models" else {"model_id": None}
                await connection.execute(insert(table).values(row))
        yield database


async def _fill(connection: AsyncConnection, tenant: str) -> None:
    for table in OWNED:
        await connection.execute(insert(table).values(_row(table, tenant)))


def _row(table: Table, tenant: str, again: str = "") -> dict[str, object]:
    """A row with a value in each column and with foreign keys met. `again` makes a second row of the same tenant."""
    return {column.name: _value(table, column, tenant, again) for column in table.columns}


def _value(table: Table, column: Column[object], tenant: str, again: str) -> object:
    if column.foreign_keys:
        target = next(iter(column.foreign_keys)).column.table.name
        return tenant if target == "tenants" else f"{target} of {tenant}"
    if column.name == "tenant_id" or (table.name == "tenants" and column.name == "id"):
        return tenant + (again if table.name == "tenants" else "")
    if table.name == "idempotency" and column.name == "scope":
        return f"{tenant} POST /api/v1/keys{again}"
    if isinstance(column.type, BigInteger | Integer):
        free = column.primary_key or column.name.endswith("seq")
        return (len(tenant) + 10 * len(again)) if free else None if column.name == "deleted_us" else 1
    if isinstance(column.type, Boolean):
        return True
    if isinstance(column.type, Double):
        return 1.0
    return f"{table.name} of {tenant}{again}"


def _owner(table: Table, row: dict[str, object]) -> str:
    """The owner of a row written by `_row`: every row has the tenant's name somewhere."""
    return next((tenant for tenant in ("acme", "globex") if tenant in str(row)), "nobody")


async def test_every_table_has_a_policy_that_holds_for_its_owner_too(database: Database) -> None:
    query = text("SELECT relname FROM pg_class WHERE relrowsecurity AND relforcerowsecurity")
    async with database.read() as connection:
        guarded = set((await connection.execute(query)).scalars())
    assert guarded == {table.name for table in OWNED} | OF_OPERATORS, (
        "a new table needs a policy, or a line in OF_NOBODY"
    )


async def test_a_tenants_transaction_may_not_look_at_operators_keys(database: Database) -> None:
    operator_keys = metadata.tables["operator_keys"]
    async with database.write() as connection:
        await connection.execute(insert(operator_keys).values(_row(operator_keys, "acme")))
    with pytest.raises(ProgrammingError, match="permission denied"):
        async with database.of("acme").read() as connection:
            await connection.execute(select(operator_keys))


@pytest.mark.parametrize("table", OWNED, ids=str)
async def test_a_select_without_where_sees_the_tenants_rows_alone(database: Database, table: Table) -> None:
    async with database.of("acme").read() as connection:
        seen = [_owner(table, dict(row)) for row in (await connection.execute(select(table))).mappings()]
    assert sorted(seen) == ["acme", "nobody"] if table.name in SHARED else seen == ["acme"]
    async with database.read() as connection:
        every = (await connection.execute(select(table))).all()
    assert len(every) == 2 + (table.name in SHARED), "the platform sees all"


@pytest.mark.parametrize("table", OWNED, ids=str)
@pytest.mark.parametrize("verb", [update, delete], ids=["update", "delete"])
async def test_a_change_without_where_changes_the_tenants_rows_alone(
    database: Database, table: Table, verb: type
) -> None:
    column = next(column for column in table.columns if not column.primary_key and not column.foreign_keys)
    before = await _all(database, table)
    statement = delete(table) if verb is delete else update(table).values({column: column})
    if verb not in MAY.get(table.name, ()):
        with pytest.raises(ProgrammingError, match="permission denied"):
            await _change(database, statement)
    elif table.name in SHARED:  # rows that every tenant sees, the role may not write
        with pytest.raises(ProgrammingError, match="violates row-level security"):
            await _change(database, statement)
    else:
        assert await _change(database, statement) == 1
        before = [row for row in before if verb is update or _owner(table, row) != "acme"]
    assert await _all(database, table) == before


async def _change(database: Database, statement: object) -> int:
    async with database.of("acme").write() as connection:
        changed: int = (await connection.execute(statement)).rowcount  # type: ignore[call-overload]
        return changed


async def _all(database: Database, table: Table) -> list[dict[str, object]]:
    async with database.read() as connection:
        return sorted(map(dict, (await connection.execute(select(table))).mappings()), key=str)


@pytest.mark.parametrize("table", OWNED, ids=str)
async def test_a_row_of_another_tenant_cannot_be_written(database: Database, table: Table) -> None:
    refused = "violates row-level security" if insert in MAY.get(table.name, ()) else "permission denied"
    row = _row(table, "globex", " again")
    if table.name == "revisions":
        row["number"] = 99
    with pytest.raises(ProgrammingError, match=refused):
        await _change(database, insert(table).values(row))


async def test_a_row_cannot_be_given_away_nor_made_visible_to_all(database: Database) -> None:
    models = metadata.tables["models"]
    for owner in ("globex", None):
        with pytest.raises(ProgrammingError, match="violates row-level security"):
            await _change(database, update(models).where(models.c.tenant_id == "acme").values(tenant_id=owner))


async def test_a_tenant_that_is_not_there_sees_what_all_see(database: Database) -> None:
    for stranger in ("", "nobody", "acme' OR '1'='1"):
        async with database.of(stranger).read() as connection:
            counts = {t.name: len((await connection.execute(select(t))).all()) for t in OWNED}
        assert {name for name, count in counts.items() if count} == SHARED, stranger


async def test_a_connection_forgets_whose_transaction_it_had(database: Database) -> None:
    """The transaction was committed, rolled back, failed or cancelled; the pool has ten connections, and every
    connection had a tenant."""
    tenants = metadata.tables["tenants"]

    async def seen(who: str | None) -> list[str]:
        async with database.of(who).read() as connection:
            return sorted((await connection.execute(select(tenants.c.id))).scalars())

    async def fails(who: str) -> None:
        async with database.of(who).write() as connection:
            await connection.execute(text("SELECT 1/0"))

    async def hangs(who: str) -> None:
        async with asyncio.timeout(0.1), database.of(who).read() as connection:
            await connection.execute(text("SELECT pg_sleep(5)"))

    everyone = ["acme", "globex"]
    for _ in range(3):
        ended = await asyncio.gather(
            *(work(who) for who in everyone for work in (seen, fails, hangs)), return_exceptions=True
        )
        assert [ended[0], ended[3]] == [["acme"], ["globex"]]
        assert all(isinstance(end, Exception) for end in (*ended[1:3], *ended[4:]))
        asked = [None, "acme", "globex"] * 10
        expected = [everyone if who is None else [who] for who in asked]
        assert await asyncio.gather(*map(seen, asked)) == expected
    async with database.read() as connection:
        said = text("SELECT current_user, current_setting('staccato.tenant')")
        assert tuple((await connection.execute(said)).one()) == ("staccato", "*")


async def test_what_is_one_moment_for_the_platform_is_one_for_a_tenant(database: Database) -> None:
    keys = metadata.tables["keys"]
    async with database.of("acme").snapshot() as connection:
        assert len((await connection.execute(select(keys))).all()) == 1
        async with database.write() as other:
            await other.execute(insert(keys).values(_row(keys, "acme", " again")))
        assert len((await connection.execute(select(keys))).all()) == 1


# ── roles ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _owned_by(server: Postgres, user: str, rights: str) -> str:
    """The URL of an empty database; the owner is the given user, who is no superuser."""
    url = await server.create(f"of_{user}", "template0")
    connection = await asyncpg.connect(url)
    await connection.execute(f"CREATE ROLE {user} LOGIN {rights}; ALTER SCHEMA public OWNER TO {user}")
    await connection.close()
    return url.replace("staccato@", f"{user}@")


async def test_an_owner_who_says_no_tenant_sees_nothing(postgres_server: Postgres) -> None:
    url = await _owned_by(postgres_server, "plain", "CREATEROLE")
    database = Database(url)
    await database.migrate()
    async with database.write() as connection:
        await _fill(connection, "acme")
    await database.close()
    connection = await asyncpg.connect(url)  # without the tenant that `Database` sets
    assert [await connection.fetch(f"SELECT * FROM {table.name}") for table in OWNED] == [[]] * len(OWNED)
    await connection.execute("SET staccato.tenant = '*'")
    assert [len(await connection.fetch(f"SELECT * FROM {table.name}")) for table in OWNED] == [1] * len(OWNED)
    await connection.close()


async def test_who_may_not_make_the_role_is_told_what_to_ask_for(postgres_server: Postgres, database: object) -> None:
    url = await _owned_by(postgres_server, "humble", "NOCREATEROLE")
    humble = Database(url)
    with pytest.raises(NotMigrated, match='have an administrator run .*; GRANT staccato_tenant TO "humble"'):
        await humble.migrate()
    administrator = await asyncpg.connect(postgres_server.url("postgres"))
    await administrator.execute("GRANT staccato_tenant TO humble")
    await administrator.close()
    await humble.migrate()
    await humble.close()
