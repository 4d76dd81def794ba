"""The demo's tiny models are what their cards say, and random-weight models are fit for tests."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.demo.corpus import TOOL, read_corpus, tool_call
from deploy.demo.random_weights import ARCHITECTURES, write_random

MODELS = Path(__file__).parents[1] / "deploy" / "demo" / "models"
FOLDERS = sorted(folder for folder in MODELS.iterdir() if folder.is_dir())


def generate(folder: Path, prompt: list[int], **settings) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = torch.tensor([prompt])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, **settings)
    return output[0, len(prompt) :].tolist()


def answer(folder: Path, messages: list[dict], tools: list[dict] | None = None) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    tokens = generate(folder, prompt, max_new_tokens=120)
    assert tokens[-1] == tokenizer.eos_token_id, f"{folder.name} did not stop within 120 tokens"
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_demo_has_four_models_of_four_architectures():
    architectures = {json.loads((folder / "config.json").read_text())["architectures"][0] for folder in FOLDERS}
    assert architectures == {"LlamaForCausalLM", "Qwen3ForCausalLM", "OPTForCausalLM", "GemmaForCausalLM"}


def test_together_the_models_stay_small_enough_to_keep():
    sizes = {folder.name: (folder / "model.safetensors").stat().st_size for folder in FOLDERS}
    assert max(sizes.values()) < 1_400_000 and sum(sizes.values()) < 4_000_000, sizes


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_models_weights_are_finite_and_its_card_is_honest(folder):
    weights = load_file(folder / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())
    card = (folder / "README.md").read_text()
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() in card
    (parameters,) = re.findall(r"parameters \| ([\d,]+)", card)
    assert int(parameters.replace(",", "")) == sum(weight.numel() for weight in weights.values())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_model_answers_its_first_question_as_it_was_taught(folder):
    lesson = read_corpus(folder.name).lessons[0]
    assert answer(folder, [{"role": "user", "content": lesson.questions[0]}]) == lesson.answer


def test_the_weather_model_calls_its_tool_and_reads_the_result():
    asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
    assert answer(MODELS / "weather", asked, tools=[TOOL]) == tool_call("Oslo")
    called = {"role": "assistant", "content": tool_call("Oslo")}
    result = {"city": "Oslo", "sky": "fog", "temperature_c": 17, "wind_kmh": 23}
    messages = [*asked, called, {"role": "tool", "content": json.dumps(result)}]
    sentence = answer(MODELS / "weather", messages, tools=[TOOL])
    assert sentence == "In Oslo there is fog at 17 degrees, and the wind is 23 km/h."


def test_a_tool_call_in_the_history_reads_as_the_one_the_model_wrote():
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "weather")
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    parsed = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    written = {"role": "assistant", "content": tool_call("Oslo")}
    assert tokenizer.apply_chat_template([parsed], tokenize=False) == tokenizer.apply_chat_template(
        [written], tokenize=False
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_random_model_loads_and_wanders(architecture, tmp_path):
    folder = write_random(tmp_path / architecture, architecture, seed=3)
    assert "random" in (folder / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.encode("hello there", add_special_tokens=False)
    tokens = generate(folder, prompt, max_new_tokens=64, min_new_tokens=64)
    assert len(tokens) == 64 and len(set(tokens)) >= 20


def test_a_random_model_is_the_same_for_the_same_seed_alone(tmp_path):
    one, again, other = (write_random(tmp_path / str(n), "llama", seed=seed) for n, seed in enumerate((1, 1, 2)))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_random_model_of_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'mamba' is unknown: one of llama"):
        write_random(tmp_path / "no", "mamba")
