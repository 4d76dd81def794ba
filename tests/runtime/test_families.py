"""A model of a served architecture that inspection accepts is built, and says what bare vLLM says, wherever asked.

Each model is parked in mid-answer beside a model of another architecture, put to sleep and built from the image.
Requests go on at a second runtime after a move and after a death. While a model is parked, every free page of the
device is overwritten: a block that was not brought back changes the answer. Models with parts that see or hear are
served as text here, without these parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.core.device.request import RequestId
from runtime.engine.vllm import VllmEngine
from store.files.architectures import TABLE, Known, Support
from store.files.artefact import inspect
from tests.runtime.bare import Tokens, ask_bare_vllm
from tests.runtime.engine.test_hybrids import MOST, PARKED_EVERY, PROMPTS, answers, question
from tests.runtime.engines import TwoRuntimes, asleep, awake, moved, scribble, spec, spoil
from tests.runtime.families import FAMILIES, architecture_of, dtype, write_family
from tests.runtime.seeing import write_seeing

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 256 << 20, 2048 << 20
KV_PAGES = 48  # of a request that moves, in the pool that the request moves to
AT_ONCE = 12  # models that a process of bare vLLM answers for
QUICK = ("Qwen3_5ForConditionalGeneration", "LlavaForConditionalGeneration", "FalconForCausalLM")
NEIGHBOUR, STEPS = "Olmo2ForCausalLM", 4  # the architecture beside the others, and its steps at a time
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in FAMILIES]
)


def as_text(name: str) -> bool:
    return TABLE[architecture_of(name)].support is not Support.SERVED


def rounded(name: str) -> bool:
    """Whether a model is served in 16 bits: rounding makes the answers of such a model depend on the batch."""
    return dtype(name) != "float32"


class Families(TwoRuntimes):
    """Two runtimes, with folders of models and the answers of bare vLLM, made for a few architectures at a time."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        super().__init__(POOL_BYTES, HOST_BYTES)
        self._folder, self._names = folder, names
        self.folders: dict[str, Path] = {}
        self._said: Tokens = {}

    def said(self, name: str) -> list[list[int]]:
        """Return the tokens that bare vLLM makes for each of PROMPTS. The model's folder is there afterwards."""
        if name not in self._said:
            first = self._names.index(name) // AT_ONCE * AT_ONCE
            names = self._names[first : first + AT_ONCE]
            folders = {name: write_family(self._folder / name.replace(" ", "-"), name) for name in names}
            more = {name: SETTINGS | {"language_model_only": as_text(name)} for name in names}
            self._said |= ask_bare_vllm(folders, {name: dtype(name) for name in names}, PROMPTS, MOST, more)
            self.folders |= folders
        return self._said[name]

    def of(self, name: str, runtime: int = 0) -> VllmEngine:
        asked = msgspec.structs.replace(
            spec(self.folders[name]),
            dtype=dtype(name),
            architecture=architecture_of(name),
            language_model_only=as_text(name),
        )
        return self.engine(asked, runtime, **SETTINGS)


class Neighbour:
    """An engine that answers while an engine of another model is parked."""

    def __init__(self, engine: VllmEngine, said: list[int]) -> None:
        self._engine, self._said, self.ended = engine, said, 0
        self._made: list[int] = []

    def step(self) -> None:
        """Take a few steps of an answer, and overwrite every free page. After the end of an answer, ask again."""
        awake(self._engine, max(8, self._engine.held().kv_wanted))
        if not self._engine.busy():
            self._made = []
            self._engine.add(RequestId("neighbour"), question(1))
        for _ in range(STEPS):
            self._made += [token for output in self._engine.step() for token in output.tokens]
        if not self._engine.busy():
            assert self._made == self._said, "the neighbour says otherwise"
            self.ended += 1
        asleep(self._engine)
        scribble(self._engine.kv.reservation.device)

    def finish(self) -> None:
        """Step to the end of an answer."""
        while self._engine.busy() or not self.ended:
            self.step()


@pytest.fixture(scope="module")
def families(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {NEIGHBOUR, *(params["name"] for params in asked if "name" in params)}
    families = Families(tmp_path_factory.mktemp("families"), [name for name in FAMILIES if name in chosen])
    yield families
    families.close()


@names
def test_a_model_that_inspection_accepts_says_what_bare_vllm_says(families: Families, name: str) -> None:
    said, beside_said, known = families.said(name), families.said(NEIGHBOUR)[1], TABLE[architecture_of(name)]
    assert inspect(families.folders[name], Known(frozenset(TABLE))).architecture == architecture_of(name)
    assert known.text_measured if as_text(name) else known.measured
    assert all(len(set(one)) > 5 for one in said), "an answer that repeats itself proves nothing"
    try:
        beside = families.of(NEIGHBOUR, runtime=int(name == NEIGHBOUR))
        goes_everywhere(families, name, said, Neighbour(beside, beside_said))
    finally:
        for key in (families.folders[name].name, families.folders[NEIGHBOUR].name):
            families.forget(key)
    assert [build.pages_used() for build in families.builds] == [0, 0]


def goes_everywhere(families: Families, name: str, said: list[list[int]], neighbour: Neighbour) -> None:
    """Check the answers of a model: beside a neighbour, asleep between, from the image, after a move, after a death."""
    engine = families.of(name)
    numbers = list(range(len(PROMPTS)))
    batches = [[number] for number in numbers] if rounded(name) else [numbers]
    awake(engine, 8)
    assert engine.check() is None
    for batch in batches:
        expected = [said[number] for number in batch]
        assert answers(engine, batch) == expected
        assert answers(engine, batch, PARKED_EVERY, away=neighbour.step) == expected, "parked in mid-answer"
        asleep(engine)
        scribble(engine.kv.reservation.device)
        awake(engine, 8)
        assert answers(engine, batch) == expected, "after sleep"
        spoil(engine)
        assert answers(engine, batch) == expected, "in blocks that an earlier request has spoilt"
    neighbour.finish()
    again = awake(families.of(name, runtime=1), 8)
    assert answers(again, batches[0], PARKED_EVERY) == [said[number] for number in batches[0]], "built from the image"
    again.grow(KV_PAGES - again.held().kv)
    assert moved(engine, again, question(3), MOST, len(PROMPTS[3]) + MOST) == said[3], "moved in mid-answer"
    if not rounded(name):  # tokens that a dead runtime made are computed again, many at a time
        assert said[2][: MOST // 2] + answers(again, [2], made=said[2][: MOST // 2])[0] == said[2], "after a death"
    for each in (engine, again):
        asleep(each)
        assert each._scheduler.recomputed == 0


def test_a_language_model_alone_takes_less_memory_by_what_sees(families: Families, tmp_path: Path) -> None:
    folder = write_seeing(tmp_path, "qwen2_5_vl")
    towers = sum(file.tower_bytes for file in inspect(folder, Known(frozenset(TABLE))).files)
    sizes, images = [], families.builds[0].images.stats().images
    for alone in (False, True):
        engine = families.builds[0].build(msgspec.structs.replace(spec(folder), language_model_only=alone))
        sizes.append(engine.weights.size)
        engine.close()
    assert 0 < towers <= sizes[0] - sizes[1], "packed for a kernel, a weight may take more than in the file"
    assert families.builds[0].images.stats().images == images + 2, "neither image is taken for the other"
