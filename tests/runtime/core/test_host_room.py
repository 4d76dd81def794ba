"""Images beyond the host cache: who goes down, who comes up, and no request is lost on the way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.core.device.events import Arrived, Build, Cancelled, Close, FetchFailed, Lose, Ordered, Placed
from runtime.core.device.model import Phase
from runtime.core.device.request import ModelKey, RequestId
from runtime.core.host_room import GIVE_UP_S, RETIRE_S
from store.contract.wire import Residency
from tests.runtime.world import World, request, spec

A, B, C = ModelKey("a"), ModelKey("b"), ModelKey("c")
SIZES = {"a": 4, "b": 6, "c": 3}


def world(host_pages: int, pinned: str = "", **sizes: int) -> World:
    """Models that were all resident once, as after a deployment; the host cache has room for some of their images."""
    made = World(20, dict(sizes or SIZES))
    made.host_pages = host_pages
    for key in made.sizes:
        made.hear(Placed(replace(spec(key, idle_s=1000.0), pinned=key in pinned)))
        made.settle()
        made.now += 10.0
    return made


def phases(made: World) -> dict[str, Phase]:
    return {str(key): model.phase for key, model in made.instance.models.items()}


def ask(made: World, stream: int, model: str) -> RequestId:
    asked = request(stream, model, made.now)
    made.open.add(asked.id)
    made.hear(Arrived(asked))
    return asked.id


def serve(made: World, stream: int, model: str) -> None:
    ask(made, stream, model)
    made.settle()
    made.now += 10.0


def test_models_beyond_the_host_cache_are_proved_one_after_another() -> None:
    made = world(host_pages=10)
    assert phases(made) == {"a": Phase.COLD, "b": Phase.RESIDENT, "c": Phase.RESIDENT}
    states = [model.state(made.instance.pages.of(model.key)) for model in made.instance.models.values()]
    assert all(state.was_resident and not state.error for state in states)
    assert states[0].residency is Residency.COLD


def test_models_beyond_the_host_cache_are_served_in_turns() -> None:
    made = world(host_pages=10)
    for round in range(4):
        for at, key in enumerate("abc"):
            serve(made, 10 * round + at, key)
    assert not made.open and not any(isinstance(effect, Lose) for effect in made.log)


def test_the_model_idle_for_longest_goes_and_no_more_than_needed() -> None:
    made = world(host_pages=13)  # room for all
    serve(made, 1, "c")
    serve(made, 2, "a")
    made.host_pages = 15
    made.sizes["d"] = 5
    made.hear(Placed(spec("d", idle_s=1000.0)))
    made.settle()
    assert phases(made) == {"a": Phase.RESIDENT, "b": Phase.COLD, "c": Phase.RESIDENT, "d": Phase.RESIDENT}


def test_a_pinned_model_goes_last() -> None:
    made = world(host_pages=10, pinned="a")
    assert phases(made) == {"a": Phase.RESIDENT, "b": Phase.COLD, "c": Phase.RESIDENT}
    serve(made, 1, "b")
    assert phases(made)["b"] is Phase.RESIDENT and not made.open


def test_an_image_that_nothing_would_bring_back_stays() -> None:
    made = world(host_pages=10)
    made.kept = (B,)
    serve(made, 1, "a")
    assert phases(made) == {"a": Phase.RESIDENT, "b": Phase.RESIDENT, "c": Phase.COLD}


def test_a_model_without_room_fails_when_no_image_could_ever_go() -> None:
    made = world(host_pages=4, a=4)
    made.kept = (A,)
    made.sizes["c"] = 3
    made.hear(Placed(spec("c")))
    ask(made, 1, "c")
    began = made.now
    made.answer()
    while made.instance.models[C].phase is not Phase.FAILED:
        tick_at = made.instance.next_tick()
        assert tick_at is not None and tick_at <= began + GIVE_UP_S + 2
        made.now = tick_at
        made.hear()
        if made.out is not None:
            made.answer()
    assert phases(made) == {"a": Phase.RESIDENT, "c": Phase.FAILED} and not made.open


def test_a_model_with_work_retires_for_a_model_that_waits_for_long_and_loses_no_request() -> None:
    made = World(20, {"a": 4, "c": 3}, tokens_most=10_000, tokens_a_page=10_000)
    made.host_pages = 6
    made.hear(Placed(spec("a")))
    made.settle()
    made.hear(Placed(spec("c")))
    ask(made, 1, "a")
    ask(made, 2, "c")
    began = made.now
    while not made.instance.models[A].demand.retires:
        assert made.now - began < RETIRE_S + 5
        made.answer()
        made.now += 0.25
    waits = ask(made, 3, "a")
    assert [*made.instance.models[A].queues.waiting] == [waits], "the batch takes no request any more"
    while made.open:
        if made.fetching is not None:
            made.arrive()
        elif made.out is not None:
            made.answer(finishes=lambda id: True)
        else:
            made.now += 1.0
            made.hear()
    built = [effect.spec.key for effect in made.log if isinstance(effect, Build)]
    assert built[-1] == "a" and Close(A) in made.log and Close(C) in made.log
    assert not any(isinstance(effect, Lose) for effect in made.log)


def test_a_lost_image_is_built_again_and_its_requests_wait() -> None:
    made = world(host_pages=13)
    model = made.instance.models[A]
    made.hear(Ordered(A, awake=False))
    made.settle()
    assert model.phase is Phase.STAGED and not made.engines[A].weights
    ask(made, 1, "a")
    assert made.fetching == A
    made.fetching, made.engines[A].kv = None, 0
    made.hear(FetchFailed(A, "damaged", made.engines[A].held(), lost=True))
    made.settle()
    assert [effect for effect in made.log if effect == Close(A)] == [Close(A)]
    assert sum(isinstance(effect, Build) and effect.spec.key == "a" for effect in made.log) == 2
    assert not made.open and not any(isinstance(effect, Lose) for effect in made.log)


@settings(max_examples=150)
@given(data=st.data())
def test_under_any_order_every_request_is_served_or_cancelled(data: st.DataObject) -> None:
    made = world(host_pages=data.draw(st.integers(6, 13)))
    stream = 100
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["arrive", "arrive", "answer", "move", "wait", "cancel"])):
            case "arrive":
                stream += 1
                ask(made, stream, data.draw(st.sampled_from("abc")))
            case "answer" if made.out is not None:
                made.answer()
            case "move" if made.fetching is not None:
                made.arrive()
            case "move" if made.parking:
                made.leave(made.parking[0])
            case "wait":
                made.now += data.draw(st.floats(0.01, 8.0))
                made.hear() if made.out is None else None
            case "cancel" if made.open:
                cancelled = data.draw(st.sampled_from(sorted(made.open)))
                made.open.remove(cancelled)
                made.hear(Cancelled([cancelled]))
    made.settle(most=1000)
    assert not made.open and not any(isinstance(effect, Lose) for effect in made.log)
