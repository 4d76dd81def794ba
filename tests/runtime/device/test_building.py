"""Builds in the device process: orders for images, slices, and what the node hears."""

from __future__ import annotations

from runtime import ipc
from runtime.core.device.request import ModelKey
from runtime.device.building import BuildPace, ImageOrders
from store.contract.wire import Residency
from tests.runtime.device.test_device import TOKENS, Node, spec

A, B, C = ModelKey("a"), ModelKey("b"), ModelKey("c")


class Orders:
    """Orders for images, of which the host cache has the models in `cached`."""

    def __init__(self, *cached: str) -> None:
        self.cached, self.wanted = set(cached), set[str]()
        self.sent: list[ipc.MakeImage | ipc.StopImage] = []
        self.orders = ImageOrders(
            lambda spec: spec.key in self.cached, lambda model: model in self.wanted, self.sent.append
        )

    def order(self, key: str) -> bool:
        return self.orders.order(spec(key))

    def asked(self) -> list[str]:
        return [sent.spec.key for sent in self.sent if isinstance(sent, ipc.MakeImage)]


def test_a_model_with_an_image_waits_for_none() -> None:
    orders = Orders("a")
    assert not orders.order("a") and orders.sent == []


def test_images_are_made_one_at_a_time_and_first_for_models_with_requests() -> None:
    orders = Orders()
    assert all(orders.order(key) for key in "abcd")
    assert orders.asked() == ["a"]
    orders.wanted = {"c"}
    orders.orders.made(A)
    assert orders.asked() == ["a", "c"]
    orders.orders.made(C)
    orders.orders.made(B)
    assert orders.asked() == ["a", "c", "b", "d"]


def test_an_order_that_is_taken_back_is_stopped_at_the_node_and_the_next_follows() -> None:
    orders = Orders()
    for key in "abc":
        orders.order(key)
    orders.orders.cancel(B)
    assert orders.sent[1:] == [ipc.StopImage("b")] and orders.asked() == ["a"]
    orders.orders.made(B)  # the node's answer
    assert orders.asked() == ["a"]
    orders.orders.cancel(A)
    orders.orders.made(A)
    assert orders.asked() == ["a", "c"]
    orders.orders.cancel(ModelKey("unknown"))
    assert orders.sent[-1] == ipc.MakeImage(spec("c"))


def served(node: Node) -> int:
    """Tokens made so far, of all models."""
    return sum(len(made) for made in node.made)


def test_other_models_step_while_an_image_is_made_and_requests_wait_for_it() -> None:
    cached = {"a"}
    node = Node(cached)
    node.send(ipc.Place(spec("a")), ipc.Place(spec("b")), node.start(model="b"), node.start(model="a"))

    def only_one_was_served() -> bool:
        if served(node) == TOKENS and node.orders and node.model("b").waiting == 1:
            assert node.model("b").residency is Residency.LOADING and "b" not in node.build.engines
            cached.add("b")
            return True
        return False

    node.when(only_one_was_served, ipc.ImageMade("b"))
    node.run(until=lambda: served(node) == 2 * TOKENS)
    assert node.orders == [ipc.MakeImage(spec("b"))] and not node.lost


def test_an_image_that_can_not_be_made_fails_the_model_with_the_reason_and_no_other() -> None:
    node = Node({"a"})
    why = "the process that made its image ended with signal 11"
    node.send(ipc.Place(spec("a")), ipc.Place(spec("b")), node.start(model="b"))
    node.when(lambda: bool(node.orders), ipc.ImageMade("b", why), node.start(model="a"))
    node.run(until=lambda: served(node) == TOKENS and node.model("b").residency is Residency.FAILED)
    assert node.lost == [f"the model could not be loaded: {why}"]


def test_a_model_withdrawn_while_its_image_is_made_is_gone_once_the_node_has_answered() -> None:
    node = Node(set())
    node.send(ipc.Place(spec("b")), node.start(model="b"))
    node.when(lambda: bool(node.orders), ipc.Withdraw("b"))
    node.when(lambda: len(node.orders) == 2, ipc.ImageMade("b"))
    node.run(until=lambda: len(node.orders) == 2 and "b" not in node.states[-1].models)
    assert node.orders[-1] == ipc.StopImage("b")


def test_a_model_that_is_placed_again_meanwhile_has_its_image_ordered_again() -> None:
    node = Node(set())
    node.send(ipc.Place(spec("b")))
    node.when(lambda: bool(node.orders), ipc.Withdraw("b"), ipc.Place(spec("b")))
    node.when(lambda: len(node.orders) == 2, ipc.ImageMade("b"))
    node.run(until=lambda: len(node.orders) == 3)
    assert node.orders == [ipc.MakeImage(spec("b")), ipc.StopImage("b"), ipc.MakeImage(spec("b"))]


def test_the_pace_of_builds_is_that_of_the_last_builds_by_bytes_and_no_less_than_the_shortest() -> None:
    pace = BuildPace()
    assert pace.expected_s(100) is None
    pace.note(100, 2.0)
    pace.note(300, 4.0)
    assert (pace.expected_s(200), pace.expected_s(800), pace.expected_s(1)) == (3.0, 12.0, 2.0)
    for _ in range(16):
        pace.note(0, 1.0)  # earlier builds count no more
    assert pace.expected_s(0) == 1.0


def test_models_hear_their_place_in_the_queue_of_builds_and_the_time_until_their_engine_is_built() -> None:
    cached = {"a"}
    node = Node(cached)
    node.send(*(ipc.Place(spec(key)) for key in "abcd"), node.start(model="d"))

    def places() -> dict[str, int]:
        return {key: state.build_place for key, state in node.states[-1].models.items()} if node.states else {}

    def seen(expected: dict[str, int], *images: str) -> bool:
        """Whether the places are as expected; then the host cache has the images from now on."""
        if places() == expected:
            cached.update(images)
        return places() == expected

    # A request waits for "d", and no image is given up half made.
    node.when(lambda: seen({"a": 0, "b": 1, "c": 3, "d": 2}, "b"), ipc.ImageMade("b"))
    node.when(lambda: seen({"a": 0, "b": 0, "c": 2, "d": 1}, "c", "d"), ipc.ImageMade("d"), ipc.ImageMade("c"))
    node.run(until=lambda: seen(dict.fromkeys("abcd", 0)) and served(node) == TOKENS)
    waited = [state.models["c"].build_eta_s for state in node.states if state.models["c"].build_place == 3]
    assert waited[-1] >= 3, "a second or more for each build, once a build has told how long builds take"
