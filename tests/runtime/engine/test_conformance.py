"""Requirements on a vLLM release before the runtime may use the release: run this file first with a new release.

test_engine.py and test_switching.py show at length that tokens are equal; this file tests the seams one by one.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from deploy.demo.random_weights import ARCHITECTURES, write_random
from runtime.core.device.request import RequestId
from runtime.core.engine import EngineError, WeightSource
from store.contract.views import Content
from store.contract.wire import EngineSpec
from tests.runtime.engines import asleep, awake, payload, spec, until
from tests.runtime.forms import write_form

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 64 << 20, 256 << 20
STRAY_MOST = 0.001  # share of a model's bytes


@pytest.fixture
def build() -> Iterator[Any]:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES)
    yield build
    gc.collect()
    build.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_this_release_passes_its_self_check(build: Any, threads: int) -> None:
    from runtime.engine.selfcheck import self_check

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        self_check(build)
    finally:
        torch.set_num_threads(before)
    assert build.pages_used() == 0 and build.images.stats().images == 0


def test_the_self_check_notices_a_kv_cache_that_is_not_brought_back(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.engine.selfcheck import self_check
    from runtime.memory.kv import KvRegion
    from runtime.memory.native import Direction

    copy = KvRegion.copy

    def forgetful(self: KvRegion, cache: Any, blocks: Any, host: Any, direction: Direction, after: Any) -> Any:
        return copy(self, cache, blocks, host, Direction.TO_HOST, after)

    monkeypatch.setattr(KvRegion, "copy", forgetful)
    with pytest.raises(EngineError, match="a request that was parked says"):
        self_check(build)


def test_the_self_check_notices_weights_that_stay_where_they_are(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.engine import worker
    from runtime.engine.selfcheck import self_check

    monkeypatch.setattr(worker, "tensors_of", lambda model: [])
    with pytest.raises(EngineError, match="of a toy's weights"):
        self_check(build)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "opt"])
def test_all_memory_of_a_model_moves(
    build: Any, random_models: dict[str, Path], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved(build, spec(random_models[architecture]), monkeypatch)


@pytest.mark.parametrize(
    "form",
    [
        "mixtral",
        "gpt_oss",
        pytest.param(
            "gpt_oss_mxfp4",
            marks=pytest.mark.skipif(
                not torch.cpu._is_amx_tile_supported(), reason="vLLM serves this form on CPUs with AMX only"
            ),
        ),
        "w8a8_asymmetric",
    ],
)
def test_all_memory_of_a_mixture_and_of_an_int8_model_moves(
    build: Any, random_models: dict[str, Path], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first model of the process is dense, as in a runtime."""
    build(spec(random_models["llama"])).close()
    dtype = "bfloat16" if form.endswith("mxfp4") else "float32"
    engine = spec(write_form(tmp_path / form, form, seed=1))
    moved(build, msgspec.structs.replace(engine, dtype=dtype), monkeypatch)


def moved(build: Any, asked: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that memory allocated by vLLM during the load is in the reservation after the tensors' move, or freed."""
    from runtime.engine.worker import Home, PooledWorker

    load_model, take_in = PooledWorker.load_model, Home.take_in
    loaded: set[int] = set()
    stray: list[int] = []

    def noted(self: PooledWorker, **kwargs: Any) -> None:
        before = storages()
        load_model(self, **kwargs)
        loaded.update(storages().keys() - before.keys())

    def counted(self: Home) -> None:
        take_in(self)
        inside = range(self.reservation.address, self.reservation.address + self.reservation.bytes)
        stray.append(sum(size for at, size in storages().items() if at in loaded and at not in inside))

    monkeypatch.setattr(PooledWorker, "load_model", noted)
    monkeypatch.setattr(Home, "take_in", counted)
    engine = build(asked)
    assert sum(stray) <= STRAY_MOST * engine.home.used
    assert awake(engine, 8).check() is None
    engine.close()
    gc.unfreeze()  # `storages` froze parts of the engine
    gc.collect()
    gc.freeze()


def storages() -> dict[int, int]:
    """Address and bytes of every tensor's memory, including tensors of frozen objects."""
    gc.collect()
    gc.unfreeze()
    things = gc.get_objects()
    gc.freeze()  # else each later collection, and each build has some, visits the objects of vLLM's modules
    tensors = [thing for thing in things if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta"]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


def test_two_models_of_equal_shape_share_no_memory(build: Any, random_models: dict[str, Path]) -> None:
    """vLLM shares tables of rotary positions between the models of a process."""
    first, second = build(spec(random_models["llama"])), build(spec(random_models["llama"], key="again"))
    assert build.images.stats().images == 1, "they have the same weights: one image"
    awake(first)
    awake(second)
    asleep(first)
    assert second.check() is None
    asleep(second)
    assert awake(first).check() is None
    first.close()
    second.close()


def test_a_sleeping_model_takes_requests_and_holds_no_page(build: Any, random_models: dict[str, Path]) -> None:
    engine = build(spec(random_models["llama"]))
    engine.add(RequestId("a"), payload([5, 6, 7], temperature=0, max_tokens=3, ignore_eos=True))
    assert engine.busy() and build.pages_used() == 0
    awake(engine, engine.held().kv_wanted)
    assert [token for _ in range(3) for output in engine.step() for token in output.tokens]
    assert not engine.busy()
    engine.close()


def test_who_lacks_a_block_between_its_pages_wants_more_of_them_than_it_has(build: Any, tmp_path: Path) -> None:
    """With gaps, pages hold fewer blocks than without gaps. If the engine wanted no more pages, steps would make no
    token, for ever."""
    engine = build(spec(write_random(tmp_path / "wide", "llama", hidden=256, layers=6, heads=4, kv_heads=4)))
    block_bytes, page_bytes = engine.kv.block_bytes, engine.kv.page_bytes
    assert 4 * block_bytes == 3 * page_bytes, "the gap below is made for that"
    asked = payload([5, 6, 7] * 80, temperature=0, max_tokens=250, ignore_eos=True)
    said: list[list[int]] = []
    for gap in ([], [2]):
        awake(engine, 5)
        engine._give_back(gap)
        said.append([])
        engine.add(RequestId(f"with {len(gap)} gaps"), asked)
        grown = 0
        while engine.busy():
            outputs = engine.step()
            said[-1] += [token for output in outputs for token in output.tokens]
            if not outputs:
                held = engine.held()
                assert held.kv_wanted > held.kv, f"nothing was made, and it wants no pages: {held}"
                engine.grow(held.kv_wanted - held.kv)
                grown += 1
        assert grown == bool(gap)
        asleep(engine)
    assert said[0] == said[1] and len(said[0]) == 250
    engine.close()


def test_with_the_pages_that_it_wants_and_no_more_every_request_gets_its_token(build: Any, tmp_path: Path) -> None:
    """The rule holds in each step, also when every page comes back; and spare pages are not needed soon."""
    engine = build(spec(write_random(tmp_path / "wide", "llama", hidden=256, layers=6, heads=4, kv_heads=4)))
    size = engine._scheduler.block_size
    contexts = {f"{n}": n for n in (5, size // 2, size - 1, size, size + 1, 2 * size - 3)}
    for id, prompt in contexts.items():
        asked = payload([prompt % 250 + 2] * prompt, temperature=0, max_tokens=size + 10, ignore_eos=True)
        engine.add(RequestId(id), asked)
    awake(engine, engine.held().kv_wanted)
    for step in range(size + 10):
        assert engine._scheduler.blocks_wanted(0)[0] == 1 + sum(-(-context // size) for context in contexts.values())
        if step % 50 == 49:
            asleep(engine)
            awake(engine, engine.held().kv_wanted)
            until(
                lambda: engine.arrived() and not engine._scheduler.arriving
            )  # a step waits only for the first request
        if not step % 70:
            before = engine.held()
            engine.shrink(before.kv_spare)
            after = engine.held()
            assert after.kv == before.kv - before.kv_spare and after.kv_wanted == before.kv_wanted
        engine.grow(engine.held().kv_wanted - engine.held().kv)
        outputs = engine.step()
        assert {output.request for output in outputs} == set(contexts), f"step {step}"
        contexts = {id: context + 1 for id, context in contexts.items()}
    assert not engine.busy() and engine._scheduler.recomputed == 0
    engine.close()


def test_the_map_of_the_pool_says_whose_each_page_is(build: Any, random_models: dict[str, Path]) -> None:
    one, two = build(spec(random_models["llama"])), build(spec(random_models["qwen3"]))

    def mapped() -> Counter[tuple[Content, str]]:
        models = {one.owners[0]: "one", two.owners[0]: "two"}
        runs = build.page_map(models, {one.owners[1]: "one", two.owners[1]: "two"})
        assert all((a.content, a.model) != (b.content, b.model) for a, b in pairwise(runs))
        found: Counter[tuple[Content, str]] = Counter()
        for run in runs:
            found[run.content, run.model] += run.pages
        assert found.total() == build.pages_total
        return found

    assert mapped() == {(Content.FREE, ""): build.pages_total}
    awake(one, 4)
    awake(two, 2)
    found = mapped()
    assert (found[Content.WEIGHTS, "one"], found[Content.KV, "one"]) == (one.held().weights, one.held().kv)
    assert (found[Content.WEIGHTS, "two"], found[Content.KV, "two"]) == (two.held().weights, two.held().kv)
    one.park()
    until(one.parked)
    build.device.settle(10)
    found = mapped()
    assert (found[Content.CACHE, "one"], found[Content.KV, "one"]) == (one.held().weights, 0)
    assert found[Content.FREE, ""] == build.pages_total - build.pages_used()
    one.close()
    two.close()


def test_an_image_that_changed_is_noticed_and_given_up(build: Any, random_models: dict[str, Path]) -> None:
    engine = build(spec(random_models["llama"]))
    image = engine.weights.image
    build.images.cache.view(image.offset, image.bytes)[: 1 << 16] = bytes(1 << 16)
    awake(engine)
    wrong = engine.check()
    assert wrong is not None
    engine.close()
    assert build.images.stats().images == 0
    again = awake(build(spec(random_models["llama"])))
    assert again.check() is None
    again.close()


# Phi is in tests/runtime/device/test_ladder.py: vLLM changes transformers' phi for the rest of a process.
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "phi"])
def test_a_second_engine_is_built_around_the_image_of_the_first(build: Any, tmp_path: Path, architecture: str) -> None:
    """A device builds around images made by another process. An image that does not fit costs a build from the files at
    each waking, in the process that serves."""
    folder, sources = write_random(tmp_path / architecture, architecture), list[WeightSource]()
    for _ in range(2):
        engine = awake(build(spec(folder)))
        assert engine.check() is None
        sources.append(engine.source)
        asleep(engine)
        engine.close()
    assert sources == [WeightSource.FILES, WeightSource.HOST]


def test_who_builds_from_files_is_told_how_many_bytes_of_them_were_read(
    build: Any, random_models: dict[str, Path]
) -> None:
    told: list[tuple[int, int]] = []
    engine = build(spec(random_models["llama"]), lambda *read: told.append(read))
    engine.close()
    files_bytes = sum(path.stat().st_size for path in random_models["llama"].glob("*.safetensors"))
    assert len(told) > 10 and told == sorted(told) and {of for _, of in told} == {files_bytes}
    assert 0.95 * files_bytes < told[-1][0] <= files_bytes  # but for the headers
    told.clear()
    build(spec(random_models["llama"]), lambda *read: told.append(read)).close()
    assert told == []  # built from the image


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0, "logprobs": 5}, {"temperature": 1, "top_p": 0.9}]
)
def test_no_request_is_the_first_of_its_kind_that_something_must_be_compiled_for(
    build: Any, random_models: dict[str, Path], sampling: dict[str, Any]
) -> None:
    from torch._dynamo.utils import counters

    engine = awake(build(spec(random_models["llama"])))
    before = counters["frames"].total()
    engine.add(RequestId("r"), payload([5, 6, 7], max_tokens=3, ignore_eos=True, **sampling))
    made = 0
    while engine.busy():
        made += sum(len(output.tokens) for output in engine.step())
    assert made == 3
    assert counters["frames"].total() == before
    engine.close()


def test_files_that_changed_since_they_were_registered_are_refused(build: Any, random_models: dict[str, Path]) -> None:
    import msgspec

    registered = msgspec.structs.replace(spec(random_models["llama"]), digest="0" * 64, architecture="LlamaForCausalLM")
    with pytest.raises(EngineError, match="have changed since they were registered"):
        build(registered)


def test_a_host_cache_that_is_full_says_so_with_numbers(random_models: dict[str, Path]) -> None:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, 4 << 20)
    with pytest.raises(EngineError, match="the host cache of 2 MiB has no room"):
        build(spec(random_models["llama"]))
    build.close()


def test_the_real_reason_of_a_failed_build_is_told_and_nothing_is_left(
    build: Any, random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The golden question fails inside vLLM. An error of the clean-up must not replace the reason."""
    from runtime.engine.runner import PooledRunner

    neighbour = awake(build(spec(random_models["qwen3"])))
    used = build.pages_used()

    def broken(self: PooledRunner, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("view size is not compatible") from ValueError("strides of 7")

    with monkeypatch.context() as patch:
        patch.setattr(PooledRunner, "execute_model", broken)
        with pytest.raises(EngineError, match=r"^view size is not compatible$"):
            build(spec(random_models["llama"]))
    logged = capsys.readouterr()
    assert "view size is not compatible <- ValueError: strides of 7" in logged.out + logged.err
    assert build.pages_used() == used and neighbour.check() is None
    engine = awake(build(spec(random_models["llama"])))
    assert engine.check() is None
    for each in (engine, neighbour):
        each.close()


def test_what_fails_while_a_build_is_cleaned_up_is_a_note_of_the_reason() -> None:
    from runtime.engine.vllm import chain, clean_up_after

    def fails() -> None:
        raise AssertionError("block 1 is retired with 1 owners")

    error = RuntimeError("out of memory")
    clean_up_after(error, fails)
    assert str(error) == "out of memory"
    assert "block 1 is retired" in chain(error)


def test_the_toy_for_gpus_is_of_a_form_that_flash_attention_takes(build: Any, tmp_path: Path) -> None:
    """The form has 16 bits and heads of width 64. The CPU serves the form as well, so the CPU tries the form."""
    import json

    from runtime.engine.selfcheck import toy

    made = toy(tmp_path, "cuda")
    config = json.loads((tmp_path / "config.json").read_text())
    assert made.dtype == "bfloat16" and config["hidden_size"] // config["num_attention_heads"] >= 64
    engine = awake(build.build(made, skip_tokenizer_init=True))
    assert engine.check() is None
    engine.close()


def test_tensors_over_a_gpus_pool_name_the_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number, torch asks the driver for the owner of the address, and an address without a page has none."""

    from runtime.engine import worker
    from runtime.memory.native import Backend

    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch, "as_tensor", lambda what, device: asked.append(device))
    device = type("D", (), {"backend": Backend.CUDA})()
    worker.as_tensor(type("R", (), {"device": device, "address": 1 << 40})(), 256, 512)  # type: ignore[arg-type]
    assert asked == ["cuda:3"]


def test_a_build_gives_torchs_unused_memory_back(
    build: Any, random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(True))
    build(spec(random_models["llama"])).close()
    assert calls == [True]


def test_a_model_whose_table_of_positions_is_too_short_is_not_built(build: Any, tmp_path: Path) -> None:
    """vLLM reads past the end of a YaRN table without an error: 8 of 8 tokens were wrong, also in a second request."""
    import json

    folder = write_random(tmp_path / "short", "llama", context=1024)
    config = json.loads((folder / "config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 128, "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": yarn}))
    with pytest.raises(EngineError, match="table of positions ends after 512, and max_model_len is 600"):
        build(spec(folder, max_model_len=600))
    engine = awake(build(spec(folder, max_model_len=512)))
    assert engine.check() is None
    engine.close()
