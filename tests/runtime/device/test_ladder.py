"""Models that do not fit the host cache together: images go to disk and come back, and every answer is the same."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any, TypeVar

import pytest

from deploy.demo.random_weights import write_random
from runtime import ipc
from runtime.core.device.events import Arrived, Built, Checked, Closed, FetchFailed
from runtime.core.engine import WeightSource
from runtime.device import journal
from store.contract.wire import Residency, replace
from store.files import artefact
from store.files.architectures import Known
from tests.conftest import soon
from tests.runtime.engines import spec
from tests.runtime.processes import DeviceProcess

T = TypeVar("T")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
MIB = 1 << 20
POOL_BYTES, HOST_BYTES, DISK_BYTES = 64 * MIB, 56 * MIB, 1024 * MIB
SHAPES = {"a": (256, 6), "b": (320, 6), "c": (192, 6), "d": (256, 5)}  # hidden size, layers: 10 to 28 MiB of weights
MANY = int(os.environ.get("LADDER_MODELS", "100"))  # models of the long test
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",  # has a parameter that vLLM adds while reading the files
}
ASKED: dict[str, Any] = dict(prompt=[7, 8, 9] * 20, temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ladder")
    return {
        name: write_random(
            folder / name, "llama", seed=at, hidden=hidden, layers=layers, heads=hidden // 64, kv_heads=1
        )
        for at, (name, (hidden, layers)) in enumerate(SHAPES.items())
    }


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


async def started(disk: Path, journal: Path | None = None) -> DeviceProcess:
    return await DeviceProcess.start(
        POOL_BYTES, HOST_BYTES, disk_folder=str(disk), disk_bytes=DISK_BYTES, journal=str(journal or "")
    )


def place(device: DeviceProcess, models: dict[str, Path], returns: bool = False) -> None:
    """Deploy the models as the platform does: with digests, by which images lie on disk."""
    for key, path in models.items():
        found = artefact.inspect(path, Known(frozenset(ARCHITECTURES.values())))
        told = replace(spec(path, key=key), digest=found.digest, architecture=found.architecture)
        device.end.send(ipc.Place(told, returns))


async def load(device: DeviceProcess, models: dict[str, Path]) -> None:
    place(device, models)
    await device.until(lambda: all(key in device.state.models for key in models))
    await device.until(lambda: all(model.load_ms or model.error for model in device.state.models.values()))
    assert not any(model.error for model in device.state.models.values()), device.state.models


async def alone(models: dict[str, Path]) -> dict[str, list[int]]:
    """Answers of the models on a device with room for every image."""
    device = await DeviceProcess.start(POOL_BYTES, 1024 * MIB)
    await device.load(models)
    said = {name: await device.answer(device.ask(name, ASKED)) for name in models}
    await device.stop()
    return said


async def test_models_beyond_the_host_cache_are_served_in_turns(models: dict[str, Path], disk: Path) -> None:
    expected = await alone(models)
    device = await started(disk)
    await load(device, models)
    for _ in range(3):
        for name in models:
            assert await device.answer(device.ask(name, ASKED)) == expected[name]
    await device.until(lambda: any(model.on_disk is True for model in device.state.models.values()))
    assert {model.residency for model in device.state.models.values()} >= {Residency.COLD}
    await device.stop()


def heard(path: Path, kind: type[T]) -> list[T]:
    """Events of a kind in a device's journal."""
    with path.open("rb") as file:
        events = [journal.event_of(record) for record in journal.read(file) if isinstance(record, journal.EventRecord)]
    return [event for event in events if isinstance(event, kind)]


async def test_a_restarted_device_reads_its_images_from_disk_and_builds_nothing(
    models: dict[str, Path], tmp_path: Path
) -> None:
    models, expected = models | {"phi": write_random(tmp_path / "phi", "phi")}, dict[str, list[int]]()
    for life in ("first", "second"):
        device = await started(tmp_path / "disk", tmp_path / life)
        await load(device, models)
        said = {name: await device.answer(device.ask(name, ASKED)) for name in models}
        assert said == (expected := expected or said)
        await soon(lambda: len(list((tmp_path / "disk").glob("*.image"))) == len(models))
        await device.stop()
    first, second = ({event.source for event in heard(tmp_path / life, Built)} for life in ("first", "second"))
    assert WeightSource.FILES in first and second == {WeightSource.DISK}


async def test_returning_models_come_up_in_free_room_alone_and_are_loaded_for_requests(
    models: dict[str, Path], tmp_path: Path
) -> None:
    first = await started(tmp_path / "disk")
    await load(first, models)
    said = {name: await first.answer(first.ask(name, ASKED)) for name in models}
    images = tmp_path / "disk"
    await soon(lambda: sum(bool(os.listxattr(path)) for path in images.glob("*.image")) == len(models))
    await first.stop()

    second = await started(images, tmp_path / "journal")
    place(second, models, returns=True)
    await second.until(lambda: any(state.residency is Residency.STAGED for state in second.state.models.values()))
    await second.until(lambda: not any(state.residency is Residency.LOADING for state in second.state.models.values()))
    states = second.state.models.values()
    assert all(state.was_loaded and not state.fetches for state in states)
    assert any(state.residency is Residency.COLD and state.on_disk is True for state in states), "there is no room"
    assert {name: await second.answer(second.ask(name, ASKED)) for name in models} == said
    await second.stop()
    unasked = itertools.takewhile(lambda event: not isinstance(event, Arrived), heard(tmp_path / "journal", object))
    assert not any(isinstance(event, Closed) for event in unasked), "no image goes for an image without requests"
    assert {event.source for event in heard(tmp_path / "journal", Built)} == {WeightSource.DISK}
    checked = {event.model for event in heard(tmp_path / "journal", Checked)}
    assert checked == set(models), "the first fetch is checked"


async def test_a_damaged_image_is_noticed_built_again_and_written_again(
    models: dict[str, Path], tmp_path: Path
) -> None:
    one = {"b": models["b"]}
    device = await started(tmp_path / "disk")
    await load(device, one)
    expected = await device.answer(device.ask("b", ASKED))
    await soon(lambda: len(list((tmp_path / "disk").glob("*.image"))) == 1)
    await device.stop()
    (path,) = (tmp_path / "disk").glob("*.image")
    whole = path.read_bytes()
    path.write_bytes(whole[:9_000_000] + bytes(4096) + whole[9_004_096:])

    device = await started(tmp_path / "disk", tmp_path / "journal")
    await load(device, one)
    assert await device.answer(device.ask("b", ASKED)) == expected
    await soon(lambda: path.exists() and path.stat().st_size == len(whole))
    await device.stop()
    assert [event.source for event in heard(tmp_path / "journal", Built)] == [WeightSource.DISK, WeightSource.FILES]
    assert [event.lost for event in heard(tmp_path / "journal", FetchFailed)] == [True]


@pytest.mark.long
@pytest.mark.timeout(60 + 30 * MANY)
async def test_many_more_models_than_memory_are_served_from_whichever_tier_they_are_in(tmp_path: Path) -> None:
    """The host cache has room for a tenth of the images."""
    models = {
        f"m{number}": write_random(
            tmp_path / f"m{number}", list(ARCHITECTURES)[number % len(ARCHITECTURES)], seed=number, hidden=256, layers=4
        )
        for number in range(MANY)
    }
    host_bytes = max(HOST_BYTES, MANY * 14 * MIB // 10)
    device = await DeviceProcess.start(
        POOL_BYTES, host_bytes, disk_folder=str(tmp_path / "disk"), disk_bytes=MANY * 32 * MIB
    )
    names, said = list(models), dict[str, list[int]]()
    for first in range(0, MANY, 10):
        await load(device, {name: models[name] for name in names[first : first + 10]})
    for name in names:
        said[name] = await device.answer(device.ask(name, ASKED))
    assert sum(model.residency is Residency.COLD for model in device.state.models.values()) >= MANY // 2
    shuffled = names * 2
    random.Random(1).shuffle(shuffled)
    for first in range(0, len(shuffled), 5):  # five models wait for the device, and for the host cache, at a time
        streams = {device.ask(name, ASKED): name for name in shuffled[first : first + 5]}
        for stream, name in streams.items():
            assert await device.answer(stream) == said[name], name
    assert not any(model.error for model in device.state.models.values())
    assert device.rss_kib("RssAnon") < 3 << 20, "engines of models that are on disk keep next to nothing"
    await device.stop()
