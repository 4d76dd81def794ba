"""Turns chosen by `slack`, asked with models as by the machine."""

from __future__ import annotations

from runtime.core.device.deadlines import STARVED_S
from runtime.core.turns.slack import Slack
from tests.runtime.core.test_policies import LOAD_S, STEP_S, Device

HALF = STEP_S / 0.5  # a TBT for which a model needs half of the device's time
MORE = STEP_S / 0.6


def order(device: Device) -> str:
    return "".join(model.key for model in device.order())


def started(models: str, tbt_s: float, **patience_s: float) -> Device:
    """A device with a model for each letter, and a request for each time that the letter comes. Requests are due soon,
    the first request first."""
    device = Device(Slack(), *sorted(set(models)))
    for n, key in enumerate(models):
        device.ask(key, running=True, ttft_s=10.0 + n / 100, tbt_s=tbt_s, patience_s=patience_s.get(key, 1.5))
    device.now = 9.9
    return device


def test_while_there_is_time_for_all_who_is_due_first_comes_first() -> None:
    assert order(started("abb", HALF)) == "ab"


def test_while_there_is_not_the_one_with_the_fewest_requests_waits() -> None:
    assert order(started("abb", MORE)) == "ba"


def test_no_more_wait_than_have_to() -> None:
    assert order(started("abbccc", HALF)) == "bca"
    assert order(started("abbccc", MORE)) == "cab"


def test_a_patient_request_counts_as_more() -> None:
    assert order(started("abb", MORE, a=6.0)) == "ab"


def test_who_waits_goes_before_those_that_have_a_longer_lead_than_it_is_set_back() -> None:
    device = started("abb", MORE)
    for request in device.models["b"].queues.running.values():
        request.progress.deliver(device.now, 400, 0.0)
    device.models["b"].deadlines.changed()
    assert order(device) == "ab"


def test_who_comes_in_too_late_for_its_first_token_lets_others_come_in_before_until_it_starves() -> None:
    device = Device(Slack(), away="ab")
    for model in device.models.values():
        model.loads.load_s = LOAD_S
    device.ask("a", ttft_s=LOAD_S / 2)
    device.ask("b", ttft_s=2 * LOAD_S)
    assert order(device) == "ba"
    device.now = STARVED_S + 1
    device.ask("b", ttft_s=2 * LOAD_S)
    assert order(device) == "ab"


def test_a_first_token_that_will_be_late_does_not_hurry_what_runs_beside_it() -> None:
    device = Device(Slack(), away="ab")
    for model in device.models.values():
        model.loads.load_s = LOAD_S
    device.ask("a", running=True, ttft_s=5 * LOAD_S)
    device.ask("b", ttft_s=2 * LOAD_S)
    assert order(device) == "ba"
    device.ask("a", ttft_s=LOAD_S / 2)
    assert order(device) == "ba"
    device.ask("a", running=True, ttft_s=1.5 * LOAD_S)
    assert order(device) == "ab"


def test_requests_that_are_lost_do_not_count_until_they_starve() -> None:
    device = started("abbb", MORE)
    lost = list(device.models["b"].queues.running.values())[:2]
    device.now = 2 * STARVED_S
    for model in device.models.values():
        for request in model.queues.running.values():
            if request not in lost:
                request.progress.deliver(device.now, 10_000, 0.0)  # the request has a long lead
        model.deadlines.changed()
    for request in lost:
        request.progress.last_at = device.now - STARVED_S / 2
    device.ask("a", running=True, ttft_s=1.0, tbt_s=MORE)
    device.ask("b", running=True, ttft_s=2.0, tbt_s=MORE)
    device.ask("a", running=True, ttft_s=3.0, tbt_s=MORE)
    assert (device.order()[0].key, device.models["b"].deadlines.dues.hopeful) == ("a", 2)
    for request in lost:
        request.progress.last_at = device.now - STARVED_S - 1
    for model in device.models.values():
        model.deadlines.changed()
    assert order(device) == "ba"
