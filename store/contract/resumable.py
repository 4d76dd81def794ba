"""Mark of a request that a client can take up again after the connection is lost. Pure."""

from __future__ import annotations

import msgspec

TAKEN_MOST = 1000  # times that a request can be taken up


class Resumable(msgspec.Struct, frozen=True, array_like=True):
    """Mark of a request whose tokens the runtime keeps for a client that lost the connection."""

    owner: bytes  # digest of tenant and key: no other caller hears of the request
    body: bytes  # digest of route and body: a different request is not taken for this request
    keep_s: float  # from the loss of the connection or the end of the tokens: then the runtime forgets the request
    started_at: float = 0.0  # UNIX seconds: price and month of the bill follow from the start
    taken: int = 0  # times that the request was taken up
    # Prompt tokens found in the prefix cache, and written there, by the runtime that computed the prompt.
    cached_tokens: int = 0
    written_tokens: int = 0
