"""Headroom: part of a device kept free around requests of high priority (Llumnix, §4.4). Pure.

A device with running requests of high priority looks fuller than the device is, in time and in memory, so that other
requests go elsewhere and running requests of other devices do not come. The headroom is the same however many requests
of high priority run: the requests have the headroom together.
"""

from __future__ import annotations

HEADROOM = 0.1  # share of the device's time, and of the memory for keys and values


def headroom(high: int) -> float:
    """Return the share of a device that `high` running requests of high priority keep free."""
    return HEADROOM if high else 0.0
