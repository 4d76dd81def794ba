"""Add the tokens by which runtimes join the bus, and the runtimes that joined."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

ALL = "(SELECT current_setting('staccato.tenant', true)) = '*'"  # no tenant's transaction sees a row
LIVING = sa.text("revoked_us IS NULL")


def upgrade() -> None:
    op.create_table(
        "join_tokens",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("mac", sa.Text, nullable=False, unique=True),
        sa.Column("runtime", sa.Text),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger, nullable=False),
        sa.Column("used_us", sa.BigInteger),
        sa.Column("used_by", sa.Text),
        sa.Column("revoked_us", sa.BigInteger),
    )
    op.create_table(
        "joined_runtimes",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("public_key", sa.Text, nullable=False),
        sa.Column("token_id", sa.Text, sa.ForeignKey("join_tokens.id"), nullable=False),
        sa.Column("joined_us", sa.BigInteger, nullable=False),
        sa.Column("revoked_us", sa.BigInteger),
    )
    op.create_index(
        "joined_runtimes_public_key",
        "joined_runtimes",
        ["public_key"],
        unique=True,
        sqlite_where=LIVING,
        postgresql_where=LIVING,
    )
    if op.get_bind().dialect.name == "postgresql":  # the tenants' role is granted nothing on the tables besides
        for table in ("join_tokens", "joined_runtimes"):
            op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
            op.execute(f"CREATE POLICY operator ON {table} USING ({ALL}) WITH CHECK ({ALL})")


def downgrade() -> None:
    op.drop_table("joined_runtimes")
    op.drop_table("join_tokens")
