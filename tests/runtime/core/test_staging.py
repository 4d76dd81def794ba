"""Staging by order and by the history of requests: images come up to the host cache, and other images give way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.core.device.events import Arrived, Build, Close, Lose, Placed, StageImage, Warmed
from runtime.core.device.model import Phase
from runtime.core.device.request import ModelKey
from runtime.core.staging import GAPS_LEAST, SPREAD, ImageUse, expected_in_s, giving_way, rhythm
from tests.runtime.world import World, request, spec

A, B, C = ModelKey("a"), ModelKey("b"), ModelKey("c")
GAPS = st.lists(st.floats(15, 1000), max_size=40)


# ── the decisions ─────────────────────────────────────────────────────────────────────────────────────────────────────


@given(short=st.integers(0, 100), at=st.floats(0, 100), data=st.data())
def test_only_images_used_later_give_way_and_none_without_need(short: int, at: float, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 200)), max_size=8))
    images = [ImageUse(ModelKey(str(number)), size, used) for number, (size, used) in enumerate(sizes)]
    taken = giving_way(short, at, images)
    later = [image for image in images if image.at > at]
    if taken is None:
        assert sum(image.bytes for image in later) < short
        return
    gone = [image for image in images if image.model in taken]
    assert all(image in later for image in gone)
    kept = [image for image in later if image not in gone]
    assert all(each.at >= other.at for each in gone for other in kept), "an image used sooner went first"
    assert sum(image.bytes for image in gone) >= short
    assert not gone or sum(image.bytes for image in gone) - gone_last(gone, taken) < short, "one image more than needed"


def gone_last(gone: list[ImageUse], taken: list[ModelKey]) -> int:
    return next(image.bytes for image in gone if image.model == taken[-1])


@given(gaps=GAPS, idle_s=st.floats(0, 1000))
def test_a_rhythm_lies_ahead_and_is_narrow(gaps: list[float], idle_s: float) -> None:
    found = rhythm(gaps, idle_s)
    assert expected_in_s(gaps, idle_s) >= 0
    if found is not None:
        assert idle_s < found.low_s <= found.middle_s <= found.high_s
        assert found.high_s - found.low_s <= SPREAD * found.middle_s
        assert expected_in_s(gaps, idle_s) == found.middle_s - idle_s
    elif sum(gap > idle_s for gap in gaps[-32:]) < GAPS_LEAST:
        assert expected_in_s(gaps, idle_s) == idle_s


# ── the machine ───────────────────────────────────────────────────────────────────────────────────────────────────────


def world(host_pages: int, **sizes: int) -> World:
    """Make models that were resident once. The host cache has room for some of the images."""
    made = World(20, dict(sizes or {"a": 4, "b": 4, "c": 4}), by_history=True)
    made.host_pages = host_pages
    for key in made.sizes:
        made.hear(Placed(replace(spec(key, idle_s=1000.0))))
        made.settle()
        made.now += 10.0
    return made


def phase(made: World, key: ModelKey) -> Phase:
    return made.instance.models[key].phase


def serve(made: World, model: str) -> None:
    asked = request(len(made.taken) + 1, model, made.now)
    made.open.add(asked.id)
    made.hear(Arrived(asked))
    made.settle()


def rest(made: World, seconds: float) -> None:
    """Let time pass. The machine decides at each tick."""
    until = made.now + seconds
    while made.now < until:
        tick_at = made.instance.next_tick()
        made.now = min(until, tick_at if tick_at is not None and tick_at > made.now else until)
        made.hear()
        made.settle()


def staged(made: World, since: int = 0) -> list[str]:
    return [effect.spec.key for effect in made.log[since:] if isinstance(effect, StageImage)]


def taught(made: World, model: str, period_s: float = 60.0, times: int = 6) -> None:
    """Ask for a model in a rhythm."""
    for _ in range(times):
        serve(made, model)
        rest(made, period_s)


def down(made: World, model: ModelKey, by: str) -> None:
    """Have the image of a model leave the host cache: the model `by` needs the room."""
    serve(made, by)
    assert phase(made, model) is Phase.COLD, f"{made.instance.models}"


def crowded_out() -> World:
    """A world in which model "a", whose requests have a rhythm, rests, and other models took the room of the image."""
    made = world(host_pages=12)
    taught(made, "a")
    serve(made, "a")
    made.host_pages = 8
    rest(made, 10.0)
    made.sizes["d"] = 4
    made.hear(Placed(spec("d", idle_s=1000.0)))
    made.settle()
    serve(made, "b")
    serve(made, "c")
    return made


def test_a_model_with_a_rhythm_comes_up_before_its_request_and_a_hit_is_no_miss() -> None:
    made = crowded_out()
    assert phase(made, A) is Phase.COLD
    rest(made, 60.0 - 10.0 - 8.0)
    assert phase(made, A) is Phase.COLD, "it is too early"
    rest(made, 7.0)
    assert staged(made)[-1] == "a" and phase(made, A) is Phase.STAGED
    before = len(made.log)
    serve(made, "a")
    assert not any(isinstance(effect, Build | StageImage) for effect in made.log[before:]), "the engine was there"
    record = made.instance.models[A].staging
    assert (record.staged, record.unused, record.unasked) == (1, 0, False)


def test_a_model_that_nobody_asks_for_counts_as_a_miss_and_the_gap_stages_it_once() -> None:
    made = crowded_out()
    rest(made, 50.0)
    assert phase(made, A) is Phase.STAGED
    record = made.instance.models[A].staging
    for round in range(4):
        serve(made, "bcd"[round % 3])
    assert phase(made, A) is Phase.COLD and (record.staged, record.unused) == (1, 1)
    before = len(made.log)
    rest(made, 500.0)
    assert not staged(made, before), "the same history brought the image back again"


def test_a_model_whose_request_was_near_when_it_left_is_not_brought_back() -> None:
    made = world(host_pages=12)
    taught(made, "a")
    serve(made, "a")
    rest(made, 59.0)
    made.host_pages = 8
    made.sizes["d"] = 4
    made.hear(Placed(spec("d", idle_s=1000.0)))
    made.settle()
    serve(made, "b")
    serve(made, "c")
    assert phase(made, A) is Phase.COLD
    before = len(made.log)
    rest(made, 200.0)
    assert not staged(made, before)


def test_without_history_nothing_is_staged() -> None:
    made = world(host_pages=8)
    for _ in range(20):
        for model in "abc":
            serve(made, model)
        rest(made, 3.0)
    assert not staged(made)


def test_an_ordered_model_comes_up_and_stays_while_others_take_turns() -> None:
    made = world(host_pages=12, a=4, b=4, c=4, d=4)
    for model in "bcd":
        serve(made, model)
        made.now += 10.0
    assert phase(made, A) is Phase.COLD
    made.hear(Warmed(A, True))
    rest(made, 1.0)
    assert phase(made, A) is Phase.STAGED and staged(made) == ["a", "a"], "first no room, then the image"
    for model in "bcdbcd":
        serve(made, model)
        made.now += 10.0
        assert phase(made, A) is not Phase.COLD
    made.hear(Warmed(A, False))
    for model in "bcd":
        serve(made, model)
        made.now += 10.0
    assert phase(made, A) is Phase.COLD and made.instance.models[A].staging.staged == 0


def test_a_warm_image_goes_only_if_a_request_could_not_be_served_otherwise_and_comes_back() -> None:
    made = world(host_pages=6, a=4, b=4)
    made.hear(Warmed(A, True))
    rest(made, 20.0)
    assert phase(made, A) is not Phase.COLD
    serve(made, "b")
    assert phase(made, A) is Phase.COLD and not made.open
    rest(made, 60.0)
    assert phase(made, A) is not Phase.COLD, "the image is back"


def test_two_warm_models_that_do_not_fit_together_do_not_push_each_other_out() -> None:
    made = world(host_pages=6, a=4, b=4)
    made.hear(Warmed(A, True), Warmed(B, True))
    rest(made, 20.0)
    before = len(made.log)
    rest(made, 300.0)
    assert not any(isinstance(effect, Close) for effect in made.log[before:])


@settings(max_examples=100)
@given(data=st.data())
def test_under_any_order_the_room_suffices_and_every_request_is_served(data: st.DataObject) -> None:
    made = world(host_pages=12)
    for model in data.draw(st.sets(st.sampled_from("abc"))):
        taught(made, model, data.draw(st.sampled_from([20.0, 45.0])), times=5)
    made.host_pages = data.draw(st.integers(4, 11))
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["serve", "rest", "warm", "answer", "fail"])):
            case "serve":
                serve(made, data.draw(st.sampled_from("abc")))
            case "rest":
                rest(made, data.draw(st.floats(0.5, 60.0)))
            case "warm":
                made.hear(Warmed(ModelKey(data.draw(st.sampled_from("abc"))), data.draw(st.booleans())))
            case "answer" if made.out is not None:
                made.answer()
            case "fail" if isinstance(made.out, StageImage) and made.out.later is not None:
                made.answer(fails=True)
        held = sum(engine.weights_pages for engine in made.engines.values())
        assert held <= max(made.host_pages, 12)
    made.settle(most=1000)
    assert not made.open and not any(isinstance(effect, Lose) for effect in made.log)
    assert not any(model.failures.error for model in made.instance.models.values())
    for model in made.instance.models.values():
        assert model.staging.unused <= model.staging.staged


# ── models served by an earlier process of the device ─────────────────────────────────────────────────────────────────


def returned(host_pages: int, *models: str) -> World:
    """A new device whose models were all served by an earlier process. The host cache has no image."""
    made = World(20, {model: 4 for model in models}, by_history=True)
    made.host_pages = host_pages
    made.hear(*(Placed(spec(model, idle_s=1000.0), prove=False, noted=True) for model in models))
    made.settle()
    rest(made, 10.0)
    return made


def test_returned_models_come_up_in_free_room_in_their_order_and_no_image_goes_for_them() -> None:
    made = returned(8, "c", "a", "b", "d")
    assert staged(made) == ["c", "a", "b"], "for the third image there is no room, and nothing else is tried"
    assert [phase(made, key) for key in (C, A, B)] == [Phase.STAGED, Phase.STAGED, Phase.COLD]
    assert not any(isinstance(effect, Close) for effect in made.log)
    record = made.instance.models[A].staging
    assert (record.staged, record.unused, record.unasked) == (0, 0, False), "no guess was made"


def test_a_returned_model_that_is_asked_for_is_built_for_its_request_alone() -> None:
    made = World(20, {"a": 4}, by_history=True)
    made.hear(Placed(spec("a", idle_s=1000.0), prove=False, noted=True))
    serve(made, "a")
    rest(made, 10.0)
    assert len([effect for effect in made.log if isinstance(effect, Build | StageImage)]) == 1


def test_without_images_on_disk_a_returned_model_waits_for_its_request() -> None:
    made = World(20, {"a": 4})
    made.hear(Placed(spec("a"), prove=False, noted=True))
    made.settle()
    rest(made, 10.0)
    assert not made.log
