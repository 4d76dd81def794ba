"""Add to every artefact what its layers keep of a request; null for artefacts inspected before."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("artefacts", sa.Column("kv_layers", sa.Text))


def downgrade() -> None:
    op.drop_column("artefacts", "kv_layers")
