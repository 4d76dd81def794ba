"""Models with several kinds of KV cache make on Staccato's engines the tokens of bare vLLM, whatever is parked when.

Requests are parked every few steps, in prefill and in decode. While the requests are away, every free page of the
device is overwritten: a block that was not brought back changes the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec

from runtime.core.device.request import RequestId
from runtime.core.engine import EngineError
from runtime.engine import groups
from runtime.engine.vllm import VllmEngine
from runtime.engine.worker import PooledWorker
from tests.runtime.bare import Tokens, ask_bare_vllm
from tests.runtime.engines import TwoRuntimes, asleep, awake, moved, parked_about, payload, scribble, spec, spoil
from tests.runtime.hybrids import HYBRIDS, ROUNDED, STATES, dtype, settings, write_hybrid

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 48 << 20, 512 << 20
MOST, PARKED_EVERY = 40, 4  # tokens of an answer; steps
WORDS = random.Random(3)
PROMPTS = [[WORDS.randrange(3, 500) for _ in range(length)] for length in (5, 70, 200, 333)]
QUICK = (
    "gpt_oss",
    "llama4_text",
    "gemma4_text",
    "granitemoehybrid",
    "qwen3_next",
    "deepseek_v2",
)  # a model of each kind


def marked(names: Iterable[str]) -> pytest.MarkDecorator:
    """A test for each of the models; models beside QUICK take minutes together."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in names]
    )


models = marked(HYBRIDS)


class Hybrids(TwoRuntimes):
    """Two runtimes, with the folders of the models and the answers of bare vLLM."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        super().__init__(POOL_BYTES, HOST_BYTES)
        self.folders = {name: write_hybrid(folder / name, name) for name in names}
        more = {name: settings(name) for name in names}
        self.said: Tokens = ask_bare_vllm(self.folders, {name: dtype(name) for name in names}, PROMPTS, MOST, more)

    def of(self, name: str, runtime: int = 0) -> VllmEngine:
        return self.engine(
            msgspec.structs.replace(spec(self.folders[name]), dtype=dtype(name)), runtime, **settings(name)
        )


@pytest.fixture(scope="module")
def hybrids(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrids]:
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [name for name in HYBRIDS if any(params.get("name") == name for params in asked)]
    hybrids = Hybrids(tmp_path_factory.mktemp("hybrids"), names)
    yield hybrids
    hybrids.close()


def question(number: int) -> bytes:
    return payload(PROMPTS[number], f"salt {number}", temperature=0, max_tokens=MOST, ignore_eos=True)


def answers(
    engine: VllmEngine,
    numbers: list[int],
    parked_every: int = 0,
    cached: bool = False,
    away: Callable[[], object] | None = None,
    made: Sequence[int] = (),
) -> list[list[int]]:
    """Ask prompts in one batch.

    Args:
        engine: an engine that is awake.
        numbers: indices of PROMPTS.
        parked_every: steps after which the engine is parked; 0: never.
        cached: whether blocks of the same prompts may be used that are left from before.
        away: called each time while the engine is parked; the default overwrites every free page of the device.
        made: tokens of each answer that another runtime has made before.

    Returns: the tokens that the engine made, for each prompt."""
    said: dict[str, list[int]] = {str(number): [] for number in numbers}
    if not cached:
        engine._scheduler.reset_prefix_cache()
    for number in numbers:
        engine.add(RequestId(str(number)), question(number), made)
    parked_about(engine, said, parked_every, away or (lambda: scribble(engine.kv.reservation.device)))
    return list(said.values())


def batches(name: str) -> list[list[int]]:
    """Prompts asked together: in 16 bits, rounding makes answers depend on the batch."""
    numbers = list(range(len(PROMPTS)))
    return [[number] for number in numbers] if name in ROUNDED else [numbers]


@models
def test_a_model_says_what_bare_vllm_says_however_often_it_is_parked(hybrids: Hybrids, name: str) -> None:
    engine = hybrids.of(name)
    awake(engine, 8)
    assert engine.check() is None
    for numbers in batches(name):
        expected = [hybrids.said[name][number] for number in numbers]
        assert answers(engine, numbers) == expected
        assert answers(engine, numbers, PARKED_EVERY) == expected, "parked in mid-answer"
    asleep(engine)
    assert engine._scheduler.recomputed == 0 and engine._scheduler._slabs.taken == 0
    assert hybrids.builds[0].pages_used() == 0
    assert all(len(set(said)) > 5 for said in hybrids.said[name]), "an answer that repeats itself proves nothing"


@models
def test_what_an_earlier_request_left_in_the_blocks_changes_no_answer(hybrids: Hybrids, name: str) -> None:
    engine = hybrids.of(name)
    awake(engine, 8)
    for number in range(len(PROMPTS)):
        spoil(engine)
        assert answers(engine, [number]) == [hybrids.said[name][number]]
    asleep(engine)


@marked(STATES)
def test_a_request_with_the_id_of_a_longer_request_begins_with_a_state_of_its_own(hybrids: Hybrids, name: str) -> None:
    engine = hybrids.of(name)
    awake(engine, 8)
    for number in (3, 0):
        engine._scheduler.reset_prefix_cache()
        said: dict[str, list[int]] = {"again": []}
        engine.add(RequestId("again"), question(number))
        parked_about(engine, said)
        assert said["again"] == hybrids.said[name][number]
        engine.step()  # tells vLLM's runner that the request has ended, and computes nothing
    asleep(engine)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*QUICK, "mamba2"])
def test_a_request_that_is_parked_at_every_step_says_the_same_a_hundred_times(hybrids: Hybrids, name: str) -> None:
    """Parked in the middle of prompts, too. Every second time the prompt's blocks are cached from the time before."""
    engine = hybrids.of(name)
    awake(engine, 8)
    for run in range(100):
        number, cached = run // 2 % len(PROMPTS), run % 2 == 1
        assert answers(engine, [number], 1, cached) == [hybrids.said[name][number]], f"run {run}"
    assert engine._scheduler.recomputed == 0
    asleep(engine)


@models
def test_a_request_goes_on_at_another_runtime(hybrids: Hybrids, name: str) -> None:
    source, target = hybrids.of(name), hybrids.of(name, runtime=1)
    awake(source, 8)
    awake(target, 8)
    assert moved(source, target, question(3), MOST, len(PROMPTS[3]) + MOST) == hybrids.said[name][3]
    asleep(source)
    asleep(target)


@marked(name for name in HYBRIDS if name not in ROUNDED)
def test_a_request_of_a_dead_runtime_goes_on(hybrids: Hybrids, name: str) -> None:
    engine, said = hybrids.of(name), hybrids.said[name][2]
    awake(engine, 8)
    made = answers(engine, [2], made=said[: MOST // 2])[0]
    asleep(engine)
    assert said[: MOST // 2] + made == said


def test_a_model_with_state_outside_the_blocks_is_refused(
    hybrids: Hybrids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = PooledWorker.initialize_from_config

    def begin_with_a_cache_of_its_own(worker: PooledWorker, config: KVCacheConfig) -> None:
        begin(worker, config)
        layers = worker.vllm_config.compilation_config.static_forward_context
        layer = next(layer for layer in layers.values() if isinstance(layer, Attention))
        layer.kv_cache = torch.zeros_like(layer.kv_cache)

    monkeypatch.setattr(PooledWorker, "initialize_from_config", begin_with_a_cache_of_its_own)
    with pytest.raises(EngineError, match="kept outside the blocks"):
        hybrids.builds[0].build(spec(write_hybrid(tmp_path, "gemma3_text", seed=4)), **settings("gemma3_text"))
    assert hybrids.builds[0].pages_used() == 0


def test_a_model_with_an_unknown_kind_of_cache_is_refused_before_its_weights_are_read(
    hybrids: Hybrids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.delitem(groups.KINDS, SlidingWindowSpec)
    with pytest.raises(EngineError, match=r"layers\.0\.self_attn\.attn keeps a SlidingWindow: only FullAttention"):
        hybrids.builds[0].build(spec(write_hybrid(tmp_path, "gemma3_text", seed=5)), lambda done, _: read.append(done))
    assert not any(read) and hybrids.builds[0].pages_used() == 0


@pytest.mark.long
@pytest.mark.parametrize(("name", "kib"), [("gpt_oss", 8448), ("gemma3_text", 4480)])
def test_windows_give_back_the_blocks_behind(hybrids: Hybrids, tmp_path: Path, name: str, kib: int) -> None:
    """`kib`: memory of a request of 4,097 tokens. A window holds two blocks."""
    asked = spec(write_hybrid(tmp_path, name, context=8192), max_model_len=4608)
    engine = hybrids.builds[0].build(asked, **settings(name) | {"max_num_batched_tokens": 512})
    awake(engine, 8)
    engine.add(RequestId("long"), payload(WORDS.choices(range(3, 500), k=4096), temperature=0, max_tokens=9))
    while not any(output.tokens for output in engine.step()):
        engine.grow(max(0, engine.held().kv_wanted - engine.held().kv))
    engine.step()  # the step after the prefill gives back what the last piece needed
    blocks, block_kib = 1 + engine._scheduler.blocks.used_blocks, engine.kv.block_bytes >> 10
    engine.close()
    assert abs(blocks * block_kib - kib) <= block_kib
