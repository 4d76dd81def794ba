"""A tenant's weight; gateway/core/objectives.py explains the weight."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("weight", sa.Double, nullable=False, server_default="1"))


def downgrade() -> None:
    op.drop_column("tenants", "weight")
