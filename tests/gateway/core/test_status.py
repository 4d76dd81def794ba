"""The phase of a deployment, from the reports of runtimes."""

from __future__ import annotations

import pytest

from gateway.core.status import _progress, _tier, loadable, phase
from store.contract.deployments import Progress
from store.contract.wire import ModelState, Residency

COLD, LOADING, RESIDENT, FAILED, LEAVING, STAGED = (ModelState(residency=residency) for residency in Residency)
ON_DISK = ModelState(residency=Residency.COLD, load_ms=10.0, on_disk=True)
SLEPT = ModelState(residency=Residency.COLD, load_ms=10.0)
RETURNED = ModelState(residency=Residency.COLD, loaded_before=True)
BETWEEN_TURNS = ModelState(residency=Residency.STAGED, load_ms=10.0, running=2)
PARKED = ModelState(residency=Residency.STAGED, load_ms=10.0)


@pytest.mark.parametrize(
    ("states", "desired", "expected"),
    [
        ([], "awake", "deploying"),
        ([COLD], "awake", "deploying"),  # never loaded: unknown whether loading succeeds
        ([COLD], "asleep", "asleep"),
        ([SLEPT], "awake", "asleep"),
        ([RETURNED], "awake", "asleep"),
        ([LOADING], "awake", "waking"),
        ([RESIDENT], "asleep", "awake"),  # a request woke it
        ([FAILED], "awake", "failed"),
        ([FAILED, SLEPT], "awake", "asleep"),
        ([FAILED, RESIDENT], "awake", "awake"),
        ([LEAVING], "asleep", "asleep"),
        ([STAGED], "awake", "deploying"),  # built, and not brought to the device yet
        ([PARKED], "awake", "asleep"),
        ([PARKED, RESIDENT], "awake", "awake"),
        ([COLD, PARKED, FAILED], "awake", "asleep"),
        ([BETWEEN_TURNS], "awake", "awake"),
    ],
)
def test_the_phase_is_that_of_the_runtime_that_is_furthest(
    states: list[ModelState], desired: str, expected: str
) -> None:
    assert phase(desired, {f"r{n}": state for n, state in enumerate(states)}) == expected


def test_the_tier_is_the_furthest_and_an_image_on_disk_is_more_than_files() -> None:
    def tier(*states: ModelState) -> str:
        return _tier({str(number): state for number, state in enumerate(states)})

    assert [tier(), tier(COLD), tier(COLD, ON_DISK), tier(ON_DISK, STAGED)] == ["none", "cold", "disk", "staged"]


def test_a_revision_is_loadable_once_some_runtime_has_loaded_it() -> None:
    fetched_again = ModelState(residency=Residency.LOADING, load_ms=10.0)
    failed_later = ModelState(residency=Residency.FAILED, load_ms=10.0)
    assert all(loadable([state]) for state in (SLEPT, RETURNED, PARKED, RESIDENT, fetched_again))
    assert not any(loadable([state]) for state in (COLD, STAGED, LOADING, FAILED, failed_later))
    assert loadable([FAILED, RESIDENT]) and not loadable([])


def test_progress_is_of_the_runtime_that_is_furthest_at_the_speed_it_had() -> None:
    def reading(read_bytes: int, s: float) -> ModelState:
        return ModelState(residency=Residency.LOADING, read_bytes=read_bytes, files_bytes=4000, reading_s=s)

    assert _progress({"r1": LOADING, "r2": RESIDENT}, 4000) is None
    assert _progress({"r1": reading(0, 1.0)}, 4000) == Progress(done_bytes=0, total_bytes=4000)
    furthest = _progress({"r1": reading(10, 1.0), "r2": reading(1000, 5.0), "r3": LOADING}, 4000)
    assert furthest == Progress(done_bytes=1000, total_bytes=4000, eta_s=15)


def test_a_model_in_the_queue_of_builds_tells_how_many_come_first_and_how_long_that_takes() -> None:
    def due(place: int, eta_s: float = 0.0) -> ModelState:
        return ModelState(residency=Residency.COLD, build_place=place, build_eta_s=eta_s)

    assert _progress({"r1": due(1)}, 4000) == Progress(done_bytes=0, total_bytes=4000)
    assert _progress({"r1": due(2)}, 4000) == Progress(
        done_bytes=0, total_bytes=4000, waits_for="1 model is built first"
    )
    assert _progress({"r1": due(40, 61.4), "r2": due(37, 60.4)}, 4000) == Progress(
        done_bytes=0, total_bytes=4000, eta_s=60, waits_for="36 models are built first"
    )
    being_read = ModelState(residency=Residency.LOADING, read_bytes=10, files_bytes=40, reading_s=1.0, build_place=1)
    assert _progress({"r1": due(3), "r2": PARKED}, 4000) is None, "a runtime has an engine: no client waits for a build"
    assert _progress({"r1": due(3), "r2": FAILED, "r3": COLD}, 4000) is not None
    assert _progress({"r1": due(3), "r2": being_read}, 40) == Progress(done_bytes=10, total_bytes=40, eta_s=3)
