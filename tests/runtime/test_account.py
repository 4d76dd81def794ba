"""Where the device's time goes. The rules one by one; that nothing of it is lost, whatever happens, is asserted in
`Account.check` after every event of test_instance_any_order.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.account import Account
from runtime.request import Request
from tests.runtime.world import request


def asked(label: str, prompt_tokens: int = 1, stream: int = 0) -> Request:
    made = request(stream, "m", prompt_tokens=prompt_tokens)
    made.label = label
    return made


def test_who_decodes_together_pays_equal_parts_to_the_microsecond() -> None:
    account, three = Account.open(10.0), [asked("a"), asked("a"), asked("b")]
    account.stepped(10.00001, three, (), 0.0)
    assert [each.spent.gpu_us for each in three] == [3, 3, 4]
    assert {label: total.gpu_us for label, total in account.totals.items()} == {"a": 6, "b": 4}
    account.check()


def test_what_a_prompt_adds_to_a_step_the_prompt_pays() -> None:
    account = Account.open(0.0)
    decode, short, long = asked("a"), asked("b", 100), asked("c", 300)
    account.stepped(0.05, [decode], [short, long], decode_s=0.01)
    assert (decode.spent.gpu_us, short.spent.gpu_us, long.spent.gpu_us) == (10_000, 10_000, 30_000)
    account.stepped(0.055, [decode], [long], decode_s=0.01)  # the books were wrong: it pays no more than there was
    assert (decode.spent.gpu_us, long.spent.gpu_us) == (15_000, 30_000)
    account.stepped(0.065, (), [long], decode_s=0.0)
    assert long.spent.gpu_us == 40_000
    account.check()


def test_who_a_model_comes_for_pays_its_way() -> None:
    account, two = Account.open(0.0), [asked("a"), asked("b")]
    account.idle(1.0)
    account.switched(1.5, two)
    account.platform(1.75)
    assert [each.spent.switch_us for each in two] == [250_000, 250_000]
    assert (account.idle_us, account.platform_us) == (1_000_000, 250_000)
    account.check()


def test_a_clock_that_goes_back_takes_nothing_from_anybody() -> None:
    account = Account.open(5.0)
    account.idle(6.0)
    account.platform(5.5)
    account.idle(6.5)
    assert (account.idle_us, account.platform_us) == (1_500_000, 0)
    account.check()


STEPS = st.tuples(
    st.integers(0, 10**7), st.integers(0, 5), st.lists(st.integers(0, 9000), max_size=5), st.floats(0, 20, width=32)
)


@given(st.floats(0, 1e9), st.lists(STEPS, max_size=20))
def test_all_that_passes_is_paid_once(begun: float, steps: list[tuple[int, int, list[int], float]]) -> None:
    account, now, everybody = Account.open(begun), begun, []
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
