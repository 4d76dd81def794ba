"""The golden question finds models with pointers to memory given back, models that disagree with themselves in a batch,
and models with tables of positions wrong at the end."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.device.request import RequestId
from runtime.core.engine import EngineError
from runtime.engine.golden import TOKENS
from runtime.engine.vllm import VllmEngine
from runtime.slices import Sliced
from tests.runtime.engines import asleep, awake, drive, parked_about, payload, spec, tokens, until
from tests.runtime.forms import write_form

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers, not ours
POOL_BYTES, HOST_BYTES = 64 << 20, 256 << 20
WORDS = random.Random(5)
PROMPTS = [[44, 301, 17], [WORDS.randrange(3, 500) for _ in range(40)], [WORDS.randrange(3, 500) for _ in range(200)]]
ANSWER, PARKED_EVERY = 20, 6  # tokens; steps
TWO_ANSWERS = r"says \[\d+(, \d+)*\] once its tensors have moved, and \[\d+(, \d+)*\] as vLLM built it"


@pytest.fixture
def builds() -> Iterator[list[Any]]:
    """Builders of two runtimes on a host, with shared images."""
    from runtime.engine.builder import Builder

    first = Builder(POOL_BYTES, HOST_BYTES)
    builds = [first, Builder(POOL_BYTES, HOST_BYTES, first.images.fd)]
    yield builds
    gc.collect()
    for build in reversed(builds):
        build.close()


def asked(number: int, salt: str = "tenant") -> bytes:
    return payload(PROMPTS[number], salt, temperature=0, max_tokens=ANSWER, ignore_eos=True)


def answers(engine: VllmEngine, together: bool, parked_every: int = 0) -> list[list[int]]:
    """Tokens that the engine makes for the prompts.

    `together`: send the prompts at once, not in turn. `parked_every`: park the model every so many steps; 0: never."""
    made: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    for batch in [list(made)] if together else [[id] for id in made]:
        for id in batch:
            engine.add(RequestId(id), asked(int(id)))
        parked_about(engine, made, parked_every)
    return list(made.values())


# ── before and after the tensors move ─────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_keeps_a_pointer_to_memory_it_gave_back_is_not_built(
    builds: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case of int8 models: oneDNN keeps the address of the scales, the scales move, and the old memory gets a new
    owner."""
    from runtime.engine.worker import Home

    folder = write_form(tmp_path / "int8", "w8a8_asymmetric", seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(Home, "_settled", lambda self, tensor: tensor, raising=False)
        with pytest.raises(EngineError, match=TWO_ANSWERS):
            builds[0](spec(folder))
    assert builds[0].pages_used() == 0 and builds[0].images.stats().images == 0
    engine = awake(builds[0](spec(folder)))
    assert engine.check() is None
    engine.close()


def test_a_wrong_answer_after_the_first_fetch_is_told_with_the_right_one(
    builds: list[Any], random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = builds[0](spec(random_models["llama"]))
    _spoil(engine, engine._worker.model_runner.model.model.norm.weight, monkeypatch)
    awake(engine)
    wrong = engine.check()
    assert wrong is not None and str(engine._golden.first) in wrong and wrong.count("[") == 2, wrong
    engine.close()
    assert builds[0].images.stats().images == 0


@pytest.mark.parametrize("model", ["llama", "opt"])
def test_a_table_of_positions_that_is_wrong_at_its_end_alone_is_found_at_the_first_fetch(
    builds: list[Any], random_models: dict[str, Path], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = builds[0](spec(random_models[model], max_model_len=512))
    if model == "opt":
        assert engine._golden.last != engine._golden.first, "learned positions say where the question stands"
    _spoil(engine, _table(engine, model)[480:], monkeypatch)
    awake(engine)
    wrong = engine.check()
    assert wrong is not None and "at its last positions" in wrong, wrong
    engine.close()


def _table(engine: VllmEngine, model: str) -> torch.Tensor:
    """The model's table of 512 positions, a row for each. OPT's learned table has two rows more, without position."""
    layers = engine._worker.model_runner.model.model
    return (
        layers.decoder.embed_positions.weight if model == "opt" else layers.layers[0].self_attn.rotary_emb.cos_sin_cache
    )


def _spoil(engine: VllmEngine, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite a tensor in the image of the weights, where sampling the image does not look."""
    image = engine.weights.image
    assert image is not None
    offset = tensor.data_ptr() - engine.home.reservation.address
    view = engine._images.cache.view(image.offset + offset, tensor.nbytes)
    view[:] = bytes(tensor.nbytes)
    monkeypatch.setattr(type(image), "sample", lambda self, number: True)


# ── in a batch ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _spoil_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoil later steps with several requests: only the first row of the hidden states stays right."""
    from runtime.engine.runner import PooledRunner

    forward = PooledRunner._model_forward

    def spoilt(self: PooledRunner, *args: Any, **kwargs: Any) -> Any:
        hidden = forward(self, *args, **kwargs)
        if self.input_batch.num_reqs > 1:
            hidden[1:] *= -1
        return hidden

    monkeypatch.setattr(PooledRunner, "_model_forward", spoilt)


def test_a_model_that_says_otherwise_in_a_batch_runs_one_request_at_a_time(
    builds: list[Any], random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built from files or from the image, and parked in mid-answer, the model makes the tokens of lone requests."""
    _spoil_batches(monkeypatch)
    for build in builds:
        engine = awake(build(spec(random_models["llama"])), 8)
        alone = answers(engine, together=False)
        assert answers(engine, together=True) == alone
        assert answers(engine, together=True, parked_every=PARKED_EVERY) == alone
        assert engine.sequential and engine.check() is None
        asleep(engine)
        engine.close()
    assert all(len(set(said)) > 5 for said in alone)
    assert builds[0].images.stats().images == 1, "the second was built from the image, which knows"


def test_a_model_that_says_otherwise_in_a_batch_shares_no_prefix_blocks(
    builds: list[Any], random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil_batches(monkeypatch)
    engine = awake(builds[0](spec(random_models["llama"])), 8)
    for id in ("one", "two"):
        engine.add(RequestId(id), asked(2))
        outputs = drive({"": engine}, random.Random(0))[RequestId(id)]
        assert outputs[0].cached_tokens == 0
    engine.close()


def test_a_sound_model_runs_in_batches(builds: list[Any], random_models: dict[str, Path]) -> None:
    engine = awake(builds[0](spec(random_models["qwen3"])), 8)
    assert not engine.sequential
    for number in range(2):
        engine.add(RequestId(str(number)), asked(number))
    assert {output.request for output in engine.step()} == {RequestId("0"), RequestId("1")}
    made = drive({"": engine}, random.Random(0))
    assert all(len(tokens(outputs)) == ANSWER - 1 for outputs in made.values())
    engine.close()


def test_a_model_whose_code_makes_other_kv_heads_than_its_config_says_is_not_built(
    builds: list[Any], tmp_path: Path
) -> None:
    """The config of GPT-NeoX has a number of KV heads, unknown to the model's code.

    vLLM wrote past the step's rows, into blocks of other requests, and answers changed in a batch."""
    folder = write_form(tmp_path / "stray", "gpt_neox", seed=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    with pytest.raises(EngineError, match="makes keys of 128 numbers a token, and its KV cache keeps 64"):
        builds[0](spec(folder))
    assert builds[0].pages_used() == 0


def test_answers_part_where_rounding_decides_and_only_an_unlikely_token_is_a_fault() -> None:
    from runtime.engine.golden import GoldenAnswer, disagrees

    alone = GoldenAnswer([3, 4, 5], [{3: -0.1, 9: -3.0}, {4: -1.0, 8: -1.01}, {5: -0.2, 7: -4.0}])
    assert not disagrees(alone, GoldenAnswer([3, 4, 5], []), tie=0.0)
    assert not disagrees(alone, GoldenAnswer([3, 8, 1], []), tie=0.05), (
        "4 and 8 are as likely: what follows is another text"
    )
    assert disagrees(alone, GoldenAnswer([3, 8, 5], []), tie=0.005)
    assert disagrees(alone, GoldenAnswer([3, 4, 7], []), tie=0.5)
    assert disagrees(alone, GoldenAnswer([6, 4, 5], []), tie=0.5), "6 is not among the likeliest"


# ── a check in the midst of others' steps ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["qwen3", "opt"])
def test_a_model_steps_between_the_layers_of_a_check_and_says_what_it_says_alone(
    builds: list[Any], random_models: dict[str, Path], kind: str
) -> None:
    serving, checked = (awake(builds[0](spec(random_models[name]))) for name in ("llama", kind))
    assert isinstance(serving, VllmEngine) and isinstance(checked, VllmEngine)
    alone = answers(serving, together=True)
    made: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    layers, slices = checked._core.vllm_config.model_config.get_total_num_hidden_layers(), 0
    check = Sliced(checked.check)
    for id in made:
        serving.add(RequestId(id), asked(int(id)))
    while not check.go_on(0.0):
        slices += 1
        for output in serving.step() if serving.busy() else []:
            made[output.request] += output.tokens
    assert check.result is None
    assert slices > 2 * TOKENS * layers  # two questions, each of so many steps
    parked_about(serving, made)
    assert list(made.values()) == alone
    for engine in (checked, serving):
        engine.close()


def back_and_waiting(engine: VllmEngine, running: tuple[str, ...], waiting: tuple[str, ...]) -> dict[str, list[int]]:
    """Park an engine with running requests, and bring the weights back; requests named `waiting` were never stepped.

    Returns the tokens made so far, by request. The running requests arrive: copies of their blocks may be under way."""
    made: dict[str, list[int]] = {id: [] for id in (*running, *waiting)}
    for id in running:
        engine.add(RequestId(id), asked(int(id)))
    for output in engine.step():
        made[output.request] += output.tokens
    for id in waiting:
        engine.add(RequestId(id), asked(int(id)))
    asleep(engine).fetch(8)
    until(engine.weights.arrived)
    return made


def half_checked(engine: VllmEngine) -> Sliced[str | None]:
    """Begin a check of the engine. Returns the check, paused in the midst of its first step."""
    check = Sliced(engine.check)
    assert not check.go_on(0.0) and engine._scheduler.running, "the check has not begun to step"
    return check


@pytest.mark.parametrize("aborted", ["0", "2"], ids=["a request with a KV cache", "a waiting request"])
def test_a_request_that_is_aborted_during_a_check_is_gone_after_the_check(
    builds: list[Any], random_models: dict[str, Path], aborted: str
) -> None:
    """Requests stepped aside for the check: an abort did not find the request, and the next step met a dead request."""
    engine = awake(builds[0](spec(random_models["llama"])), 8)
    assert isinstance(engine, VllmEngine)
    alone = answers(engine, together=True)
    made = back_and_waiting(engine, running=("0", "1"), waiting=("2",))
    until(engine.arrived)
    engine._scheduler._settle_arriving()
    check = half_checked(engine)
    engine.abort([RequestId(aborted)])
    assert check.go_on(60.0) and check.result is None
    left = sorted({"0", "1", "2"} - {aborted})
    assert sorted(engine._scheduler.requests) == left
    parked_about(engine, made)
    assert [made[id] for id in left] == [alone[int(id)] for id in left]
    engine.close()


def test_a_request_that_arrives_or_leaves_during_a_check_takes_no_part_in_the_check(
    builds: list[Any], random_models: dict[str, Path]
) -> None:
    """A request that leaves lets all arriving requests land: the check computed a tenant's request, and failed."""
    engine = awake(builds[0](spec(random_models["llama"])), 8)
    assert isinstance(engine, VllmEngine)
    alone = answers(engine, together=True)
    made = back_and_waiting(engine, running=("0", "1"), waiting=("2",))
    assert engine._scheduler.arriving == 2
    check = half_checked(engine)
    engine.commit(RequestId("0"))
    until(lambda: engine.commit(RequestId("0")) is not None)
    assert check.go_on(60.0) and check.result is None
    departure = engine.commit(RequestId("0"))
    assert departure is not None and departure.made == made["0"] == alone[0][: len(made["0"])]
    engine.abort_move(RequestId("0"))
    parked_about(engine, made)
    assert list(made.values()) == alone
    engine.close()
