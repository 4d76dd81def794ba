"""Twenty models, four times the pool: one device process serves them all at once, and holds nothing when they sleep."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.demo.random_weights import write_random
from runtime import pipe
from store.wire import Finish, Residency, Run
from tests.conftest import ROOT
from tests.runtime.engines import payload, spec

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM, torch and transformers, not ours
MIB = 1 << 20
MODELS, POOL_BYTES, HOST_BYTES = 20, 64 * MIB, 1024 * MIB
ARCHITECTURES = ("llama", "qwen3", "opt", "gemma")
SOON_S = 120
ASKED: list[dict[str, Any]] = [
    dict(prompt=[44, 301, 17], temperature=0, max_tokens=24),
    dict(prompt=[7, 8, 9] * 50, temperature=0, max_tokens=16),
    dict(prompt=[9, 10, 11], temperature=1.0, seed=7, max_tokens=24),
]


class DeviceProcess:
    """A device process; this process plays its node."""

    @classmethod
    async def start(cls, pool_bytes: int, host_bytes: int) -> DeviceProcess:
        self = cls()
        ours, theirs = pipe.pair()
        with theirs:
            arguments = pipe.Began(theirs.fileno(), "round-robin", pool_bytes, host_bytes).arguments()
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "runtime.device", *arguments, pass_fds=[theirs.fileno()], cwd=ROOT
            )
        self.end = await pipe.NodeEnd.open(ours)
        self.state = pipe.State()
        self.said: dict[int, list[int]] = {}
        self.ended: dict[int, tuple[Finish, str]] = {}
        self._streams = 0
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        async for message in self.end.messages():
            async with self._news:
                self._hear(message)
                self._news.notify_all()

    def _hear(self, message: pipe.ToNode) -> None:
        match message:
            case pipe.State():
                self.state = message
            case pipe.Made(deltas):
                for delta in deltas["g"]:
                    self.said[delta.stream] += delta.tokens
                    if delta.finish is not None:
                        self.ended[delta.stream] = (delta.finish, delta.error)

    def ask(self, model: str, asked: dict[str, Any], salt: str = "") -> int:
        self._streams += 1
        self.said[self._streams] = []
        sampling = {key: value for key, value in asked.items() if key != "prompt"}
        run = Run(
            gateway="g",
            stream=self._streams,
            model=model,
            request="",
            attempt=1,
            prompt_tokens=len(asked["prompt"]),
            max_tokens=asked["max_tokens"],
            payload=payload(asked["prompt"], salt, **sampling, ignore_eos=True),
            engine="",
        )
        self.end.send(pipe.Start(run))
        return self._streams

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(SOON_S), self._news:
            await self._news.wait_for(done)

    def all_loaded(self) -> bool:
        return len(self.state.models) == MODELS and all(model.load_ms for model in self.state.models.values())

    async def answer(self, stream: int) -> list[int]:
        await self.until(lambda: stream in self.ended)
        assert self.ended[stream] == (Finish.LENGTH, "")
        return self.said[stream]

    def rss_kib(self, kind: str) -> int:
        """`RssAnon` or `RssShmem` of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith(kind)))

    async def stop(self) -> None:
        self.end.send(pipe.Quit())
        await self.process.wait()
        await self._reader
        self.end.close()


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
    for key, path in models.items():
        device.end.send(pipe.Place(spec(path, key=key)))
    await device.until(device.all_loaded)
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
        device.end.send(pipe.Order(key, awake=False))
    await device.until(lambda: device.state.pages_used == 0)
    assert all(model.residency is Residency.STAGED for model in device.state.models.values())
    given_back_kib = shared_kib - device.rss_kib("RssShmem")
    assert given_back_kib >= 0.9 * POOL_BYTES / 1024, f"{given_back_kib} KiB of the pool left the process"
