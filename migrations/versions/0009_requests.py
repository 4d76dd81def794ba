"""Add a table of ended requests with the parts of their time, kept for some days, for `staccato show REQUEST`."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

ROLE = "staccato_tenant"
SAID = "(SELECT current_setting('staccato.tenant', true))"
SEEN = f"{SAID} = '*' OR tenant_id = {SAID}"


def upgrade() -> None:
    op.create_table(
        "requests",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("deployment_id", sa.Text, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("started_us", sa.BigInteger, nullable=False),
        sa.Column("finish", sa.Text, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("cold", sa.Text, nullable=False),
        sa.Column("total_us", sa.BigInteger, nullable=False),
        sa.Column("first_token_us", sa.BigInteger),
        sa.Column("parts", sa.Text, nullable=False),
    )
    op.create_index("requests_by_tenant", "requests", ["tenant_id", "started_us"])
    op.create_index("requests_by_start", "requests", ["started_us"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"GRANT SELECT ON requests TO {ROLE}")
        op.execute("ALTER TABLE requests ENABLE ROW LEVEL SECURITY")
        op.execute("ALTER TABLE requests FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY tenant ON requests USING ({SEEN}) WITH CHECK ({SEEN})")


def downgrade() -> None:
    op.drop_table("requests")
