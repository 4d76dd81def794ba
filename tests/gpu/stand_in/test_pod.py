"""A node's pod with eight runtimes over the stand-in for the GPU's driver: one host cache, registered in one place.

The chart runs in a cluster of this machine (tests/deploy/cluster); a node's pod gets the stand-in by four settings."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes.util import find_library
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from tests.deploy.cluster.installation import ChartInstallation, cluster, until
from tests.deploy.helm import helm
from tests.gpu.stand_in import SETTINGS, environment
from tests.gpu.stand_in.frames import Registered, check_copies, check_one_region, registered

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has a CUDA driver"),
]
NODE, RUNTIMES = "st-runtime-cpu", 8
TOLD = "/dev/shm"  # a folder in which the pod may write


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    runtime = {"accelerator": "cpu", "perNode": RUNTIMES, "deviceMemoryMiB": 128, "hostCacheMiB": 256}
    values = {"postgres": {"enabled": True}, "runtime": runtime, "pools": [{"name": "cpu"}]}
    with helm(tmp_path_factory.mktemp("helm")) as started:
        rendered: list[dict[str, Any]] = started.render(values)
    told = {name: value.replace(str(ROOT), "/opt/staccato") for name, value in environment().items()}
    told |= SETTINGS | {"STAND_IN_FOLDER": TOLD}
    (node,) = (one for one in rendered if one["metadata"]["name"] == NODE and one["kind"] == "StatefulSet")
    node["spec"]["template"]["spec"]["containers"][0]["env"] += [
        {"name": name, "value": value} for name, value in told.items()
    ]
    return rendered


@pytest.fixture(scope="module")
def installed(objects: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartInstallation]:
    with cluster(tmp_path_factory.mktemp("cluster"), f"{NODE}-0:{RUNTIMES}") as running:
        for part in ("nats", "postgres", "migrate", ""):
            running.apply(objects, part)
        yield ChartInstallation(running)


def devices_of(installation: ChartInstallation) -> list[psutil.Process]:
    (pod,) = installation.cluster.pods[NODE]
    return [process for process in pod.processes() if "runtime.device" in " ".join(process.cmdline())]


def test_eight_runtimes_of_a_pod_register_the_same_memory(installed: ChartInstallation) -> None:
    gpus = installed.get("/api/v1/gpus")["data"]
    assert len(gpus) == RUNTIMES
    image_bytes = gpus[0]["models"].popitem()[1]["weights_bytes"]
    told: list[Registered] = []

    def steady() -> bool:
        told[:] = registered(devices_of(installed), TOLD)
        return len(told) == RUNTIMES and min(device.bytes for device in told) > image_bytes

    until(steady)
    check_one_region(told, image_bytes)
    check_copies(told)
    assert installed.under_streams(lambda: None) > 0
    installed.check_books()
