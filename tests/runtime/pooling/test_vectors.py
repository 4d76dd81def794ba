"""Vectors are bare vLLM's wherever they are made: alone, in a batch, beside others, parked, from the image.

While a model is parked, every free page of the device is overwritten."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from vllm import PoolingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deploy.demo.random_weights import write_random
from runtime.core.device.request import RequestId
from runtime.core.engine import BadRequest, Output
from runtime.engine.vllm import VllmEngine
from store.contract.tasks import Task
from store.contract.wire import Finish
from store.files.architectures import ENCODERS, TABLE, Known
from store.files.artefact import inspect
from tests.runtime.engines import TwoRuntimes, asleep, awake, fill, payload, scribble, spec, tokens
from tests.runtime.pooling.bare import Vectors, vectors_of_bare_vllm
from tests.runtime.pooling.models import CONTEXT, VECTOR_MODELS, write_vector_model

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 128 << 20, 512 << 20
STEP_TOKENS = 64  # of a decoder: longer prompts are computed in parts
PROMPTS = [[(31 * n * n + 7 * seed + 3) % 500 + 3 for n in range(5 + 37 * seed)] for seed in range(6)]
NEAR = 2e-6  # float32: a batch adds in another order
QUICK = ("BertModel mean", "ModernBertForSequenceClassification", "Qwen3ForCausalLM")
TALK = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "detokenize": False}
names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in VECTOR_MODELS]
)
_encoder, _decoder = MsgpackEncoder(size_threshold=1 << 62), MsgpackDecoder(EngineCoreOutput)


def text(prompt: Sequence[int], task: Task, salt: str = "") -> bytes:
    """The payload of a request for the vector of a prompt (token ids)."""
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=None,
        pooling_params=PoolingParams(task=task.value, use_activation=True),
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt or None,
        data_parallel_rank=None,
    )
    return bytes(_encoder.encode(request)[0])


def vector(output: Output) -> list[float]:
    """The vector of an answer."""
    assert output.finish is Finish.STOP and output.tokens == [] and output.logprobs is not None
    made: list[float] = _decoder.decode(output.logprobs).pooling_output.tolist()
    return made


def near(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    pairs = [pair for left, right in zip(one, other, strict=True) for pair in zip(left, right, strict=True)]
    return bool(pairs) and max(abs(a - b) for a, b in pairs) <= NEAR


class Makers(TwoRuntimes):
    """Two runtimes, with folders of models and the vectors of bare vLLM."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        super().__init__(POOL_BYTES, HOST_BYTES)
        self.folders = {name: write_vector_model(folder / name.replace(" ", "-"), name) for name in names}
        tasks = {name: VECTOR_MODELS[name].task for name in names}
        self.vectors: Vectors = vectors_of_bare_vllm(self.folders, tasks, PROMPTS)
        self.talker = self.builds[0].build(spec(write_random(folder / "talker", "llama", seed=9)))

    def of(self, name: str, runtime: int = 0) -> VllmEngine:
        asked = msgspec.structs.replace(spec(self.folders[name], CONTEXT), task=VECTOR_MODELS[name].task)
        settings = {} if name.split()[0] in ENCODERS else {"max_num_batched_tokens": STEP_TOKENS}
        return self.engine(asked, runtime, **settings)

    def close(self) -> None:
        self.talker.close()
        super().close()


@pytest.fixture(scope="module")
def makers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Makers]:
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {"BertModel mean", *(params["name"] for params in asked if params.get("name") in VECTOR_MODELS)}
    makers = Makers(tmp_path_factory.mktemp("vectors"), [name for name in VECTOR_MODELS if name in chosen])
    yield makers
    makers.close()


def answers(engine: VllmEngine, task: Task, parks: bool = False) -> list[list[float]]:
    """Ask for the vectors of all prompts at once. `parks`: the engine is parked before the first step, and before each
    further step."""
    for number, prompt in enumerate(PROMPTS):
        engine.add(RequestId(str(number)), text(prompt, task, "tenant"))
    said: dict[str, list[float]] = {}
    while engine.busy():
        if parks:
            asleep(engine)
            scribble(engine.kv.reservation.device)
            awake(engine, engine.held().kv_wanted)
        said |= {output.request: vector(output) for output in engine.step(ahead=True)}
        engine.grow(max(0, engine.held().kv_wanted - engine.held().kv))
    return [said[str(number)] for number in range(len(PROMPTS))]


@names
def test_vectors_are_those_of_bare_vllm_wherever_they_are_made(makers: Makers, name: str) -> None:
    kind, wanted = VECTOR_MODELS[name], makers.vectors[name]
    found = inspect(makers.folders[name], Known(frozenset(TABLE)))
    assert (found.architecture, found.task) == (name.split()[0], kind.task)
    assert not near(wanted[:1], wanted[1:2]), "vectors that are all alike prove nothing"
    engine = awake(makers.of(name), 4)
    assert engine.check() is None and engine.stray_bytes() == 0 and not engine.sequential
    for prompt, expected in zip(PROMPTS, wanted, strict=True):
        engine.add(RequestId("alone"), text(prompt, kind.task))
        said = [output for _ in iter(engine.busy, False) for output in engine.step()]
        assert near([vector(said[0])], [expected]) and len(said) == 1
    assert near(answers(engine, kind.task), wanted), "in a batch"
    assert near(answers(engine, kind.task, parks=True), wanted), "parked before each step"
    asleep(engine)
    scribble(engine.kv.reservation.device)
    assert near(answers(awake(engine, 4), kind.task), wanted), "after sleep"
    again = awake(makers.of(name, runtime=1), 4)
    assert again.check() is None and near(answers(again, kind.task), wanted), "from the image"
    with pytest.raises(BadRequest, match="nothing to go on with"):
        again.prepare(RequestId("moves"), text(PROMPTS[0], kind.task), 64)
    for each in (engine, again):
        asleep(each)
    makers.forget(makers.folders[name].name)


def test_a_model_of_text_says_the_same_beside_a_model_of_vectors(makers: Makers) -> None:
    talker, engine = awake(makers.talker, 4), awake(makers.of("BertModel mean"), 4)
    asked = payload(PROMPTS[2], **TALK)
    talker.add(RequestId("alone"), asked)
    alone = [token for _ in iter(talker.busy, False) for token in tokens(talker.step())]
    talker.add(RequestId("beside"), asked)
    said: list[int] = []
    while talker.busy():
        said += tokens(talker.step())
        assert near(answers(engine, Task.EMBED), makers.vectors["BertModel mean"])
    assert said == alone and len(set(said)) > 3
    asleep(talker)
    asleep(engine)


def test_a_request_for_something_else_than_the_model_makes_is_refused(makers: Makers) -> None:
    engine = makers.of("BertModel mean")
    with pytest.raises(BadRequest, match="the model makes vectors"):
        engine.add(RequestId("text"), payload(PROMPTS[0], **TALK))
    with pytest.raises(BadRequest, match="the model makes text"):
        makers.talker.add(RequestId("vector"), text(PROMPTS[0], Task.EMBED))
    assert not engine.busy() and not makers.talker.busy()


def test_a_config_without_the_kind_of_positions_is_read_as_transformers_means_the_config(
    makers: Makers, tmp_path: Path
) -> None:
    """vLLM asks XLM-RoBERTa's config for a field that transformers no longer writes."""
    said: list[list[list[float]]] = []
    for written in (True, False):
        folder = write_vector_model(tmp_path / f"xlm-{written}", "XLMRobertaModel")
        config = json.loads((folder / "config.json").read_text())
        assert config.pop("position_embedding_type") == "absolute"
        if not written:
            (folder / "config.json").write_text(json.dumps(config))
        engine = makers.builds[0].build(msgspec.structs.replace(spec(folder, CONTEXT), task=Task.EMBED))
        said.append(answers(awake(engine, 4), Task.EMBED))
        asleep(engine)
        engine.close()
    assert said[0] == said[1]


def test_a_vector_of_other_weights_is_noticed_before_the_model_serves(makers: Makers) -> None:
    engine = awake(makers.of("BertModel mean"), 4)
    fill(engine.weights.reservation, 0, engine.weights.size, 0)
    assert "when it was read from its files" in (engine.check() or "")
    asleep(engine)
    makers.forget(makers.folders["BertModel mean"].name)
