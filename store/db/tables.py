"""Tables of the database. Times are UNIX microseconds, money is integer pico-units (1e-12 of the currency).

Rows that bills depend on are never deleted: tenants, models and deployments are marked with `deleted_us` and their
names become free again. `migrations/` brings a database to this shape; a test compares the two shapes.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    text,
    true,
)

metadata = MetaData()


def _unique(name: str, *columns: Column[str], when: str) -> Index:
    """Make a unique index over the rows for which the condition `when` holds."""
    return Index(name, *columns, unique=True, sqlite_where=text(when), postgresql_where=text(when))


tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("weight", Double, nullable=False, server_default="1"),  # weight of the tenant's patience under overload
    Column("limits", Text),  # JSON of tenants.Limits; null: no limits
    Column("created_us", BigInteger, nullable=False),
    Column("deleted_us", BigInteger),
    Column("managed_by", Text),  # declared object that the row was made for; null: made by hand
    Column("keep_prefixes", Boolean, nullable=False, server_default=true()),  # false: zero retention, everywhere
)
_unique("tenants_name", tenants.c.name, when="deleted_us IS NULL")

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),  # by which a person recognises the key
    Column("mac", Text, nullable=False, unique=True),  # HMAC-SHA256 under the pepper, hex: the key is stored nowhere
    Column("scopes", Text, nullable=False),  # JSON list
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    Column("revoked_us", BigInteger),
    Column("last_used_us", BigInteger),  # exact to some minutes; null: not used since the column exists
    Column("priority", Text, nullable=False, server_default="normal"),  # highest that requests of the key may ask for
)

# Keys of operators, besides the root key, which is in no table. store/db/operators.py explains the scopes.
operator_keys = Table(
    "operator_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),  # name of the holder; a key and its successor share the name
    Column("prefix", Text, nullable=False),
    Column("mac", Text, nullable=False, unique=True),  # as in keys
    Column("scopes", Text, nullable=False),  # JSON list
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    Column("revoked_us", BigInteger),
    Column("last_used_us", BigInteger),
)

# Tokens by which runtimes join the bus, and the runtimes that joined. store/contract/joining/proofs.py has the rules.
join_tokens = Table(
    "join_tokens",
    metadata,
    Column("id", Text, primary_key=True),
    Column("mac", Text, nullable=False, unique=True),  # as in keys
    Column("runtime", Text),  # the only id of a runtime that may use the token; null: any id
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Column("used_us", BigInteger),
    Column("used_by", Text),  # id of the runtime
    Column("revoked_us", BigInteger),
)
joined_runtimes = Table(
    "joined_runtimes",
    metadata,
    Column("id", Text, primary_key=True),  # id of the runtime
    Column("public_key", Text, nullable=False),  # nkey
    Column("token_id", Text, ForeignKey("join_tokens.id"), nullable=False),
    Column("joined_us", BigInteger, nullable=False),
    Column("revoked_us", BigInteger),
)
_unique("joined_runtimes_public_key", joined_runtimes.c.public_key, when="revoked_us IS NULL")

artefacts = Table(
    "artefacts",
    metadata,
    Column("digest", Text, primary_key=True),  # sha256 over names, sizes and contents of the files
    Column("architecture", Text, nullable=False),
    Column("dtype", Text, nullable=False),  # type of most weights in the files
    Column("weight_bytes", BigInteger, nullable=False),  # in the files
    Column("kv_bytes_per_token", BigInteger, nullable=False),  # written by all layers, at two bytes an element
    Column("kv_layers", Text),  # JSON list of KeptLayers, at two bytes an element; null: every layer keeps every token
    Column("context_tokens", BigInteger, nullable=False),
    Column("files", Text, nullable=False),  # JSON list of {name, size, sha256}
    Column("created_us", BigInteger, nullable=False),
)

models = Table(
    "models",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id")),  # null: the operator's model, visible to every tenant
    Column("name", Text, nullable=False),
    Column("source", Text, nullable=False),  # as given by the owner
    Column("path", Text, nullable=False),  # the model's folder, symlinks resolved; empty until the model is fetched
    Column("state", Text, nullable=False),  # importing | ready | refused | cancelled
    Column("reason", Text, nullable=False),  # why the model was refused or cancelled
    Column("digest", Text, ForeignKey("artefacts.digest")),
    Column("created_us", BigInteger, nullable=False),
    Column("deleted_us", BigInteger),
    Column("revision", Text),  # the fetched commit, if the source has commits
    Column("expected", Text),  # the digest that the model must have
    Column("progress", Text),  # JSON of models.Progress, during the import
    Column("imported_bytes", BigInteger),  # disk space of the import, now or once done; null: a folder not imported
    Column("managed_by", Text),  # as in tenants
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
    Column("version", Integer, nullable=False),  # counts the changes made by people: the ETag
    Column("canary", Text),  # JSON of deployments.Canary: the target's share of the traffic until promotion
    Column("created_us", BigInteger, nullable=False),
    Column("deleted_us", BigInteger),
    Column("managed_by", Text),  # as in tenants
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
    Column("activated_us", BigInteger),  # when the revision first had the traffic
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

# No foreign keys: a delivered token is booked, whatever became of the tenant.
usage = Table(
    "usage",
    metadata,
    Column("request", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("final", Boolean, nullable=False),
    Column("period", Text, nullable=False),  # YYYY-MM of the bill with this row
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("deployment_id", Text, nullable=False),
    Column("deployment", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("engine_key", Text, nullable=False),
    Column("model_id", Text),
    Column("prompt_tokens", BigInteger, nullable=False),  # to be charged: 0 for a second attempt
    Column("cached_tokens", BigInteger, nullable=False),  # part of prompt_tokens
    Column("output_tokens", BigInteger, nullable=False),
    Column("price_id", Text),  # null: no price held when the request started
    Column("started_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger, nullable=False),
    Column("finish", Text, nullable=False),
    Column("gpu_us", BigInteger, nullable=False, server_default="0"),  # time of device steps
    Column("switch_us", BigInteger, nullable=False, server_default="0"),  # time of the model's way to the device
    Column("cache_byte_s", BigInteger, nullable=False, server_default="0"),  # in the host cache
    Column("kv_byte_s", BigInteger, nullable=False, server_default="0"),  # in the device's KV cache
)
Index("usage_by_tenant", usage.c.tenant_id, usage.c.started_us)
Index("usage_by_period", usage.c.period, usage.c.tenant_id)
# Few rows are open at a time: the search for forgotten requests reads only open rows.
Index("usage_open", usage.c.ended_us, sqlite_where=text("final = 0"), postgresql_where=text("NOT final"))

# Ended requests with a breakdown of their time, kept for STACCATO_REQUEST_DAYS: no bill depends on these rows.
requests = Table(
    "requests",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("deployment_id", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("finish", Text, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cold", Text, nullable=False),  # none | host | disk: place of the model when the request came
    Column("total_us", BigInteger, nullable=False),
    Column("first_token_us", BigInteger),  # null: no token came
    Column("parts", Text, nullable=False),  # JSON: part of store/contract/series.py → microseconds
)
Index("requests_by_tenant", requests.c.tenant_id, requests.c.started_us)
Index("requests_by_start", requests.c.started_us)

# Credits and debits by the operator's hand. Rows are added and never change, like every row of a bill.
corrections = Table(
    "corrections",
    metadata,
    Column("id", Text, primary_key=True),
    Column("period", Text, nullable=False),  # YYYY-MM of the bill with the correction
    Column("corrects", Text, nullable=False),  # YYYY-MM of the corrected bill
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("currency", Text, nullable=False),
    Column("amount_minor", BigInteger, nullable=False),  # minor units; negative: a credit
    Column("reason", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)
Index("corrections_by_period", corrections.c.period, corrections.c.tenant_id)

# Digests of the first exports of closed periods: a later export must be equal.
exports = Table(
    "exports",
    metadata,
    Column("period", Text, primary_key=True),
    Column("tenant_id", Text, primary_key=True),  # empty: every tenant
    Column("format", Text, primary_key=True),
    Column("detail", Text, primary_key=True),  # lines | rows
    Column("version", Text, primary_key=True),  # version of the writing code: a newer version may write other bytes
    Column("sha256", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)

# Rows are never changed and never deleted: triggers refuse both. store/db/audit.py explains the hashes.
audit = Table(
    "audit",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),  # 1, 2, 3, ... without a gap
    Column("hash", Text, nullable=False),
    Column("tenant_seq", BigInteger),  # 1, 2, 3, ... among the rows of a tenant
    Column("tenant_hash", Text),
    Column("id", Text, nullable=False, unique=True),
    Column("at_us", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),  # deployment.created, key.revoked, ...
    Column("tenant_id", Text),
    Column("subject_id", Text, nullable=False),
    Column("by", Text, nullable=False),  # a tenant's key's id, operator:ID:NAME, "admin" (root) or "platform"
    Column("request_id", Text),
    Column("old", Text),  # JSON of the old values, without secrets
    Column("new", Text),
)
_unique("audit_by_tenant", audit.c.tenant_id, audit.c.tenant_seq, when="tenant_id IS NOT NULL")

# A single row: the end of the chain. A transaction adding to the chain locks the row until the transaction ends.
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
    Column("fingerprint", Text, nullable=False),  # fingerprint of the request's body
    Column("status", Integer, nullable=False),
    Column("body", Text, nullable=False),  # the answer, without secrets
    Column("created_us", BigInteger, nullable=False, index=True),
)
