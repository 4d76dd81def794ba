"""The first tables. store/db/tables.py explains the columns."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "artefacts",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("architecture", sa.Text, nullable=False),
        sa.Column("dtype", sa.Text, nullable=False),
        sa.Column("weight_bytes", sa.BigInteger, nullable=False),
        sa.Column("kv_bytes_per_token", sa.BigInteger, nullable=False),
        sa.Column("context_tokens", sa.BigInteger, nullable=False),
        sa.Column("files", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text),
        sa.Column("subject_id", sa.Text, nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )
    op.create_table(
        "idempotency",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_idempotency_created_us", "idempotency", ["created_us"])
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("deleted_us", sa.BigInteger),
    )
    _unique("tenants_name", "tenants", ["name"], "deleted_us IS NULL")
    op.create_table(
        "usage",
        sa.Column("request", sa.Text, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("final", sa.Boolean, nullable=False),
        sa.Column("period", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("deployment_id", sa.Text, nullable=False),
        sa.Column("deployment", sa.Text, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("engine_key", sa.Text, nullable=False),
        sa.Column("model_id", sa.Text),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("price_id", sa.Text),
        sa.Column("started_us", sa.BigInteger, nullable=False),
        sa.Column("ended_us", sa.BigInteger, nullable=False),
        sa.Column("finish", sa.Text, nullable=False),
    )
    op.create_index("usage_by_period", "usage", ["period", "tenant_id"])
    op.create_index("usage_by_tenant", "usage", ["tenant_id", "started_us"])
    op.create_table(
        "deployments",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("desired_state", sa.Text, nullable=False),
        sa.Column("active_revision", sa.Integer, nullable=False),
        sa.Column("target_revision", sa.Integer),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("deleted_us", sa.BigInteger),
    )
    _unique("deployments_name", "deployments", ["tenant_id", "name"], "deleted_us IS NULL")
    op.create_table(
        "keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("mac", sa.Text, nullable=False, unique=True),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
        sa.Column("revoked_us", sa.BigInteger),
    )
    op.create_index("ix_keys_tenant_id", "keys", ["tenant_id"])
    op.create_table(
        "models",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id")),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, sa.ForeignKey("artefacts.digest")),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("deleted_us", sa.BigInteger),
    )
    _unique("models_shared_name", "models", ["name"], "deleted_us IS NULL AND tenant_id IS NULL")
    _unique("models_tenant_name", "models", ["tenant_id", "name"], "deleted_us IS NULL AND tenant_id IS NOT NULL")
    op.create_table(
        "prices",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id")),
        sa.Column("model_id", sa.Text, sa.ForeignKey("models.id")),
        sa.Column("currency", sa.Text, nullable=False),
        sa.Column("prompt_pico", sa.BigInteger, nullable=False),
        sa.Column("cached_pico", sa.BigInteger, nullable=False),
        sa.Column("output_pico", sa.BigInteger, nullable=False),
        sa.Column("valid_from_us", sa.BigInteger, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "revisions",
        sa.Column("deployment_id", sa.Text, sa.ForeignKey("deployments.id"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("model_id", sa.Text, sa.ForeignKey("models.id"), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("activated_us", sa.BigInteger),
    )
    op.create_index("ix_revisions_model_id", "revisions", ["model_id"])


def _unique(name: str, table: str, columns: list[str], when: str) -> None:
    """Make a unique index over the rows for which `when` holds."""
    op.create_index(name, table, columns, unique=True, sqlite_where=sa.text(when), postgresql_where=sa.text(when))


def downgrade() -> None:
    op.drop_table("revisions")
    op.drop_table("prices")
    op.drop_table("models")
    op.drop_table("keys")
    op.drop_table("deployments")
    op.drop_table("usage")
    op.drop_table("tenants")
    op.drop_table("idempotency")
    op.drop_table("events")
    op.drop_table("artefacts")
