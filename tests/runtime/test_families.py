"""A model of a served architecture that inspection accepts is built, and says what bare vLLM says, parked or not.

Models that see or hear are served as text here, without the parts that see or hear. While the requests are away, every
free page of the device is overwritten: a block that was not brought back changes the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from runtime.core.engine import WeightSource
from store.contract.wire import EngineSpec
from store.files.architectures import TABLE, Known, Support
from store.files.artefact import inspect
from tests.runtime.bare import Tokens, ask_bare_vllm
from tests.runtime.engine.test_hybrids import MOST, PARKED_EVERY, PROMPTS, answers
from tests.runtime.engines import asleep, awake, spec
from tests.runtime.families import FAMILIES, dtype, write_family
from tests.runtime.seeing import write_seeing

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 256 << 20, 1024 << 20
AT_ONCE = 12  # models that a process of bare vLLM answers for
QUICK = ("Qwen3_5ForConditionalGeneration", "LlavaForConditionalGeneration")
SETTINGS = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
architectures = pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in FAMILIES]
)


def as_text(architecture: str) -> bool:
    return TABLE[architecture].support is not Support.SERVED


class Built:
    """A builder, folders of models, and answers of bare vLLM."""

    def __init__(self, folder: Path, architectures: Sequence[str]) -> None:
        from runtime.engine.builder import Builder

        self.build = Builder(POOL_BYTES, HOST_BYTES, async_scheduling=True)
        self.folders = {name: write_family(folder / name, name) for name in architectures}
        more = {name: SETTINGS | {"language_model_only": as_text(name)} for name in architectures}
        dtypes = {name: dtype(name) for name in architectures}
        self.said: Tokens = {}
        for first in range(0, len(architectures), AT_ONCE):
            folders = {name: self.folders[name] for name in architectures[first : first + AT_ONCE]}
            self.said |= ask_bare_vllm(folders, dtypes, PROMPTS, MOST, more)

    def spec(self, architecture: str) -> EngineSpec:
        plain = spec(self.folders[architecture])
        return msgspec.structs.replace(
            plain, dtype=dtype(architecture), architecture=architecture, language_model_only=as_text(architecture)
        )


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [name for name in FAMILIES if any(params.get("architecture") == name for params in asked)]
    built = Built(tmp_path_factory.mktemp("families"), names)
    yield built
    built.build.close()


@architectures
def test_what_inspection_accepts_is_built_and_says_what_bare_vllm_says(built: Built, architecture: str) -> None:
    assert inspect(built.folders[architecture], Known(frozenset(TABLE))).architecture == architecture
    assert TABLE[architecture].text_measured if as_text(architecture) else TABLE[architecture].measured
    engine = built.build.build(built.spec(architecture), **SETTINGS)
    try:
        awake(engine, 8)
        assert engine.check() is None
        for numbers in [[number] for number in range(len(PROMPTS))]:
            expected = [built.said[architecture][number] for number in numbers]
            assert answers(engine, numbers) == expected
            assert answers(engine, numbers, PARKED_EVERY) == expected, "parked in mid-answer"
        asleep(engine)
        assert engine._scheduler.recomputed == 0 and built.build.pages_used() == 0
    finally:
        engine.close()
    again = built.build.build(built.spec(architecture), **SETTINGS)
    assert again.source is WeightSource.HOST, "the image does not fit the engine: the files would be read at each build"
    again.close()
    assert all(len(set(said)) > 5 for said in built.said[architecture]), "an answer that repeats itself proves nothing"


def test_a_language_model_alone_takes_less_memory_by_what_sees(built: Built, tmp_path: Path) -> None:
    folder = write_seeing(tmp_path, "qwen2_5_vl")
    towers = sum(file.tower_bytes for file in inspect(folder, Known(frozenset(TABLE))).files)
    sizes, images = [], built.build.images.stats().images
    for alone in (False, True):
        engine = built.build.build(msgspec.structs.replace(spec(folder), language_model_only=alone))
        sizes.append(engine.weights.size)
        engine.close()
    assert 0 < towers <= sizes[0] - sizes[1], "packed for a kernel, a weight may take more than in the file"
    assert built.build.images.stats().images == images + 2, "neither image is taken for the other"
