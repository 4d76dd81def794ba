"""Two runtimes with separate host caches: real nodes and engines, in a single process that the tests can look into.
Running requests move there and back, over TCP or NIXL. The tokens equal the tokens of a run without moves, and every
token is computed once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ByteSize

from deploy.demo.random_weights import write_random
from gateway.ops import certificates
from runtime import ipc
from runtime.config import RuntimeSettings
from runtime.core.device.request import RequestId, request_id
from runtime.core.engine import Engine
from runtime.core.turns.registry import POLICIES
from runtime.device.loop import Device
from runtime.engine.vllm import VllmEngine
from runtime.memory.images import Images
from runtime.migration import transport
from runtime.node.runtime import Node
from store.bus import Bus
from store.contract import wire
from store.contract.wire import Finish
from tests.conftest import NatsServer
from tests.runtime.devices import Kept
from tests.runtime.engines import asleep, awake, drive, payload, spec, tokens
from tests.runtime.migration.test_nixl import needs_nixl

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 24 << 20, 60 << 20  # too little for a runtime to keep empty memory
LENGTH, NEW = 1024, 160  # tokens
WORDS = random.Random(1)
ASKED: list[dict[str, Any]] = [
    dict(prompt=[44, 301, 17], temperature=0),
    dict(prompt=[WORDS.randrange(3, 500) for _ in range(300)], temperature=0),
    dict(prompt=[12, 13], temperature=0.9, top_p=0.95, top_k=60, seed=7),
    dict(prompt=[WORDS.randrange(3, 500) for _ in range(200)], temperature=1, seed=3, repetition_penalty=1.3),
]
MOVED_LEAST = 5  # requests moved from each runtime
SOON_S = 240  # a test takes 6 s alone; a busy machine needs more


class Runtime(Node):
    """A node whose device is a thread of the test's process."""

    build: Kept

    async def _serve_device(self) -> None:
        ours, theirs = ipc.pair()
        device = Device(ipc.DeviceEnd(theirs), POLICIES["slack"](), self.build, time.monotonic)
        thread = threading.Thread(target=_run, args=(device,))
        thread.start()
        end = await ipc.NodeEnd.open(ours)
        try:
            async for message in end.messages():
                await self._from_device(message, end)
        finally:
            end.close()
            await asyncio.to_thread(thread.join)
            theirs.close()


def _run(device: Device) -> None:
    """Run the device on a thread of the test's process.

    On the first question in a thread, torch hands its number of threads on to OpenMP. Without the question, vLLM's
    attention compares OpenMP's number with torch's, and fails if an earlier test has set torch to a single thread. A
    device process runs engines on one thread, with the number in its environment.
    """
    import torch

    torch.get_num_threads()
    device.run()


class Hosts:
    """The engine of a model on each of two hosts, the answers without moves, and the number of tokens computed for each
    request. `pause_s`: seconds by which each step takes longer, so that a request does not end before its move."""

    def __init__(self, folder: Path) -> None:
        from runtime.engine.builder import Builder

        self.spec = spec(write_random(folder / "m", "llama", layers=4, heads=4, kv_heads=2), LENGTH, key="m")
        self.caches = [os.memfd_create(f"host-{number}") for number in (1, 2)]
        for cache in self.caches:
            os.ftruncate(cache, HOST_BYTES)
        self.builds = [Builder(POOL_BYTES, HOST_BYTES, cache) for cache in self.caches]
        self.kept = [Kept(build) for build in self.builds]
        self.engines: list[VllmEngine] = [kept(self.spec, lambda *_: None) for kept in self.kept]  # type: ignore[misc]
        awake(self.engines[0])
        self.undisturbed = self._undisturbed(self.engines[0])
        asleep(self.engines[0])
        self.computed: Counter[RequestId] = Counter()
        self.pause_s = 0.0
        for engine in self.engines:
            self._watch(engine)

    def _undisturbed(self, engine: Engine) -> list[list[int]]:
        ids = [RequestId(f"{number}") for number in range(len(ASKED))]
        for id, asked in zip(ids, ASKED, strict=True):
            engine.add(id, request(asked, "undisturbed"))
        said = drive({"": engine}, random.Random(0))
        return [tokens(said[id]) for id in ids]

    def _watch(self, engine: VllmEngine) -> None:
        schedule = engine._scheduler.schedule

        def watched(*args: Any) -> Any:
            scheduled = schedule(*args)
            time.sleep(self.pause_s)
            self.computed.update({RequestId(id): count for id, count in scheduled.num_scheduled_tokens.items()})
            return scheduled

        engine._scheduler.schedule = watched  # type: ignore[method-assign]

    def parked_bytes(self) -> list[int]:
        """Bytes parked in each host cache, by any runtime."""
        found = []
        for cache in self.caches:
            images = Images.open(cache)
            found.append(images.stats().parked_bytes)
            images.close()
        return found

    def close(self) -> None:
        for kept, build, cache in zip(self.kept, self.builds, self.caches, strict=True):
            kept.close()
            assert build.pages_used() == 0
            build.close()
            os.close(cache)


def request(asked: dict[str, Any], salt: str = "") -> bytes:
    sampling = {key: value for key, value in asked.items() if key != "prompt"}
    return payload(asked["prompt"], salt, **sampling, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("models"))
    yield hosts
    hosts.close()


class Turns:
    """A lock that threads get in the order of asking. A thread that gives threading's own lock back often has the lock
    again before a waiting thread: beside four busy loops a thread waited for 3.2 s while the other thread had 30 turns.
    A device then says nothing for seconds, and requests stay where they are."""

    def __init__(self) -> None:
        self._books = threading.Lock()
        self._queue: deque[threading.Event] = deque()  # the turn of the first thread has come

    def __enter__(self) -> None:
        turn = threading.Event()
        with self._books:
            self._queue.append(turn)
            self._queue[0].set()
        turn.wait()

    def __exit__(self, *_: object) -> None:
        with self._books:
            self._queue.popleft()
            if self._queue:
                self._queue[0].set()


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines step one at a time: steps of engines in a process must not overlap."""
    turns = Turns()

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def alone(*args: Any) -> Any:
            with turns:
                return method(*args)

        return alone

    for name in ("step", "check"):
        monkeypatch.setattr(VllmEngine, name, locked(getattr(VllmEngine, name)))


class Gateway:
    """A gateway that asks, and puts the frames of both runtimes together."""

    def __init__(self, bus: Bus, engine: str) -> None:
        self._bus, self._engine = bus, engine
        self.said: dict[int, dict[int, int]] = {}  # by stream: tokens by index
        self.ended: dict[int, Finish] = {}
        self.at: dict[int, str] = {}  # runtime
        self.news = asyncio.Event()

    async def start(self) -> None:
        await self._bus.subscribe(wire.frame_subject("g"), self._hear)

    async def _hear(self, data: bytes) -> None:
        for delta in wire.decode(wire.Frame, data).deltas:
            for index, token in enumerate(delta.tokens, delta.at):
                assert self.said[delta.stream].setdefault(index, token) == token
            if delta.moved is not None:
                self.at[delta.stream] = delta.moved.runtime
            if delta.finish is not None:
                assert not delta.error, delta.error
                self.ended[delta.stream] = delta.finish
        self.news.set()

    async def ask(self, runtime: str, asked: dict[str, Any]) -> int:
        stream = len(self.said) + 1
        self.said[stream], self.at[stream] = {}, runtime
        run = any_run(self._engine, stream, asked["prompt"], request(asked, f"{stream}"))
        await self.tell(wire.run_subject(runtime), run)
        return stream

    async def tell(self, subject: str, message: wire.Message) -> None:
        reply = wire.decode(wire.Reply, await self._bus.request(subject, message))
        assert reply.refusal is None, reply.reason

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not done():
                await self._bus.publish(wire.GATEWAY_ALIVE, wire.encode(wire.GatewayAlive(gateway="g")))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await self.news.wait()
                self.news.clear()

    def answer(self, stream: int) -> list[int]:
        return [self.said[stream][index] for index in range(len(self.said[stream]))]


@contextlib.asynccontextmanager
async def running(
    hosts: Hosts, url: str, by: Literal["tcp", "nixl"], **tls: Path
) -> AsyncIterator[tuple[Gateway, list[Runtime], list[asyncio.Event]]]:
    """The runtimes r1 and r2. Both know each other and have loaded the model."""
    async with contextlib.AsyncExitStack() as stack:
        names = ("r1", "r2", "g")
        *buses, gateways = [await stack.enter_async_context(Bus.connect(url, name)) for name in names]
        runtimes, stops, tasks = [], [asyncio.Event(), asyncio.Event()], []
        for name, bus, cache, kept, stop in zip(names, buses, hosts.caches, hosts.kept, stops, strict=False):
            settings = RuntimeSettings(
                runtime_id=name,
                host_cache=ByteSize(HOST_BYTES),
                host_cache_fd=cache,
                transport=by,
                **tls,  # type: ignore[arg-type]
            )
            runtime = Runtime(bus, settings)
            runtime.build = kept
            runtimes.append(runtime)
            tasks.append(asyncio.create_task(runtime.run(stop)))
        gateway = Gateway(gateways, hosts.builds[0].version)
        await gateway.start()
        await gateways.put(wire.MODELS, "m", hosts.spec)
        await gateway.until(lambda: all(map(ready, runtimes)) or any(task.done() for task in tasks))
        assert not [task.result() for task in tasks if task.done()]
        try:
            yield gateway, runtimes, stops
        finally:  # the next test has the same engines
            for stop in stops:
                stop.set()
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*tasks)


def any_run(engine: str, stream: int, prompt: list[int], payload: bytes) -> wire.Run:
    return wire.Run(
        gateway="g",
        stream=stream,
        model="m",
        request="",
        attempt=1,
        prompt_tokens=len(prompt),
        max_tokens=NEW,
        payload=payload,
        engine=engine,
    )


def ready(runtime: Runtime) -> bool:
    """Whether the runtime has loaded the model, and knows a runtime to which a request could move."""
    state = runtime._own.state.models.get("m")
    if state is None or not state.load_ms:
        return False
    engine = runtime._own.engine
    return runtime._peers.target(any_run(engine, 1, [1], b""), engine, time.monotonic()) is not None


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("by", ["tcp", pytest.param("nixl", marks=needs_nixl)])
async def test_requests_that_run_move_between_hosts_and_back_and_nothing_is_computed_twice(
    hosts: Hosts,
    nats_server: NatsServer,
    one_at_a_time: None,
    monkeypatch: pytest.MonkeyPatch,
    by: Literal["tcp", "nixl"],
    secured: bool,
    tmp_path: Path,
) -> None:
    hosts.computed.clear()
    hosts.pause_s = 0.0
    tls = certificates_of(tmp_path) if secured else {}
    carried: Counter[str] = Counter()
    path = {"tcp": transport.Tcp, "nixl": transport.Nixl}[by]
    deliver = path._deliver

    async def counted(self: Any, parcels: list[list[int]]) -> None:
        carried[self._address] += sum(map(len, parcels))
        await deliver(self, parcels)

    monkeypatch.setattr(path, "_deliver", counted)
    async with running(hosts, nats_server.url, by, **tls) as (gateway, runtimes, stops):
        streams = [await gateway.ask(f"r{1 + number % 2}", asked) for number, asked in enumerate(ASKED * 2)]
        await gateway.until(lambda: all(gateway.said.values()))
        hosts.pause_s = 0.1  # a busy machine, too, moves requests before the requests end
        while not ended(gateway):  # each runtime keeps giving its requests away
            before = moves(runtimes)
            for source, target in (("r1", "r2"), ("r2", "r1")):
                await gateway.tell(wire.migrate_subject(source), wire.Migrate(target=target, model="m", count=2))
            await gateway.until(lambda before=before: sum(moves(runtimes)) > sum(before) or ended(gateway))
            if min(moves(runtimes)) >= MOVED_LEAST:
                hosts.pause_s = 0.0
        for stream, answer in zip(streams, hosts.undisturbed * 2, strict=True):
            assert gateway.ended[stream] is Finish.LENGTH and gateway.answer(stream) == answer
        assert min(moves(runtimes)) >= MOVED_LEAST
        assert len(carried) == 2 and min(carried.values()) >= 10
        await gateway.until(lambda: all(runtime.blocks.taken_bytes == 0 for runtime in runtimes))

        hosts.pause_s = 0.05
        more = [await gateway.ask("r1", asked) for asked in ASKED]
        await gateway.until(lambda: all(len(gateway.said[stream]) > 5 for stream in more))
        assert not gateway.ended.keys() & set(more)
        stops[0].set()  # r1 drains to the second host
        await gateway.until(lambda: all(gateway.at[stream] == "r2" for stream in more) or ended(gateway))
        hosts.pause_s = 0.0
        await gateway.until(lambda: len(gateway.ended) == len(streams + more))
        for stream, answer in zip(more, hosts.undisturbed, strict=True):
            assert gateway.at[stream] == "r2" and gateway.answer(stream) == answer

    for stream, asked in zip(streams + more, ASKED * 3, strict=True):
        once = len(asked["prompt"]) + NEW - 1
        assert hosts.computed[request_id("g", stream)] == once
    for engine in hosts.engines:
        scheduler = engine._scheduler
        assert scheduler.recomputed == 0 and scheduler._slabs.taken == 0
        assert not scheduler.requests and not scheduler._incoming and not scheduler._outgoing
        asleep(engine)
    assert hosts.parked_bytes() == [0, 0]


def certificates_of(folder: Path) -> dict[str, Path]:
    """The settings of a runtime that speaks TLS."""
    certificates.make(folder, ["runtime-r1"], [])
    files = {"cert": "runtime-r1.crt", "key": "runtime-r1.key", "ca": "ca.crt"}
    return {f"transport_tls_{part}": folder / name for part, name in files.items()}


def moves(runtimes: list[Runtime]) -> list[int]:
    """The number of requests moved away from each runtime."""
    return [runtime._migrations.moved for runtime in runtimes]


def ended(gateway: Gateway) -> bool:
    return len(gateway.ended) == len(gateway.said)
