"""Every table of the database. Times are UNIX microseconds, money is integer pico-units (1e-12 of the currency).

Rows that money hangs on are never deleted: tenants, models and deployments are marked with `deleted_us` and their names
become free again. `migrations/` brings a database to this shape; a test holds the two against each other.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, MetaData, Table, Text, text

metadata = MetaData()


def _unique(name: str, *columns: Column[str], when: str) -> Index:
    """A unique index over the rows for which `when` holds."""
    return Index(name, *columns, unique=True, sqlite_where=text(when), postgresql_where=text(when))


tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("weight", Double, nullable=False, server_default="1"),  # how much its patience counts under overload
    Column("limits", Text),  # JSON of tenants.Limits; null: none
    Column("created_us", BigInteger, nullable=False),
    Column("deleted_us", BigInteger),
)
_unique("tenants_name", tenants.c.name, when="deleted_us IS NULL")

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),  # what a person recognises the key by
    Column("mac", Text, nullable=False, unique=True),  # HMAC-SHA256 under the pepper, hex: the key is kept nowhere
    Column("scopes", Text, nullable=False),  # JSON list
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    Column("revoked_us", BigInteger),
)

artefacts = Table(
    "artefacts",
    metadata,
    Column("digest", Text, primary_key=True),  # sha256 over names, sizes and contents of the files
    Column("architecture", Text, nullable=False),
    Column("dtype", Text, nullable=False),  # of the files
    Column("weight_bytes", BigInteger, nullable=False),  # in the files
    Column("kv_bytes_per_token", BigInteger, nullable=False),  # at two bytes an element
    Column("context_tokens", BigInteger, nullable=False),
    Column("files", Text, nullable=False),  # JSON list of {name, size, sha256}
    Column("created_us", BigInteger, nullable=False),
)

models = Table(
    "models",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id")),  # null: the operator's, visible to all
    Column("name", Text, nullable=False),
    Column("source", Text, nullable=False),  # as it was given
    Column("path", Text, nullable=False),  # the folder it means, symlinks resolved; empty until it is fetched
    Column("state", Text, nullable=False),  # importing | ready | refused | cancelled
    Column("reason", Text, nullable=False),  # why it was refused
    Column("digest", Text, ForeignKey("artefacts.digest")),
    Column("created_us", BigInteger, nullable=False),
    Column("deleted_us", BigInteger),
    Column("revision", Text),  # the commit that was fetched, where the source has such a thing
    Column("expected", Text),  # the digest that it must have
    Column("progress", Text),  # JSON of models.Progress, while it is fetched
    Column("imported_bytes", BigInteger),  # that it takes, or will; null: a folder of somebody else's
)
_unique("models_shared_name", models.c.name, when="deleted_us IS NULL AND tenant_id IS NULL")
_unique("models_tenant_name", models.c.tenant_id, models.c.name, when="deleted_us IS NULL AND tenant_id IS NOT NULL")

deployments = Table(
    "deployments",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("desired_state", Text, nullable=False),  # awake | asleep: the last word of an operator
    Column("active_revision", Integer, nullable=False),  # has the traffic
    Column("target_revision", Integer),  # gets the traffic once a runtime could load it
    Column("version", Integer, nullable=False),  # counts the changes that people made: the ETag
    Column("canary", Text),  # JSON of deployments.Canary: the share of the traffic that the target has meanwhile
    Column("created_us", BigInteger, nullable=False),
    Column("deleted_us", BigInteger),
)
_unique("deployments_name", deployments.c.tenant_id, deployments.c.name, when="deleted_us IS NULL")

revisions = Table(
    "revisions",
    metadata,
    Column("deployment_id", Text, ForeignKey("deployments.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("model_id", Text, ForeignKey("models.id"), nullable=False, index=True),
    Column("spec", Text, nullable=False),  # JSON of deployments.Spec, complete
    Column("created_us", BigInteger, nullable=False),
    Column("activated_us", BigInteger),  # when it first had the traffic
)

prices = Table(
    "prices",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id")),  # null: for every tenant
    Column("model_id", Text, ForeignKey("models.id")),  # null: for every model
    Column("currency", Text, nullable=False),
    Column("prompt_pico", BigInteger, nullable=False),  # a token
    Column("cached_pico", BigInteger, nullable=False),
    Column("output_pico", BigInteger, nullable=False),
    Column("valid_from_us", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("gpu_s_pico", BigInteger, nullable=False, server_default="0"),  # a second of a device
    Column("switch_s_pico", BigInteger, nullable=False, server_default="0"),
    Column("cache_gb_s_pico", BigInteger, nullable=False, server_default="0"),  # 10^9 bytes for a second
    Column("kv_gb_s_pico", BigInteger, nullable=False, server_default="0"),
)

# No foreign keys: a token that was delivered is booked, whatever became of its tenant.
usage = Table(
    "usage",
    metadata,
    Column("request", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("final", Boolean, nullable=False),
    Column("period", Text, nullable=False),  # YYYY-MM of the bill it stands on
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("deployment_id", Text, nullable=False),
    Column("deployment", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("engine_key", Text, nullable=False),
    Column("model_id", Text),
    Column("prompt_tokens", BigInteger, nullable=False),  # to be charged: 0 for a second attempt
    Column("cached_tokens", BigInteger, nullable=False),  # among them
    Column("output_tokens", BigInteger, nullable=False),
    Column("price_id", Text),  # null: nobody had set a price when it started
    Column("started_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger, nullable=False),
    Column("finish", Text, nullable=False),
    Column("gpu_us", BigInteger, nullable=False, server_default="0"),  # of device steps
    Column("switch_us", BigInteger, nullable=False, server_default="0"),  # of its model's way in
    Column("cache_byte_s", BigInteger, nullable=False, server_default="0"),  # of the host cache
    Column("kv_byte_s", BigInteger, nullable=False, server_default="0"),  # of the device's KV cache
)
Index("usage_by_tenant", usage.c.tenant_id, usage.c.started_us)
Index("usage_by_period", usage.c.period, usage.c.tenant_id)
# Few rows are open at a time: who looks for those that were forgotten reads no others.
Index("usage_open", usage.c.ended_us, sqlite_where=text("final = 0"), postgresql_where=text("NOT final"))

# Credits and debits by the operator's hand. They follow each other and never change, like everything on the bill.
corrections = Table(
    "corrections",
    metadata,
    Column("id", Text, primary_key=True),
    Column("period", Text, nullable=False),  # YYYY-MM of the bill it stands on
    Column("corrects", Text, nullable=False),  # YYYY-MM of the bill it is about
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("currency", Text, nullable=False),
    Column("amount_minor", BigInteger, nullable=False),  # minor units; negative: a credit
    Column("reason", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)
Index("corrections_by_period", corrections.c.period, corrections.c.tenant_id)

# What the first export of a closed period was: every later one must be the same.
exports = Table(
    "exports",
    metadata,
    Column("period", Text, primary_key=True),
    Column("tenant_id", Text, primary_key=True),  # empty: of all tenants
    Column("format", Text, primary_key=True),
    Column("detail", Text, primary_key=True),  # lines | rows
    Column("version", Text, primary_key=True),  # of the code that wrote it: another one may write other bytes
    Column("sha256", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)

# Never changed and never deleted: triggers refuse it. What the hashes mean stands in store/audit.py.
audit = Table(
    "audit",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),  # 1, 2, 3, ... without a gap
    Column("hash", Text, nullable=False),
    Column("tenant_seq", BigInteger),  # the same among the rows of its tenant
    Column("tenant_hash", Text),
    Column("id", Text, nullable=False, unique=True),
    Column("at_us", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),  # deployment.created, key.revoked, ...
    Column("tenant_id", Text),
    Column("subject_id", Text, nullable=False),
    Column("by", Text, nullable=False),  # key id, "admin" or "platform"
    Column("request_id", Text),
    Column("old", Text),  # JSON of what it was, as far as it is no secret
    Column("new", Text),
)
_unique("audit_by_tenant", audit.c.tenant_id, audit.c.tenant_seq, when="tenant_id IS NOT NULL")

# One row: where the chain ends. Whoever adds to it holds this row until the end of the transaction.
audit_head = Table(
    "audit_head",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("hash", Text, nullable=False),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("scope", Text, primary_key=True),  # caller and route
    Column("key", Text, primary_key=True),
    Column("fingerprint", Text, nullable=False),  # of the request's body
    Column("status", Integer, nullable=False),
    Column("body", Text, nullable=False),  # the answer, without secrets
    Column("created_us", BigInteger, nullable=False, index=True),
)
