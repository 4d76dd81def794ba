"""State of a runtime that all parts of its node share."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from runtime import ipc
from store.contract import wire
from store.contract.wire import Role


class DrainedBy(enum.Enum):
    """Giver of the order to drain."""

    OPERATOR = "operator"
    SCHEDULER = "scheduler"  # for want of load


@dataclass(slots=True)
class OwnState:
    """State of the runtime of this node: name, device process and drain."""

    id: str
    epoch: int
    role: Role
    role_given: bool = False  # the scheduler gave the role
    prompt_s: float = 0.0  # time of the device that the prompts of the requests so far take
    device: ipc.NodeEnd | None = None  # None: no device process is ready
    engine: str = ""  # version of the engine, told by the device process
    life: int = 0  # number of the device process in the host cache
    state: ipc.State = field(default_factory=ipc.State)  # last state told by the device process
    forms: dict[str, wire.KvForm] = field(default_factory=dict)  # by model with an engine built
    ending: bool = False  # the runtime drains, to end then
    drained_by: DrainedBy | None = None  # the runtime drains by order, not to end; None: no order
    lease_due: asyncio.Event = field(default_factory=asyncio.Event)  # set: the lease is renewed at once
    report_due: asyncio.Event = field(default_factory=asyncio.Event)  # set: a stream began or ended since the report

    @property
    def draining(self) -> bool:
        return self.ending or self.drained_by is not None

    @property
    def surplus(self) -> bool:
        """Whether the scheduler drained the runtime for want of load."""
        return self.drained_by is DrainedBy.SCHEDULER

    def send(self, message: ipc.ToDevice) -> None:
        """Send the message to the device process, if the process is ready."""
        if self.device is not None:
            self.device.send(message)

    def device_lost(self) -> None:
        """Forget everything that the device process told, except the version of its engine."""
        self.device, self.state, self.forms = None, ipc.State(), {}
