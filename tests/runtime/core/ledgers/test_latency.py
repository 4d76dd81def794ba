"""Where the time of requests goes on a device: every part has an owner, and the parts add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from runtime.core.device.request import ModelKey, Request, RequestId
from runtime.core.ledgers.latency import Clocks
from store.contract.series import WAIT_S
from store.contract.wire import Course

CHAT, CODE = ModelKey("chat"), ModelKey("code")


def request(id: str, model: ModelKey = CHAT) -> Request:
    return Request(RequestId(id), "g", 1, model, b"", 0.0)


def total_us(course: Course) -> int:
    return sum(structs.astuple(course))


def test_who_comes_to_a_busy_device_waits_for_the_turn_the_way_in_and_the_switch() -> None:
    clocks = Clocks(0.0)
    clocks.turn(CODE, 1.0)
    asked = request("a")
    clocks.arrived(asked, 2.0)
    clocks.wakes_up(CHAT, 3.0)  # while the other model still steps
    clocks.nobody(5.0)
    clocks.is_in(CHAT, 3.0, 6.0)
    clocks.joined(asked, 6.5)
    clocks.turn(CHAT, 7.0)
    first = clocks.made(asked.id, lambda: 8.0)
    assert first == Course(queue_us=1_000_000, wake_us=3_000_000, switch_us=1_000_000, prefill_us=1_000_000)


def test_tokens_after_the_first_wait_for_others_and_for_the_way_back() -> None:
    clocks = Clocks(0.0)
    asked = request("a")
    clocks.arrived(asked, 0.0)
    clocks.joined(asked, 0.0)
    clocks.turn(CHAT, 0.0)
    assert clocks.made(asked.id, lambda: 1.0) == Course(prefill_us=1_000_000)
    assert clocks.made(asked.id, lambda: 1.5) is None, "it is told once"
    clocks.turn(CODE, 3.0)
    clocks.nobody(6.0)
    clocks.wakes_up(CHAT, 6.0)
    clocks.is_in(CHAT, 2.0, 8.0)
    clocks.turn(CHAT, 8.0)
    last = clocks.ended(asked.id, 9.0)
    assert last == Course(prefill_us=1_000_000, switch_us=2_000_000, decode_us=3_000_000, wait_us=3_000_000)
    assert clocks.so_far(asked.id, 9.0) is None


def test_a_full_batch_of_its_own_model_is_a_queue() -> None:
    clocks = Clocks(0.0)
    clocks.turn(CHAT, 0.0)
    asked = request("a")
    clocks.arrived(asked, 1.0)
    clocks.joined(asked, 4.0)
    assert clocks.made(asked.id, lambda: 5.0) == Course(queue_us=3_000_000, prefill_us=1_000_000)


def test_one_that_was_computed_elsewhere_has_no_prefill() -> None:
    clocks = Clocks(0.0)
    asked = Request(RequestId("a"), "g", 1, CHAT, b"", 0.0, handed=True)
    clocks.arrived(asked, 0.0)
    clocks.joined(asked, 0.0)
    clocks.turn(CHAT, 0.0)
    assert clocks.ended(asked.id, 2.0) == Course(decode_us=2_000_000)


def test_a_switch_counts_from_when_somebody_waited() -> None:
    clocks = Clocks(0.0)
    asked = request("a")
    clocks.arrived(asked, 100.0)
    clocks.turn(CHAT, 100.02)
    clocks.nobody(101.0)
    clocks.turn(CHAT, 101.5)  # a second turn in a row is no switch
    assert clocks.switches.counts == [int(bound == 0.025) for bound in (*WAIT_S, 0.0)]
    assert abs(clocks.switches.sum_s - 0.02) < 1e-9


def test_ways_from_disk_and_from_the_host_are_told_apart() -> None:
    clocks = Clocks(0.0)
    clocks.wakes_up(CHAT, 0.0, built=True)
    clocks.pauses(CHAT, 1.0)
    clocks.wakes_up(CHAT, 2.0)
    clocks.is_in(CHAT, 1.5, 2.5)
    clocks.wakes_up(CHAT, 5.0)
    clocks.is_in(CHAT, 0.5, 5.5)
    assert {source: sum(times.counts) for source, times in clocks.wakes.items()} == {"host": 1, "disk": 1}
    assert (clocks.wakes["disk"].sum_s, clocks.wakes["host"].sum_s) == (1.5, 0.5)


ACTS = ("chat", "code", "nobody", "wake", "in", "pause", "join", "made")


@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 3000)), max_size=30))
def test_whatever_happens_the_parts_are_the_time_since_the_arrival(acts: list[tuple[str, int]]) -> None:
    """A model under a fetch never has the turn."""
    clocks, now, asked, waking, joined = Clocks(0.0), 1.0, request("a"), False, False
    clocks.arrived(asked, now)
    for act, ms in acts:
        now += ms / 1e3
        match act:
            case "chat" if not waking:
                clocks.turn(CHAT, now)
            case "code":
                clocks.turn(CODE, now)
            case "nobody":
                clocks.nobody(now)
            case "wake" if clocks.holder != CHAT:
                clocks.wakes_up(CHAT, now)
                waking = True
            case "in":
                clocks.is_in(CHAT, 0.1, now)
                waking = False
            case "pause":
                clocks.pauses(CHAT, now)
                waking = False
            case "join" if not joined:
                clocks.joined(asked, now)
                joined = True
            case "made" if joined:
                clocks.made(asked.id, lambda at=now: at)
        course = clocks.so_far(asked.id, now)
        assert course is not None and min(structs.astuple(course)) >= 0
        assert abs(total_us(course) - (now - 1.0) * 1e6) <= 6
