"""Images on a real disk come up to the host cache by a schedule, and by the history of requests, before any request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.random_weights import write_random
from runtime import ipc
from runtime.core.device.model import Phase
from runtime.sim.replay import replay
from store.contract.wire import EngineSpec, Residency, replace
from store.files import artefact
from store.files.architectures import Known
from tests.runtime.devices import Driven, Kept, Script
from tests.runtime.engines import spec

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
MIB = 1 << 20
POOL_BYTES, HOST_BYTES, DISK_BYTES = 64 * MIB, 56 * MIB, 1024 * MIB
MODELS = ("a", "b", "c")  # of equal size: the host cache has room for two images
PERIOD_S = 120.0
ASKED: dict[str, Any] = dict(prompt=[7, 8, 9] * 20, temperature=0, max_tokens=4)


class Skipping:
    """A monotonic clock that a test puts forward."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[EngineSpec]:
    folder, made = tmp_path_factory.mktemp("staging"), []
    for at, name in enumerate(MODELS):
        path = write_random(folder / name, "llama", seed=at, hidden=256, layers=6, heads=4, kv_heads=1)
        found = artefact.inspect(path, Known(frozenset(["LlamaForCausalLM"])))
        made.append(replace(spec(path, key=name), digest=found.digest, architecture=found.architecture))
    return made


@pytest.fixture
def clock() -> Skipping:
    return Skipping()


@pytest.fixture
def driven(specs: list[EngineSpec], tmp_path: Path, clock: Skipping) -> Iterator[Driven]:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES, disk=(str(tmp_path / "disk"), DISK_BYTES))
    engines = Kept(build)
    yield Driven(engines, "round-robin", tmp_path / "journal", specs, clock, by_history=True)
    engines.close()
    build.close()


def serve(driven: Driven, *models: str) -> Script:
    """Ask for each model in turn, and wait for the answer."""
    for model in models:
        start = driven.start(model, ASKED)
        yield lambda: True, [start]
        yield lambda: not driven.open, []


def beginning(driven: Driven, folder: Path) -> Script:
    yield lambda: True, driven.place()
    yield driven.placed, []
    yield lambda: len(list(folder.glob("*.image"))) == len(MODELS), []


def cold(driven: Driven, model: str) -> bool:
    return bool(driven.models[model].phase is Phase.COLD)


def test_a_model_with_a_rhythm_is_in_memory_when_its_request_comes_and_a_wrong_guess_counts(
    driven: Driven, clock: Skipping, tmp_path: Path
) -> None:
    found: dict[str, Any] = {}

    def day() -> Script:
        for _ in range(5):
            yield from serve(driven, "a")
            clock.skipped_s += PERIOD_S
        yield from serve(driven, "a")
        clock.skipped_s += 5.0
        yield from serve(driven, "b", "c")
        assert cold(driven, "a")
        clock.skipped_s += PERIOD_S - 6.0 - (clock() - driven.models["a"].queues.idle.left_at)
        yield lambda: driven.models["a"].phase is Phase.STAGED, []
        model = driven.models["a"]
        found["tier"] = model.state(driven.device.instance.pages.of(model.key)).residency
        found["staged"] = model.staging.staged, model.staging.unused
        yield from serve(driven, "a")
        found["asked"] = model.staging.staged, model.staging.unused
        clock.skipped_s += 5.0
        yield from serve(driven, "b", "c")
        clock.skipped_s += PERIOD_S - 6.0 - (clock() - driven.models["a"].queues.idle.left_at)
        yield lambda: driven.models["a"].phase is Phase.STAGED, []
        yield from serve(driven, "b", "c")  # no request for a comes
        found["missed"] = cold(driven, "a"), model.staging.staged, model.staging.unused

    driven.run(itertools.chain(beginning(driven, tmp_path / "disk"), day()))
    assert found["tier"] is Residency.STAGED, "a gateway tells the client `host`, not `disk`"
    assert found["staged"] == found["asked"] == (1, 0)
    assert found["missed"] == (True, 2, 1)
    assert replay(tmp_path / "journal").difference is None


def test_a_scheduled_model_comes_up_from_disk_and_stays(driven: Driven, clock: Skipping, tmp_path: Path) -> None:
    found: list[bool] = []

    def day() -> Script:
        yield from serve(driven, "a", "b", "c")
        yield lambda: cold(driven, "a"), [ipc.Warm("a", True)]
        yield lambda: driven.models["a"].phase is Phase.STAGED, []
        for other in "bcbc":
            clock.skipped_s += 30.0
            yield from serve(driven, other)
            found.append(cold(driven, "a"))
        yield lambda: True, [ipc.Warm("a", False)]
        clock.skipped_s += 30.0
        yield from serve(driven, "b", "c")
        found.append(cold(driven, "a"))

    driven.run(itertools.chain(beginning(driven, tmp_path / "disk"), day()))
    assert found == [False] * 4 + [True]
