"""Priority of a request: as asked, or the deployment's, within the bound of the key. Pure.

A key has a highest priority that its requests may ask for. A deployment gives its own priority to every request, so a
request may always ask for the deployment's priority, and for a lower priority.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from store.contract.priorities import WORDS, Priority, priority

HEADER = "x-staccato-priority"
# OpenAI's tiers that ask for a priority. Every other tier leaves the priority to the deployment.
TIERS = {"priority": Priority.HIGH, "flex": Priority.BATCH}


class UnknownPriority(ValueError):
    """Error of a header that names no priority."""


class PriorityTooHigh(ValueError):
    """Error of a request for a priority above the bound of the key."""


def asked(header: str | None, service_tier: Raw) -> Priority | None:
    """Return the priority that a request asks for; None: the deployment's. The header goes before the body.

    A tier of a wrong type asks for nothing: vLLM refuses such a body with a sentence of its own. Raises
    UnknownPriority.

    Args:
        header: value of the header HEADER.
        service_tier: the field of the body, unparsed; empty if the body has no such field."""
    if header is not None:
        word = header.strip().lower()
        if word not in WORDS:
            raise UnknownPriority(f"{HEADER} is {header[:40]!r}: say one of {', '.join(WORDS)}")
        return priority(word)
    try:
        return TIERS.get(msgspec.json.decode(bytes(service_tier or b"null"), type=str | None) or "")
    except msgspec.DecodeError:
        return None


def granted(asks: Priority | None, deployment: Priority, bound: Priority) -> Priority:
    """Return the priority of a request. Raises PriorityTooHigh.

    Args:
        asks: the priority asked for; None: the deployment's.
        deployment: the deployment's priority.
        bound: highest priority that the key may ask for, beside the deployment's."""
    if asks is None:
        return deployment
    highest = max(bound, deployment)
    if asks > highest:
        raise PriorityTooHigh(
            f"the request asks for priority {asks.word}, and this key may ask for {highest.word} at most: ask for less,"
            f" or have an operator make a key with `staccato key create --priority {asks.word}`"
        )
    return asks
