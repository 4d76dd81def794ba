"""Settings of what gateways of a simulated fleet see. Not compiled: a compiled struct can't be frozen."""

from __future__ import annotations

import msgspec

from store.contract.reports import PERIOD_S


class Sight(msgspec.Struct, frozen=True):
    """What gateways of a simulated fleet see."""

    gateways: int = 4
    period_s: float = PERIOD_S  # between two reports of a device
    exact: bool = False  # a single gateway sees all devices as they are
    seed: int = 0  # of the times of reports


AS_GATEWAYS_SEE = Sight()
