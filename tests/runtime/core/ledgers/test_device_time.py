"""Where the device's time goes, rule by rule. `DeviceTime.check` asserts that no time is lost, after every event of
test_instance_any_order.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.device.events import Arrived, Park, Placed
from runtime.core.device.request import Request
from runtime.core.ledgers.device_time import DeviceTime
from store.contract.kv_curve import KvCurve
from store.contract.wire import Spent
from tests.runtime.world import World, request, spec


def asked(label: str, prompt_tokens: int = 1, stream: int = 0) -> Request:
    made = request(stream, "m", prompt_tokens=prompt_tokens)
    made.label = label
    return made


def test_who_decodes_together_pays_equal_parts_to_the_microsecond() -> None:
    account, three = DeviceTime.open(10.0), [asked("a"), asked("a"), asked("b")]
    account.stepped(10.00001, three, (), 0.0)
    assert [each.spent.gpu_us for each in three] == [3, 3, 4]
    assert {label: total.gpu_us for label, total in account.totals.items()} == {"a": 6, "b": 4}
    account.check()


def test_what_a_prompt_adds_to_a_step_the_prompt_pays() -> None:
    account = DeviceTime.open(0.0)
    decode, short, long = asked("a"), asked("b", 100), asked("c", 300)
    account.stepped(0.05, [decode], [short, long], decode_s=0.01)
    assert (decode.spent.gpu_us, short.spent.gpu_us, long.spent.gpu_us) == (10_000, 10_000, 30_000)
    account.stepped(0.055, [decode], [long], decode_s=0.01)  # books gone wrong: the prompt pays at most the step's time
    assert (decode.spent.gpu_us, long.spent.gpu_us) == (15_000, 30_000)
    account.stepped(0.065, (), [long], decode_s=0.0)
    assert long.spent.gpu_us == 40_000
    account.check()


def test_who_a_model_comes_for_pays_its_way() -> None:
    account, two = DeviceTime.open(0.0), [asked("a"), asked("b")]
    account.idle(1.0)
    account.switched(1.5, two)
    account.platform(1.75)
    assert [each.spent.switch_us for each in two] == [250_000, 250_000]
    assert (account.idle_us, account.platform_us) == (1_000_000, 250_000)
    account.check()


def test_a_clock_that_goes_back_takes_nothing_from_anybody() -> None:
    account = DeviceTime.open(5.0)
    account.idle(6.0)
    account.platform(5.5)
    account.idle(6.5)
    assert (account.idle_us, account.platform_us) == (1_500_000, 0)
    account.check()


def test_keys_and_values_are_paid_for_from_the_first_step_on_where_they_are() -> None:
    account, one = DeviceTime.open(0.0), asked("a", 100)
    account.stepped(2.0, (), [one], 0.0)
    account.held(1.5, [one], kv=KvCurve(3, 0), away_us=7_000_000)  # the model was away before the request came
    assert (one.spent.kv_byte_us, one.spent.cache_byte_us) == (300 * 500_000, 0)
    account.idle(4.0)
    account.stepped(5.0, [one], (), 0.0)
    account.held(4.0, [one], kv=KvCurve(3, 0), away_us=9_000_000)  # and for two seconds of the three since
    assert (one.spent.kv_byte_us, one.spent.cache_byte_us) == (300 * 1_500_000, 300 * 2_000_000)
    assert one.spent.shown() == Spent(3_000_000, 0, 450, 600)


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=20))
def test_what_is_held_is_held_for_as_long_as_there_was(steps: list[tuple[int, int]]) -> None:
    account, one, now, away = DeviceTime.open(0.0), asked("a", 1), 0.0, 0
    for us, of_them_away in steps:
        now, away = now + us / 1e6, away + min(us, of_them_away)
        account.stepped(now, [one], (), 0.0)
        account.held(0.0, [one], kv=KvCurve(1, 0), away_us=away)
        assert one.spent.kv_byte_us >= 0
        assert one.spent.kv_byte_us + one.spent.cache_byte_us == account.at_us
    assert one.spent.cache_byte_us <= away


def test_what_a_request_holds_is_on_the_host_while_its_model_is_away() -> None:
    two = World(7, {"a": 3, "b": 3}, tokens_most=6)
    for key in "ab":
        two.hear(Placed(spec(key, kv_bytes_per_token=1)))
        two.settle()
    first, second = request(1, "a"), request(2, "b")
    began = two.now
    two.open |= {first.id, second.id}
    two.hear(Arrived(first), Arrived(second))
    two.settle(200)
    model = two.instance.models[first.model]
    assert Park(first.model) in two.log and 0 < model.loads.away_us < (two.now - began) * 1e6
    assert 0 < first.spent.cache_byte_us <= first.context * model.loads.away_us
    assert 0 < first.spent.kv_byte_us <= first.context * ((two.now - began) * 1e6 - model.loads.away_us)


STEPS = st.tuples(
    st.integers(0, 10**7), st.integers(0, 5), st.lists(st.integers(0, 9000), max_size=5), st.floats(0, 20, width=32)
)


@given(st.floats(0, 1e9), st.lists(STEPS, max_size=20))
def test_all_that_passes_is_paid_once(begun: float, steps: list[tuple[int, int, list[int], float]]) -> None:
    account, now, everybody = DeviceTime.open(begun), begun, []
    for us, decoding, prompts, decode_s in steps:
        now += us / 1e6
        decodes = [asked(f"d{number}") for number in range(decoding)]
        computes = [asked("p", tokens) for tokens in prompts]
        everybody += [*decodes, *computes]
        if decodes or computes:
            account.stepped(now, decodes, computes, decode_s)
        else:
            account.idle(now)
        account.check()
        assert all(each.spent.gpu_us >= 0 for each in everybody)
    paid = sum(each.spent.gpu_us for each in everybody)
    assert paid == sum(total.gpu_us for total in account.totals.values())
    assert paid + account.idle_us == account.at_us - account.begun_us
