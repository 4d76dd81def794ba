"""A device's loop over real engines, driven by a script that reacts to the output: commands come between two steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from runtime import ipc
from runtime.core.device.request import Objective
from runtime.core.engine import Engine, EngineBuilder, Told
from runtime.core.turns.registry import POLICIES
from runtime.device.journal import BeginRecord, DecisionJournal
from runtime.device.loop import Device
from store.contract.wire import EngineSpec, Finish, Run
from store.files.records import appended
from tests.runtime.engines import payload

USUAL = Objective()
DEADLINE_S = 120
Script = Iterator[tuple[Callable[[], bool], list[ipc.ToDevice]]]


class Kept:
    """A build whose engines outlive the device. The next device gets the engines as if just built, without a page.

    An engine that was closed is forgotten, and built anew for the next device."""

    def __init__(self, build: EngineBuilder) -> None:
        self.version, self.pages_total, self.page_bytes = build.version, build.pages_total, build.page_bytes
        self.pages_used = build.pages_used
        self.on_disk, self.device_bytes = build.on_disk, build.device_bytes
        self.spare_room = build.spare_room
        self.proved, self.note_proof, self.drop_proof = build.proved, build.note_proof, build.drop_proof
        self.life, self.hold, self.block_tokens = build.life, build.hold, build.block_tokens
        self._build = build
        self._engines: dict[str, Engine] = {}

    def __call__(self, spec: EngineSpec, told: Told, /) -> Engine:
        if spec.key not in self._engines:
            engine = self._build(spec, told)
            engine.close = partial(self._close, spec.key, engine.close)  # type: ignore[method-assign]
            self._engines[spec.key] = engine
        assert not self._engines[spec.key].held().weights, "it was left with pages"
        return self._engines[spec.key]

    def _close(self, key: str, close: Callable[[], None]) -> None:
        self._engines.pop(key, None)  # first: an engine that can't be closed is not handed out again either
        close()

    def settle(self) -> None:
        """Close every engine that a failed test left with pages or requests."""
        with ExitStack() as stack:  # closes the other engines, too, if an engine can't be closed
            for engine in self._engines.values():
                held = engine.held()
                if held.weights or held.kv or engine.busy():
                    stack.callback(engine.close)

    def close(self) -> None:
        with ExitStack() as stack:
            for engine in self._engines.values():
                stack.callback(engine.close)


class Driven:
    """A device and the node's end of the pipe, on one thread."""

    def __init__(
        self,
        build: EngineBuilder,
        policy: str,
        journal: Path,
        specs: list[EngineSpec],
        clock: Callable[[], float] = time.monotonic,
        by_history: bool = False,
    ) -> None:
        self._ours, theirs = ipc.pair()
        self._ours.setblocking(False)
        self._theirs, self._in = theirs, bytearray()
        began = BeginRecord(policy, build.pages_total, build.page_bytes, by_history=by_history)
        self._end = _End(theirs, self._before)
        self._journal = appended(journal)
        written = DecisionJournal(self._journal, began)
        self.device = Device(self._end, POLICIES[policy](), build, clock, journal=written, by_history=by_history)
        self.specs = {spec.key: spec for spec in specs}
        self.said: dict[int, list[int]] = {}
        self.payloads: list[bytes] = []
        self.ended: dict[int, Finish] = {}
        self.cancelled: set[int] = set()
        self._streams = itertools.count(1)
        self._script: Script = iter(())
        self._waits_for: Callable[[], bool] = lambda: True
        self._then: list[ipc.ToDevice] = []

    @property
    def models(self) -> Any:
        return self.device.instance.models

    @property
    def open(self) -> list[int]:
        return [stream for stream in self.said if stream not in self.ended and stream not in self.cancelled]

    def place(self) -> list[ipc.ToDevice]:
        return [ipc.Place(spec) for spec in self.specs.values()]

    def placed(self) -> bool:
        return len(self.models) == len(self.specs) and all(model.loads.load_ms for model in self.models.values())

    def sleep(self) -> list[ipc.ToDevice]:
        return [ipc.Order(key, awake=False) for key in self.specs]

    def start(self, model: str, asked: dict[str, Any], objective: Objective = USUAL, salt: str = "") -> ipc.Start:
        stream = next(self._streams)
        self.said[stream] = []
        sampling = {key: value for key, value in asked.items() if key != "prompt"}
        self.payloads.append(payload(asked["prompt"], salt, **sampling, ignore_eos=True))
        run = Run(
            gateway="g",
            stream=stream,
            model=model,
            request="",
            attempt=1,
            prompt_tokens=len(asked["prompt"]),
            max_tokens=asked["max_tokens"],
            payload=self.payloads[-1],
            engine="",
            ttft_s=objective.ttft_s,
            tbt_s=objective.tbt_s,
            patience_s=objective.patience_s,
        )
        return ipc.Start(run)

    def stop(self, stream: int) -> ipc.Stop:
        self.cancelled.add(stream)
        return ipc.Stop("g", [stream])

    def run(self, script: Script) -> None:
        """Run the device by a script of (condition, commands). In the end every model is put to sleep."""
        self._script = itertools.chain(script, self._end_of_day())
        self.device.run()
        self._read()
        self._journal.close()
        self._theirs.close()
        self._ours.close()

    def _end_of_day(self) -> Script:
        yield lambda: not self.open, self.sleep()
        yield lambda: self.device.instance.pages.used == 0, [ipc.Quit()]

    def _before(self) -> None:
        """Read the device's messages and send due commands. Called between two steps of the loop."""
        self._read()
        while self._waits_for():
            for message in self._then:
                self._ours.sendall(ipc._framed(message))
            try:
                self._waits_for, self._then = next(self._script)
            except StopIteration:
                self._waits_for = lambda: False

    def _read(self) -> None:
        try:
            while data := self._ours.recv(1 << 20):
                self._in += data
        except BlockingIOError:
            pass
        while len(self._in) >= 4 and len(self._in) >= (end := 4 + int.from_bytes(self._in[:4], "little")):
            message = ipc._to_node.decode(bytes(self._in[4:end]))
            del self._in[:end]
            if isinstance(message, ipc.Made):
                for delta in message.deltas["g"]:
                    assert delta.at == len(self.said[delta.stream]), "a gap, or a repeat"
                    self.said[delta.stream] += delta.tokens
                    if delta.finish is not None:
                        assert not delta.error, delta.error
                        self.ended[delta.stream] = delta.finish


class _End(ipc.DeviceEnd):
    """The device's end of the pipe. `before` is called ahead of each read of commands; a wait lasts 1 ms at most."""

    def __init__(self, end: Any, before: Callable[[], None]) -> None:
        super().__init__(end)
        self._before, self._late_at = before, time.monotonic() + DEADLINE_S

    def receive(self) -> list[ipc.ToDevice]:
        assert time.monotonic() < self._late_at, "what was waited for did not come"
        self._before()
        return super().receive()

    def wait(self, timeout_s: float | None) -> None:
        super().wait(1e-3)


@contextmanager
def kept(pool_bytes: int, host_bytes: int) -> Iterator[Kept]:
    from runtime.engine.builder import Builder

    build = Builder(pool_bytes, host_bytes)
    engines = Kept(build)
    yield engines
    engines.close()
    build.close()
