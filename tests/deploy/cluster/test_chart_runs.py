"""The chart's rendered objects run as pods of a cluster on this machine, and streams outlive what happens to a cluster.

Each pod has the template's command, settings, volumes, user, probes and grace period, and a network namespace of its
own; services pass connections on to ready pods. Only images are missing: pods have this machine's programs."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.cluster.installation import TOKENS, ChartInstallation, cluster, until
from tests.deploy.helm import helm

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
RUNTIMES = "st-runtime-cpu"
NODES = 3  # most nodes at a time
AWAY_S = 15.0


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    runtime = {"accelerator": "cpu", "perNode": 1, "deviceMemoryMiB": 64, "hostCacheMiB": 128}
    values = {"postgres": {"enabled": True}, "runtime": runtime, "pools": [{"name": "cpu"}]}
    with helm(tmp_path_factory.mktemp("helm")) as started:
        return started.render(values)


@pytest.fixture(scope="module")
def installed(objects: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartInstallation]:
    with cluster(tmp_path_factory.mktemp("cluster"), *(f"{RUNTIMES}-{n}:1" for n in range(NODES))) as running:
        for part in ("nats", "postgres", "migrate", ""):
            running.apply(objects, part)
        installation = ChartInstallation(running)
        yield installation
        installation.check_books()


def test_a_request_is_served_through_the_service(installed: ChartInstallation) -> None:
    assert all(len(answer) == TOKENS for answer in installed.calm.values())
    installed.check_books()


def test_nodes_come_and_go_under_streams(installed: ChartInstallation) -> None:
    def scaled() -> None:
        installed.cluster.scale(RUNTIMES, NODES)
        until(lambda: len(installed.get("/api/v1/gpus")["data"]) == NODES)
        time.sleep(10)  # streams begin on the new nodes
        installed.cluster.scale(RUNTIMES, 1)

    print(installed.under_streams(scaled), "answers")
    installed.check_books()


def test_a_drained_node_gives_its_streams_away(installed: ChartInstallation) -> None:
    installed.cluster.scale(RUNTIMES, 2)

    def drained() -> None:
        installed.cluster.delete(RUNTIMES, installed.cluster.pods[RUNTIMES][0])
        installed.cluster.await_ready()

    print(installed.under_streams(drained), "answers")
    installed.check_books()


@pytest.mark.parametrize("workload", ["st-nats", "st-postgres"])
def test_servers_that_die_one_after_another_cost_no_stream(installed: ChartInstallation, workload: str) -> None:
    def lost() -> None:
        for pod in [*installed.cluster.pods[workload]]:
            restarts = pod.restarts
            pod.kill()
            until(lambda pod=pod, restarts=restarts: pod.restarts > restarts and pod.ready)

    print(installed.under_streams(lost), "answers")
    installed.check_books()


def test_a_server_of_the_bus_that_stays_away_costs_no_stream(installed: ChartInstallation) -> None:
    def away() -> None:
        installed.cluster.scale("st-nats", 2)
        time.sleep(AWAY_S)
        installed.cluster.scale("st-nats", 3)

    print(installed.under_streams(away), "answers")
    installed.check_books()


def test_an_upgrade_costs_no_stream(installed: ChartInstallation, objects: list[dict[str, Any]]) -> None:
    upgraded = copy.deepcopy(objects)
    for one in upgraded:
        for container in one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            container["image"] = container["image"].replace(":0.1.0", ":0.1.1")
        if one["metadata"]["name"] == RUNTIMES:
            one["spec"]["replicas"] = 2
    print(installed.under_streams(lambda: installed.cluster.apply(upgraded)), "answers")
    installed.check_books()
