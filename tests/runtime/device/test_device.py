"""The device's loop with scripted engines: tokens of a step are sent before the next step begins, and a failure costs
only requests of a single model."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import pytest

from runtime import ipc
from runtime.core.device.request import RequestId
from runtime.core.engine import BadRequest, EngineError, Held, Hold, Output, Told, WeightSource
from runtime.core.turns.turn import RoundRobin
from runtime.device.loop import Device
from store.contract.device_bytes import DeviceBytes
from store.contract.views import Content, PageRun, Use
from store.contract.wire import EngineSpec, Finish, KvForm, ModelState, Residency, Run, replace
from tests.runtime.world import spec

PAGES_TOTAL, PAGE_BYTES = 8, 2 << 20
WEIGHTS_PAGES = 3
TOKENS = 3  # per request
DEADLINE_S = 20
GONE = (Residency.STAGED, Residency.COLD, Residency.FAILED)


class Scripted:
    """An engine that makes a token per step for each request and notes the calls.

    A request needs one page of KV cache. A transfer is over after a few looks at the transfer.
    """

    weights_pages = WEIGHTS_PAGES
    kv_pages_least = 1
    source = WeightSource.HOST
    owners = (1, 2)
    sequential = False
    ahead = False
    kv_form = KvForm(1, PAGE_BYTES, "scripted")

    def __init__(self, made: list[list[int]]) -> None:
        self.requests: dict[RequestId, int] = {}
        self.seen_before_step: list[int] = []
        self.calls: list[str] = []
        self.weights = self.kv = 0
        self._made, self._looks = made, 0

    def held(self) -> Held:
        wanted = len(self.requests)
        return Held(self.weights, self.kv, wanted, max(0, self.kv - wanted))

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = (), grammar: bytes = b"") -> None:
        if payload == b"bad":
            raise BadRequest("that is no request")
        self.requests[request] = 0

    def abort(self, requests: list[RequestId]) -> None:
        for request in requests:
            self.requests.pop(request, None)

    def busy(self) -> bool:
        return bool(self.requests)

    def step(self, ahead: bool = False) -> list[Output]:
        self.seen_before_step.append(len(self._made))
        outputs = []
        for request in list(self.requests)[: self.kv]:
            self.requests[request] += 1
            last = self.requests[request] == TOKENS
            outputs.append(Output(request, [self.requests[request]], Finish.LENGTH if last else None))
            if last:
                del self.requests[request]
        return outputs

    def fetch(self, kv_pages: int) -> None:
        self.calls.append("fetch")
        self.weights, self.kv, self._looks = WEIGHTS_PAGES, kv_pages, 0

    def arrived(self) -> bool:
        return self._over()

    def check(self) -> str | None:
        self.calls.append("check")
        return None

    def park(self) -> None:
        self.calls.append("park")
        self._looks = 0

    def parked(self) -> bool:
        if not self._over():
            return False
        self.kv = 0
        return True

    def _over(self) -> bool:
        self._looks += 1
        return self._looks > 3

    def grow(self, kv_pages: int) -> None:
        self.kv += kv_pages

    def shrink(self, kv_pages: int) -> None:
        self.kv -= kv_pages

    def wait(self, timeout_s: float) -> None:
        time.sleep(0)

    def kv_fragmentation(self) -> float:
        return 0.0

    def evict(self, weights_pages: int) -> None:
        self.weights -= weights_pages

    def forget_prefixes(self, salt: str) -> None:
        self.calls.append(f"forget {salt}")

    def close(self) -> None:
        self.calls.append("close")
        self.weights = self.kv = 0


class Builder:
    version = "scripted"
    life = 1
    pages_total = PAGES_TOTAL
    page_bytes = PAGE_BYTES
    block_tokens = 16

    def __init__(self, made: list[list[int]]) -> None:
        self.engines: dict[str, Scripted] = {}
        self.images: set[str] = set()  # models with an image on the disk
        self.proofs: set[str] = set()  # models whose proofs are noted beside the images
        self.change: Callable[[Scripted], None] = lambda engine: None  # called with every engine built
        self._made = made

    def __call__(self, spec: EngineSpec, told: Told, /) -> Scripted:
        if spec.key == "broken":
            raise EngineError("it can't be read")
        engine = self.engines[spec.key] = Scripted(self._made)
        self.change(engine)
        return engine

    def hold(self, blocks: list[int], block_bytes: int, life: int) -> Hold | None:
        raise AssertionError("nobody moves here")

    def device_bytes(self) -> DeviceBytes:
        return DeviceBytes()

    def pages_used(self) -> int:
        return sum(engine.weights + engine.kv for engine in self.engines.values())

    def on_disk(self, spec: EngineSpec, /) -> bool:
        return spec.key in self.images

    def proved(self, spec: EngineSpec, /) -> bool:
        return spec.key in self.proofs

    def note_proof(self, spec: EngineSpec, /) -> bool:
        self.proofs |= {spec.key} & self.images
        return spec.key in self.images

    def drop_proof(self, spec: EngineSpec, /) -> None:
        self.proofs.discard(spec.key)

    def spare_room(self, spec: EngineSpec, later: Sequence[EngineSpec], /) -> int | None:
        return None

    def page_map(self, models: Mapping[int, str], caches: Mapping[int, str]) -> list[PageRun]:
        (engine,) = self.engines.values()
        held = [PageRun(engine.weights, Content.WEIGHTS, models[1]), PageRun(engine.kv, Content.KV, caches[2])]
        return [*held, PageRun(PAGES_TOTAL - self.pages_used(), Content.FREE)]


class Node:
    """The node's end of the pipe, which reads in a separate thread, as the node process does."""

    builder = Builder

    def __init__(self, cached: set[str] | None = None) -> None:
        """`cached`: models with an image in the host cache; None: the device makes images itself."""
        self._ours, self._theirs = ipc.pair()
        self.orders: list[ipc.MakeImage | ipc.StopImage] = []
        self.made: list[list[int]] = []
        self.lost: list[str] = []
        self.states: list[ipc.State] = []
        self.passed: list[ipc.Passed] = []
        self.maps: list[ipc.Mapped] = []
        self.build = self.builder(self.made)
        has_image = None if cached is None else lambda spec: spec.key in cached
        end = ipc.DeviceEnd(self._theirs)
        self.device = Device(end, RoundRobin(), self.build, time.monotonic, has_image=has_image)
        self._plans: list[tuple[Callable[[], bool], tuple[ipc.ToDevice, ...]]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._streams = itertools.count(1)

    @property
    def tokens(self) -> list[list[int]]:
        return [made for made in self.made if made]

    def model(self, key: str) -> ModelState:
        """State of the model, as last told by the device."""
        cold = ModelState(residency=Residency.COLD)
        return self.states[-1].models.get(key, cold) if self.states else cold

    def start(self, payload: bytes = b"", model: str = "a") -> ipc.Start:
        run = Run(
            gateway="g",
            stream=next(self._streams),
            model=model,
            request="",
            attempt=1,
            prompt_tokens=1,
            max_tokens=TOKENS,
            payload=payload,
            engine="scripted",
        )
        return ipc.Start(run)

    def send(self, *messages: ipc.ToDevice) -> None:
        """Send messages in one piece: the device hears every message before the next decision."""
        self._ours.sendall(b"".join(map(ipc._framed, messages)))

    def when(self, condition: Callable[[], bool], *messages: ipc.ToDevice) -> None:
        """Send messages as soon as the condition is true, after the messages of earlier conditions."""
        self._plans.append((condition, messages))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run the device until `until()` is true, after every earlier condition."""
        self.when(until, ipc.Quit())
        late = threading.Timer(DEADLINE_S, lambda: self.send(ipc.Quit()))
        late.daemon = True
        self._reader.start()
        late.start()
        self.device.run()
        late.cancel()
        late.join()
        self._theirs.close()
        self._reader.join(5)
        self._ours.close()
        assert not self._reader.is_alive()
        assert not self._plans, "what was waited for did not come"

    def _read(self) -> None:
        data = bytearray()
        while chunk := self._ours.recv(1 << 16):
            data += chunk
            while len(data) >= 4 and len(data) >= 4 + int.from_bytes(data[:4], "little"):
                end = 4 + int.from_bytes(data[:4], "little")
                message = ipc._to_node.decode(bytes(data[4:end]))
                if isinstance(message, ipc.StateChange):
                    message = message.after(self.states[-1].models if self.states else {})
                self._note(message)
                del data[:end]

    def _note(self, message: ipc.ToNode) -> None:
        if isinstance(message, ipc.Made):
            for delta in message.deltas["g"]:
                if delta.error:
                    self.lost.append(delta.error)
            self.made.append([token for delta in message.deltas["g"] for token in delta.tokens])
        elif isinstance(message, ipc.State):
            self.states.append(message)
        elif isinstance(message, ipc.Passed):
            self.passed.append(message)
        elif isinstance(message, ipc.Mapped):
            self.maps.append(message)
        elif isinstance(message, ipc.MakeImage | ipc.StopImage):
            self.orders.append(message)
        while self._plans and self._plans[0][0]():
            self.send(*self._plans.pop(0)[1])


def failing_once(error: Exception, call: str) -> Callable[[Scripted], None]:
    """A change of engines: the first `call` to the first engine raises; engines built later work."""
    engines: list[Scripted] = []

    def change(engine: Scripted) -> None:
        engines.append(engine)
        works = getattr(engine, call)

        def fail_once(*args: object) -> object:
            if engine is engines[0]:
                setattr(engine, call, works)
                raise error
            return works(*args)

        setattr(engine, call, fail_once)

    return change


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokens_leave_before_the_next_step_begins() -> None:
    def slow(engine: Scripted) -> None:
        step = engine.step

        def slow_step(ahead: bool = False) -> list[Output]:
            time.sleep(0.05)  # bytes handed to the kernel have been read meanwhile
            return step()

        engine.step = slow_step  # type: ignore[method-assign]

    node = Node()
    node.build.change = slow
    node.send(ipc.Place(spec("a")), node.start())
    node.run(until=lambda: len(node.made) == TOKENS)
    assert node.made == [[1], [2], [3]]
    assert node.build.engines["a"].seen_before_step == [0, 1, 2]


def test_a_request_the_engine_refuses_is_answered_and_the_others_go_on() -> None:
    node = Node()
    node.send(ipc.Place(spec("a")), node.start(b"bad"), node.start())
    node.run(until=lambda: len(node.tokens) == TOKENS)
    assert node.lost == ["that is no request"]
    assert node.tokens == [[1], [2], [3]]


def test_quit_ends_an_idle_device() -> None:
    node = Node()
    node.run(until=lambda: True)


# ── what is told of time and pages ────────────────────────────────────────────────────────────────────────────────────


def test_where_all_of_its_time_went_is_told_in_spans_that_join() -> None:
    node = Node()
    node.send(*(ipc.Place(spec(key)) for key in "ab"), *(node.start(model=key) for key in "abab"))
    node.run(until=lambda: all(node.model(key).tokens == 2 * TOKENS for key in "ab") and not node.states[-1].holder)
    spans = [span for passed in node.passed for span in passed.spans]
    accounts = node.states[-1].accounts
    assert all(a.at_us + a.us == b.at_us for a, b in pairwise(spans)) and spans[0].at_us == node.device.account.begun_us
    us = {use: sum(span.us for span in spans if span.use is use) for use in Use}
    paid = [sum(parts) for parts in zip(*accounts.labels.values(), strict=True)]
    assert [us[Use.STEPS], us[Use.SWITCH]] == paid
    assert us[Use.PLATFORM] == accounts.platform_us > 0
    assert {span.model for span in spans if span.use in (Use.STEPS, Use.SWITCH)} == {"a", "b"}
    assert sum(span.steps for span in spans) == sum(len(e.seen_before_step) for e in node.build.engines.values())
    assert all((span.why is not None) == (span.use is Use.SWITCH) for span in spans)
    ways = [stage.name for passed in node.passed for stage in passed.stages if stage.model == "a"]
    assert ways[:3] == ["build", "fetch", "check"]
    assert node.passed[-1].now is Use.IDLE and Use.PLATFORM in {passed.now for passed in node.passed}


def test_the_map_of_the_pool_is_told_when_it_is_asked_for() -> None:
    node = Node()
    node.send(ipc.Place(spec("a")))
    node.when(lambda: node.model("a").residency is Residency.RESIDENT, ipc.ShowDevicePages())
    node.run(until=lambda: bool(node.maps))
    (mapped,) = node.maps
    state = node.model("a")
    assert mapped.runs == [
        PageRun(state.weights_pages, Content.WEIGHTS, "a"),
        PageRun(state.kv_pages, Content.KV, "a"),
        PageRun(PAGES_TOTAL - node.states[-1].pages_used, Content.FREE),
    ]


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_models_that_do_not_fit_together_take_turns_on_the_same_pages() -> None:
    """Three models share eight pages; each model needs three pages for weights and two for requests."""
    node = Node()
    node.send(*(ipc.Place(spec(key)) for key in "abc"), *(node.start(model=key) for key in "abcabc"))
    node.run(until=lambda: all(node.model(key).tokens == 2 * TOKENS for key in "abc") and not node.states[-1].holder)
    last = node.states[-1]
    assert (last.pages_total, last.page_bytes) == (PAGES_TOTAL, PAGE_BYTES)
    assert last.pages_used == sum(state.weights_pages + state.kv_pages for state in last.models.values()) <= PAGES_TOTAL
    assert all(engine.calls[:2] == ["fetch", "check"] for engine in node.build.engines.values())
    assert any("park" in engine.calls for engine in node.build.engines.values())


def test_a_model_that_was_put_to_sleep_holds_nothing_and_wakes_for_a_request() -> None:
    node = Node()
    node.send(ipc.Place(spec("a")))
    node.when(lambda: node.model("a").residency is Residency.RESIDENT, ipc.Order("a", awake=False))
    node.when(lambda: node.model("a").residency is Residency.STAGED and node.states[-1].pages_used == 0, node.start())
    node.run(until=lambda: len(node.tokens) == TOKENS)
    assert node.build.engines["a"].calls == ["fetch", "check", "park", "fetch", "check"]


def test_an_idle_device_tells_of_an_image_that_another_process_wrote() -> None:
    """The engine of a sleeping model is lost, and the image is on the disk a moment later."""
    node = Node()
    node.build.change = failing_once(RuntimeError("the copy failed"), "park")

    def written() -> bool:
        gone = node.model("a").residency is Residency.COLD
        node.build.images.update("a" if gone else "")
        return gone

    node.send(ipc.Place(spec("a")))
    node.when(lambda: node.model("a").residency is Residency.RESIDENT, ipc.Order("a", awake=False))
    node.when(written)
    node.run(until=lambda: node.model("a").on_disk is True)


def test_pages_that_the_pool_counts_and_no_model_holds_are_found_when_the_device_rests() -> None:
    node = Node()
    node.build.pages_used = lambda: 1  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="the pool counts 1 pages in use, and the models hold 0"):
        node.device.run()
    node._theirs.close()
    node._ours.close()


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_cannot_be_built_is_reported_and_the_others_go_on() -> None:
    node = Node()
    node.send(ipc.Place(spec("broken")), ipc.Place(spec("a")), node.start(model="broken"), node.start())
    node.run(until=lambda: node.model("a").tokens == TOKENS)
    assert "it can't be read" in node.lost[0]
    assert node.model("broken").residency is Residency.FAILED


@pytest.mark.parametrize("error", [RuntimeError("illegal memory access"), EngineError("RuntimeError")])
def test_a_step_that_raises_loses_its_requests_and_the_model_comes_back(error: Exception) -> None:
    node = Node()
    node.build.change = failing_once(error, "step")
    node.send(ipc.Place(spec("a")), node.start())
    node.when(lambda: bool(node.lost), node.start())
    node.run(until=lambda: len(node.tokens) == TOKENS)
    assert node.lost == ["the engine failed in a step: RuntimeError"]


@pytest.mark.parametrize("error", [EngineError("the pool has too little"), RuntimeError("boom")])
@pytest.mark.parametrize("call", ["fetch", "arrived"])
def test_a_transfer_that_fails_is_tried_again(call: str, error: Exception) -> None:
    node = Node()
    node.build.change = failing_once(error, call)
    node.send(ipc.Place(spec("a")), node.start())
    node.run(until=lambda: len(node.tokens) == TOKENS)
    assert not node.lost


def test_a_transfer_that_fails_again_and_again_fails_its_model_alone() -> None:
    def never_arriving(engine: Scripted) -> None:
        def arrived() -> bool:
            engine.weights = engine.kv = 0
            raise EngineError("the link is down")

        engine.arrived = arrived  # type: ignore[method-assign]

    node = Node()
    node.build.change = never_arriving
    node.send(ipc.Place(spec("a")), node.start())
    node.run(until=lambda: node.model("a").residency is Residency.FAILED)
    assert node.lost == ["the model could not be brought to the device: the link is down"]
    assert node.build.engines["a"].calls == ["fetch", "fetch", "fetch", "close"]


@pytest.mark.parametrize("error", [None, RuntimeError("boom")])
def test_a_model_that_fails_its_check_serves_nobody(error: Exception | None) -> None:
    def wrong(engine: Scripted) -> None:
        def check() -> str:
            if error is not None:
                raise error
            return "it says other words"

        engine.check = check  # type: ignore[method-assign]

    node = Node()
    node.build.change = wrong
    node.send(ipc.Place(spec("a")), node.start())
    node.run(until=lambda: node.model("a").residency is Residency.FAILED and bool(node.lost))
    assert ("it says other words" if error is None else "RuntimeError") in node.lost[0]
    assert not node.tokens


@pytest.mark.parametrize("call", ["add", "grow", "held", "busy", "abort", "park", "parked", "close"])
def test_an_engine_that_raises_anywhere_costs_no_other_model_anything(call: str) -> None:
    node = Node()
    node.build.change = failing_once(RuntimeError("boom"), call)
    node.send(ipc.Place(spec("a")), ipc.Place(spec("b")))
    starts = [node.start(), node.start(), node.start(model="b")]
    node.when(lambda: node.model("b").residency is Residency.RESIDENT, *starts, ipc.Stop("g", [1]))
    node.when(lambda: node.model("b").tokens == TOKENS, ipc.Order("a", awake=False))
    node.when(lambda: node.model("a").residency in GONE, ipc.Withdraw("a"))
    node.run(until=lambda: "a" not in node.states[-1].models)
    assert not any("boom" in error for error in node.lost), "what an exception says is not for clients"
    assert not (node.device._transfers or node.device._unfit), "it looks after an engine that is gone"


@pytest.mark.parametrize("call", ["add", "grow"])
def test_an_engine_that_raised_is_asked_for_nothing_but_to_close(call: str) -> None:
    node = Node()
    node.build.change = failing_once(RuntimeError("boom"), call)
    node.send(ipc.Place(spec("a")), node.start(), node.start())
    node.run(until=lambda: node.model("a").residency is Residency.COLD and len(node.lost) == 2)
    engine = node.build.engines["a"]
    assert engine.calls == ["fetch", "check", "close"] and not engine.seen_before_step
    assert len(engine.requests) == (0 if call == "add" else 2)


def test_where_its_time_goes_is_told_to_the_microsecond() -> None:
    node = Node()
    node.send(ipc.Place(spec("a")), node.start())
    node.run(until=lambda: len(node.tokens) == TOKENS and bool(node.states) and bool(node.states[-1].accounts.labels))
    accounts = node.states[-1].accounts
    paid = sum(sum(each) for each in accounts.labels.values())
    assert accounts.us == accounts.idle_us + accounts.platform_us + accounts.open_us + paid
    assert paid > 0 and accounts.platform_us > 0, "a model was built"


def test_the_device_says_of_a_stream_that_nobody_wants_how_far_it_came_and_what_it_used() -> None:
    node = Node()
    last: list[tuple[int, int, bool]] = []
    note = node._note

    def noting(message: ipc.ToNode) -> None:
        if isinstance(message, ipc.Made):
            ends = [delta for delta in message.deltas["g"] if delta.finish is Finish.ABORT]
            last.extend((delta.stream, delta.at, delta.spent.gpu_us > 0) for delta in ends)
        note(message)

    node._note = noting  # type: ignore[method-assign]
    stop_was_sent = threading.Event()

    def hold(engine: Scripted) -> None:
        step = engine.step

        def held(ahead: bool = False) -> list[Output]:
            """The second step lasts until the node has sent `Stop`: the stream cannot end by length before the stop."""
            if engine.seen_before_step:
                assert stop_was_sent.wait(DEADLINE_S)
            return step()

        engine.step = held  # type: ignore[method-assign]

    node.build.change = hold
    node.send(ipc.Place(spec("a")), node.start(), node.start())
    node.when(lambda: len(node.tokens) == 1, node.start(), ipc.Stop("g", [1, 3, 99]))
    node.when(lambda: stop_was_sent.set() is None)
    node.run(until=lambda: len(last) == 2)
    (first, at, used), third = sorted(last)
    assert first == 1 and at in (1, 2) and used, "with the tokens that were told before, and the time that they took"
    assert third == (3, 0, False), "no device began with this one"


def test_a_proof_is_noted_once_the_image_is_on_disk_and_a_returning_model_is_not_loaded_for_it() -> None:
    first = Node()
    first.send(ipc.Place(spec("a"), returns=True))

    def written() -> bool:
        first.build.images.update("a" if first.model("a").was_resident else "")
        return bool(first.build.images)

    first.when(written)
    first.run(until=lambda: "a" in first.build.proofs)
    assert first.build.engines["a"].calls[:2] == ["fetch", "check"]
    second = Node()
    second.build.images, second.build.proofs = {"a", "b"}, {"a", "b"}
    pinned = replace(spec("b"), pinned=True)
    second.send(ipc.Place(spec("a"), returns=True), ipc.Place(pinned, returns=True))
    second.run(until=lambda: second.model("b").residency is Residency.RESIDENT)
    assert second.model("a").was_loaded and "a" not in second.build.engines
    new = Node()
    new.build.images, new.build.proofs = {"a"}, {"a"}
    new.send(ipc.Place(spec("a")))
    new.run(until=lambda: new.model("a").was_resident)


def test_a_model_that_fails_a_check_loses_its_noted_proof() -> None:
    node = Node()
    node.build.images, node.build.proofs = {"a"}, {"a"}
    node.build.change = lambda engine: setattr(engine, "check", lambda: "it says 1 instead of 2")
    node.send(ipc.Place(spec("a"), returns=True), node.start())
    node.run(until=lambda: node.model("a").residency is Residency.FAILED)
    assert not node.build.proofs
