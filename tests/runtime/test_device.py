"""The device's loop with a scripted engine: what a step made is on its way before the next step begins."""

from __future__ import annotations

import itertools
import threading
import time

from runtime import pipe
from runtime.device import Device
from runtime.engine.base import BadRequest, EngineError, Output
from runtime.policy.turns import RoundRobin
from runtime.request import RequestId
from store.wire import EngineSpec, Finish, Residency, Run
from tests.runtime.test_instance import spec


class Scripted:
    """An engine that makes one token a step for each request and notes what it finds."""

    def __init__(self, made: list[list[int]], node: pipe.DeviceEnd) -> None:
        self.requests: dict[RequestId, int] = {}
        self.seen_before_step: list[int] = []
        self._made, self._node = made, node

    def add(self, request: RequestId, payload: bytes) -> None:
        if payload == b"bad":
            raise BadRequest("that is no request")
        self.requests[request] = 0

    def abort(self, requests: list[RequestId]) -> None:
        for request in requests:
            self.requests.pop(request, None)

    def busy(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Output]:
        self.seen_before_step.append(len(self._made))
        outputs = []
        for request in list(self.requests):
            self.requests[request] += 1
            last = self.requests[request] == 3
            outputs.append(Output(request, [self.requests[request]], Finish.LENGTH if last else None))
            if last:
                del self.requests[request]
        return outputs

    def close(self) -> None:
        self.requests.clear()


class Builder:
    version = "scripted"

    def __init__(self, engine: Scripted) -> None:
        self.engine = engine

    def __call__(self, spec: EngineSpec) -> Scripted:
        if spec.key == "broken":
            raise EngineError("it can't be read")
        return self.engine


class Node:
    """The other end: reads in a thread of its own, as the node process does."""

    def __init__(self) -> None:
        ours, theirs = pipe.pair()
        self.made: list[list[int]] = []
        self.lost: list[str] = []
        self.states: list[pipe.State] = []
        self.engine = Scripted(self.made, pipe.DeviceEnd(theirs))
        self.device = Device(self.engine._node, RoundRobin(), Builder(self.engine), time.monotonic)
        self._ours, self._theirs = ours, theirs
        self._reader = threading.Thread(target=self._read)
        self._streams = itertools.count(1)

    def send(self, *messages: pipe.ToDevice) -> None:
        for message in messages:
            self._ours.sendall(pipe._framed(message))

    def start(self, payload: bytes = b"", model: str = "a") -> pipe.Start:
        run = Run(
            gateway="g",
            stream=next(self._streams),
            model=model,
            request="",
            attempt=1,
            prompt_tokens=1,
            max_tokens=3,
            payload=payload,
            engine="scripted",
        )
        return pipe.Start(run)

    def _read(self) -> None:
        data = bytearray()
        while chunk := self._ours.recv(1 << 16):
            data += chunk
            while len(data) >= 4 and len(data) >= 4 + int.from_bytes(data[:4], "little"):
                end = 4 + int.from_bytes(data[:4], "little")
                self._note(pipe._to_node.decode(bytes(data[4:end])))
                del data[:end]

    def _note(self, message: pipe.ToNode) -> None:
        if isinstance(message, pipe.Made):
            for delta in message.deltas["g"]:
                if delta.error:
                    self.lost.append(delta.error)
            self.made.append([token for delta in message.deltas["g"] for token in delta.tokens])
        elif isinstance(message, pipe.State):
            self.states.append(message)

    def run_until_quit(self) -> None:
        """Everything that was sent is done, then the device ends."""
        self._reader.start()
        quitting = threading.Timer(0.5, lambda: self.send(pipe.Quit()))
        quitting.start()
        self.device.run()
        quitting.join()
        self._theirs.close()
        self._reader.join(5)
        self._ours.close()
        assert not self._reader.is_alive()


def test_tokens_leave_before_the_next_step_begins() -> None:
    node = Node()
    step = node.engine.step

    def slow_step() -> list[Output]:
        time.sleep(0.05)  # what was handed to the kernel has been read meanwhile
        return step()

    node.engine.step = slow_step  # type: ignore[method-assign]
    node.send(pipe.Place(spec("a")), node.start())
    node.run_until_quit()
    assert node.made == [[1], [2], [3]]
    assert node.engine.seen_before_step == [0, 1, 2]


def test_a_request_the_engine_refuses_is_answered_and_the_others_go_on() -> None:
    node = Node()
    node.send(pipe.Place(spec("a")), node.start(b"bad"), node.start())
    node.run_until_quit()
    assert node.lost == ["that is no request"]
    assert [tokens for tokens in node.made if tokens] == [[1], [2], [3]]


def test_a_model_that_cannot_be_built_is_reported_and_the_others_go_on() -> None:
    node = Node()
    node.send(pipe.Place(spec("broken")), pipe.Place(spec("a")), node.start(model="broken"), node.start())
    node.run_until_quit()
    assert "it can't be read" in node.lost[0]
    assert node.states[-1].models["broken"].residency is Residency.FAILED
    assert node.states[-1].models["a"].tokens == 3


def test_a_step_that_raises_loses_its_requests_and_the_model_comes_back() -> None:
    node = Node()
    step, raised = node.engine.step, []

    def failing_step() -> list[Output]:
        if not raised:
            raised.append(True)
            raise RuntimeError("illegal memory access")
        return step()

    node.engine.step = failing_step  # type: ignore[method-assign]
    node.send(pipe.Place(spec("a")), node.start())
    threading.Timer(0.2, lambda: node.send(node.start())).start()
    node.run_until_quit()
    assert node.lost == ["the engine failed in a step: RuntimeError"]
    assert [tokens for tokens in node.made if tokens] == [[1], [2], [3]]


def test_quit_ends_an_idle_device_at_once() -> None:
    node = Node()
    started = time.monotonic()
    node.run_until_quit()
    assert time.monotonic() - started < 3
