"""Add to tenants, models and deployments the declared object that made the row."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

TABLES = ("tenants", "models", "deployments")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("managed_by", sa.Text))


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "managed_by")
