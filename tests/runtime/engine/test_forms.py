"""Mixtures of experts, int8 and 4-bit models and GPT-NeoX make on Staccato's engines the tokens of bare vLLM.

The models are parked in mid-answer, put to sleep, built from the image and moved to a second runtime, in a process
whose first model was dense.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from runtime.core.device.request import RequestId
from runtime.core.engine import EngineError
from runtime.engine.vllm import VllmEngine
from tests.conftest import ROOT
from tests.runtime.bare import WITHOUT_AMX, Tokens, ask_bare_vllm
from tests.runtime.engines import TwoRuntimes, asleep, awake, moved, parked_about, payload, spec
from tests.runtime.forms import FORMS, INT4, INT8, dtype, rounds, write_form

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 64 << 20, 256 << 20
MOST, PARKED_EVERY = 24, 7  # tokens of an answer; steps
WORDS = random.Random(3)
PROMPTS = [[44, 301, 17], [WORDS.randrange(3, 500) for _ in range(40)], [9, 10, 11, 12]]
PROMPTS += [[WORDS.randrange(3, 500) for _ in range(150)]]
AMX, INT4_KERNEL = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
LACKING = {
    "gpt_oss_mxfp4": "" if AMX else "vLLM serves this form on CPUs with AMX only",
    **dict.fromkeys(INT4, "" if INT4_KERNEL else "vLLM has products of 4-bit weights for CPUs with AVX-512 only"),
}
SEEDS = dict.fromkeys(INT4, 4)  # with many other seeds a model of 4-bit weights repeats a token
SERVED = [form for form in FORMS if not LACKING.get(form)]
forms = pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=[] if form in SERVED else pytest.mark.skip(LACKING[form])) for form in FORMS],
)


class Pair(TwoRuntimes):
    """Two runtimes, with the folders of the forms and the answers of bare vLLM."""

    def __init__(self, folder: Path) -> None:
        from runtime.engine.selfcheck import self_check

        super().__init__(POOL_BYTES, HOST_BYTES)
        self_check(self.builds[0])  # the process begins with a dense model, as in a runtime
        self.folders = {form: write_form(folder / form, form, seed=SEEDS.get(form, 1)) for form in SERVED}
        dtypes = {form: dtype(form) for form in SERVED}
        alone = {form: {"max_num_seqs": 1} for form in SERVED if rounds(form)}
        self.said: Tokens = ask_bare_vllm(self.folders, dtypes, PROMPTS, MOST, alone)

    def of(self, form: str, runtime: int = 0) -> VllmEngine:
        return self.engine(msgspec.structs.replace(spec(self.folders[form]), dtype=dtype(form)), runtime)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("forms"))
    yield pair
    pair.close()


def question(number: int) -> bytes:
    return payload(PROMPTS[number], f"salt {number}", temperature=0, max_tokens=MOST, ignore_eos=True)


def answers(engine: VllmEngine, form: str, parked_every: int = 0) -> list[list[int]]:
    """Tokens for every prompt, in one batch unless rounding to 16 bits makes answers depend on the batch.

    The engine is parked and fetched every `parked_every` steps (0: never)."""
    made: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    numbers = list(range(len(PROMPTS)))
    for batch in [[number] for number in numbers] if rounds(form) else [numbers]:
        for number in batch:
            engine.add(RequestId(str(number)), question(number))
        parked_about(engine, made, parked_every)
    return list(made.values())


@contextlib.contextmanager
def up(*engines: VllmEngine) -> Iterator[None]:
    """Keep the engines awake in the context. Afterwards the engines sleep without a page, even after an error."""
    for engine in engines:
        awake(engine, 8)
    try:
        yield
    finally:
        for engine in engines:
            engine.abort([RequestId(id) for id in engine._scheduler.requests])
            asleep(engine)


@forms
def test_a_form_says_what_bare_vllm_says_parked_and_after_sleep(pair: Pair, form: str) -> None:
    engine = pair.of(form)
    with up(engine):
        assert engine.check() is None
        assert answers(engine, form) == pair.said[form]
        assert answers(engine, form, PARKED_EVERY) == pair.said[form], "parked in mid-answer"
    assert pair.builds[0].pages_used() == 0
    with up(engine):
        assert answers(engine, form) == pair.said[form], "after sleep"
    assert all(len(set(said)) > 5 for said in pair.said[form]), "an answer that repeats itself proves nothing"


@forms
def test_a_form_built_from_the_image_says_what_bare_vllm_says(pair: Pair, form: str) -> None:
    pair.of(form)
    again = pair.of(form, runtime=1)
    with up(again):
        assert again.check() is None
        assert answers(again, form, PARKED_EVERY) == pair.said[form]


@forms
def test_a_form_goes_on_at_another_runtime_as_on_bare_vllm(pair: Pair, form: str) -> None:
    source, target = pair.of(form), pair.of(form, runtime=1)
    with up(source, target):
        assert moved(source, target, question(3), MOST, len(PROMPTS[3]) + MOST) == pair.said[form][3]


@forms
def test_a_request_of_a_dead_runtime_goes_on_as_on_bare_vllm(pair: Pair, form: str) -> None:
    engine, said = pair.of(form), pair.said[form][3]
    with up(engine):
        engine.add(RequestId("begun"), question(3), said[: MOST // 2])
        made = [token for _ in iter(engine.busy, False) for output in engine.step() for token in output.tokens]
    assert said[: MOST // 2] + made == said


@pytest.mark.skipif(INT4_KERNEL, reason="this processor has the kernel for 4-bit weights")
@pytest.mark.parametrize("form", INT4)
def test_a_processor_without_the_kernel_of_a_form_refuses_the_model(pair: Pair, tmp_path: Path, form: str) -> None:
    asked = msgspec.structs.replace(spec(write_form(tmp_path / form, form)), dtype=dtype(form))
    with pytest.raises(EngineError, match="vLLM has no cpu_gemm_wna16 for this processor or GPU"):
        pair.builds[0].build(asked)
    assert pair.builds[0].pages_used() == 0


@pytest.mark.long
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE", "AVX512_CORE_VNNI"])
def test_int8_products_are_right_with_every_instruction_set_of_onednn(isa: str) -> None:
    """The tests of int8 forms run in a process whose oneDNN, also in bare vLLM, is limited to an instruction set."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, WITHOUT_AMX: "1"}
    chosen = " or ".join(INT8)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not long", "-k", chosen, str(Path(__file__))]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290)
    assert ran.returncode == 0, ran.stdout[-3000:]
