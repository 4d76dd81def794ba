"""Add a table of operators' keys, and to every key the time of the last use."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

ALL = "(SELECT current_setting('staccato.tenant', true)) = '*'"  # no tenant's transaction sees a row


def upgrade() -> None:
    op.add_column("keys", sa.Column("last_used_us", sa.BigInteger))
    op.create_table(
        "operator_keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("mac", sa.Text, nullable=False, unique=True),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
        sa.Column("revoked_us", sa.BigInteger),
        sa.Column("last_used_us", sa.BigInteger),
    )
    if op.get_bind().dialect.name == "postgresql":  # the tenants' role is granted nothing on the table besides
        op.execute("ALTER TABLE operator_keys ENABLE ROW LEVEL SECURITY")
        op.execute("ALTER TABLE operator_keys FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY operator ON operator_keys USING ({ALL}) WITH CHECK ({ALL})")


def downgrade() -> None:
    op.drop_table("operator_keys")
    op.drop_column("keys", "last_used_us")
