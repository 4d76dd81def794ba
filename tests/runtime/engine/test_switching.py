"""Models to zero and back amid requests: no page is lost, no token differs, no token is computed twice.

The test drives engines as the device's loop does, but in any order, and copies, maps and unmaps fail now and then. A
request must make the tokens that the request makes alone, on an engine that never moved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deploy.demo.random_weights import write_random
from runtime.core.device.request import RequestId
from runtime.core.engine import Engine, EngineError, Output
from runtime.memory.native import FaultPoint, PageState
from tests.runtime.engines import asleep, awake, drive, payload, spec, tokens, until
from tests.runtime.hybrids import write_hybrid

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
PAGE = 2 << 20
POOL_PAGES, HOST_BYTES = 9, 256 << 20
PREFIX_BYTES, TTL_S = 4 << 20, 600.0  # room for the prefixes of one model, or two
EXAMPLES, EXAMPLES_LONG, SWITCHES = 3, 8, 130  # in total 390 switches, 1,040 in the long form
OPEN_MOST = 6  # requests per model
ASKED_MOST = 40  # times that a question is asked until blocks come back
MADE = 10  # tokens until the first block of each equal request is full

SHAPES: dict[str, dict[str, Any]] = {  # a KV block takes 256 to 768 KiB: a few to a page, some across two pages
    "llama": dict(architecture="llama", layers=4, heads=4, kv_heads=2),
    "qwen3": dict(architecture="qwen3", layers=3, heads=4, kv_heads=4),
    "opt": dict(architecture="opt", layers=2),
    "other-llama": dict(architecture="llama", layers=4, heads=4, kv_heads=2, seed=5),
}
FORGETFUL: dict[str, dict[str, Any]] = {
    "gemma3_text": dict(
        hidden_size=128, num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    ),
    "nemotron_h": dict(hidden_size=128),
}
MODELS = (*SHAPES, *FORGETFUL)
ASKED: list[dict[str, Any]] = [
    dict(prompt=[44, 301, 17], temperature=0, max_tokens=30),
    dict(prompt=[5, 6] * 90, temperature=0, max_tokens=40),
    dict(prompt=[5, 6] * 90 + [7], temperature=0, max_tokens=25),  # shares a block with the question before
    dict(prompt=[9, 10, 11] * 40, temperature=1.0, seed=7, max_tokens=30),  # crosses into its second block
    dict(prompt=[12, 13], temperature=0.7, seed=3, repetition_penalty=1.3, max_tokens=20),
    dict(prompt=[7, 8, 9, 44, 17] * 80, temperature=0, max_tokens=8),  # a prefix of three blocks
]


class World:
    """Engines over one small pool, and the answer to each question.

    `async_scheduling`: whether a step may begin before the tokens of the step before are known."""

    def __init__(self, folder: Path, async_scheduling: bool) -> None:
        from runtime.engine.builder import Builder
        from runtime.engine.vllm import VllmEngine

        self.build = Builder(
            POOL_PAGES * PAGE, HOST_BYTES, prefixes=(PREFIX_BYTES, TTL_S), async_scheduling=async_scheduling
        )
        self.async_scheduling, self.begun_ahead = async_scheduling, 0
        self.engines: dict[str, VllmEngine] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}
        for name in MODELS:
            path = folder / name
            written = (
                write_random(path, **SHAPES[name]) if name in SHAPES else write_hybrid(path, name, **FORGETFUL[name])
            )
            engine = self.build(spec(written))
            assert isinstance(engine, VllmEngine)
            self.engines[name] = engine
            awake(engine)
            for number, asked in enumerate(ASKED):
                engine.add(RequestId("alone"), question(asked, "alone"))
                made = drive({name: engine}, random.Random(0))
                self.answers[name, number] = tokens(made[RequestId("alone")])
            asleep(engine)

    def check_pages(self) -> None:
        """Check that each page is free or owned, and each engine owns the pages in its books."""
        stats = self.build.device.stats()
        pages = self.build.device.pages()
        taken = [page for page in pages if page.state in (PageState.MAPPED, PageState.CLEAN)]
        assert stats.pages_free + len(taken) + stats.pages_limbo == POOL_PAGES
        for name, engine in self.engines.items():
            held = engine.held()
            weights = sum(page.owner == engine.weights.reservation.owner for page in taken)
            kv = sum(page.owner == engine.kv.reservation.owner for page in taken)
            assert (weights, kv) == (held.weights, held.kv), name

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        assert self.build.pages_used() == 0
        self.build.close()


def question(asked: dict[str, Any], salt: str = "") -> bytes:
    return payload(asked["prompt"], salt, **{k: v for k, v in asked.items() if k != "prompt"}, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["step after step", "ahead"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("models"), request.param)
    yield world
    world.close()


class Run:
    """A random history of engines and requests."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.inside: list[str] = []
        self.open: dict[RequestId, tuple[str, int]] = {}
        self.said: dict[RequestId, list[int]] = {}
        self.count = self.switches = 0

    def arrive(self) -> None:
        name = self.rng.choice(MODELS)
        if sum(model == name for model, _ in self.open.values()) < OPEN_MOST:
            self.count += 1
            id, number = RequestId(f"{self.count}"), self.rng.randrange(len(ASKED))
            self.world.engines[name].add(id, question(ASKED[number]))
            self.open[id], self.said[id] = (name, number), []

    def abort(self) -> None:
        if self.open:
            id = self.rng.choice(list(self.open))
            name, _ = self.open.pop(id)
            self.world.engines[name].abort([id])

    def fail_something(self) -> None:
        """Let some operation fail soon. A copy under way is spared: a copy that fails three times is given up."""
        point = self.rng.choice(list(FaultPoint))
        if point is FaultPoint.COPY and any(engine._scheduler.ticket for engine in self.world.engines.values()):
            return
        self.world.build.device.inject(point, self.rng.randint(1, 8))

    def step(self) -> None:
        busy = [name for name in self.inside if self.world.engines[name].busy()]
        if not busy:
            return
        engine = self.world.engines[self.rng.choice(busy)]
        held = engine.held()
        if held.kv_wanted > held.kv and self.rng.random() < 0.3:  # else the pages at hand must do
            engine.grow(min(held.kv_wanted - held.kv, self.world.build.device.stats().pages_free))
        self.take(engine.step(ahead=self.rng.random() < 0.8))
        self.world.begun_ahead += engine.ahead

    def settle(self, name: str) -> None:
        """End the step under way, as the device's loop does before anything but a further step."""
        if (engine := self.world.engines[name]).ahead:
            self.take(engine.step())

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.said[output.request] += output.tokens
            if output.finish is not None:
                name, number = self.open.pop(output.request)
                assert self.said[output.request] == self.world.answers[name, number], (name, number)

    def shrink(self) -> None:
        if self.inside:
            engine = self.world.engines[self.rng.choice(self.inside)]
            engine.shrink(self.rng.randint(0, engine.held().kv_spare))

    def switch(self) -> None:
        """Bring a random model in, and put as many models out as necessary, in any order."""
        name = self.rng.choice([name for name in MODELS if name not in self.inside])
        engine = self.world.engines[name]
        kv = self.rng.randint(1, max(1, min(engine.held().kv_wanted, POOL_PAGES - engine.weights_pages)))
        while self.free() < engine.weights_pages - engine.held().weights + kv:
            others = [other for other in MODELS if other != name and self.world.engines[other].held().weights]
            self.put_out(self.rng.choice(others))
        try:
            awake(engine, kv)
        except EngineError:  # a map or a copy failed: nothing came in, and the next try finds the old state
            self.put_out(name)
            return
        self.inside.append(name)
        self.switches += 1
        if self.rng.random() < 0.2:
            assert engine.check() is None

    def put_out(self, name: str) -> None:
        engine = self.world.engines[name]
        if name in self.inside or engine.held().kv:
            self.settle(name)
            engine.park()
            until(engine.parked)
            if name in self.inside:
                self.inside.remove(name)
        engine.evict(self.rng.randint(1, engine.weights_pages))

    def free(self) -> int:
        self.world.build.device.settle(30)
        return self.world.build.device.stats().pages_free


def test_requests_that_come_back_together_leave_blocks_for_their_next_steps(world: World) -> None:
    """Requests of equal length need a further block in the same step. If all came back, no request could make it."""
    engine, size = world.engines["llama"], world.engines["llama"]._scheduler.block_size
    awake(engine, 1)
    count = engine._blocks.get_num_free_blocks()
    said: dict[RequestId, list[int]] = {RequestId(f"equal {number}"): [] for number in range(count)}
    asked = dict(prompt=[44] * (size - MADE), temperature=0, max_tokens=2 * MADE)
    for id in said:
        engine.add(id, question(asked, salt=id))

    def step() -> int:
        made = [output for output in engine.step() if output.tokens]
        for output in made:
            said[output.request] += output.tokens
        return len(made)

    while min(map(len, said.values())) <= MADE:  # all blocks are full
        assert step()
    for _ in range(2):
        asleep(engine)
        awake(engine, 1)
        assert step(), f"{count} requests are back, and a step made no token"
    while engine.busy():
        assert step()
    asleep(engine)
    assert set(map(len, said.values())) == {2 * MADE} and len(set(map(tuple, said.values()))) == 1


# A failing example is not made smaller: engines take seconds to build, and the seed suffices.
@settings(max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_requests_say_what_they_say_alone_whatever_is_parked_and_whatever_fails(world: World, seed: int) -> None:
    switch_about(world, seed)


@pytest.mark.long
@settings(max_examples=EXAMPLES_LONG, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_the_same_through_a_thousand_switches(world: World, seed: int) -> None:
    switch_about(world, seed)


def switch_about(world: World, seed: int) -> None:
    run = Run(world, random.Random(seed))
    actions = [run.arrive, run.abort, run.step, run.shrink, run.switch, run.fail_something]
    while run.switches < SWITCHES:
        (action,) = run.rng.choices(actions, weights=[6, 1, 12, 1, 4, 1])
        action()
        world.check_pages()
    for operation in FaultPoint:
        world.build.device.inject(operation, 0)
    for name in [*run.inside]:
        run.put_out(name)
    for name, engine in world.engines.items():  # open requests end, too
        while engine.busy():
            for other in [*run.inside]:
                run.put_out(other)
            until_free(world, engine)
            awake(engine, min(engine.kv.pages_total, POOL_PAGES - engine.weights_pages))
            run.inside.append(name)
            while engine.busy():
                run.step()
    for name in [*run.inside]:
        run.put_out(name)
    for engine in world.engines.values():
        engine.evict(engine.weights_pages)
    world.build.device.settle(30)
    assert not run.open
    ask_before_and_after_sleep(world, "llama", len(ASKED) - 1)
    assert world.build.pages_used() == 0
    assert sum(engine._scheduler.recomputed for engine in world.engines.values()) == 0
    assert sum(engine._scheduler._slabs.taken for engine in world.engines.values()) == 0
    prefixes = world.build.device_bytes().prefixes
    assert prefixes.dropped and not prefixes.wrong, prefixes
    assert bool(world.begun_ahead) == world.async_scheduling


def ask_before_and_after_sleep(world: World, name: str, number: int) -> None:
    """Ask a model a question of several blocks, have the model sleep until the blocks are kept in the host cache, and
    ask again, until blocks came back: random histories alone bring blocks back once or twice, and now and then never.
    After slow copies on a busy machine an engine computes rather than copies for a while."""
    engine, brought = world.engines[name], world.build.device_bytes().prefixes.brought
    for _ in range(ASKED_MOST):
        awake(engine)
        engine.add(RequestId("again"), question(ASKED[number]))
        made = drive({name: engine}, random.Random(0))
        assert tokens(made[RequestId("again")]) == world.answers[name, number]
        asleep(engine)
        world.build.prefixes.settle()
        if world.build.device_bytes().prefixes.brought > brought:
            return
    raise AssertionError(f"no block came back in {ASKED_MOST} times")


def until_free(world: World, engine: Engine) -> None:
    for other in world.engines.values():
        if other is not engine:
            other.evict(other.weights_pages)
    world.build.device.settle(30)
