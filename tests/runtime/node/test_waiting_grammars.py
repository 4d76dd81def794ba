"""Requests with a grammar not ready yet: neither node nor device process sees work of the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from msgspec.structs import replace as changed
from pydantic import ByteSize

from runtime import ipc
from runtime.config import RuntimeSettings
from runtime.core.compile_orders import NotCompiled
from runtime.core.device.request import RequestId
from runtime.core.engine import Told
from runtime.group.group import EngineCall, GroupEngine
from runtime.node.runtime import Node
from store.bus import Bus
from store.contract import wire
from store.contract.wire import Finish, Residency
from tests.conftest import NatsServer, soon
from tests.runtime.device import test_device as scripted
from tests.runtime.migration import test_handover as handover
from tests.runtime.node.test_node import limited, run

# ── the node ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Asked(Node):
    """A node with a device process played by the test, and grammars ready when the test sets `ready`."""

    ready: asyncio.Event
    device_end: ipc.DeviceEnd
    refuses = False
    cancelled = 0

    async def compiled(self, spec: wire.EngineSpec, tenant: str, text: bytes) -> bytes:
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.refuses:
            raise NotCompiled("the grammar takes more than 5 s to compile")
        return b"compiled " + text

    def started(self) -> list[ipc.Start]:
        return [command for command in self.device_end.receive() if isinstance(command, ipc.Start)]

    async def ask(self, asked: wire.Run) -> wire.Reply:
        return await self._serving.run(wire.encode(asked))


@pytest.fixture
async def node(nats_server: NatsServer) -> AsyncIterator[Asked]:
    async with Bus.connect(nats_server.url, "r1") as bus:
        node = Asked(bus, RuntimeSettings(runtime_id="r1", host_cache=ByteSize(1 << 20)))
        node.ready = asyncio.Event()
        node._grammars.compiled = node.compiled  # type: ignore[method-assign]
        ours, theirs = ipc.pair()
        node.device_end = ipc.DeviceEnd(theirs)
        pipe = node._own.device = await ipc.NodeEnd.open(ours)
        node._serving.spec_changed("m", wire.replace(limited(), replicas=0))
        await node._from_device(ipc.DeviceReady("e", 7), pipe)
        node.device_end.receive()
        yield node
        pipe.close()
        theirs.close()
        await asyncio.sleep(0)


GRAMMAR = b'{"regex":"a"}'


async def test_the_device_hears_of_a_request_when_its_grammar_is_ready_and_of_others_at_once(node: Asked) -> None:
    assert (await node.ask(wire.replace(run(1), grammar=GRAMMAR))).refusal is None
    assert not node._waited_for(), "the device is silent, and nobody may take that for a hang"
    assert (await node.ask(run(2))).refusal is None
    await asyncio.sleep(0)
    assert [(start.run.stream, start.grammar) for start in node.started()] == [(2, b"")]
    assert node._waited_for()
    node.ready.set()
    started: list[ipc.Start] = []
    await soon(lambda: bool(started.extend(node.started()) or started))
    assert [(start.run.stream, start.grammar) for start in started] == [(1, b"compiled " + GRAMMAR)]


async def test_a_request_that_is_left_takes_its_grammars_work_with_it(node: Asked) -> None:
    await node.ask(wire.replace(run(1), grammar=GRAMMAR))
    await asyncio.sleep(0)
    await node._cancel(wire.encode(wire.Cancel(gateway="g", streams=[1])))
    await soon(lambda: node.cancelled == 1)
    node.ready.set()
    await asyncio.sleep(0.01)
    assert node.started() == [] and node.stream("g", 1) is None


async def test_a_request_whose_device_process_is_lost_meanwhile_goes_on_elsewhere(node: Asked) -> None:
    await node.ask(wire.replace(run(1), grammar=GRAMMAR))
    await asyncio.sleep(0)
    await node._streams.lose_all("the runtime lost its device process")
    await soon(lambda: node.cancelled == 1)
    assert node.stream("g", 1) is None


async def test_a_refused_grammar_ends_its_request_as_the_clients_fault_at_no_cost(
    node: Asked, nats_server: NatsServer
) -> None:
    said: list[wire.Delta] = []

    async def hear(data: bytes) -> None:
        said.extend(wire.decode(wire.Frame, data).deltas)

    async with Bus.connect(nats_server.url, "g") as gateway:
        await gateway.subscribe(wire.frame_subject("g"), hear)
        await gateway.catch_up(5)
        node.refuses = True
        node.ready.set()
        assert (await node.ask(wire.replace(run(1), grammar=GRAMMAR))).refusal is None
        await soon(lambda: bool(said))
    (delta,) = said
    assert (delta.finish, delta.tokens, delta.spent) == (Finish.REFUSED, [], wire.NOTHING_SPENT)
    assert "5 s" in delta.error and node.started() == []


async def test_a_request_whose_grammar_is_not_ready_is_given_away_by_a_node_that_drains(node: Asked) -> None:
    from runtime.migration.transport import NotMoved

    await node.ask(wire.replace(run(1), grammar=GRAMMAR))
    node._own.forms["m"] = wire.KvForm(1, 1, "")
    with pytest.raises(NotMoved) as stays:
        await node._migrations.move("g", 1, "r2")
    assert stays.value.waits, "its gateway finds it another runtime"


async def test_a_request_whose_model_is_withdrawn_before_its_grammar_is_compiled_is_lost_and_not_forgotten(
    node: Asked, nats_server: NatsServer
) -> None:
    """The withdrawal comes between the answer to the gateway and the first step of the compilation."""
    said: list[wire.Delta] = []

    async def hear(data: bytes) -> None:
        said.extend(wire.decode(wire.Frame, data).deltas)

    async with Bus.connect(nats_server.url, "g") as gateway:
        await gateway.subscribe(wire.frame_subject("g"), hear)
        await gateway.catch_up(5)
        node.ready.set()
        assert (await node.ask(wire.replace(run(1), grammar=GRAMMAR))).refusal is None
        node._serving.spec_changed("m", None)
        await soon(lambda: bool(said))
    assert said[0].finish is Finish.LOST and node.started() == []


async def test_an_offer_whose_model_is_withdrawn_while_its_grammar_is_compiled_is_refused(node: Asked) -> None:
    form = wire.KvForm(1, 1, "")
    moved = wire.replace(run(1), grammar=GRAMMAR)
    offer = wire.Prepare(move="move", source="r2", host_cache="", form=form, run=moved, tokens=1)
    offering = asyncio.create_task(node._migrations._prepare(wire.encode(offer)))
    await asyncio.sleep(0.01)
    node._serving.spec_changed("m", None)
    node.ready.set()
    assert (await offering).refusal is wire.Refusal.UNKNOWN_MODEL


# ── the device process ────────────────────────────────────────────────────────────────────────────────────────────────


class Reading(scripted.Scripted):
    """Reads a grammar until the test allows the end."""

    may_end = False

    def read(self, grammar: bytes) -> None:
        self.calls.append(f"read {grammar.decode()}")

    def has_read(self, grammar: bytes) -> bool:
        return self.may_end

    def add(self, request: RequestId, payload: bytes, made: object = (), grammar: bytes = b"") -> None:
        self.calls.append(f"add {grammar.decode()}")
        super().add(request, payload)


class ReadingBuilder(scripted.Builder):
    def __call__(self, spec: wire.EngineSpec, told: object, /) -> scripted.Scripted:
        engine = self.engines[spec.key] = Reading(self._made)
        self.change(engine)
        return engine


class DeviceNode(scripted.Node):
    builder = ReadingBuilder

    def started(self, grammar: bytes = b"") -> ipc.Start:
        return changed(self.start(), grammar=grammar)

    @property
    def engine(self) -> Reading:
        engine = self.build.engines["a"]
        assert isinstance(engine, Reading)
        return engine


def placed() -> DeviceNode:
    """A device node with the model `a` built and asked once, so with an engine."""
    node = DeviceNode()
    node.send(ipc.Place(scripted.spec("a")), node.started())
    return node


def test_a_model_whose_only_request_waits_for_its_grammar_has_no_turn() -> None:
    node = placed()
    seen: list[tuple[int, int]] = []

    def quiet() -> bool:
        """Note the model's turns and requests; True once the waiting request is held and the grammar is being read."""
        (model,) = node.device.instance.models.values()
        seen.append((model.record.turns, len(model.queues.waiting) + len(model.queues.running)))
        return "read G" in node.engine.calls and len(node.device._readings._held) == 1

    node.when(lambda: len(node.made) >= scripted.TOKENS, node.started(b"G"))
    node.run(until=quiet)
    turns, requests = seen[-1]
    assert (turns, requests) == (1, 0), "the first request's turn alone, and the instance has not heard of the second"
    assert "add G" not in node.engine.calls


def test_a_request_goes_on_when_its_grammar_is_read_and_others_need_not_wait_for_that() -> None:
    node = placed()

    def other_was_added() -> bool:
        node.engine.may_end = node.engine.calls.count("add ") == 2
        return node.engine.may_end

    node.when(lambda: len(node.made) >= scripted.TOKENS, node.started(b"G"), node.started())
    node.when(other_was_added)
    node.run(until=lambda: sum(map(len, node.made)) >= 3 * scripted.TOKENS)
    added = [call for call in node.engine.calls if call.startswith(("add", "read"))]
    assert added == ["add ", "read G", "add ", "add G"]


def test_a_request_that_is_cancelled_while_its_grammar_is_read_never_arrives() -> None:
    node = placed()
    start = node.started(b"G")
    node.when(lambda: len(node.made) >= scripted.TOKENS, start)
    node.when(lambda: bool(node.device._readings), ipc.Stop("g", [start.run.stream]))
    node.run(until=lambda: not node.device._readings and "read G" in node.engine.calls)
    assert "add G" not in node.engine.calls


def test_an_engine_that_is_not_built_reads_the_grammar_when_it_gets_the_request() -> None:
    node = DeviceNode()
    node.send(ipc.Place(scripted.spec("a")), node.started(b"G"))
    node.run(until=lambda: len(node.made) >= scripted.TOKENS)
    assert node.engine.calls.count("add G") == 1
    assert node.model("a").residency is not Residency.FAILED


# ── requests that move, and groups of ranks ───────────────────────────────────────────────────────────────────────────


class Remembering(handover.Movable):
    """An engine that notes the grammars given to the engine."""

    def read(self, grammar: bytes) -> None:
        self.calls.append(f"read {grammar.decode()}")

    def has_read(self, grammar: bytes) -> bool:
        return True

    def prepare(
        self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False, grammar: bytes = b""
    ) -> bool:
        self.calls.append(f"prepared with {grammar.decode()}")
        return super().prepare(request, payload, tokens, admitted)

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = (), grammar: bytes = b"") -> None:
        self.calls.append(f"added with {grammar.decode()}")
        super().add(request, payload, made)


class RememberingBuilder(handover.MovableBuilder):
    def __call__(self, spec: wire.EngineSpec, told: Told, /) -> scripted.Scripted:
        engine = self.engines[spec.key] = Remembering(self._made)
        self.change(engine)
        return engine


class Target(handover.Target):
    builder = RememberingBuilder

    def coming(self) -> ipc.PrepareMove:
        return changed(super().coming(), grammar=b"G")


def test_a_request_that_moves_here_is_expected_with_its_grammar() -> None:
    target = Target()
    handover.taken_over(target)
    assert "prepared with G" in target.build.engines["a"].calls


def test_a_request_that_moves_here_and_is_computed_again_keeps_its_grammar() -> None:
    target = Target()
    target.build.change = lambda engine: setattr(engine, "room", False)
    target.when(target.resident, target.coming())
    target.when(lambda: target.answered(1), wire.Commit(move="m", departure=handover.LEFT))
    target.run(until=lambda: target.landed() and target.tokens == [[2], [3]])
    assert "added with G" in target.build.engines["a"].calls


def test_all_ranks_of_a_group_are_given_the_same_grammar() -> None:
    class Others:
        size = 2
        calls: list[EngineCall] = []

        def with_them(self, call: EngineCall, act: Callable[[], object]) -> object:
            self.calls.append(call)
            return act()

    others = Others()
    engine = GroupEngine("m", Remembering([]), others)  # type: ignore[arg-type]
    engine.read(b"G")
    engine.add(RequestId("a"), b"", (), b"G")
    assert [(call.method, call.arguments) for call in others.calls] == [
        ("read", (b"G",)),
        ("add", (RequestId("a"), b"", (), b"G")),
    ]
