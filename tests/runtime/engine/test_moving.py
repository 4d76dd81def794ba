"""Running requests move between two engines of a model over two pools and one host cache. The requests make the tokens
made alone, no token is computed twice, and no page stays behind, at whatever point a move is broken off."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from deploy.demo.random_weights import write_random
from runtime.core.device.request import RequestId
from runtime.core.engine import BadRequest, EngineError, Output
from runtime.engine.vllm import VllmEngine
from runtime.memory.native import FaultPoint
from store.contract.wire import Departure
from tests.runtime.engines import add, asleep, awake, departed, drive, grammar_of, payload, spec, tokens, until

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 18 << 20, 128 << 20
BLOCK = 128  # tokens, vLLM's choice for a CPU
SHAPES: dict[str, dict[str, Any]] = {  # eight blocks of KV cache to a page; some blocks lie across two pages
    "llama": dict(architecture="llama", layers=4, heads=4, kv_heads=2),
    "qwen3": dict(architecture="qwen3", layers=3, heads=4, kv_heads=4),
}
LONG = [random.Random(1).randrange(3, 500) for _ in range(3 * BLOCK)]
ASKED: dict[str, dict[str, Any]] = {
    "greedy": dict(prompt=[44, 301, 17], temperature=0, max_tokens=40),
    "three blocks": dict(prompt=LONG[: 2 * BLOCK - 9], temperature=1, seed=2, max_tokens=40),  # after nine tokens
    "the same prefix": dict(prompt=[*LONG[:BLOCK], 7], temperature=1, seed=4, max_tokens=30),
    "seeded": dict(prompt=LONG[7 : BLOCK - 5], temperature=0.9, top_p=0.95, top_k=60, seed=7, max_tokens=50),
    "penalised": dict(prompt=[12, 13], temperature=0.7, seed=3, repetition_penalty=1.3, min_tokens=20, max_tokens=40),
    "logprobs": dict(prompt=LONG[:30], temperature=1, seed=9, logprobs=2, max_tokens=30),
    "regex": dict(prompt=LONG[50:80], temperature=1, seed=5, regex="([a-m]|[n-z]{2}){9}[0-9]{9}", max_tokens=60),
}
GONE = RequestId("gone")


def request(kind: str, salt: str = "") -> bytes:
    from vllm.sampling_params import StructuredOutputsParams

    sampling = dict(ASKED[kind])
    if regex := sampling.pop("regex", None):
        structured = StructuredOutputsParams(regex=regex)
        structured._backend = "xgrammar"  # as vLLM's front half decides
        sampling |= dict(structured_outputs=structured, stop_token_ids=[1])
    return payload(sampling.pop("prompt"), salt, **sampling, ignore_eos=True)


class World:
    """Two engines of each model, as in two runtimes of a host, and the answer to each question.

    Steps may begin before the tokens of the step before are known."""

    def __init__(self, folder: Path) -> None:
        from runtime.engine.builder import Builder

        self.builds = [Builder(POOL_BYTES, HOST_BYTES, async_scheduling=True)]
        self.builds.append(Builder(POOL_BYTES, HOST_BYTES, self.builds[0].images.fd, async_scheduling=True))
        paths = {name: write_random(folder / name, **shape) for name, shape in SHAPES.items()}
        self.pairs = {name: [build(spec(path)) for build in self.builds] for name, path in paths.items()}
        self.first_steps: list[int] = []  # for each move, the tokens computed in the request's first step after it
        self.adopted: set[RequestId] = set()
        self.answers: dict[tuple[str, str], list[Output]] = {}
        for name, pair in self.pairs.items():
            awake(pair[0])
            for kind in ASKED:
                add(pair[0], RequestId("alone"), request(kind, "alone"))
                self.answers[name, kind] = drive({"": pair[0]}, random.Random(0))[RequestId("alone")]
                assert len(set(tokens(self.answers[name, kind]))) > 8, f"{name}/{kind} repeats itself"
            for engine in pair:
                asleep(engine)
                self._watch(engine)

    def _watch(self, engine: VllmEngine) -> None:
        schedule = engine._scheduler.schedule

        def watched(*args: Any) -> Any:
            scheduled = schedule(*args)
            for id in self.adopted & scheduled.num_scheduled_tokens.keys():
                self.first_steps.append(scheduled.num_scheduled_tokens[id])
                self.adopted.discard(RequestId(id))
            return scheduled

        engine._scheduler.schedule = watched  # type: ignore[method-assign]

    def check_nothing_is_left(self) -> None:
        for name, pair in self.pairs.items():
            for engine in pair:
                engine.step()  # the runner hears of the ended requests
                scheduler = engine._scheduler
                assert not engine.busy() and not scheduler.requests, name
                assert scheduler.blocks.used_blocks == 0, name
                assert scheduler._slabs.taken == 0, name
                assert scheduler.recomputed == 0, name
                assert not engine._worker.model_runner.requests and not scheduler._behind, name

    def close(self) -> None:
        for pair in self.pairs.values():
            for engine in pair:
                engine.close()
        for build in reversed(self.builds):
            assert build.pages_used() == 0
            build.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("models"))
    yield world
    world.close()


@pytest.fixture
def pair(world: World) -> Iterator[tuple[VllmEngine, VllmEngine]]:
    """Both engines of a model, awake. After the test, nothing may be left in the engines."""
    source, target = world.pairs["llama"]
    yield awake(source), awake(target)
    world.check_nothing_is_left()
    for engine in (source, target):
        asleep(engine)


class Move:
    """The move of a request, made call by call as by the platform."""

    def __init__(self, world: World, id: RequestId, asked: bytes, source: VllmEngine, target: VllmEngine) -> None:
        self.world, self.id, self.asked, self.source, self.target = world, id, asked, source, target
        self.received, self.staged, self.stages = 0, list[int](), 2
        self._next = self._expect

    ended = moved = False
    why: EngineError | None = None

    def advance(self) -> None:
        try:
            self._next()
        except EngineError as error:
            self.why = error
            self.give_up()

    def give_up(self) -> None:
        self.target.abort([self.id])
        self.source.abort_move(self.id)
        self.ended = True

    def _expect(self) -> None:
        if self.target.prepare(self.id, self.asked, BLOCK, grammar=grammar_of(self.target, self.asked)):
            self._next = self._stage
        else:
            self.give_up()

    def _stage(self) -> None:
        if (staged := self.source.copy(self.id, self.received)) is None:
            return self.give_up()
        self.staged = staged
        self._next = self._hand_over

    def _hand_over(self) -> None:
        if not self.source.copied(self.id):
            return
        if self.target.copy(self.id, self.received, self.staged) is None:
            return self.give_up()
        self.received += len(self.staged)
        self.stages -= 1
        self._next = self._stage if self.stages else self._leave

    def _leave(self) -> None:
        if self.source.ahead:  # a request leaves between two steps
            return
        assert self.source.commit(self.id) is None
        self._next = self._depart

    def _depart(self) -> None:
        if (departure := self.source.commit(self.id)) is None:
            return
        self.departure = departure
        if self.target.copy(self.id, self.received, departure.host[self.received :]) is None:
            return self.give_up()
        self._next = self._adopt

    def _adopt(self) -> None:
        self.target.commit(self.id, self.departure)
        self.world.adopted.add(self.id)
        self.moved = True
        self._next = self._part

    def _part(self) -> None:
        if self.target.copied(self.id):
            self.source.abort([self.id])
            self.ended = True


def finish_move(move: Move) -> None:
    while not move.ended:
        move.advance()


def begin(world: World, engine: VllmEngine, kind: str, steps: int = 4) -> tuple[RequestId, list[Output]]:
    """Start a request and run `steps` steps. Returns the request's id and the outputs so far."""
    id = RequestId(kind)
    add(engine, id, request(kind))
    said: list[Output] = []
    while len(said) < steps:
        said += engine.step()
    return id, said


class Run:
    """A random history of the two engines of a model."""

    def __init__(self, world: World, name: str, rng: random.Random) -> None:
        self.world, self.name, self.rng = world, name, rng
        self.pair = world.pairs[name]
        self.open: dict[RequestId, tuple[str, int]] = {}  # the question, and the number of the engine
        self.said: dict[RequestId, list[Output]] = {}
        self.moves: dict[RequestId, Move] = {}
        self.count = self.moved = self.begun_ahead = 0

    def arrive(self) -> None:
        if len(self.open) < 7:
            self.count += 1
            id, kind, side = RequestId(f"{self.name}/{self.count}"), self.rng.choice(list(ASKED)), self.rng.randrange(2)
            add(self.pair[side], id, request(kind))
            self.open[id], self.said[id] = (kind, side), []

    def abort(self) -> None:
        if self.open:
            id = self.rng.choice(list(self.open))
            for engine in self.pair:
                engine.abort([id])
            del self.open[id]
            self.moves.pop(id, None)
            self.world.adopted.discard(id)

    def step(self) -> None:
        side = self.rng.randrange(2)
        engine = self.pair[side]
        if not engine.busy():
            return
        held = engine.held()
        if held.kv_wanted > held.kv and self.rng.random() < 0.5:
            engine.grow(held.kv_wanted - held.kv)
        self.take(side, engine.step(ahead=self.rng.random() < 0.7))
        self.begun_ahead += engine.ahead

    def settle(self, side: int) -> None:
        """End the step under way, as the device's loop does before anything but a further step."""
        if self.pair[side].ahead:
            self.take(side, self.pair[side].step())

    def take(self, side: int, outputs: list[Output]) -> None:
        for output in outputs:
            kind, owner = self.open[output.request]
            assert owner == side, "the source still speaks for a request that has moved"
            self.said[output.request].append(output)
            if output.finish is not None:
                self._ended(output.request, kind)

    def _ended(self, id: RequestId, kind: str) -> None:
        said, alone = self.said[id], self.world.answers[self.name, kind]
        assert tokens(said) == tokens(alone), (self.name, kind)
        assert (said[-1].finish, said[-1].stop_reason) == (alone[-1].finish, alone[-1].stop_reason)
        assert [bool(output.logprobs) for output in said] == [bool(output.logprobs) for output in alone]
        del self.open[id]
        if (move := self.moves.pop(id, None)) is not None:
            move.source.abort([id])
            move.target.abort([id])

    def begin_move(self) -> None:
        if still := [id for id in self.open if id not in self.moves]:
            id = self.rng.choice(still)
            kind, side = self.open[id]
            self.moves[id] = Move(self.world, id, request(kind), self.pair[side], self.pair[1 - side])
            self.moves[id].stages = self.rng.randint(1, 3)

    def advance_move(self) -> None:
        if self.moves:
            id = self.rng.choice(list(self.moves))
            move = self.moves[id]
            move.advance()
            if move.moved and self.pair[self.open[id][1]] is move.source:
                self.open[id] = self.open[id][0], 1 - self.open[id][1]
                self.moved += 1
            if move.ended:
                del self.moves[id]

    def give_up_move(self) -> None:
        if pending := [id for id, move in self.moves.items() if not move.moved]:
            self.moves.pop(self.rng.choice(pending)).give_up()

    def park(self) -> None:
        side = self.rng.randrange(2)
        engine = self.pair[side]
        self.settle(side)
        engine.park()
        for _ in range(self.rng.randrange(3)):  # moves go on meanwhile
            self.advance_move()
        until(engine.parked)
        for _ in range(self.rng.randrange(3)):
            self.advance_move()
        awake(engine, self.rng.randint(1, 4))

    def fail_something(self) -> None:
        self.rng.choice(self.world.builds).device.inject(FaultPoint.COPY, self.rng.randint(1, 4))

    def check(self) -> None:
        for engine in self.pair:
            scheduler = engine._scheduler
            out = [going for going in scheduler._outgoing.values() if going.left is not None]
            assert len(scheduler.requests) == scheduler.unfinished + len(out) + len(scheduler._incoming)
            wanted = engine.held().kv_wanted * engine.kv.page_bytes
            assert wanted >= (1 + scheduler.blocks.used_blocks) * engine.kv.block_bytes


@pytest.mark.parametrize(
    ("name", "seed", "moves"),
    [("llama", 0, 60), ("qwen3", 1, 60), ("llama", 2, 60), ("qwen3", 3, 60)],
)
@patch("runtime.engine.blocks.COPY_TRIES", 1000)  # all faults in a row may hit one copy, above all on a busy machine
def test_requests_that_move_say_what_they_say_alone(world: World, name: str, seed: int, moves: int) -> None:
    run = Run(world, name, random.Random(seed))
    for engine in run.pair:
        awake(engine, 3)
    world.first_steps.clear()
    weighted = {
        run.arrive: 5,
        run.step: 14,
        run.begin_move: 6,
        run.advance_move: 40,
        run.abort: 0.5,
        run.give_up_move: 0.7,
        run.park: 0.7,
        run.fail_something: 1,
    }
    while run.moved < moves:
        (action,) = run.rng.choices(list(weighted), weights=list(weighted.values()))
        action()
        run.check()
    for build in world.builds:
        build.device.inject(FaultPoint.COPY, 0)
    while run.open or run.moves:
        run.advance_move()
        run.step()
    assert set(world.first_steps) == {1} and len(world.first_steps) > moves // 2
    assert run.begun_ahead > moves
    world.check_nothing_is_left()
    for engine in run.pair:
        asleep(engine)


@pytest.mark.parametrize("kind", ASKED)
def test_a_request_may_move_there_and_back(world: World, pair: tuple[VllmEngine, VllmEngine], kind: str) -> None:
    here, there = pair
    id, said = begin(world, here, kind)
    while said[-1].finish is None:
        move = Move(world, id, request(kind), here, there)
        finish_move(move)
        assert move.moved, move.why
        here, there = there, here
        if not there.busy():
            assert there.step() == []
        made = len(said)
        while len(said) == made:  # a first step may only compile a grammar
            said += here.step()
    assert tokens(said) == tokens(world.answers["llama", kind])
    if kind == "logprobs":
        assert [output.logprobs for output in said] == [o.logprobs for o in world.answers["llama", kind]]


def test_what_moves_or_is_expected_is_no_work_and_what_has_blocks_wants_them(
    world: World, pair: tuple[VllmEngine, VllmEngine]
) -> None:
    source, target = pair
    id, _ = begin(world, source, "three blocks")
    assert target.prepare(id, request("three blocks"), 4 * BLOCK) and target.prepare(GONE, request("greedy"), 4 * BLOCK)
    assert not target.busy() and target.held().kv_wanted == 2, "eight blocks and the null block: two pages"
    assert target.step() == []
    source.commit(id)
    assert not source.busy() and source.step() == []
    target.abort([id, GONE])
    source.abort([id])


@pytest.mark.parametrize("calls", range(9))
def test_a_move_that_is_broken_off_anywhere_leaves_the_request_where_it_was(
    world: World, pair: tuple[VllmEngine, VllmEngine], calls: int
) -> None:
    source, target = pair
    id, said = begin(world, source, "three blocks", steps=12)
    move = Move(world, id, request("three blocks"), source, target)
    for _ in range(calls):
        move.advance()
        until(lambda: source.copied(id))
        if not source._scheduler._outgoing.get(id) or source.busy():
            said += source.step()
    assert move.moved == (calls == 8), "the target has it, has not stepped yet, and is told to forget it"
    move.give_up()
    world.adopted.discard(id)
    assert not target.busy() and target._scheduler.blocks.used_blocks == 0
    said += drive({"": source}, random.Random(0))[id]
    assert tokens(said) == tokens(world.answers["llama", "three blocks"])


@pytest.mark.parametrize("calls", range(12))
@pytest.mark.parametrize("engine_first", [0, 1])
def test_an_abort_at_any_moment_frees_all_on_either_side(
    world: World, pair: tuple[VllmEngine, VllmEngine], calls: int, engine_first: int
) -> None:
    source, _ = pair
    id, _ = begin(world, source, "three blocks", steps=12)
    move = Move(world, id, request("three blocks"), *pair)
    for _ in range(calls):
        move.advance()
    world.adopted.discard(id)
    for engine in (pair[engine_first], pair[1 - engine_first]):
        engine.abort([id])
        assert engine._scheduler.blocks.used_blocks == engine._scheduler._slabs.taken == 0


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_a_source_that_is_parked_lets_what_has_left_depart_or_stay(
    world: World, pair: tuple[VllmEngine, VllmEngine], left: bool, stays: bool
) -> None:
    source, target = pair
    id, said = begin(world, source, "seeded", steps=14)
    assert target.prepare(id, request("seeded"), BLOCK) and source.copy(id, 0) is not None
    if left:
        source.commit(id)
    asleep(source)
    assert source.held().kv == 0
    if not left:
        assert source.copy(id, 0) is None
        source.commit(id)  # a parked request may leave as well
    until(lambda: source.copied(id))
    if stays:
        source.abort_move(id)
        target.abort([id])
        awake(source)
        said += drive({"": source}, random.Random(0))[id]
    else:
        departure = departed(source, id)
        assert target.copy(id, 0, departure.host) is not None
        target.commit(id, departure)
        until(lambda: target.copied(id))
        source.abort([id])
        said += drive({"": target}, random.Random(0))[id]
        awake(source)
    assert tokens(said) == tokens(world.answers["llama", "seeded"])


def test_a_target_that_is_parked_gives_up_what_it_expects(world: World, pair: tuple[VllmEngine, VllmEngine]) -> None:
    source, target = pair
    id, said = begin(world, source, "seeded")
    assert target.prepare(id, request("seeded"), BLOCK)
    asleep(target)
    assert target.held().kv == 0 and target.copy(id, 0, []) is None
    assert not target.prepare(GONE, request("seeded"), BLOCK), "a parked model has no blocks"
    awake(target)
    assert target.copy(id, 0, []) is None, "not even when it is back"
    source.commit(id)
    until(lambda: source.copied(id))
    with pytest.raises(EngineError, match="seeded is not expected: .* its model was parked"):
        target.commit(id, departed(source, id))
    source.abort_move(id)
    said += drive({"": source}, random.Random(0))[id]
    assert tokens(said) == tokens(world.answers["llama", "seeded"])


def test_there_may_be_no_room_at_the_target_at_first_or_for_more(
    world: World, pair: tuple[VllmEngine, VllmEngine]
) -> None:
    source, target = pair
    id, said = begin(world, source, "three blocks", steps=12)
    others = [RequestId(f"other {number}") for number in range(8)]
    for other in others[:7]:
        assert target.prepare(other, request("greedy"), 4 * BLOCK)
    assert target.prepare(others[7], request("greedy"), BLOCK)
    assert target._scheduler.blocks.get_num_free_blocks() == 2
    assert not target.prepare(id, request("three blocks"), 2 * BLOCK), "one is kept for the golden question"
    assert target.prepare(id, request("three blocks"), BLOCK)
    staged = source.copy(id, 0)
    assert staged is not None and len(staged) == 2
    until(lambda: source.copied(id))
    assert target.copy(id, 0, staged) is None
    assert target.copy(id, 0, staged, admitted=True) is not None, "the expectation stayed, and there is one block"
    target.grow(1)
    source.commit(id)
    departure = departed(source, id)
    assert departure.host[:2] == staged and len(departure.host) == 3
    assert target.copy(id, 2, departure.host[2:]) is not None
    target.commit(id, departure)
    target.abort(others)
    until(lambda: target.copied(id))
    source.abort([id])
    said += drive({"": target}, random.Random(0))[id]
    assert tokens(said) == tokens(world.answers["llama", "three blocks"])


@pytest.mark.parametrize("parked", [False, True])
def test_a_copy_out_that_fails_for_good_is_said_and_the_request_stays(
    world: World, pair: tuple[VllmEngine, VllmEngine], monkeypatch: pytest.MonkeyPatch, parked: bool
) -> None:
    monkeypatch.setattr("runtime.engine.blocks.COPY_TRIES", 1)
    source, _ = pair
    id, said = begin(world, source, "seeded")
    source.kv.reservation.device.inject(FaultPoint.COPY, 1)
    source.commit(id)
    with pytest.raises(EngineError, match="of request seeded can't be copied out: .*injector"):
        until(lambda: source.copied(id))
    if parked:
        asleep(source)
        with pytest.raises(EngineError, match="could not be copied out before its model was parked"):
            source.commit(id)
    source.abort_move(id)
    if parked:
        awake(source)
    said += drive({"": source}, random.Random(0))[id]
    assert tokens(said) == tokens(world.answers["llama", "seeded"])
    assert source._scheduler.recomputed == parked, "its blocks were nowhere any more"
    source._scheduler.recomputed = 0


@pytest.mark.parametrize("adopted", [False, True])
def test_a_copy_in_that_fails_for_good_is_said_or_the_request_computed_again(
    world: World, pair: tuple[VllmEngine, VllmEngine], monkeypatch: pytest.MonkeyPatch, adopted: bool
) -> None:
    monkeypatch.setattr("runtime.engine.blocks.COPY_TRIES", 1)
    source, target = pair
    id, said = begin(world, source, "penalised")
    assert target.prepare(id, request("penalised"), BLOCK)
    source.commit(id)
    departure = departed(source, id)
    target.kv.reservation.device.inject(FaultPoint.COPY, 1)
    assert target.copy(id, 0, departure.host) is not None
    if adopted:
        target.commit(id, departure)
        until(lambda: target.copied(id))
        source.abort([id])
    else:
        with pytest.raises(EngineError, match="of request penalised can't be copied in: .*injector"):
            until(lambda: target.copied(id))
        target.abort([id])
        source.abort_move(id)
    said += drive({"": target if adopted else source}, random.Random(0))[id]
    assert tokens(said) == tokens(world.answers["llama", "penalised"])
    assert target._scheduler.recomputed == adopted
    target._scheduler.recomputed = 0


def test_what_can_not_be_is_refused_by_name(world: World, pair: tuple[VllmEngine, VllmEngine]) -> None:
    source, target = pair
    with pytest.raises(BadRequest):
        target.prepare(GONE, b"\x00 no request", 5)
    with pytest.raises(EngineError, match="request gone can't leave: it does not run here"):
        source.commit(GONE)
    with pytest.raises(EngineError, match="request gone is not expected"):
        target.commit(GONE, Departure([5], 3, [0], b""))
    assert source.copy(GONE, 0) is None and source.copied(GONE) and target.copy(GONE, 0, [0]) is None
    source.abort_move(GONE)

    source.add(GONE, request("greedy"))
    assert source.copy(GONE, 0) is None, "it has made nothing that would be lost"
    with pytest.raises(EngineError, match="has made no token yet"):
        source.commit(GONE)
    with pytest.raises(EngineError, match="request gone is here already"):
        source.prepare(GONE, request("greedy"), 5)
    source.abort([GONE])

    ends = tokens(world.answers["llama", "greedy"])
    for kind, departure, wrong in [
        ("greedy", Departure([5, 6], 3, [0], b""), "request gone needs 1 blocks and 0 were handed over"),
        ("greedy", Departure([5, 6], 5, [0], b""), "5 of 5 tokens are computed"),
        ("greedy", Departure([5, 600], 4, [0], b""), "token 600 was made before"),
        ("greedy", Departure(ends, 20, [0], b""), "the 40 tokens that were made before are all"),
        ("seeded", Departure([5, 6], 4, [0], b"no state"), "."),
    ]:
        assert target.prepare(GONE, request(kind), 5, grammar=grammar_of(target, request(kind)))
        with pytest.raises(EngineError, match=wrong):
            target.commit(GONE, departure)
        assert not target._scheduler.requests and target._scheduler.blocks.used_blocks == 0
    assert target.prepare(GONE, request("greedy"), 5)
    with pytest.raises(EngineError, match="request gone can't be received"):
        target.copy(GONE, 0, [1 << 20])
    target.abort([GONE])


def test_what_is_expected_leaves_room_for_the_golden_question(
    world: World, pair: tuple[VllmEngine, VllmEngine]
) -> None:
    _, target = pair
    tries = iter(range(99))
    while target.prepare(RequestId(str(next(tries))), request("greedy"), BLOCK):
        pass
    assert next(tries) > 9 and target.check() is None
    target.abort([RequestId(str(number)) for number in range(99)])
