"""Requests for a canary, and the end of a failing canary. Pure."""

from __future__ import annotations

from hashlib import blake2b

ERRORS_LEAST = 3  # fewer errors may be chance


def takes(request_id: str, weight: int) -> bool:
    """Whether the canary gets a request: `weight` of a hundred requests, and a request always or never."""
    drawn = int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big")
    return drawn % 100 < weight


def fault(ended: int, failed: int, errors_most: float) -> str | None:
    """Return why the canary is stopped; None: the canary continues."""
    if failed < ERRORS_LEAST or failed <= errors_most * ended:
        return None
    return (
        f"{failed} of {ended} requests failed, more than {errors_most:.3g} of them: roll back, or mend it and try again"
    )
