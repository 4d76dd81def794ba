"""PostgreSQL separates tenants: policies on every table with tenants' rows, and a role subject to these policies.

The setting staccato.tenant names the tenant of a transaction. `*` means every tenant. Without the setting, a
transaction sees no rows.
"""

import sqlalchemy as sa
from alembic import op

from store.db.database import NotMigrated

revision = "0006"
down_revision = "0005"

ROLE = "staccato_tenant"
SAID = "(SELECT current_setting('staccato.tenant', true))"  # evaluated once per statement
OWN = f"tenant_id = {SAID}"
SHARED = f"({OWN} OR tenant_id IS NULL)"  # rows without a tenant are the operator's, visible to every tenant

# Table → the role's rights, the rows visible to a tenant, and (if fewer) the rows that a tenant may write.
TABLES = {
    "tenants": ("SELECT, UPDATE", f"id = {SAID}", None),
    "keys": ("SELECT, INSERT, UPDATE", OWN, None),
    "artefacts": ("SELECT", "digest IN (SELECT digest FROM models)", None),
    "models": ("SELECT, INSERT, UPDATE", SHARED, OWN),
    "deployments": ("SELECT, INSERT, UPDATE", OWN, None),
    "revisions": ("SELECT, INSERT, UPDATE", "deployment_id IN (SELECT id FROM deployments)", None),
    "prices": ("SELECT", SHARED, None),
    "usage": ("SELECT", OWN, None),
    "corrections": ("SELECT", OWN, None),
    "exports": ("SELECT", OWN, None),
    "audit": ("SELECT, INSERT", OWN, None),
    "idempotency": ("SELECT, INSERT, UPDATE, DELETE", f"split_part(scope, ' ', 1) = {SAID}", None),
}
OPEN = {"audit_head": "SELECT, UPDATE"}  # a single row, about all tenants


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    _make_role(connection)
    schema = connection.scalar(sa.text("SELECT quote_ident(current_schema())"))
    op.execute(f"GRANT USAGE ON SCHEMA {schema} TO {ROLE}")
    for table, (verbs, seen, written) in TABLES.items():
        op.execute(f"GRANT {verbs} ON {table} TO {ROLE}")
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")  # also for the table's owner
        check = f"{SAID} = '*' OR {written or seen}"
        op.execute(f"CREATE POLICY tenant ON {table} USING ({SAID} = '*' OR {seen}) WITH CHECK ({check})")
        # A deletion evaluates no WITH CHECK.
        if written:
            op.execute(f"CREATE POLICY tenant_delete ON {table} AS RESTRICTIVE FOR DELETE USING ({check})")
    for table, verbs in OPEN.items():
        op.execute(f"GRANT {verbs} ON {table} TO {ROLE}")


def _make_role(connection: sa.Connection) -> None:
    """Make the role, once for all databases of the server. Raises NotMigrated if the user may not."""
    asked = sa.text(
        "SELECT current_user, rolsuper OR rolcreaterole, EXISTS (SELECT FROM pg_roles WHERE rolname = :role)"
        " FROM pg_roles WHERE rolname = current_user"
    )
    user, may, there = connection.execute(asked, {"role": ROLE}).one()
    if there and connection.scalar(sa.text(f"SELECT pg_has_role('{ROLE}', 'MEMBER')")):
        return
    if not may:
        raise NotMigrated(
            f"the database needs a role that {user} may not make: have an administrator run "
            f'CREATE ROLE {ROLE} NOLOGIN; GRANT {ROLE} TO "{user}"; and start again'
        )
    try:
        with connection.begin_nested():
            connection.execute(sa.text(f"CREATE ROLE {ROLE} NOLOGIN"))
    except sa.exc.ProgrammingError:  # made meanwhile, for another database of this server
        pass
    connection.execute(sa.text(f"GRANT {ROLE} TO CURRENT_USER"))


def downgrade() -> None:
    """Remove the policies. The role stays, since other databases of the server may use it."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for table in OPEN:
        op.execute(f"REVOKE ALL ON {table} FROM {ROLE}")
    for table, (_, _, written) in TABLES.items():
        if written:
            op.execute(f"DROP POLICY tenant_delete ON {table}")
        op.execute(f"DROP POLICY tenant ON {table}")
        op.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
        op.execute(f"REVOKE ALL ON {table} FROM {ROLE}")
