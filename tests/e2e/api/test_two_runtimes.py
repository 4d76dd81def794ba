"""Two runtimes with room for two of four models each: a model's requests stay together, and decisions replay equal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from runtime.sim.replay import of_a_dispatcher, replay_choices
from tests.conftest import free_port
from tests.e2e.conftest import MODELS, Platform

NAMES = ("faq", "weather", "poet", "music")
DEVICE_MEMORY = "12MiB"  # room for two of the models
STREAMS, TOKENS = 6, 160  # streams of a model, tokens of a stream
LONG_TOKENS = 400  # tokens of a stream that still runs when a drain reaches its node
SAMPLES, SAMPLES_LEAST = 13, 4  # a fast machine ends the streams before the last sample
SPLIT_MOST = 1  # samples in which a model has requests on both runtimes
FETCHES_MOST = 12
DRAINS_MOST = 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "journal").mkdir()
    platform = Platform(folder / "data", free_port(), {"STACCATO_JOURNAL": str(folder / "journal")})
    try:
        platform.start("--runtimes", "2", "--device-memory", DEVICE_MEMORY)
        platform.tenant("acme")
        for name in NAMES:
            platform.model(name, MODELS / name)
            assert platform.deploy("acme", name)["status"]["phase"] in ("awake", "asleep")
        platform.until(lambda: all(len(gpu["models"]) == len(NAMES) for gpu in gpus(platform)), 300)
        yield platform
    finally:
        code = platform.stop()
    assert code == 0


def gpus(platform: Platform) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = platform.get("/api/v1/gpus").json()["data"]
    return found


def fetches(platform: Platform) -> int:
    return sum(model["fetches"] for gpu in gpus(platform) for model in gpu["models"].values())


def busiest(platform: Platform) -> str:
    """Return the runtime with the most running requests, after a wait of up to 60 s for a first request."""

    def running() -> dict[str, int]:
        return {gpu["id"]: sum(model["running"] for model in gpu["models"].values()) for gpu in gpus(platform)}

    platform.until(lambda: any(running().values()), 60)
    counts = running()
    return max(counts, key=lambda runtime: counts[runtime])


async def said(client: openai.AsyncOpenAI, model: str, number: int, tokens: int = TOKENS) -> str:
    extra = {"ignore_eos": True, "top_k": 1}
    prompt = f"Stream {number} of {model}:"
    answer = await client.completions.create(model=model, prompt=prompt, max_tokens=tokens, extra_body=extra)
    return answer.choices[0].text


async def sampled(platform: Platform, streams: asyncio.Future[Any]) -> tuple[int, Counter[str]]:
    """Take up to SAMPLES samples while streams run. Returns the number of samples, and, by model, the number of samples
    in which the model has requests on both runtimes."""
    taken, split = 0, Counter[str]()
    while taken < SAMPLES and not streams.done():
        places = Counter(
            name
            for gpu in await asyncio.to_thread(gpus, platform)
            for name, model in gpu["models"].items()
            if model["running"] + model["waiting"]
        )
        taken += 1
        split.update(name for name, count in places.items() if count > 1)
        await asyncio.sleep(0.05)
    return taken, split


async def test_requests_of_a_model_stay_together_and_say_what_they_say_alone(pair: Platform) -> None:
    asked = [(name, number) for number in range(STREAMS) for name in NAMES]
    async with pair.async_client("acme", timeout=300, max_retries=0) as client:
        alone = {each: await said(client, *each) for each in asked}
        before = fetches(pair)
        streams = asyncio.ensure_future(asyncio.gather(*(said(client, *each) for each in asked)))
        await asyncio.sleep(0.2)  # every request is at a runtime
        taken, split = await sampled(pair, streams)
        together = await streams
    print(taken, "samples; of a model on both runtimes:", dict(split), "fetches:", fetches(pair) - before)
    assert dict(zip(asked, together, strict=True)) == alone
    assert taken >= SAMPLES_LEAST and max(split.values(), default=0) <= SPLIT_MOST
    assert fetches(pair) - before <= FETCHES_MOST


async def drained_beside_streams(platform: Platform, asked: Sequence[tuple[str, int]]) -> None:
    """Drain the busiest runtime while streams run: the node then chooses another runtime for each stream."""
    async with platform.async_client("acme", timeout=300, max_retries=0) as client:
        streams = asyncio.ensure_future(asyncio.gather(*(said(client, *each, LONG_TOKENS) for each in asked)))
        drained = await asyncio.to_thread(busiest, platform)
        platform.post(f"/api/v1/gpus/{drained}:drain", {"on": True})
        await streams
        platform.post(f"/api/v1/gpus/{drained}:drain", {"on": False})


async def test_every_choice_of_gateway_and_nodes_is_made_again_by_a_replay(pair: Platform) -> None:
    asked = [(name, number) for number in range(STREAMS) for name in NAMES]
    for _ in range(DRAINS_MOST):  # on a busy machine the streams may end before the runtime drains
        await drained_beside_streams(pair, asked)
        replayed = {
            path.name: replay_choices(path)
            for path in Path(pair.settings["STACCATO_JOURNAL"]).iterdir()
            if of_a_dispatcher(path)
        }
        assert [replay.difference for replay in replayed.values()] == [""] * 3, "a gateway and two nodes"
        nodes = {name: replayed.pop(name) for name in list(replayed) if name.startswith(("r1-peers-", "r2-peers-"))}
        if any(node.chosen for node in nodes.values()):
            break
    (gateway,) = replayed.values()
    assert gateway.chosen >= STREAMS * len(NAMES) and gateway.heard > gateway.chosen
    assert sum(node.chosen for node in nodes.values()) > 0
