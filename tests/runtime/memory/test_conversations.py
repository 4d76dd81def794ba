"""Prefixes of ended requests outlast the device's pages: conversations on real engines that sleep between turns."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.core.device.request import RequestId
from runtime.core.engine import Output
from store.contract.wire import ONCE
from tests.runtime.engines import asleep, awake, drive, payload, spec

if TYPE_CHECKING:
    from runtime.core.prefix_index import KeptBlock
    from runtime.engine.builder import Builder
    from runtime.engine.vllm import VllmEngine
    from runtime.memory.native import TransferTicket

POOL_BYTES, HOST_BYTES, KEPT_BYTES = 128 << 20, 512 << 20, 128 << 20
PAGES = 8
COPY_S = 60
TTL_S = 600.0


@pytest.fixture(scope="module")
def build() -> Iterator[Builder]:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES, prefixes=(KEPT_BYTES, TTL_S))
    yield build
    build.close()


@pytest.fixture
def engine(build: Builder, random_models: dict[str, Path]) -> Iterator[VllmEngine]:
    engine = build(spec(random_models["llama"], 1024))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def bringing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come back whatever the copy takes: on a busy machine a toy computes its tokens sooner than copies end."""
    from runtime.core.prefix_index import BringingCosts

    monkeypatch.setattr(BringingCosts, "pays", lambda *_: True)


@dataclass
class Conversation:
    """A tenant's conversation with a model: each turn's prompt is everything before, and some words more."""

    seed: int
    salt: str = "tenant-1"
    words: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: list[int] = field(default_factory=list)  # prompt tokens of each turn that were not computed
    said: list[list[int]] = field(default_factory=list)

    def turn(self, engine: VllmEngine, words: int = 150) -> None:
        rng = random.Random(f"{self.seed} {len(self.said)}")
        self.words += [rng.randrange(3, 500) for _ in range(words)]
        id = RequestId(f"{self.seed}-{self.salt}-{len(self.said)}")
        asked = payload(self.words, self.salt, temperature=0, max_tokens=12, ignore_eos=True)
        engine.add(id, asked)
        outputs = drive({"": engine}, random.Random(0))[id]
        self.prompt_tokens += len(self.words)
        self.cached.append(sum(output.cached_tokens for output in outputs))
        self.said.append([token for output in outputs for token in output.tokens])
        self.words += self.said[-1]


def test_a_conversation_finds_its_prefix_after_its_model_slept_without_a_page(
    build: Builder, engine: VllmEngine
) -> None:
    sleeping, awake_all_along = Conversation(1), Conversation(1, "tenant-2")
    awake(engine, PAGES)
    for _ in range(4):
        awake_all_along.turn(engine)
    for _ in range(4):
        nap(build, engine)
        sleeping.turn(engine)
    assert sleeping.said == awake_all_along.said
    assert sleeping.cached == awake_all_along.cached and sum(sleeping.cached) > 0
    asleep(engine)
    assert engine.held().kv == engine.held().weights == 0


def test_a_foreign_tenants_equal_prompt_finds_nothing(build: Builder, engine: VllmEngine) -> None:
    own, foreign = Conversation(2), Conversation(2, "tenant-2")
    own.turn(awake(engine, PAGES), 400)
    nap(build, engine)
    foreign.turn(engine, 400)
    assert foreign.cached == [0] and foreign.said == own.said
    again = Conversation(2)
    again.turn(engine, 400)
    assert again.cached == [384] and again.said == own.said


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_block_with_a_flipped_byte_is_computed_and_never_served(
    build: Builder, engine: VllmEngine, changed: int
) -> None:
    first, again = Conversation(3), Conversation(3)
    first.turn(awake(engine, PAGES), 400)
    asleep(engine)
    build.prefixes.settle()
    wrong = build.device_bytes().prefixes.wrong
    block = kept(build, engine)[changed]
    build.images.cache.view(block.host * block.bytes, block.bytes)[block.bytes // 3] ^= 1
    again.turn(awake(engine, PAGES), 400)
    assert build.device_bytes().prefixes.wrong == wrong + 1
    assert again.cached == [128 * changed] and again.said == first.said
    nap(build, engine)
    once_more = Conversation(3)
    once_more.turn(engine, 400)
    assert once_more.cached == [384], "the block computed again was kept in place of the changed block"


def test_blocks_of_shrunken_caches_are_kept_as_well(build: Builder, engine: VllmEngine) -> None:
    first, again = Conversation(4), Conversation(4)
    first.turn(awake(engine, PAGES), 400)
    engine.shrink(PAGES)
    engine.grow(PAGES)
    build.prefixes.settle()
    again.turn(engine, 400)
    assert again.cached == [384] and again.said == first.said


def test_conversations_that_take_each_others_blocks_find_their_prefixes(build: Builder, engine: VllmEngine) -> None:
    """A page has 15 blocks beside the null block. Two conversations of up to seven blocks each fit, and four do not."""
    crowded, roomy = ([Conversation(seed, f"{kind} {seed}") for seed in range(20, 24)] for kind in ("crowded", "roomy"))
    awake(engine, PAGES)
    for conversation in roomy * 4:
        conversation.turn(engine, 200)
    asleep(engine)
    awake(engine, 1)
    for conversation in crowded * 4:
        conversation.turn(engine, 200)
        build.prefixes.settle()
        assert engine.held().kv == 1
    assert [each.said for each in crowded] == [each.said for each in roomy]
    assert [each.cached for each in crowded] == [each.cached for each in roomy] == [[0, 128, 384, 512]] * 4


def test_a_block_is_handed_out_when_its_copy_is_over(
    build: Builder, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are so late that the bytes come from the device only when the device's thread waits for the copies."""
    first, again, others = Conversation(30), Conversation(30), [Conversation(seed) for seed in (31, 32)]
    first.turn(awake(engine, 1), 800)
    copies: list[LateCopy] = []
    copy = engine.kv.copy

    def late(*asked: Any) -> LateCopy:
        copies.append(LateCopy(partial(copy, *asked)))
        return copies[-1]

    with monkeypatch.context() as patch:
        patch.setattr(engine.kv, "copy", late)
        for other in others:
            other.turn(engine, 800)
        assert copies[0].over.is_set()
        for each in copies:
            each.wait(COPY_S)
    build.prefixes.settle()
    again.turn(engine, 800)
    assert again.said == first.said and again.cached == [768]


class LateCopy:
    """The ticket of a copy that the main thread makes when the main thread waits for the copy."""

    def __init__(self, copy: Callable[[], TransferTicket]) -> None:
        self._copy, self.over = copy, threading.Event()

    def wait(self, timeout_s: float) -> None:
        if threading.current_thread() is threading.main_thread() and not self.over.is_set():
            self._copy().wait(timeout_s)
            self.over.set()
        assert self.over.wait(timeout_s)


@pytest.mark.parametrize("slept", [False, True], ids=["on the device", "in the host cache"])
def test_a_tenants_prefixes_are_forgotten_and_the_neighbours_stay(
    build: Builder, engine: VllmEngine, slept: bool
) -> None:
    first = [Conversation(40, salt) for salt in ("tenant-1", "tenant-2")]
    again = [Conversation(40, salt) for salt in ("tenant-1", "tenant-2")]
    awake(engine, PAGES)
    for conversation in first:
        conversation.turn(engine, 400)
    if slept:
        nap(build, engine)
    held_bytes = build.device_bytes().prefixes.held_bytes
    engine.forget_prefixes("tenant-1")
    if slept:
        assert build.device_bytes().prefixes.held_bytes == held_bytes - 3 * engine.kv.block_bytes
    nap(build, engine)
    for conversation in again:
        conversation.turn(engine, 400)
    assert [conversation.cached for conversation in again] == [[0], [384]]
    assert [conversation.said for conversation in again] == [conversation.said for conversation in first]


def test_prefixes_are_forgotten_while_they_are_copied(build: Builder, engine: VllmEngine) -> None:
    Conversation(41).turn(awake(engine, PAGES), 400)
    asleep(engine)
    engine.forget_prefixes("tenant-1")
    build.prefixes.settle()
    assert build.device_bytes().prefixes.held_bytes == 0
    again = Conversation(41)
    again.turn(awake(engine, PAGES), 400)
    assert again.cached == [0]


def test_an_engine_without_room_on_the_host_forgets_as_well(random_models: dict[str, Path]) -> None:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES)
    engine = awake(build(spec(random_models["llama"], 1024)), PAGES)
    cached = []
    for _ in range(2):
        for conversation in (Conversation(42), Conversation(42)):
            conversation.turn(engine, 400)
            cached += conversation.cached
        engine.forget_prefixes("tenant-1")
    assert cached == [0, 384, 0, 384]
    engine.close()
    build.close()


def test_a_request_for_once_leaves_nothing(build: Builder, engine: VllmEngine) -> None:
    """The second request has even the salt of the first."""
    first, again, usual = Conversation(43, ONCE + "1"), Conversation(43, ONCE + "1"), Conversation(43)
    kept_before = build.device_bytes().prefixes.kept
    first.turn(awake(engine, PAGES), 400)
    again.turn(engine, 400)
    nap(build, engine)
    again.said.clear()
    again.words.clear()
    again.turn(engine, 400)
    assert again.cached == [0, 0] and build.device_bytes().prefixes.kept == kept_before
    usual.turn(engine, 400)
    assert first.said == again.said == usual.said


def test_a_request_for_once_is_parked_like_any_other(build: Builder, engine: VllmEngine) -> None:
    rng = random.Random(44)
    asked = [rng.randrange(3, 500) for _ in range(300)]
    awake(engine, PAGES).add(RequestId("runs"), payload(asked, ONCE + "2", temperature=0, max_tokens=12))
    made = [engine.step()[0].tokens[0] for _ in range(5)]
    nap(build, engine)
    made += [token for output in drive({"": engine}, rng)[RequestId("runs")] for token in output.tokens]
    alone = Conversation(44, words=asked)
    alone.turn(engine, 0)
    assert alone.said == [made]


def test_the_golden_question_leaves_no_block(build: Builder, engine: VllmEngine) -> None:
    before = build.device_bytes().prefixes
    awake(engine, PAGES)
    assert engine.check() is None
    nap(build, engine)
    assert engine.check() is None
    assert build.device_bytes().prefixes == before


def test_a_parked_request_comes_back_beside_a_kept_prefix(build: Builder, engine: VllmEngine) -> None:
    """The parked request's own blocks are copied once, as a parked request's."""
    first, again = Conversation(5), Conversation(5)
    first.turn(awake(engine, PAGES), 400)
    kept_before = build.device_bytes().prefixes.kept
    rng = random.Random(5)
    asked = [rng.randrange(3, 500) for _ in range(300)]
    engine.add(RequestId("runs"), payload(asked, "tenant-1", temperature=0, max_tokens=20, ignore_eos=True))
    made = [engine.step()[0].tokens[0] for _ in range(5)]
    nap(build, engine)
    assert build.device_bytes().prefixes.kept == kept_before + 3
    again.turn(engine, 400)
    assert again.cached == [384] and again.said == first.said
    lone = Conversation(5, "tenant-3", words=asked)
    lone.turn(engine, 0)
    assert lone.said[0][:5] == made and not engine.busy()


def test_an_engine_that_is_closed_leaves_no_block(build: Builder, random_models: dict[str, Path]) -> None:
    engine = build(spec(random_models["qwen3"], 1024))
    Conversation(6).turn(awake(engine, PAGES), 400)
    asleep(engine)
    assert build.device_bytes().prefixes.held_bytes == 3 * engine.kv.block_bytes
    engine.close()
    build.prefixes.settle()
    assert build.device_bytes().prefixes.held_bytes == 0 == build.images.stats().prefix_bytes


def test_a_builder_without_room_for_prefixes_keeps_none(random_models: dict[str, Path]) -> None:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES)
    engine = build(spec(random_models["llama"], 1024))
    first, again = Conversation(7), Conversation(7)
    first.turn(awake(engine, PAGES), 400)
    nap(build, engine)
    again.turn(engine, 400)
    assert again.cached == [0] and again.said == first.said
    assert build.images.stats().prefix_bytes == 0
    engine.close()
    build.close()


def test_at_the_bound_the_oldest_conversation_loses_its_tail(random_models: dict[str, Path]) -> None:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES, prefixes=(2 << 20, TTL_S))
    engine = awake(build(spec(random_models["llama"], 1024)), PAGES)
    fit, long = (2 << 20) // engine.kv.block_bytes, 7
    first = [Conversation(seed) for seed in (8, 9, 10)]
    again = [Conversation(seed) for seed in (8, 9, 10)]
    for conversation in first:
        conversation.turn(engine, 128 * long + 1)
        nap(build, engine)
    assert build.images.stats().prefix_bytes == 2 << 20
    for conversation in reversed(again):
        conversation.turn(engine, 128 * long + 1)
    assert [conversation.said for conversation in again] == [conversation.said for conversation in first]
    assert fit == 16 and [conversation.cached for conversation in again] == [[128 * (fit - 2 * long)], [896], [896]]
    engine.close()
    build.close()


HAPPENINGS = ("nothing", "nap", "crowd", "forget", "once")


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(HAPPENINGS)), min_size=4, max_size=12))
def test_cached_tokens_are_the_tokens_that_no_step_computed(
    build: Builder, engine: VllmEngine, history: list[tuple[int, str]]
) -> None:
    """Counted over the steps: a request computes its prompt but for the cached tokens, and its answer but for the last
    token. Four conversations of two tenants have pages for two conversations."""
    talks = [Conversation(50 + number, f"tenant-{number % 2}") for number in range(4)]
    awake(engine, 1)
    for number, happening in history:
        match happening:
            case "nap":
                nap(build, engine, 1)
            case "crowd":
                Conversation(60, ONCE + "crowd").turn(engine, 800)
            case "forget":
                engine.forget_prefixes("tenant-0")
            case "once":
                talks[number] = Conversation(50 + number, ONCE + str(number))
        if len(talks[number].words) > 700:
            talks[number] = Conversation(50 + number, f"tenant-{number % 2}")
        with counted(engine) as steps:
            talks[number].turn(engine)
        cached, said = talks[number].cached[-1], talks[number].said[-1]
        asked = len(talks[number].words) - len(said)
        assert sum(steps) == asked - cached + len(said) - 1
        assert cached % 128 == 0 and not (cached and talks[number].salt.startswith(ONCE))
    asleep(engine)


@contextmanager
def counted(engine: VllmEngine) -> Iterator[list[int]]:
    """Count the tokens of each step of an engine. Yields a list with an item for each step so far."""
    steps, step = list[int](), engine.step

    def noted(ahead: bool) -> list[Output]:
        outputs = step(ahead=ahead)
        steps.append(engine._scheduler.scheduled_tokens)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", noted)
        yield steps


def nap(build: Builder, engine: VllmEngine, pages: int = PAGES) -> None:
    """Have the model sleep until its blocks lie in the host cache, and wake up again."""
    asleep(engine)
    build.prefixes.settle()
    awake(engine, pages)


def kept(build: Builder, engine: VllmEngine) -> list[KeptBlock]:
    """Blocks kept for an engine, heads first."""
    assert engine._prefixes is not None
    blocks = build.prefixes._index.of(engine._prefixes._space.number)
    order = list(build.prefixes._index._orders["tenant-1"].values())
    return sorted(blocks, key=order.index, reverse=True)
