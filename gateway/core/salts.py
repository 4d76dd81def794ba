"""Cache salts, by which the prefixes of tenants stay separate. Pure."""

from __future__ import annotations

import hashlib
import hmac


def cache_salt(secret: bytes, tenant_id: str) -> str:
    """The cache salt of a tenant. Prefixes are found under the salt alone, and no tenant can guess a salt.

    `secret`: the secret of the gateways."""
    return hmac.new(secret, tenant_id.encode(), hashlib.sha256).hexdigest()[:32]
