"""Turn the events into an audit log, a chain that can only grow; deployments may have a canary."""

import sqlalchemy as sa
from alembic import op

from store.db import audit

revision = "0005"
down_revision = "0004"

EVENT = ("id", "at_us", "kind", "tenant_id", "subject_id", "by")

# The end of the chain moves forward a row at a time; rows of the log never change.
SQLITE = (
    """CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit
       BEGIN SELECT RAISE(ABORT, 'the audit log never changes'); END""",
    """CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit
       BEGIN SELECT RAISE(ABORT, 'the audit log never changes'); END""",
    """CREATE TRIGGER audit_head_forward BEFORE UPDATE ON audit_head WHEN NEW.seq <> OLD.seq + 1
       BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END""",
    """CREATE TRIGGER audit_head_no_delete BEFORE DELETE ON audit_head
       BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END""",
    """CREATE TRIGGER audit_head_one BEFORE INSERT ON audit_head
       BEGIN SELECT RAISE(ABORT, 'the audit log has one end'); END""",
)
POSTGRESQL = (
    """CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS
       $$ BEGIN RAISE EXCEPTION 'the audit log only grows'; END $$""",
    """CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE ON audit
       FOR EACH ROW EXECUTE FUNCTION audit_refuse()""",
    """CREATE TRIGGER audit_no_truncate BEFORE TRUNCATE ON audit
       FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse()""",
    """CREATE TRIGGER audit_head_forward BEFORE UPDATE ON audit_head
       FOR EACH ROW WHEN (NEW.seq <> OLD.seq + 1) EXECUTE FUNCTION audit_refuse()""",
    """CREATE TRIGGER audit_head_one BEFORE INSERT OR DELETE ON audit_head
       FOR EACH ROW EXECUTE FUNCTION audit_refuse()""",
    """CREATE TRIGGER audit_head_no_truncate BEFORE TRUNCATE ON audit_head
       FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse()""",
)


def upgrade() -> None:
    op.add_column("deployments", sa.Column("canary", sa.Text))
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("tenant_seq", sa.BigInteger),
        sa.Column("tenant_hash", sa.Text),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text),
        sa.Column("subject_id", sa.Text, nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text),
        sa.Column("old", sa.Text),
        sa.Column("new", sa.Text),
    )
    owned = {"sqlite_where": sa.text("tenant_id IS NOT NULL"), "postgresql_where": sa.text("tenant_id IS NOT NULL")}
    op.create_index("audit_by_tenant", "audit", ["tenant_id", "tenant_seq"], unique=True, **owned)
    head = op.create_table(
        "audit_head",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.Text, nullable=False),
    )
    connection = op.get_bind()
    connection.execute(head.insert().values(seq=0, hash=audit.GENESIS))
    for row in connection.execute(sa.text("SELECT * FROM events ORDER BY id")).mappings().all():
        detail = {"detail": row["detail"]} if row["detail"] else None
        moved = {name: row[name] for name in EVENT}
        audit.append(connection, moved | {"request_id": None, "old": None, "new": audit.canonical(detail)})
    op.drop_table("events")
    for statement in SQLITE if connection.dialect.name == "sqlite" else POSTGRESQL:
        op.execute(statement)


def downgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text),
        sa.Column("subject_id", sa.Text, nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )
    names = ", ".join(f'"{name}"' for name in EVENT)
    op.execute(f"INSERT INTO events ({names}, detail) SELECT {names}, COALESCE(new, '') FROM audit")
    op.drop_table("audit_head")
    op.drop_table("audit")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_refuse()")
    op.drop_column("deployments", "canary")
