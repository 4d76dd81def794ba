"""Turn policies of a device, by the names used in settings."""

from __future__ import annotations

from collections.abc import Callable

from runtime.core.turns.aegaeon import Aegaeon
from runtime.core.turns.fixed import RequestLevel, Resident
from runtime.core.turns.prism import Prism
from runtime.core.turns.slack import Slack
from runtime.core.turns.turn import RoundRobin, Turns

POLICIES: dict[str, Callable[[], Turns]] = {
    "slack": Slack,
    "aegaeon": Aegaeon,
    "aegaeon-paper": lambda: Aegaeon(quota_s_most=4.0),
    "prism": Prism,
    "request": RequestLevel,
    "resident": Resident,
    "dedicated": lambda: RequestLevel(patience_s=float("inf")),
    "round-robin": RoundRobin,
}
