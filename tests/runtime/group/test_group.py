"""Models split over two devices: two device processes with vLLM's tensor parallelism on the CPU, and one Instance."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.demo.random_weights import write_random
from runtime import ipc
from runtime.core.device.request import RequestId
from runtime.core.engine import EngineError, Output
from runtime.group import follower
from runtime.group.follower import Follower
from runtime.group.group import EngineCall, Failed, digest
from store.contract.wire import Residency
from tests.forks import ran
from tests.runtime.bare import ask_bare_vllm
from tests.runtime.engines import spec
from tests.runtime.forms import write_form
from tests.runtime.processes import DeviceProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
on_two = pytest.mark.asyncio(loop_scope="module")  # tests with the group
MIB = 1 << 20
POOL_BYTES, HOST_BYTES = 18 * MIB, 512 * MIB  # per device: halves of two of the four models, and some KV cache
SHAPE = dict(hidden=256, layers=4, heads=4, kv_heads=2)
ASKED: list[dict[str, Any]] = [
    dict(prompt=[44, 301, 17], temperature=0, max_tokens=32),
    dict(prompt=[7, 8, 9] * 50, temperature=0, max_tokens=24),
    dict(prompt=[9, 10, 11], temperature=1.0, seed=7, max_tokens=32),
    dict(prompt=[9, 10, 11], temperature=1.0, max_tokens=8),  # different tokens each time
]
GREEDY = [number for number, asked in enumerate(ASKED) if not asked["temperature"]]
REPEATABLE = [*GREEDY, 2]
END_S = 60.0  # for the end of all ranks, on a machine that has other work too


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("split")
    return {
        name: write_random(folder / name, name, seed=number, **SHAPE)
        for number, name in enumerate(("llama", "qwen3", "opt", "gemma"))
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def groups() -> AsyncIterator[list[DeviceProcess]]:
    """Groups that tests have started: the last may live."""
    started: list[DeviceProcess] = []
    yield started
    if started and started[-1].process.returncode is None:
        others = ranks_of(started[-1])
        await started[-1].stop()
        await ended(others)


@pytest_asyncio.fixture(loop_scope="module")
async def group(groups: list[DeviceProcess]) -> DeviceProcess:
    """A living group. Two processes import vLLM for a group, so tests share a group until the group dies."""
    if not groups or groups[-1].process.returncode is not None:
        groups.append(await DeviceProcess.start(POOL_BYTES, HOST_BYTES, tensor_parallel=2))
    return groups[-1]


def ranks_of(device: DeviceProcess) -> list[int]:
    """Pids of the processes of ranks other than the first."""
    threads = Path(f"/proc/{device.process.pid}/task").iterdir()
    children = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    return [pid for pid in children if b"runtime.group.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def alone(
    device: DeviceProcess, models: dict[str, Path], questions: list[int]
) -> tuple[dict[tuple[str, int], list[int]], dict[str, int]]:
    """Tokens of each model asked alone, by model and question, and bytes of each model's weights on both devices."""
    said, weights = {}, {}
    for key in models:
        for number in questions:
            said[key, number] = await device.answer(device.ask(key, ASKED[number], "alone"))
        weights[key] = device.state.models[key].weights_pages * device.state.page_bytes
    return said, weights


async def ended(pids: list[int]) -> None:
    async with asyncio.timeout(END_S):
        while any(_there(pid) for pid in pids):
            await asyncio.sleep(0.01)


def _there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@on_two
async def test_models_on_two_devices_take_turns_and_say_what_they_say_on_one(
    group: DeviceProcess, models: dict[str, Path]
) -> None:
    single = await DeviceProcess.start(64 * MIB, HOST_BYTES)
    try:
        await single.load(models)
        on_one, whole = await alone(single, models, GREEDY)
    finally:
        await single.stop()
    await group.load(models)
    on_both, split = await alone(group, models, REPEATABLE)
    assert {asked: on_both[asked] for asked in on_one} == on_one
    assert all(split[key] < 1.25 * whole[key] for key in models), f"{split} on two devices, {whole} on one"
    assert sum(split.values()) > 1.5 * 2 * POOL_BYTES, f"{split} bytes of weights are too few to prove anything"
    fetches = sum(model.fetches for model in group.state.models.values())

    questions = [(key, number) for key in models for number in range(len(ASKED))] * 2
    random.Random(1).shuffle(questions)
    streams = [group.ask(key, ASKED[number]) for key, number in questions]
    for (key, number), stream in zip(questions, streams, strict=True):
        said = await group.answer(stream)
        assert said == on_both.get((key, number), said), (key, number)
    more = sum(model.fetches for model in group.state.models.values()) - fetches
    assert more >= 2 * len(models), f"{more} fetches: the models hardly took turns"

    for key in models:
        group.end.send(ipc.Order(key, awake=False))
    await group.until(lambda: group.state.pages_used == 0)
    assert all(model.residency is Residency.STAGED for model in group.state.models.values())


@on_two
@pytest.mark.long
async def test_a_mixture_of_experts_on_two_devices_says_what_bare_vllm_says(
    group: DeviceProcess, models: dict[str, Path], tmp_path: Path
) -> None:
    """A dense model was first, and both models take turns: the ranks have a group for experts after any first model."""
    mixture = write_form(tmp_path / "qwen3_moe", "qwen3_moe", seed=1)
    prompts, most = [ASKED[number]["prompt"] for number in GREEDY], 24
    bare = await asyncio.to_thread(ask_bare_vllm, {"mixture": mixture}, {"mixture": "float32"}, prompts, most)
    said = bare["mixture"]
    await group.load({"llama": models["llama"]})
    await group.load({"mixture": mixture})
    for _ in range(2):
        asked = [group.ask("mixture", {"prompt": prompt, "temperature": 0, "max_tokens": most}) for prompt in prompts]
        beside = group.ask("llama", ASKED[0])
        assert [await group.answer(stream) for stream in asked] == said
        await group.answer(beside)
        group.end.send(ipc.Order("mixture", awake=False))
        await group.until(lambda: group.state.models["mixture"].residency is Residency.STAGED)
    assert not group.state.models["mixture"].sequential, "both ranks say in a batch what they say alone"


@on_two
async def test_a_model_that_cannot_be_split_says_why_and_the_others_go_on(
    group: DeviceProcess, models: dict[str, Path], tmp_path: Path
) -> None:
    odd = write_random(tmp_path / "odd", "llama", seed=9, hidden=192, layers=2, heads=3, kv_heads=3)
    group.end.send(ipc.Place(spec(odd, key="odd")))
    await group.until(lambda: "odd" in group.state.models and group.state.models["odd"].error)
    assert "divisible by tensor parallel size (2)" in group.state.models["odd"].error
    await group.load({"llama": models["llama"]})
    assert len(await group.answer(group.ask("llama", ASKED[0]))) == ASKED[0]["max_tokens"]


@on_two
@pytest.mark.parametrize("which", ["first", "other"])
async def test_where_one_rank_dies_all_end(group: DeviceProcess, models: dict[str, Path], which: str) -> None:
    await group.load({"llama": models["llama"]})
    stream = group.ask("llama", ASKED[0] | {"max_tokens": 400})
    await group.until(lambda: len(group.said[stream]) > 5)
    first, others = group.process.pid, ranks_of(group)
    assert len(others) == 1
    os.kill(first if which == "first" else others[0], signal.SIGKILL)
    async with asyncio.timeout(END_S):
        await group.process.wait()
    await ended(others)
    assert len(group.said[stream]) < 400


# ── what ranks agree upon ─────────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_so_where_all_say_so_and_what_fails_for_one_fails_for_all(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        printed = threads.map(lambda rank: ran("tests.runtime.group.agreeing", [rank, str(tmp_path)]), ("0", "1"))
        first, other = map(json.loads, printed)
    assert other == [True, False, 5, "no copy"]
    assert first[:3] == [True, False, 5] and "another rank" in first[3]


# ── a rank that does otherwise, forced ────────────────────────────────────────────────────────────────────────────────


class Diverged(BaseException):
    pass


class Scripted:
    """An engine that makes equal tokens in each step, or raises if `fails`."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def step(self, ahead: bool = False) -> list[Output]:
        if self._fails:
            raise EngineError("no")
        return [Output(RequestId("r"), [3, 4])]


SAID = digest(0, [Output(RequestId("s"), [3, 4])])  # the request's name does not count


@pytest.mark.parametrize(
    ("fails", "told", "wrong"),
    [
        (False, [EngineCall("m", "step", ()), EngineCall("m", "step", (), SAID)], None),
        (
            False,
            [EngineCall("m", "step", ()), EngineCall("m", "step", (), SAID + 1)],
            "this rank has made other tokens",
        ),
        (True, [EngineCall("m", "step", ()), Failed("EngineError")], None),
        (True, [EngineCall("m", "step", ()), Failed("KeyError")], "step: EngineError: no"),
        (True, [EngineCall("m", "step", ()), EngineCall("m", "step", ())], "step: EngineError: no"),
        (False, [EngineCall("m", "step", ()), Failed("EngineError")], "the first rank failed with EngineError"),
    ],
)
def test_a_rank_ends_when_it_does_otherwise_than_the_first(
    monkeypatch: pytest.MonkeyPatch, fails: bool, told: list[Any], wrong: str | None
) -> None:
    def diverged(model: str, detail: str) -> None:
        raise Diverged(detail)

    monkeypatch.setattr(follower, "_diverged", diverged)
    ours, theirs = Pipe()
    build: Callable[..., Any] = lambda spec, told: Scripted(fails)  # noqa: E731
    for message in (EngineCall("m", "", (spec(Path("m")),)), *told):
        ours.send(message)
    ours.close()
    rank = Follower(build, theirs)  # type: ignore[arg-type]
    if wrong is None:
        rank.run()
    else:
        with pytest.raises(Diverged, match=wrong):
            rank.run()
