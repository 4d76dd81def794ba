"""The Instance machine, rule by rule. test_instance_any_order.py tests the machine under any order of events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from runtime.core.device.events import (
    Add,
    Arrived,
    Build,
    Built,
    Cancelled,
    Check,
    Close,
    Effect,
    Evict,
    Fetch,
    Grow,
    Lose,
    MemoryEffect,
    Ordered,
    Park,
    Placed,
    Shrink,
    Step,
    Tell,
    Told,
    Withdrawn,
)
from runtime.core.device.model import Phase
from runtime.core.device.request import ModelKey, RequestId
from runtime.core.engine import Held
from store.contract.wire import Residency
from tests.runtime.world import PAGE_BYTES, Engine, World, prepared, request, spec, step

A, B, C = ModelKey("a"), ModelKey("b"), ModelKey("c")


def world(
    total: int = 20,
    tokens_most: int = 6,
    quota: int = 2,
    rest: str = "",
    tokens_a_page: int = 2,
    kv_bytes: int = 0,  # of a token
    **sizes: int,
) -> World:
    """A world with the models of `sizes` (pages of weights by key), placed in turn, and resident if room suffices.

    Models in `rest` sleep: only clean weights are left.
    """
    made = World(total, sizes, quota, tokens_most, tokens_a_page)
    for key in sizes:
        made.hear(Placed(spec(key, 1.0 if key in rest else None, kv_bytes)))
        made.settle()
    made.now = 1.0
    made.hear()
    made.settle()
    return made


def ask(world: World, *models: str) -> list[Effect]:
    """Ask a request of each model, all at once. Requests are numbered from 1."""
    arrivals = []
    for model in models:
        arrived = request(len(world.asked) + 1, model)
        world.asked.append(arrived.id)
        world.open.add(arrived.id)
        arrivals.append(Arrived(arrived))
    return world.hear(*arrivals)


def kinds(effects: Sequence[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def holders(world: World) -> list[str]:
    """Models of the steps so far, in order."""
    return [effect.model for effect in world.log if isinstance(effect, Step)]


def moves(effects: Sequence[Effect]) -> list[MemoryEffect]:
    return [effect for effect in effects if isinstance(effect, MemoryEffect)]


def phase(world: World, key: ModelKey) -> Phase:
    return world.instance.models[key].phase


# ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_models_with_work_take_turns_of_the_quota() -> None:
    both = world(a=2, b=2, tokens_a_page=100)
    ask(both, "a", "b")
    both.settle()
    assert "".join(holders(both)) == "aabbaabbaabb"
    assert both.instance.switches == 5
    assert [both.instance.models[key].record.turns for key in (A, B)] == [3, 3]


def test_a_model_that_got_new_requests_whenever_it_was_done_does_not_starve_another() -> None:
    three = world(a=2, b=2, c=2, tokens_most=1)
    ask(three, "a", "b", "c")
    for _ in range(4):
        holder = holders(three)[-1]
        three.answer()
        ask(three, holder)
    assert "".join(holders(three)[:5]) == "abcab"


def test_no_turn_is_under_way_when_all_work_is_done() -> None:
    one = world(a=2)
    ask(one, "a")
    assert one.instance.turn is not None
    one.settle()
    assert one.instance.turn is None


# ── coming and going ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_placed_model_is_built_fetched_and_checked_once_to_prove_that_it_can_serve() -> None:
    new = World(10, {"a": 2})
    assert new.hear(Placed(spec("a"))) == [Build(spec("a"))]
    assert new.answer() == [Fetch(A, 1)]
    assert new.arrive() == [Check(A)]
    assert new.instance.models[A].residency is Residency.LOADING
    assert not new.instance.models[A].state(Held()).ever_resident
    assert new.answer() == []
    state = new.instance.models[A].state(new.instance.pages.of(A))
    assert state.ever_resident and state.was_resident
    assert (state.residency, state.weights_pages, state.kv_pages) == (Residency.RESIDENT, 2, 1)
    assert (state.load_ms, state.fetch_ms, state.fetches) == (2500.0, 500.0, 1)
    cached = new.instance.models[A].state(Held(weights=2, kv=5, kv_spare=4))
    assert (cached.kv_pages, cached.spare_pages, cached.wanted_pages) == (5, 4, 0)


def test_the_first_fetch_brings_the_pages_that_the_check_needs() -> None:
    new = World(10, {"a": 2})
    new.hear(Placed(spec("a")))
    new.out, new.engines[A] = None, Engine(2, 4)
    assert new.hear(Built(A, 2.0, 2, 4, Held(kv_wanted=3))) == [Fetch(A, 3)]


def test_a_model_too_large_for_the_device_says_so_in_numbers_and_is_not_tried_again() -> None:
    new = World(5, {"a": 2})
    new.hear(Placed(spec("a")))
    assert kinds(new.answer()) == [Close]
    new.answer()
    model = new.instance.models[A]
    assert model.residency is Residency.FAILED
    error = model.failures.error
    assert "6 pages (12 MiB)" in error and "5 pages (10 MiB)" in error and "max_model_len" in error
    assert new.instance.next_tick() is None
    assert kinds(new.hear(Placed(spec("a")))) == [Build]


def test_a_request_for_a_sleeping_model_waits_until_it_is_back() -> None:
    one = world(a=2)
    assert one.hear(Ordered(A, awake=False)) == [Park(A)]
    assert one.leave(A) == [Evict(A, 2)]
    assert phase(one, A) is Phase.STAGED and one.instance.pages.used == 0
    assert ask(one, "a") == [Fetch(A, 1)]
    assert one.arrive() == [Check(A)]
    assert kinds(one.answer()) == [Add, Step]
    assert one.instance.models[A].state(Held()).load_ms == 500.0


def test_a_model_says_which_of_its_pages_no_request_needs() -> None:
    state = world(a=2).instance.models[A].state(Held(kv=7, kv_spare=3))
    assert (state.kv_pages, state.spare_pages) == (7, 3)


def test_a_model_says_what_its_requests_need_of_the_devices_memory() -> None:
    one = world(a=2, kv_bytes=5)
    assert one.instance.models[A].state(Held()).least_bytes is None
    one.hear(Ordered(A, awake=False))
    one.leave(A)
    ask(one, "a", "a", "a")
    state = one.instance.models[A].state(Held())
    assert (state.head_bytes, state.queued_bytes, state.least_bytes) == (5, 10, 5)
    one.arrive()
    one.answer()
    state = one.instance.models[A].state(Held())
    assert (state.head_bytes, state.queued_bytes, state.least_bytes) == (0, 0, 0)


def test_one_that_may_come_finds_pages_that_nobody_has_and_takes_them_from_nobody() -> None:
    one = world(total=12, a=2, b=2, kv_bytes=PAGE_BYTES // 128)
    held, free = one.instance.pages.of(A), one.instance.pages.free
    assert held.kv_spare == 1 and free >= 5
    assert one.hear(prepared(B, 128 * (free + 2))) == [], "there are not so many"
    assert one.hear(prepared(A, 3 * 128)) == [Grow(A, 3 - held.kv + 2)]
    assert one.hear(prepared(A, 3 * 128)) == [], "they are there"
    assert one.hear(prepared(A, 5 * 128)) == [Grow(A, 2)]
    one.hear(Ordered(A, awake=False))
    one.leave(A)
    assert one.hear(prepared(A, 1)) == [], "it is asleep, and comes by the usual way"


def test_a_model_with_requests_is_not_put_to_sleep() -> None:
    one = world(a=2)
    ask(one, "a")
    assert one.hear(Ordered(A, awake=False)) == []
    one.settle()
    assert phase(one, A) is Phase.RESIDENT


def test_an_idle_model_leaves_when_its_time_is_up_and_its_weights_stay_as_cache() -> None:
    one = World(10, {"a": 2})
    one.hear(Placed(spec("a", idle_s=5.0)))
    one.settle()
    assert one.instance.next_tick() == 5.0
    one.now = 4.9
    assert one.hear() == []
    one.now = 5.0
    assert one.hear() == [Park(A)]
    assert one.leave(A) == []
    assert one.instance.pages.of(A) == Held(weights=2)
    assert ask(one, "a") == [Fetch(A, 1)]


def test_a_device_whose_last_model_left_waits_for_no_time() -> None:
    one = World(10, {"a": 2})
    one.hear(Placed(spec("a", idle_s=5.0)))
    one.settle()
    one.hear(Withdrawn(A))
    one.settle()
    assert not one.instance.models and one.instance.next_tick() is None


def test_an_order_to_wake_brings_a_model_in_without_requests() -> None:
    one = world(a=2)
    one.hear(Ordered(A, awake=False))
    one.settle()
    assert one.hear(Ordered(A, awake=True)) == [Fetch(A, 1)]
    one.settle()
    assert phase(one, A) is Phase.RESIDENT


def test_a_withdrawn_model_loses_its_requests_and_everything_it_holds() -> None:
    one = world(a=2)
    ask(one, "a")
    one.hear(Withdrawn(A))
    assert one.answer() == [Close(A)]
    one.answer()
    assert not one.instance.models and one.instance.pages.used == 0
    (late,) = ask(one, "a")
    assert isinstance(late, Lose) and "not placed" in late.error


def test_a_model_that_is_withdrawn_while_it_is_checked_is_closed_when_that_is_over() -> None:
    new = World(10, {"a": 2})
    new.hear(Placed(spec("a")))
    new.answer()
    new.arrive()
    new.hear(Withdrawn(A))
    assert new.answer() == [Close(A)]


def test_no_request_reaches_a_model_before_its_check() -> None:
    new = World(10, {"a": 2})
    new.hear(Placed(spec("a")))
    ask(new, "a")
    new.answer()
    assert new.arrive() == [Check(A)]
    (lost, close) = new.answer(fails=True)
    assert isinstance(lost, Lose) and "it says other words" in lost.error and close == Close(A)
    assert new.instance.models[A].residency is Residency.FAILED


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_step_loses_that_models_requests_and_no_other() -> None:
    both = world(a=2, b=2)
    ask(both, "a", "b")
    assert kinds(both.answer(fails=True)) == [Lose, Close]
    assert kinds(both.answer()) == [Add, Step]
    assert both.instance.models[B].queues.running and phase(both, A) is Phase.COLD


def test_a_request_that_the_engine_forgot_is_ended() -> None:
    one = world(a=2)
    ask(one, "a")
    one.engines[A].requests.clear()
    (lost,) = one.answer()
    assert isinstance(lost, Lose) and "ended without this request" in lost.error


def test_an_engine_that_fails_outside_a_step_is_closed_and_built_again_when_asked() -> None:
    one = world(a=2)
    assert one.break_engine(A) == [Close(A)]
    one.answer()
    assert ask(one, "a") == [Build(spec("a"))]
    one.settle()
    assert not one.open


def test_a_model_that_cannot_be_built_says_why_to_all_who_wait() -> None:
    new = World(10, {"a": 2})
    new.hear(Placed(spec("a")))
    ask(new, "a")
    (lost,) = new.answer(fails=True)
    assert isinstance(lost, Lose) and "no such file" in lost.error
    (late,) = ask(new, "a")
    assert isinstance(late, Lose) and "no such file" in late.error


def test_a_failed_load_is_tried_again_later_and_later() -> None:
    new = World(10, {"a": 2})
    new.hear(Placed(spec("a")))
    pauses = []
    for _ in range(3):
        assert new.answer(fails=True) == []
        retry_at = new.instance.next_tick()
        assert retry_at is not None
        pauses.append(retry_at - new.now)
        new.now = retry_at - 0.1
        assert new.hear() == []
        new.now = retry_at
        assert kinds(new.hear()) == [Build]
    assert pauses == [30.0, 60.0, 120.0]


def test_a_fetch_that_fails_is_tried_three_times_and_then_its_requests_are_told_why() -> None:
    one = world(a=2)
    one.hear(Ordered(A, awake=False))
    one.settle()
    assert ask(one, "a") == [Fetch(A, 1)]
    assert one.arrive(fails=True) == [Fetch(A, 1)]
    assert one.arrive(fails=True) == [Fetch(A, 1)]
    (lost, close) = one.arrive(fails=True)
    assert isinstance(lost, Lose) and "the copy failed" in lost.error and close == Close(A)
    one.answer()
    assert phase(one, A) is Phase.FAILED and one.instance.next_tick() == one.now + 30.0


def test_a_fetch_that_succeeds_forgives_those_that_failed() -> None:
    one = world(a=2)
    for _ in range(4):
        one.hear(Ordered(A, awake=False))
        one.settle()
        one.hear(Ordered(A, awake=True))
        one.arrive(fails=True)
        one.arrive(fails=True)
        one.settle()
        assert phase(one, A) is Phase.RESIDENT


# ── who gets pages, and whose ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_next_model_is_fetched_while_the_holder_steps() -> None:
    two = world(total=11, a=4, b=4, rest="b")
    assert ask(two, "a")[-1] == step(A)
    ask(two, "b")
    assert two.answer()[-2:] == [Fetch(B, 1), step(A)]
    two.arrive()
    assert two.answer()[-1] == Check(B)
    assert two.answer()[-1] == step(B)


def test_there_is_one_fetch_at_a_time_in_the_order_of_turns() -> None:
    three = world(total=20, a=3, b=3, c=3, rest="abc")
    ask(three, "b", "c", "a")
    assert three.fetching == B
    assert three.arrive()[-2:] == [Fetch(C, 1), Check(B)]
    assert three.answer()[-1] == step(B)


def test_no_page_more_is_taken_than_is_needed_and_clean_weights_go_first() -> None:
    three = world(total=13, a=3, b=4, c=4, rest="ab")
    assert three.instance.pages.free == 1  # a page is c's KV cache
    three.sizes["d"] = 5
    three.hear(Placed(spec("d")))
    assert three.answer() == [Evict(A, 3), Evict(B, 2), Fetch(ModelKey("d"), 1)]
    assert phase(three, C) is Phase.RESIDENT


def test_spare_pages_go_before_a_model_without_requests_is_parked() -> None:
    two = world(total=10, a=4, b=3, tokens_most=1, rest="a")
    ask(two, "b", "b", "b")
    two.settle()
    assert two.instance.pages.of(B) == Held(weights=3, kv=3, kv_spare=3)
    two.hear(Ordered(A, awake=False))
    two.settle()
    assert two.hear(Ordered(A, awake=True)) == [Shrink(B, 1), Fetch(A, 1)]


def test_a_model_without_requests_is_parked_before_one_with_requests() -> None:
    three = world(total=9, a=3, b=3, c=3, quota=8)
    assert [phase(three, key) for key in (A, B, C)] == [Phase.STAGED, Phase.RESIDENT, Phase.RESIDENT]
    ask(three, "c", "a")
    assert three.parking == [B] and three.fetching == A and three.out == step(C)


def test_the_holder_keeps_its_pages_until_its_turn_is_over() -> None:
    two = world(total=7, a=3, b=3, quota=3)
    begin = ask(two, "b", "a")
    assert moves(begin) == moves(two.answer()) == moves(two.answer()) == []
    assert holders(two) == ["b"] * 3
    assert moves(two.answer()) == [Park(B), Evict(B, 1), Grow(A, 1)] and two.out == step(A)


def test_of_models_with_requests_the_one_whose_turn_comes_last_is_parked() -> None:
    three = world(total=9, a=3, b=3, c=3, quota=1)
    ask(three, "b", "c")
    three.answer()
    ask(three, "a")
    assert holders(three) == ["b", "c"]
    assert moves(three.answer()) == [Park(C), Evict(C, 3), Fetch(A, 1)]  # c had its turn
    assert three.out == step(B)


def test_a_parked_models_requests_go_on_where_they_were() -> None:
    two = world(total=7, a=3, b=3)
    ask(two, "a", "b")
    two.settle(200)
    told: dict[RequestId, list[int]] = {}
    for effect in two.log:
        if isinstance(effect, Tell):
            assert effect.at == len(told.setdefault(effect.request.id, []))
            told[effect.request.id] += effect.output.tokens
    assert list(told.values()) == [[1, 2, 3, 4, 5, 6]] * 2
    assert Fetch(A, 3) in two.log and Fetch(B, 3) in two.log  # fetched with room for the parked KV cache


def test_a_model_steps_between_being_fetched_and_being_parked() -> None:
    three = world(total=7, a=4, b=4, c=4)
    start = len(three.log)
    ask(three, "a", "b", "c")
    three.settle(300)
    for key in (A, B, C):
        ours = [
            type(effect)
            for effect in three.log[start:]
            if isinstance(effect, Fetch | Step | Park) and effect.model == key
        ]
        assert not any(pair == (Fetch, Park) for pair in zip(ours, ours[1:], strict=False))


def test_a_model_whose_requests_grow_gets_pages_before_its_step() -> None:
    one = world(total=6, a=2, tokens_most=4)
    assert ask(one, "a")[-1] == step(A)
    one.answer()
    assert one.answer()[-2:] == [Grow(A, 1), step(A)]  # the second token filled the page


def test_growth_parks_models_without_requests() -> None:
    two = world(total=8, a=4, b=3, quota=8)
    ask(two, "a")
    two.answer()
    assert two.answer()[-2:] == [Park(B), step(A)]
    two.leave(B)
    assert two.answer()[-2:] == [Grow(A, 1), step(A)]


def test_growth_parks_no_model_with_requests_in_the_turn_of_another() -> None:
    two = world(total=9, a=4, b=3, quota=8)
    ask(two, "a", "b")
    two.answer()
    assert two.answer()[-1] == step(A)
    assert two.answer()[-1] == step(B)  # a had two tokens and is stuck
    assert not two.parking and two.instance.models[A].demand.stuck


def test_a_stuck_model_gets_its_pages_from_others_when_its_turn_comes() -> None:
    two = world(total=8, a=3, b=3, quota=2)
    ask(two, "a", "b")
    for _ in range(5):
        two.answer()
    assert two.instance.models[A].demand.stuck and two.out == step(B)
    # b is stuck as well, and a comes first.
    assert two.answer() == [Park(B), Evict(B, 1), Grow(A, 1), step(A)]


def make_large(world: World, key: ModelKey, pages: int) -> None:
    """From now on, the first request in the model's engine needs `pages` pages."""
    growing = next(iter(world.engines[key].requests.values()))
    growing.tokens, growing.tokens_most = 2 * (pages - 1), 99


def test_a_stuck_model_steps_again_when_a_request_of_it_is_cancelled() -> None:
    two = world(total=8, a=3, b=3, quota=8)
    ask(two, "a", "b", "a")
    make_large(two, A, 3)
    assert two.answer()[-1] == step(B) and two.instance.models[A].demand.stuck
    two.open.discard(two.asked[0])
    two.hear(Cancelled([two.asked[0]]))
    assert not two.instance.models[A].demand.stuck


def test_the_one_that_steps_meanwhile_is_parked_last() -> None:
    three = world(total=8, a=3, b=3, c=3, quota=1)
    ask(three, "b", "c")
    make_large(three, B, 4)
    assert three.answer()[-1] == step(C)  # b is stuck
    ask(three, "a")
    assert moves(three.answer()) == [Park(B)] and three.out == step(C)
    three.leave(B)
    assert moves(three.answer()) == [Evict(B, 3), Fetch(A, 1)] and three.out == step(C)


def test_a_model_that_got_pages_keeps_them_until_it_stepped() -> None:
    three = world(total=8, a=3, b=3, c=3, quota=8, rest="ab", tokens_a_page=100)
    ask(three, "b")
    three.settle()
    three.hear(Ordered(B, awake=False))
    three.settle()
    ask(three, "c", "b")
    assert three.fetching == B and three.out == step(C)
    three.arrive()
    assert [three.answer()[-1], three.answer()[-1]] == [Check(B), step(C)]
    ask(three, "a")  # a's turn would come before b's turn
    assert three.answer()[-1] == step(C) and not three.parking


def test_no_model_is_parked_for_room_that_is_on_its_way() -> None:
    four = world(total=12, a=3, b=3, c=3, d=3)
    assert phase(four, A) is Phase.STAGED and four.instance.pages.free == 0
    four.hear(Ordered(A, awake=True))
    assert four.parking == [B]
    four.hear(Ordered(C, awake=True))  # c is awake: nothing changes
    assert four.parking == [B]


def test_requests_that_wait_for_a_resident_model_keep_the_pages_that_they_will_use() -> None:
    two = world(total=9, a=4, b=3, quota=8)
    ask(two, "a", "b")
    two.answer()
    assert moves(two.answer()) == [] and two.instance.pages.of(B).kv == 1  # a would grow


def test_a_request_joins_when_there_are_pages_for_it_and_no_sooner() -> None:
    one = world(total=8, a=4, tokens_a_page=1, tokens_most=2)
    effects = ask(one, *["a"] * 4)
    assert kinds(effects).count(Add) == 4  # the sizes are unknown: the engine will say
    one.settle()
    known = World(8, {"a": 4}, tokens_a_page=1, tokens_most=2)
    known.hear(Placed(spec("a", kv_bytes_per_token=PAGE_BYTES)))
    known.settle()
    effects = ask(known, *["a"] * 4)
    assert moves(effects) == [Grow(A, 3)] and kinds(effects).count(Add) == 3
    assert {len(model.queues.waiting) for model in known.instance.models.values()} == {1}
    known.settle()
    assert not known.open


def test_what_the_pool_can_never_give_is_not_waited_for() -> None:
    two = world(total=6, a=2, b=2)
    ask(two, *["a"] * 9, *["b"] * 9)  # at the end each model needs 4 pages
    two.settle(800)
    assert not two.open and Fetch(A, 4) in two.log


def test_while_pages_are_on_their_way_the_books_do_not_follow_the_engine() -> None:
    one = world(a=2, rest="a")
    ask(one, "a")
    one.instance.hear(Told(A, Held(0, 0, 3)), 0.0)
    assert one.instance.pages.of(A) == Held(2, 1, 3)


@pytest.mark.parametrize("models", [2, 4, 6])
def test_every_request_gets_its_next_token_after_a_bounded_number_of_device_effects(models: int) -> None:
    """No two models fit at once. A turn takes a check and two steps at most. A request without a page at the fetch of
    its model gets its token a turn of the model later."""
    sizes = dict.fromkeys("abcdef"[:models], 5)
    crowded = world(total=7, tokens_most=2, **sizes)
    ask(crowded, *sizes, *sizes)
    waits = dict.fromkeys(crowded.open, 0)
    while crowded.open:
        start = len(crowded.log)
        if crowded.fetching is not None:
            crowded.arrive()
        elif crowded.parking:
            crowded.leave(crowded.parking[0])
        else:
            crowded.answer()
            waits = {id: waits[id] + 1 for id in crowded.open}
        waits.update((effect.request.id, 0) for effect in crowded.log[start:] if isinstance(effect, Tell))
        assert max(waits.values(), default=0) <= 2 * models * 3, waits


def test_a_model_that_fits_only_without_a_pinned_one_is_not_kept_waiting() -> None:
    two = World(9, {"a": 5, "b": 5})
    two.hear(Placed(msgspec.structs.replace(spec("a"), pinned=True)))
    two.settle()
    two.hear(Placed(spec("b")))
    two.settle()
    assert phase(two, B) is Phase.RESIDENT
    assert phase(two, A) is Phase.STAGED
