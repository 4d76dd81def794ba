"""Add to every tenant's key the highest priority that requests of the key may ask for."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("keys", sa.Column("priority", sa.Text, nullable=False, server_default="normal"))


def downgrade() -> None:
    op.drop_column("keys", "priority")
