"""Agents that talk to six models in turn, on a device with room for two models.

The models sleep between the turns of a conversation, so the blocks of a conversation go to the host cache and come
back. The cached tokens are compared with those of an engine that keeps every block for good."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.demo.random_weights import write_random
from runtime import ipc
from tests.runtime.engines import spec
from tests.runtime.processes import DeviceProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
MIB = 1 << 20
ROOM_FOR_TWO, ROOM_FOR_ALL, HOST_BYTES = 56 * MIB, 768 * MIB, 2048 * MIB
KEPT = (512 * MIB, 600.0)  # bytes of prefixes, seconds
ARCHITECTURES = ("llama", "qwen2", "qwen3")
MODELS, CONTEXT = 6, 2048
SYSTEM, SAID, HEARD, BLOCK = (
    400,
    12,
    100,
    128,
)  # tokens: the agent's prompt in front, an answer, the words of a turn; a block
FEW, MANY = (6, 4), (20, 12)  # conversations, turns in each


@dataclass
class Day:
    """Answers of a device to the conversations, and the tokens of the prompts."""

    answers: list[list[int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    brought: int = 0  # blocks copied back from the host cache


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("agents"))


def write_models(folder: Path) -> dict[str, Path]:
    """Write the six models with random weights, unless the models lie in the folder. Returns the models' folders."""
    shape = dict(hidden=256, layers=4, heads=4, kv_heads=2, context=CONTEXT)
    paths = {f"m{n}": folder / f"m{n}" for n in range(MODELS)}
    for n, path in enumerate(paths.values()):
        if not path.exists():
            write_random(path, ARCHITECTURES[n % len(ARCHITECTURES)], seed=n, **shape)
    return paths


async def test_a_device_for_two_models_caches_nearly_every_token_of_six(models: dict[str, Path]) -> None:
    await cached_alike(models, FEW, least=0.95)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_the_same_for_twenty_conversations_of_twelve_turns(models: dict[str, Path]) -> None:
    await cached_alike(models, MANY, least=0.95)


async def cached_alike(models: dict[str, Path], size: tuple[int, int], least: float) -> None:
    roomy, sleeping = await day(models, ROOM_FOR_ALL, (0, 0.0), size), await day(models, ROOM_FOR_TWO, KEPT, size)
    most = size[0] * sum(kept_for_good(turn) for turn in range(size[1]))
    print(
        f"prompts {sleeping.prompt_tokens}, cached at best {most}, here {sleeping.cached_tokens}, {roomy.cached_tokens}"
    )
    assert sleeping.answers == roomy.answers
    assert sleeping.brought and not roomy.brought
    assert least * most <= sleeping.cached_tokens <= most


def kept_for_good(turn: int) -> int:
    """Tokens in full blocks of the turns before, of which each last token was not computed."""
    return (SYSTEM + (HEARD + SAID) * turn - 1) // BLOCK * BLOCK if turn else 0


async def day(models: dict[str, Path], pool_bytes: int, kept: tuple[int, float], size: tuple[int, int]) -> Day:
    """Have the conversations go on by turns. A conversation has one model and one tenant to the end."""
    device = await DeviceProcess.start(pool_bytes, HOST_BYTES, prefixes=kept)
    for key, path in models.items():
        device.end.send(ipc.Place(spec(path, CONTEXT, key)))
    await device.until(lambda: all(m in device.state.models and device.state.models[m].load_ms for m in models))
    conversations, turns = size
    found = Day()
    heard = [words(f"system {number}", SYSTEM) for number in range(conversations)]
    for turn in range(turns):
        for number in range(conversations):
            model = f"m{number % MODELS}"
            heard[number] += words(f"{number} {turn}", HEARD)
            asked = dict(prompt=heard[number], temperature=0, max_tokens=SAID)
            stream = device.ask(model, asked, f"tenant {number}")
            heard[number] += await device.answer(stream)
            found.answers.append(device.said[stream])
            found.prompt_tokens += len(asked["prompt"])
            found.cached_tokens += device.cached[stream]
    found.brought = device.state.device_bytes.prefixes.brought
    await device.stop()
    return found


def words(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]
