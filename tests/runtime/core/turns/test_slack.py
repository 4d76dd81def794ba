"""Turns chosen by `slack`, asked with models as by the machine."""

from __future__ import annotations

from runtime.core.device.deadlines import STARVED_S
from runtime.core.device.model import Phase
from runtime.core.turns.slack import HEAD_PER_TTFT, HEAD_S, Slack
from store.contract.priorities import Priority
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


# ── requests of high priority ─────────────────────────────────────────────────────────────────────────────────────────

NORMAL, HIGH = Priority.NORMAL, Priority.HIGH
RARE = 100 * STEP_S  # a TBT for which a model needs little of the device's time


def due(device: Device, key: str, in_s: float, priority: Priority, tbt_s: float = RARE) -> None:
    """Let a decoding request come whose next token is due `in_s` from now."""
    request = device.ask(key, running=True, tbt_s=tbt_s, patience_s=100.0, priority=priority)
    request.progress.due_at = device.now + in_s
    device.models[key].queues.ttft_s = 10.0


def pair(high_s: float, normal_s: float = -1.0, tbt_s: float = RARE, away: str = "") -> Device:
    """A device with a model a, whose token is due `normal_s` from now, and a model b with a request of high priority
    due `high_s` from now."""
    device = Device(Slack(), *sorted({"a", "b"} - set(away)), away=away)
    for model in device.models.values():
        model.loads.load_s = LOAD_S
    device.now = 100.0
    due(device, "a", normal_s, NORMAL, tbt_s)
    due(device, "b", high_s, HIGH, tbt_s)
    return device


def yields(device: Device, holder: str, needy: str) -> bool:
    device.order()
    return device.turns.yields(device.models[holder], device.models[needy], None, device.now)


def test_a_model_goes_first_once_a_token_of_high_priority_is_nearly_due() -> None:
    assert order(pair(HEAD_S + 0.1)) == "ab"
    assert order(pair(HEAD_S - 0.1)) == "ba"
    assert order(pair(HEAD_S + LOAD_S - 0.1, away="b")) == "ba", "the way in counts"
    hasty = pair(HEAD_S - 0.1)
    hasty.models["b"].queues.ttft_s = (HEAD_S - 0.2) / HEAD_PER_TTFT
    assert order(hasty) == "ab", "a head start is short where first tokens are due soon"


def test_a_burst_ends_for_a_token_of_high_priority_and_for_no_other() -> None:
    for priority, steps in ((HIGH, "b"), (NORMAL, "a")):
        device = pair(10.0, 2.0)
        first = device.step()
        assert first is not None and first.key == "a"
        due(device, "b", HEAD_S - 0.1, priority)
        then = device.step()
        assert then is not None and then.key == steps


def test_without_time_for_all_models_with_high_priority_wait_last() -> None:
    for tbt_s, expected in ((MORE, "ba"), (HALF, "ab")):
        device = pair(HEAD_S + 1.0, HEAD_S, tbt_s)
        due(device, "a", HEAD_S, NORMAL, tbt_s)  # more is at stake
        assert order(device) == expected


def test_if_requests_of_high_priority_alone_need_more_than_the_device_some_of_their_models_wait() -> None:
    device = pair(HEAD_S / 2, HEAD_S, MORE)
    for _ in range(2):
        due(device, "a", HEAD_S, HIGH, MORE)
    assert order(device) == "ab", "the model with most at stake goes on"


def test_a_model_with_high_priority_is_parked_only_if_it_can_be_back_in_time() -> None:
    back_s = HEAD_S + 2 * LOAD_S
    assert not yields(pair(back_s + 0.9, -20.0, away="a"), "b", "a")
    assert yields(pair(back_s + 1.1, -20.0, away="a"), "b", "a")


def test_any_other_model_is_parked_for_a_nearly_due_token_of_high_priority() -> None:
    assert yields(pair(HEAD_S + LOAD_S - 0.1, -1.0, away="b"), "a", "b")
    assert not yields(pair(HEAD_S + LOAD_S + 0.1, -1.0, away="b"), "a", "b")
    both = pair(HEAD_S + LOAD_S - 0.1, -1.0, away="b")
    due(both, "a", HEAD_S + 0.1, HIGH)
    assert not yields(both, "a", "b"), "the model on the device has such a token itself"


def test_high_priority_over_its_tenants_share_gets_no_head_start() -> None:
    device = pair(HEAD_S - 0.1, HEAD_S - 0.2)
    device.models["c"] = device.model("c", Phase.RESIDENT)
    due(device, "c", 100.0, HIGH)
    assert order(device) == "bac"
    over(device, "b")
    assert order(device) == "abc"


def over(device: Device, key: str) -> None:
    """Have the tenant of the model's requests be over its share."""
    shares = next(iter(device.models.values())).shares
    for model in device.models.values():
        model.shares = shares
        model.deadlines.changed()
    for request in device.models[key].queues.running.values():
        request.tenant = "flood"
    for tenant in ("flood", ""):
        shares.arrive(tenant, 1.0)
    shares.over.add("flood")


def test_a_model_that_starves_goes_before_high_priority() -> None:
    device = pair(HEAD_S / 2)
    (starved,) = device.models["a"].queues.running.values()
    starved.progress.due_at, starved.progress.last_at = -1000.0, device.now - STARVED_S - HEAD_S
    device.models["a"].deadlines.changed()
    assert order(device) == "ab"
    starved.progress.last_at = device.now - STARVED_S + 1.0
    device.models["a"].deadlines.changed()
    assert order(device) == "ba"


def test_prompts_of_high_priority_begin_first() -> None:
    device = Device(Slack(), "a")
    device.ask("a", ttft_s=1.0)
    high = device.ask("a", ttft_s=8.0, priority=HIGH)
    assert device.turns.admit(device.models["a"], device.now)[0] is high
