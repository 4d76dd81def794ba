"""Imported models: the revision found at the source, the progress, and the size."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

COLUMNS = {"revision": sa.Text, "expected": sa.Text, "progress": sa.Text, "imported_bytes": sa.BigInteger}


def upgrade() -> None:
    for name, kind in COLUMNS.items():
        op.add_column("models", sa.Column(name, kind))


def downgrade() -> None:
    for name in reversed(COLUMNS):
        op.drop_column("models", name)
