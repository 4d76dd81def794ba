"""Which requests a canary gets, and when it has to stop. Pure."""

from __future__ import annotations

from hashlib import blake2b

ERRORS_LEAST = 3  # fewer are chance


def takes(request_id: str, weight: int) -> bool:
    """`weight` in a hundred requests, and a request always or never."""
    drawn = int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big")
    return drawn % 100 < weight


def fault(ended: int, failed: int, errors_most: float) -> str | None:
    """Why it is taken out; None: it goes on."""
    if failed < ERRORS_LEAST or failed <= errors_most * ended:
        return None
    return (
        f"{failed} of {ended} requests failed, more than {errors_most:.3g} of them: roll back, or mend it and try again"
    )
