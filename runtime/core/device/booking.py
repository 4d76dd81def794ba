"""Bookings of a device's time, as the Instance machine hears events. Pure."""

from __future__ import annotations

from runtime.core.device.events import BuildFailed, Built, Checked, Closed, Event, StepFailed
from runtime.core.device.model import Model
from runtime.core.device.record import Turn
from runtime.core.ledgers.device_time import DeviceTime

_PLATFORM = Built | BuildFailed | Checked | Closed | StepFailed  # answers to effects that serve no request


def book_event(account: DeviceTime, event: Event, waited: bool, busy: bool, now: float) -> None:
    """Book the time before `event` to the platform or to idleness, if the time is known to be no request's.

    `waited`: whether requests waited or ran; `busy`: whether a device effect was under way. `now` is in seconds."""
    if busy and isinstance(event, _PLATFORM):
        account.platform(now)
    elif not (waited or busy):
        account.idle(now)


def book_step(account: DeviceTime, model: Model, turn: Turn | None, began: float, now: float) -> None:
    """Book a step of `model` in `turn`, from `began` to `now`, in seconds, to the requests that ran in the step."""
    assert turn is not None, "a step is made in a turn"
    running = list(model.queues.running.values())
    if not running:  # every request was cancelled while the step ran
        account.platform(now)
        return
    if not turn.steps:
        account.switched(began, running)
    if model.queues.prompts:
        prompts = [request for request in running if not request.computed]
        decodes = [request for request in running if request.computed]
        context = sum([request.context for request in decodes])
        account.stepped(now, decodes, prompts, model.costs.step(len(decodes), context) if decodes else 0.0)
    else:
        account.stepped(now, running, (), 0.0)
    account.held(began, running, model.kv, model.loads.away_us)
