"""A tenant's limits; store/db/tenants.py explains the limits."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("limits", sa.Text))


def downgrade() -> None:
    op.drop_column("tenants", "limits")
