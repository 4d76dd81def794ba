"""Decision whether a runtime may join the bus: by the key that is bound to the runtime's id, or by a join token.

The caller has checked before that the runtime signed the server's nonce with the key. A join token is used once: the
use binds the id to the key. From then on the key alone lets the runtime in, until the binding is revoked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Ids name subjects of the bus: an id with a dot, a star or a greater-than sign would reach beyond the runtime.
RUNTIME_ID = re.compile(r"[A-Za-z0-9-]{1,63}")
TOKEN_PREFIX = "st-join-"
TOKEN = re.compile(TOKEN_PREFIX + r"[0-9a-f]{32}-[0-9a-f]{48}")
NAME_PREFIX = "runtime-"  # as in the names of grants.runtime


@dataclass(frozen=True)
class JoinToken:
    """A join token without the secret. Times are UNIX microseconds."""

    id: str
    runtime: str | None  # the only id that may use the token; None: any id that is free
    created_us: int
    expires_us: int
    used_us: int | None
    used_by: str | None  # id of the runtime that used the token
    revoked_us: int | None


@dataclass(frozen=True)
class JoinedRuntime:
    """Binding of a runtime's id to the public key of the runtime. Times are UNIX microseconds."""

    id: str
    public_key: str
    token_id: str
    joined_us: int
    revoked_us: int | None


@dataclass(frozen=True)
class JoinProof:
    """Proof of a runtime: a key that signed the nonce, the id that the runtime says, and whether a token came."""

    runtime: str
    public_key: str
    with_token: bool


@dataclass(frozen=True)
class AlreadyBound:
    """The key is bound to the id: the runtime comes in, and no token is used."""


@dataclass(frozen=True)
class JoinsNow:
    """The token is good: the runtime comes in once the token is marked as used and the key is bound to the id."""

    token_id: str


@dataclass(frozen=True)
class NotAdmitted:
    """The runtime stays outside. The reason names no secret."""

    reason: str


Admission = AlreadyBound | JoinsNow | NotAdmitted


def decide(proof: JoinProof, token: JoinToken | None, bindings: Iterable[JoinedRuntime], now_us: int) -> Admission:
    """Decide on a proof.

    Args:
        token: the token that came with the proof, if the database knows the token.
        bindings: bindings of the proof's id or of the proof's key, revoked bindings included.
        now_us: UNIX microseconds."""
    bindings = list(bindings)
    living = [each for each in bindings if each.revoked_us is None]
    own = next((each for each in living if each.id == proof.runtime), None)
    if own and own.public_key == proof.public_key:
        return AlreadyBound()
    if other := next((each for each in living if each.public_key == proof.public_key), None):
        return NotAdmitted(f"the key is bound to the runtime {other.id}")
    if own:
        return NotAdmitted("the id is bound to a different key")
    if not proof.with_token:
        revoked = any((each.id, each.public_key) == (proof.runtime, proof.public_key) for each in bindings)
        return NotAdmitted("the runtime was revoked" if revoked else "the key is unknown, and no join token came")
    return _by_token(proof, token, now_us)


def _by_token(proof: JoinProof, token: JoinToken | None, now_us: int) -> Admission:
    if token is None:
        return NotAdmitted("the join token is unknown")
    if token.revoked_us is not None:
        return NotAdmitted("the join token was revoked")
    if token.used_us is not None:
        return NotAdmitted("the join token was used before")
    if token.expires_us <= now_us:
        return NotAdmitted("the join token has expired")
    if token.runtime not in (None, proof.runtime):
        return NotAdmitted("the join token is for a different runtime")
    return JoinsNow(token.id)
