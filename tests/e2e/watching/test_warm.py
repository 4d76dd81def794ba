"""Models on disk through the whole platform: a schedule, or a rhythm of requests, has a model in memory in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.random_weights import write_random
from runtime.memory.disk import IMAGE
from tests.conftest import free_port
from tests.e2e.conftest import Platform

SETTINGS = {"STACCATO_HOST_CACHE": "56MiB", "STACCATO_DEVICE_MEMORY": "64MiB", "STACCATO_DISK_CACHE": "1GiB"}
ALWAYS = ["Mon-Sun 0:00-24:00 Europe/Berlin"]
MODELS = ("scheduled", "other", "third")  # images of 22 MiB: the host cache has room for two


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    platform = Platform(tmp_path / "data", free_port(), SETTINGS)
    platform.start()
    platform.tenant("acme")
    yield platform
    platform.stop()


def cold(platform: Platform, model: str) -> str:
    """Ask for a model. Returns where the model was."""
    body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0}
    answer = platform.request("POST", "/v1/completions", body, platform.keys["acme"])
    assert answer.status_code == 200, answer.text
    return answer.headers["x-staccato-cold"]


def hosted(platform: Platform) -> dict[str, dict[str, Any]]:
    """States of the models on the device, by the names of the deployments."""
    (device,) = platform.get("/api/v1/gpus").json()["data"]
    states = device["models"].values()
    return {name.split("/")[1].split("@")[0]: state for state in states for name in state["deployments"]}


def tier(platform: Platform, model: str) -> str:
    return str(platform.get(f"/api/v1/deployments/{model}").json()["status"]["residency"])


def deploy(platform: Platform, folder: Path) -> None:
    """Deploy the models, the first with a schedule that never ends. Waits until the image of each is on disk: an image
    that leaves the host cache earlier is made again from the model's files."""
    for seed, name in enumerate(MODELS):
        path = write_random(folder / name, "llama", seed=seed, hidden=256, layers=6, heads=4, kv_heads=1)
        platform.model(name, path)
        shown = platform.deploy("acme", name, warm=ALWAYS if name == "scheduled" else [])
        assert shown["status"]["phase"] != "failed", shown["status"]
        platform.until(lambda count=seed + 1: len(list(platform.data.rglob("*" + IMAGE))) == count)


@pytest.mark.timeout(300)
def test_a_scheduled_model_is_in_memory_and_other_models_come_from_disk(platform: Platform, tmp_path: Path) -> None:
    deploy(platform, tmp_path)
    assert platform.get("/api/v1/deployments/scheduled").json()["warm"] == ALWAYS
    platform.until(lambda: tier(platform, "scheduled") in ("staged", "resident"))
    cold(platform, "third")  # takes the room of the model `other`, if `other` was built last
    for name in ("other", "third") * 2:
        platform.until(lambda name=name: tier(platform, name) == "disk")
        assert cold(platform, name) == "disk"
    assert tier(platform, "scheduled") in ("staged", "resident")
    assert cold(platform, "scheduled") in ("host", "none")
    (device,) = platform.get("/api/v1/gpus").json()["data"]
    said = {
        name.split("/")[1].split("@")[0]: state for state in device["models"].values() for name in state["deployments"]
    }
    assert {name: state["warm"] for name, state in said.items()} == {"scheduled": True, "other": False, "third": False}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_model_asked_in_a_rhythm_is_in_memory_in_time(platform: Platform, tmp_path: Path) -> None:
    """Models take turns in the room that the scheduled model leaves. The model `other` is asked every 30 s."""
    deploy(platform, tmp_path)
    was: list[str] = []
    due = time.monotonic()
    for _ in range(8):
        time.sleep(max(0.0, due - time.monotonic()))
        was.append(cold(platform, "other"))
        due = time.monotonic() + 30
        cold(platform, "third")
        platform.until(lambda: tier(platform, "other") == "disk")
    print(was, {name: (state["staged"], state["staged_unused"]) for name, state in hosted(platform).items()})
    assert was[1:4] == ["disk"] * 3 and was[-2:] == ["host"] * 2
    assert hosted(platform)["other"]["staged"] >= 2
