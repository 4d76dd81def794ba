"""Grouped prefill: groups of a model without starving other models. A request is served once, and joins the queue of
the earliest completion."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.device.request import ModelKey, RequestId
from runtime.core.turns.groups import GROUP_MOST, Prefill, Queue, choose

SWITCH_S = 0.6


def prefill(number: int, model: str, work_s: float = 0.1) -> Prefill:
    return Prefill(RequestId(f"{number:04}"), ModelKey(model), work_s, SWITCH_S)


def queue(*prefills: Prefill, most: float = 5.0, id: int = 0) -> Queue:
    made = Queue(id, most)
    for each in prefills:
        made.add(each)
    return made


@dataclass
class Served:
    """A device that serves a queue."""

    queue: Queue
    waiting: set[RequestId] = field(default_factory=set)
    done: list[Prefill] = field(default_factory=list)
    now: float = 0.0

    def add(self, prefill: Prefill) -> None:
        self.waiting.add(prefill.request)
        self.queue.add(prefill)

    def serve(self, *able: str) -> bool:
        group = self.queue.next(
            lambda prefill: prefill.request in self.waiting, lambda model: not able or model in able
        )
        if group is None:
            return False
        self.queue.begin(group, self.now)
        self.waiting.remove(group.waiting[0].request)
        self.done.append(group.waiting[0])
        self.now = self.queue.busy_until
        return True

    def serve_all(self) -> str:
        while self.serve():
            pass
        return "".join(prefill.model for prefill in self.done)


def served(*prefills: Prefill, most: float = 5.0) -> Served:
    device = Served(Queue(group_s_most=most))
    for each in prefills:
        device.add(each)
    return device


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_of_one_model_are_served_together_and_in_their_order() -> None:
    device = served(prefill(1, "a"), prefill(2, "b"), prefill(3, "a"), prefill(4, "b"))
    assert device.serve_all() == "aabb"
    assert [each.request for each in device.done] == ["0001", "0003", "0002", "0004"]


def test_a_group_has_eight_requests_at_most() -> None:
    assert served(*(prefill(n, "a" if n else "b") for n in range(11))).serve_all() == "b" + "a" * 10
    assert served(*(prefill(n, "a") for n in range(9)), prefill(9, "b"), prefill(10, "a")).serve_all() == "a" * 10 + "b"
    assert served(*(prefill(n, "a") for n in range(8)), prefill(8, "b"), prefill(9, "a")).serve_all() == "a" * 8 + "ba"


def test_who_was_served_keeps_its_place_so_a_hot_model_does_not_fill_the_group_for_ever() -> None:
    device = served(prefill(0, "hot"), prefill(1, "cold"))
    for number in range(2, 50):
        device.add(prefill(number, "hot"))
        device.serve()
    assert [each.model for each in device.done].index(ModelKey("cold")) <= GROUP_MOST


def test_who_was_served_counts_in_a_group_that_began_alone_too() -> None:
    device = served(*(prefill(n, "a") for n in range(4)))
    assert device.serve() and device.serve()
    for number, model in enumerate("aaaa" + "b" + "a", start=4):
        device.add(prefill(number, model))
    assert device.serve_all() == "a" * 8 + "ba"


def test_a_group_that_begins_while_others_wait_is_closed() -> None:
    device = served(prefill(1, "a"), prefill(2, "a"), prefill(3, "b"))
    device.serve()
    device.add(prefill(4, "a"))
    assert device.serve_all() == "aaba"


def test_a_group_that_begins_alone_takes_more_while_it_is_alone() -> None:
    device = served(prefill(1, "a"), prefill(2, "a"))
    device.serve()
    device.add(prefill(3, "a"))
    device.add(prefill(4, "b"))
    assert device.serve_all() == "aaab"


def test_once_others_wait_a_group_takes_no_more_work_than_its_most() -> None:
    long = [prefill(n, "a", work_s=2.0) for n in range(3)]
    alone = queue(*long)
    assert [group.admitted for group in alone.groups] == [3]
    waited_for = queue(long[0], prefill(9, "b"), *long[1:])
    assert [(group.model, group.admitted) for group in waited_for.groups] == [("a", 2), ("b", 1), ("a", 1)]


def test_a_prompt_longer_than_the_most_has_a_group_of_its_own() -> None:
    assert [group.admitted for group in queue(prefill(1, "a", 9.0), prefill(2, "b"), prefill(3, "a")).groups] == [
        1,
        1,
        1,
    ]


def test_who_cancels_leaves_and_an_empty_group_goes() -> None:
    device = served(prefill(1, "a"), prefill(2, "b"), prefill(3, "b"), prefill(4, "c"))
    device.waiting -= {RequestId("0002"), RequestId("0003")}
    assert device.serve_all() == "ac" and not device.queue.groups


def test_a_model_that_cannot_run_lets_others_go_before_and_keeps_its_place() -> None:
    device = served(prefill(1, "a"), prefill(2, "b"), prefill(3, "c"))
    assert device.serve("b", "c")
    assert device.serve_all() == "bac"


EVENTS = st.lists(
    st.one_of(st.sampled_from(["hot"] * 3 + ["b", "c", "serve", "serve", "cancel"])), min_size=1, max_size=120
)


@given(EVENTS, st.floats(0.1, 3.0), st.randoms(use_true_random=False))
def test_every_request_is_served_once_and_waits_for_no_more_than_the_groups_before_it(events, most, random) -> None:  # type: ignore[no-untyped-def]
    device, cancelled = served(most=most), set()
    bound: dict[RequestId, int] = {}
    for number, event in enumerate(events):
        if event == "serve":
            device.serve()
        elif event == "cancel" and device.waiting:
            id = random.choice(sorted(device.waiting))
            device.waiting.remove(id)
            cancelled.add(id)
        elif event != "cancel":
            device.add(new := prefill(number, event, random.uniform(0.05, 1.0)))
            groups = [i for i, group in enumerate(device.queue.groups) if new in group.waiting]
            assert len(groups) == 1
            bound[new.request] = len(device.done) + GROUP_MOST * (groups[0] + 1) - 1
    device.serve_all()
    order = [each.request for each in device.done]
    assert sorted(order) == sorted(set(bound) - cancelled)
    assert all(place <= bound[id] for place, id in enumerate(order))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.05, 4.0)), max_size=60), st.floats(0.1, 3.0))
def test_no_group_that_others_wait_for_has_more_work_than_its_most_unless_it_was_there_before(arrivals, most) -> None:  # type: ignore[no-untyped-def]
    made = queue(most=most)
    for number, (model, work_s) in enumerate(arrivals):
        before = [group.admitted_s for group in made.groups]
        made.add(prefill(number, model, work_s))
        grown = [group for group, was in zip(made.groups, before, strict=False) if group.admitted_s > was]
        assert all(group.admitted_s <= most or group is made.groups[-1] for group in grown)
        assert all(1 <= group.admitted <= GROUP_MOST for group in made.groups)


# ── several devices ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_group_of_the_model_is_joined_wherever_it_is() -> None:
    queues = [queue(id=0), queue(prefill(1, "b", 3.0), prefill(2, "a", 3.0), id=1)]
    assert choose(queues, prefill(3, "a"), 0.0).id == 1
    assert choose(queues, prefill(3, "c"), 0.0).id == 0


def test_the_switch_and_what_is_under_way_count() -> None:
    here, there = queue(prefill(1, "a", 0.3), id=0), queue(prefill(2, "b", 0.2), id=1)
    assert here.finish_at(prefill(3, "c"), 1.0) == 1.0 + SWITCH_S + 0.3 + SWITCH_S + 0.1
    here.current = ModelKey("a")
    assert here.finish_at(prefill(3, "c"), 1.0) == 1.0 + 0.3 + SWITCH_S + 0.1
    assert choose([here, there], prefill(3, "c"), 1.0).id == 0
    here.busy_until = 9.0
    assert choose([here, there], prefill(3, "c"), 1.0).id == 1


def test_no_switch_follows_a_last_group_of_the_same_model() -> None:
    queues = [queue(*(prefill(n, "a", 0.05) for n in range(8)), id=0), queue(id=1)]
    assert queues[0].finish_at(prefill(9, "a"), 0.0) == SWITCH_S + 8 * 0.05 + 0.1
    assert queues[1].finish_at(prefill(9, "a"), 0.0) == SWITCH_S + 0.1


def test_of_equal_queues_the_first_id_is_taken() -> None:
    assert choose([queue(id=2), queue(id=1)], prefill(1, "a"), 0.0).id == 1
