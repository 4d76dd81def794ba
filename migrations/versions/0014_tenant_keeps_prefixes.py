"""Whether runtimes may keep prefixes of a tenant's ended requests, whatever the tenant's deployments say."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("keep_prefixes", sa.Boolean, nullable=False, server_default=sa.true()))


def downgrade() -> None:
    op.drop_column("tenants", "keep_prefixes")
