"""The device's side of usage and prices, corrections, digests of exports of closed periods. See store/db/tables.py."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

COUNTERS = ("gpu_us", "switch_us", "cache_byte_s", "kv_byte_s")
RATES = ("gpu_s_pico", "switch_s_pico", "cache_gb_s_pico", "kv_gb_s_pico")


def upgrade() -> None:
    for name in COUNTERS:
        op.add_column("usage", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    for name in RATES:
        op.add_column("prices", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    still_open = {"sqlite_where": sa.text("final = 0"), "postgresql_where": sa.text("NOT final")}
    op.create_index("usage_open", "usage", ["ended_us"], **still_open)
    op.create_table(
        "corrections",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("period", sa.Text, nullable=False),
        sa.Column("corrects", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("currency", sa.Text, nullable=False),
        sa.Column("amount_minor", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
    )
    op.create_index("corrections_by_period", "corrections", ["period", "tenant_id"])
    op.create_table(
        "exports",
        sa.Column("period", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("format", sa.Text, primary_key=True),
        sa.Column("detail", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("exports")
    op.drop_table("corrections")
    op.drop_index("usage_open", "usage")
    for name in RATES:
        op.drop_column("prices", name)
    for name in COUNTERS:
        op.drop_column("usage", name)
