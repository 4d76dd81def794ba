"""The turn policies of one device, by the names that operators give them."""

from __future__ import annotations

from collections.abc import Callable

from runtime.policy.aegaeon import Aegaeon
from runtime.policy.fixed import RequestLevel, Resident
from runtime.policy.prism import Prism
from runtime.policy.slack import Slack
from runtime.policy.turns import RoundRobin, Turns

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
