"""Twenty models, four times the pool: a device process serves every model at once, and asleep holds no page."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.demo.random_weights import write_random
from runtime import ipc
from store.contract.wire import Residency
from tests.conftest import soon
from tests.runtime.processes import DeviceProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
MIB = 1 << 20
MODELS, POOL_BYTES, HOST_BYTES = 20, 64 * MIB, 1024 * MIB
ARCHITECTURES = ("llama", "qwen3", "opt", "gemma")
ASKED: list[dict[str, Any]] = [
    dict(prompt=[44, 301, 17], temperature=0, max_tokens=24),
    dict(prompt=[7, 8, 9] * 50, temperature=0, max_tokens=16),
    dict(prompt=[9, 10, 11], temperature=1.0, seed=7, max_tokens=24),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("twenty")
    shape = dict(hidden=256, layers=4, heads=4, kv_heads=2)
    return {
        f"m{number}": write_random(
            folder / f"m{number}", ARCHITECTURES[number % len(ARCHITECTURES)], seed=number, **shape
        )
        for number in range(MODELS)
    }


@pytest_asyncio.fixture
async def device() -> AsyncIterator[DeviceProcess]:
    device = await DeviceProcess.start(POOL_BYTES, HOST_BYTES)
    yield device
    await device.stop()


async def test_twenty_models_on_a_quarter_of_their_memory_say_what_each_says_alone(
    device: DeviceProcess, models: dict[str, Path]
) -> None:
    await device.load(models)
    page_bytes = device.state.page_bytes

    alone = {}
    weights_bytes = 0
    for key in models:
        for number, asked in enumerate(ASKED):
            alone[key, number] = await device.answer(device.ask(key, asked, "alone"))
        weights_bytes += device.state.models[key].weights_pages * page_bytes
    assert weights_bytes >= 4 * POOL_BYTES, f"{weights_bytes} bytes of weights are too few to prove anything"
    fetches = sum(model.fetches for model in device.state.models.values())

    questions = [(key, number) for key in models for number in range(len(ASKED))] * 2
    random.Random(1).shuffle(questions)
    streams = [device.ask(key, ASKED[number]) for key, number in questions]
    for (key, number), stream in zip(questions, streams, strict=True):
        assert await device.answer(stream) == alone[key, number], (key, number)
    more = sum(model.fetches for model in device.state.models.values()) - fetches
    assert more >= 2 * MODELS, f"{more} fetches: the models hardly took turns"

    shared_kib = device.rss_kib("RssShmem")
    for key in models:
        device.end.send(ipc.Order(key, awake=False))
    await device.until(lambda: device.state.pages_used == 0)
    assert all(model.residency is Residency.STAGED for model in device.state.models.values())
    # Pages on the way to the kernel count as free before the kernel has every page.
    await soon(lambda: shared_kib - device.rss_kib("RssShmem") >= 0.9 * POOL_BYTES / 1024)


async def test_an_engine_keeps_little_memory_of_its_own(device: DeviceProcess, models: dict[str, Path]) -> None:
    """Engines of models without a page on the device; the first engines bring what all engines of a process share."""

    async def private_kib(names: list[str]) -> int:
        """Private memory of the process once the models have answered and sleep."""
        await device.load({name: models[name] for name in names})
        for name in names:
            await device.answer(device.ask(name, ASKED[0]))
            device.end.send(ipc.Order(name, awake=False))
        await device.until(lambda: device.state.pages_used == 0)
        return device.rss_kib("RssAnon")

    first, *others = [list(models)[at : at + 4] for at in range(0, MODELS, 4)]
    before = await private_kib(first)
    for names in others:
        after = await private_kib(names)
    assert after - before < 2 * 1024 * (MODELS - len(first)), (
        f"{before} KiB with {len(first)} engines, {after} with all"
    )
