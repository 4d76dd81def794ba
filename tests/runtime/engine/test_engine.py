"""Real vLLM cores, several architectures in one process: interleaved models make the tokens that each makes alone."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from runtime.core.device.request import RequestId
from runtime.core.engine import BadRequest, Engine, EngineError, NoHostRoom
from runtime.memory.images import HostCacheFull, ImageKey, Making
from runtime.memory.native import FaultPoint
from store.contract.wire import Finish
from tests.runtime.engines import add, awake, drive, payload, spec, tokens, until

if TYPE_CHECKING:
    from runtime.engine.vllm import VllmEngine

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 128 << 20, 256 << 20

WORDS = random.Random(1)
PROMPTS: dict[str, dict[str, Any]] = {
    "greedy": dict(prompt=[44, 301, 17], temperature=0, max_tokens=40),
    "long": dict(prompt=[WORDS.randrange(3, 500) for _ in range(200)], temperature=0, max_tokens=40),
    "seeded": dict(prompt=[9, 10, 11], temperature=1.0, seed=7, max_tokens=40),
    "penalised": dict(prompt=[12, 13], temperature=0.7, seed=3, repetition_penalty=1.3, max_tokens=30),
}
for arguments in PROMPTS.values():
    arguments["ignore_eos"] = True


@pytest.fixture(scope="module")
def engines(random_models: dict[str, Path]) -> Iterator[dict[str, Engine]]:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES, async_scheduling=True)
    engines = {name: awake(build(spec(path))) for name, path in random_models.items()}
    yield engines
    for engine in engines.values():
        engine.close()
    build.close()


def bare_vllm(path: Path) -> dict[str, list[int]]:
    """Tokens of each request, run alone on vLLM's own `LLM` in the test's process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(path),
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=32 << 20,
        disable_log_stats=True,
        seed=0,
    )
    said = {}
    for name, arguments in PROMPTS.items():
        sampling = SamplingParams(**{key: value for key, value in arguments.items() if key != "prompt"})
        (output,) = llm.generate([{"prompt_token_ids": arguments["prompt"]}], sampling, use_tqdm=False)
        said[name] = list(output.outputs[0].token_ids)
    llm.llm_engine.engine_core._finalizer.detach()  # the finalizer would end the process groups of every engine
    return said


@pytest.mark.parametrize("seed", range(3))
def test_interleaved_tokens_equal_those_of_each_request_alone_on_bare_vllm(
    engines: dict[str, Engine], random_models: dict[str, Path], seed: int, bare: dict[str, dict[str, list[int]]]
) -> None:
    for model, engine in engines.items():
        for name, arguments in PROMPTS.items():
            engine.add(RequestId(f"{model}/{name}"), payload(**arguments))
    made = drive(engines, random.Random(seed))
    for model in engines:
        for name in PROMPTS:
            assert tokens(made[RequestId(f"{model}/{name}")]) == bare[model][name], (model, name)
            assert len(set(bare[model][name])) > 10, f"{model}/{name} repeats itself: it proves nothing"


@pytest.fixture(scope="module")
def bare(random_models: dict[str, Path], engines: dict[str, Engine]) -> dict[str, dict[str, list[int]]]:
    return {name: bare_vllm(path) for name, path in random_models.items()}


@pytest.mark.parametrize("kept_pages", [0, 1])
@pytest.mark.parametrize("model", ["llama", "qwen3", "opt"])
def test_weights_may_go_before_the_requests_are_out_and_these_go_on_as_if_alone(
    engines: dict[str, Engine], model: str, kept_pages: int, bare: dict[str, dict[str, list[int]]]
) -> None:
    from runtime.engine.vllm import VllmEngine

    engine = engines[model]
    assert isinstance(engine, VllmEngine)
    device, said = engine.kv.reservation.device, {RequestId(name): list[int]() for name in PROMPTS}
    for name, arguments in PROMPTS.items():
        engine.add(RequestId(name), payload(**arguments))
    for _ in range(12):
        for output in engine.step():
            said[output.request] += output.tokens
    held, free = engine.held(), device.stats().pages_free

    device.inject(FaultPoint.COPY, 1)  # requests are surely copied out when the weights have gone
    engine.park()
    engine.evict(held.weights - kept_pages)
    device.settle(60)
    assert device.stats().pages_free - free == held.weights - kept_pages, "the KV cache stays until requests are out"
    assert (engine.held().weights, engine.held().kv) == (kept_pages, held.kv)
    other = device.reserve(device.stats().pages_free * device.page_bytes)
    other.map(0, other.bytes, 60)  # pages handed to a second owner keep no content
    until(engine.parked)
    other.release()
    device.settle(60)
    assert device.stats().pages_free - free == held.weights - kept_pages + held.kv

    awake(engine, held.kv)
    for id, outputs in drive({model: engine}, random.Random(0)).items():
        said[id] += tokens(outputs)
    assert said == bare[model]
    assert engine._scheduler.recomputed == 0


def test_the_last_output_says_why_it_is_the_last(engines: dict[str, Engine]) -> None:
    engine = engines["llama"]
    engine.add(RequestId("a"), payload([5, 6, 7], temperature=0, max_tokens=3, ignore_eos=True))
    made = drive({"llama": engine}, random.Random(0))[RequestId("a")]
    assert [output.finish for output in made] == [None, None, Finish.LENGTH]
    stop = tokens(made)[1]
    engine.add(RequestId("b"), payload([5, 6, 7], temperature=0, max_tokens=9, stop_token_ids=[stop]))
    ended = drive({"llama": engine}, random.Random(0))[RequestId("b")][-1]
    assert (ended.finish, ended.stop_reason) == (Finish.STOP, stop)


def test_an_aborted_request_says_no_more_and_the_engine_is_idle(engines: dict[str, Engine]) -> None:
    engine = engines["opt"]
    engine.add(RequestId("gone"), payload([5, 6], temperature=0, max_tokens=50, ignore_eos=True))
    engine.add(RequestId("stays"), payload([7, 8], temperature=0, max_tokens=5, ignore_eos=True))
    engine.step()
    engine.abort([RequestId("gone"), RequestId("unknown")])
    made = drive({"opt": engine}, random.Random(0))
    assert list(made) == [RequestId("stays")] and not engine.busy()


def test_logprobs_come_with_the_tokens(engines: dict[str, Engine]) -> None:
    engine = engines["qwen3"]
    engine.add(RequestId("a"), payload([5, 6, 7], temperature=0, max_tokens=4, ignore_eos=True, logprobs=2))
    made = drive({"qwen3": engine}, random.Random(0))[RequestId("a")]
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.serial_utils import MsgpackDecoder

    for output in made:
        assert output.logprobs is not None
        lists = MsgpackDecoder(EngineCoreOutput).decode(output.logprobs).new_logprobs
        assert lists.logprob_token_ids[0][0] == output.tokens[0]


def test_structured_output_is_structured(engines: dict[str, Engine], random_models: dict[str, Path]) -> None:
    from transformers import AutoTokenizer
    from vllm.sampling_params import StructuredOutputsParams

    engine = cast("VllmEngine", engines["llama"])
    choice = StructuredOutputsParams(regex="(yes|no)")
    asked = payload([5, 6, 7], temperature=0, max_tokens=8, stop_token_ids=[1], structured_outputs=choice)
    add(engine, RequestId("a"), asked)
    made = drive({"llama": engine}, random.Random(0))[RequestId("a")]
    tokenizer = AutoTokenizer.from_pretrained(random_models["llama"])
    assert tokenizer.decode(tokens(made), skip_special_tokens=True) in ("yes", "no")


def test_a_grammar_without_its_compiled_form_is_refused_and_compiled_by_no_engine(engines: dict[str, Engine]) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    asked = payload([5, 6, 7], max_tokens=8, structured_outputs=StructuredOutputsParams(regex="(yes|no)"))
    with pytest.raises(BadRequest, match="upgrade the gateway"):
        engines["llama"].add(RequestId("a"), asked)
    assert not engines["llama"].busy()


def test_prefixes_are_shared_within_a_salt_and_never_across(engines: dict[str, Engine]) -> None:
    engine = engines["llama"]

    def cached(salt: str) -> int:
        engine.add(RequestId("a"), payload(list(range(3, 303)), salt, temperature=0, max_tokens=2))
        return drive({"llama": engine}, random.Random(0))[RequestId("a")][0].cached_tokens

    assert cached("tenant-1") == 0
    assert cached("tenant-1") > 0
    assert cached("tenant-2") == 0


def test_a_request_that_is_none_is_refused_and_harms_nobody(engines: dict[str, Engine]) -> None:
    with pytest.raises(BadRequest):
        engines["llama"].add(RequestId("a"), b"\x00 no request")
    assert not engines["llama"].busy()


def test_closing_one_engine_leaves_the_others_as_they_were(
    engines: dict[str, Engine], random_models: dict[str, Path]
) -> None:
    from runtime.engine.builder import Builder

    def say(engine: Engine) -> list[int]:
        engine.add(RequestId("a"), payload([5, 6, 7, 8], temperature=0, max_tokens=20, ignore_eos=True))
        return tokens(drive({"": engine}, random.Random(0))[RequestId("a")])

    before = say(engines["opt"])
    build = Builder(POOL_BYTES, HOST_BYTES)
    extra = awake(build(spec(random_models["qwen3"])))
    assert say(extra) == say(engines["qwen3"])
    extra.close()
    assert say(engines["opt"]) == before
    again = awake(build(spec(random_models["qwen3"])))
    assert say(again) == say(engines["qwen3"])
    again.close()
    build.close()


def test_only_the_first_engine_of_a_process_searches_modules_and_packages(
    engines: dict[str, Engine], random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    from vllm.triton_utils import dispatcher

    from runtime.engine.builder import Builder

    searches: list[Any] = []
    monkeypatch.setattr(dispatcher, "_rebind_kernels", searches.append)
    monkeypatch.setattr(metadata, "entry_points", lambda **group: searches.append(group) or [])
    build = Builder(POOL_BYTES, HOST_BYTES)
    build(spec(random_models["llama"])).close()
    build.close()
    assert engines and not searches


def test_a_model_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    from runtime.engine.builder import Builder

    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "llama"}')
    with pytest.raises(EngineError, match="NoSuchModel|architecture"):
        Builder(POOL_BYTES, HOST_BYTES)(spec(tmp_path))


def test_program_code_of_a_model_never_runs_even_if_a_caller_trusts_the_code(tmp_path: Path) -> None:
    from transformers import AutoConfig

    import runtime.engine.settings  # noqa: F401  (the replacement of the import)

    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    with pytest.raises(EngineError, match="never runs"):
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert not ran.exists()


def test_another_version_of_vllm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from runtime.engine.settings import check_version

    assert check_version().startswith(("vllm-0.32", "vllm-0.33"))
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(EngineError, match=r"0\.99\.1 is installed, this build needs >= 0\.32\.0, < 0\.34\.0"):
        check_version()


def test_an_engine_comes_and_goes_while_the_heap_of_modules_stays_frozen(random_models: dict[str, Path]) -> None:
    """A collection that visits the modules keeps every model of a device waiting for half a second."""
    from runtime.engine.builder import Builder, freeze_heap

    build = Builder(POOL_BYTES, HOST_BYTES)
    freeze_heap()
    frozen = gc.get_freeze_count()
    engine = awake(build(spec(random_models["llama"])))
    core = weakref.ref(engine._core)  # type: ignore[attr-defined]
    assert 0.9 * frozen < gc.get_freeze_count() <= frozen, "a frozen engine is never collected"
    engine.close()
    assert core() is None and 0.9 * frozen < gc.get_freeze_count() <= frozen
    build.close()


LEFT_MOST = 500  # objects of a closed engine, found by a search for garbage


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "opt"])
def test_a_closed_engine_goes_without_a_search_for_garbage(
    random_models: dict[str, Path], kind: str, resident: bool
) -> None:
    """Python's search for garbage visits the objects of every engine of the process. No model steps meanwhile."""
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES, prefixes=(16 << 20, 60.0))
    build(spec(random_models[kind])).close()  # the first engine of an architecture leaves objects behind
    engine: VllmEngine = cast("VllmEngine", build(spec(random_models[kind])))
    if resident:
        awake(engine)
        add(engine, RequestId("a"), payload(**PROMPTS["long"]))
        drive({"": engine}, random.Random(0))
        add(engine, RequestId("b"), payload(**PROMPTS["seeded"]))
        engine.step()
    gc.collect()
    worker = engine._worker
    parts = (engine._core, engine._scheduler, engine._blocks, worker, worker.model_runner, worker.model_runner.model)
    left = [weakref.ref(part) for part in parts]
    del parts, worker
    gc.disable()
    try:
        engine.close()
        assert [part() for part in left] == [None] * len(left)
        assert gc.collect() < LEFT_MOST
    finally:
        gc.enable()
    build.close()


def test_a_build_without_room_in_the_host_cache_searches_for_no_garbage(random_models: dict[str, Path]) -> None:
    """A device with models on disk has such a build for nearly every model that comes up: room is made afterwards."""
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, 8 << 20)
    searches: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            searches.append(info["generation"])

    large = msgspec.structs.replace(spec(random_models["llama"]), weight_bytes=64 << 20)
    gc.callbacks.append(note)
    try:
        with pytest.raises(NoHostRoom):
            build(large)
        assert 2 not in searches
    finally:
        gc.callbacks.remove(note)
    build.close()


def test_room_for_an_image_of_known_size_is_taken_before_the_build_and_goes_to_no_other_image(
    random_models: dict[str, Path],
) -> None:
    """The first build ends without room, because another image comes meanwhile; the second build is not overtaken."""
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, 8 << 20)
    build.makes_images_beside = True  # also over the stand-in for a GPU's driver
    other = ImageKey("other", "", "", "", "")
    made: list[Making] = []
    refused: list[HostCacheFull] = []

    def overtake(read_bytes: int, files_bytes: int) -> None:
        if not made and not refused:
            try:
                made.append(cast("Making", build.images.make(other, size)))
            except HostCacheFull as error:
                refused.append(error)

    size = build.images.stats().total_bytes - (3 << 20)
    with pytest.raises(NoHostRoom):
        build(spec(random_models["llama"]), overtake)
    made.pop().abandon()
    engine = build(spec(random_models["llama"]), overtake)
    assert refused and not made
    engine.close()
    build.close()


def test_a_device_that_makes_images_itself_takes_no_room_ahead(random_models: dict[str, Path]) -> None:
    """Another runtime that wants the image would wait for a whole build."""
    from runtime.engine.builder import Builder

    build, states = Builder(POOL_BYTES, HOST_BYTES), list[object]()
    build.makes_images_beside = False
    model = spec(random_models["llama"])
    build(model).close()
    assert build.images.discard(build._key(model))
    build(model, lambda *_: states.append(build.images.state(build._key(model)))).close()
    assert states and set(states) == {None}
    build.close()


def test_an_engine_makes_the_blocks_of_its_cache_when_the_blocks_come_into_use(random_models: dict[str, Path]) -> None:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES)
    engine: VllmEngine = cast("VllmEngine", build(spec(random_models["llama"])))
    blocks = engine._blocks.blocks
    before = len([*blocks])
    assert before < len(blocks) // 2
    awake(engine)
    add(engine, RequestId("a"), payload(**PROMPTS["long"]))
    drive({"": engine}, random.Random(0))
    assert before < len([*blocks]) < len(blocks)
    engine.close()
    build.close()


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (8, [1, 2, 4, 8]), (48, [1, 2, 4, 8, 16, 32, 48])])
def test_graphs_cover_every_batch_up_to_the_setting(most: int, sizes: list[int]) -> None:
    from runtime.engine.runner import graph_settings

    assert graph_settings(most, False)["compilation_config"]["cudagraph_capture_sizes"] == sizes


def test_without_graphs_every_step_is_eager() -> None:
    from runtime.engine.runner import graph_settings

    assert graph_settings(0, True) == graph_settings(0, False) == {"enforce_eager": True}


def test_engines_share_scratch_memory_that_grows_and_leave_each_other_what_persists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own scratch memory would refuse the second prompt, which is longer than the steps that were captured."""
    import torch
    from vllm.v1.worker import workspace

    from runtime.engine.runner import EngineScratch

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # this machine has no accelerator
    monkeypatch.setattr(EngineScratch, "_shared", [])
    one, other = (EngineScratch(workspace.WorkspaceManager(torch.device("cpu"))) for _ in range(2))
    monkeypatch.setattr(workspace, "_manager", None)
    one.use()
    current = workspace.current_workspace_manager
    (small,) = current().get_simultaneous(((256,), torch.uint8))
    locks = current().get_persistent("locks", (4,), torch.int32)
    workspace.lock_workspace()
    captured = one.buffers()
    other.use()
    assert current().get_simultaneous(((100,), torch.uint8))[0].data_ptr() == small.data_ptr()
    (large,) = current().get_simultaneous(((4096,), torch.uint8))
    assert current().get_persistent("locks", (8,), torch.int32).shape == (8,)
    one.use()
    assert current().get_simultaneous(((4096,), torch.uint8))[0].data_ptr() == large.data_ptr() != small.data_ptr()
    assert current().get_persistent("locks", (4,), torch.int32) is locks
    assert captured[0] is not None and captured[0].data_ptr() == small.data_ptr(), "graphs keep their buffers"
    workspace.reset_workspace_manager()  # as vLLM does when an engine ends
    assert current() is one
