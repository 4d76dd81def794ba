"""The chart's objects are started as local processes: the same arguments, settings, files and probes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.ops.bus_servers import nats_binary
from store.db import database
from tests.conftest import ROOT, free_port
from tests.deploy.helm import helm
from tests.deploy.tools import DEPLOY
from tests.gateway.machine.counted import caches

READY_S = 60
NODE_S = 240  # eight runtimes start on two busy cores
NODE = "st-runtime-cpu-0"
RUNTIME = {"accelerator": "cpu", "perNode": 8, "deviceMemoryMiB": 16, "hostCacheMiB": 64, "drainSeconds": 1}
SERVERS = 3
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(scope="module", params=[False])
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The chart's objects; the parameter says whether runtimes join by proof."""
    values = {"postgres": {"enabled": True}, "runtime": RUNTIME, "pools": [{"name": "cpu"}]}
    with helm(tmp_path_factory.mktemp("helm")) as started:
        return started.render(values | {"join": {"enabled": request.param}})


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    command = [DEPLOY / "secrets.sh", tmp_path / "secrets", "db", f"{NODE}:8", "--join"]
    subprocess.run(command, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    (tmp_path / "secrets/platform/STACCATO_DATABASE_URL").write_text(f"sqlite:///{tmp_path}/s.db")
    return tmp_path / "secrets"


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def begin(*command: object, **settings: str) -> subprocess.Popen[bytes]:
        ours = {key: value for key, value in os.environ.items() if not key.startswith("STACCATO_")}
        environment = ours | {"PYTHONPATH": str(ROOT)} | settings
        started.append(subprocess.Popen([str(word) for word in command], env=environment))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
        process.wait(20)


def container(rendered: list[dict[str, Any]], component: str) -> dict[str, Any]:
    for found in rendered:
        if found["kind"] in ("Deployment", "StatefulSet", "Job") and component in found["metadata"]["name"]:
            (only,) = found["spec"]["template"]["spec"]["containers"]
            return dict(only)
    raise LookupError(component)


def start_bus(rendered: list[dict[str, Any]], secrets: Path, folder: Path, start: Start) -> list[tuple[int, int]]:
    """Start the chart's NATS servers. Returns the servers' ports for clients and for routes."""
    (text,) = (found["data"]["nats.conf"] for found in rendered if found["kind"] == "ConfigMap")
    (sets,) = (
        found["spec"] for found in rendered if found["metadata"]["name"] == "st-nats" and "replicas" in str(found)
    )
    assert sets["replicas"] == SERVERS and sets["podManagementPolicy"] == "Parallel"
    ports = [(free_port(), free_port()) for _ in range(SERVERS)]
    (folder / "users").symlink_to(secrets / "nats")
    (folder / "tls").mkdir()
    for inside, outside in {"tls.crt": "nats.crt", "tls.key": "nats.key", "ca.crt": "ca.crt"}.items():
        (folder / "tls" / inside).symlink_to(secrets / "nats" / outside)
    for number, (port, routes) in enumerate(ports):
        here = {"0.0.0.0:4222": f"127.0.0.1:{port}", "0.0.0.0:6222": f"127.0.0.1:{routes}"}
        here |= {"0.0.0.0:8222": "127.0.0.1:-1", "/data": str(folder / f"data-{number}")}
        here |= {"/etc/staccato/tls": str(folder / "tls")}
        here |= {f"st-nats-{other}.st-nats:6222": f"127.0.0.1:{ports[other][1]}" for other in range(SERVERS)}
        own = text
        for there, mapped in here.items():
            assert there in own, there
            own = own.replace(there, mapped)
        (folder / f"nats-{number}").mkdir()
        (folder / f"nats-{number}" / "nats.conf").write_text(own)
        command = (nats_binary(), "--config", folder / f"nats-{number}" / "nats.conf")
        start(*command, POD_NAME=f"st-nats-{number}")
    return ports


@pytest.mark.parametrize("rendered", [True], indirect=True)
def test_the_charts_bus_ledger_scheduler_and_join_service_run_as_they_are_rendered(
    rendered: list[dict[str, Any]], secrets: Path, tmp_path: Path, start: Start
) -> None:
    ports = start_bus(rendered, secrets, tmp_path, start)

    def run(component: str) -> subprocess.Popen[bytes]:
        one = container(rendered, component)
        said = {entry["name"]: entry["value"] for entry in one["env"]}
        (tmp_path / component).mkdir()
        said["STACCATO_SIGNS"] = str(tmp_path / component)
        if "STACCATO_SECRETS" in said:
            said["STACCATO_SECRETS"] = str(secrets / "platform")
        if "STACCATO_NATS_URL" in said:
            assert said["STACCATO_NATS_REPLICAS"] == str(SERVERS)
            for number, (port, _) in enumerate(ports):
                there = f"st-nats-{number}.st-nats:4222"
                assert there in said["STACCATO_NATS_URL"]
                said["STACCATO_NATS_URL"] = said["STACCATO_NATS_URL"].replace(there, f"127.0.0.1:{port}")
            said["STACCATO_NATS_CA"] = str(secrets / "nats/ca.crt")
            said["STACCATO_NATS_CREDENTIALS"] = str(secrets / f"nats/{component}.nk")
        if component == "join":
            said["STACCATO_JOIN_ISSUER"] = str(secrets / "nats" / Path(said["STACCATO_JOIN_ISSUER"]).name)
            said["STACCATO_DATA"] = str(secrets / "platform")  # has the pepper
        return start(sys.executable, "-P", DEPLOY / "docker/staccato", *one["args"], **said)

    assert run("migrate").wait(READY_S) == 0
    assert database.revision(f"sqlite:///{tmp_path}/s.db") == database.head()
    for component in ("ledger", "scheduler", "join"):
        process = run(component)
        probe, sign = container(rendered, component)["readinessProbe"]["exec"]["command"]
        environment = {"PATH": os.environ["PATH"], "STACCATO_SIGNS": str(tmp_path / component)}
        await_sign([DEPLOY / "docker" / probe, sign], environment, process, READY_S)


def await_sign(
    probe: list[Path | str], environment: dict[str, str], process: subprocess.Popen[bytes], s: float
) -> None:
    """Return when a probe succeeds. Fails after `s` seconds, and if the process ends before."""
    deadline = time.monotonic() + s
    while subprocess.run(probe, env=environment).returncode:
        assert process.poll() is None and time.monotonic() < deadline, probe
        time.sleep(0.2)


@pytest.mark.long
def test_eight_runtimes_of_a_node_of_the_chart_share_a_host_cache(
    rendered: list[dict[str, Any]], secrets: Path, tmp_path: Path, start: Start
) -> None:
    """The pod's container runs with the arguments, settings, files and probe of the chart. Paths of the pod are paths
    below the test's folder, and the ports of blocks are free ports: other tests may have the chart's."""
    ports = start_bus(rendered, secrets, tmp_path, start)
    one = container(rendered, "runtime")
    pod, asked = tmp_path / "pod", {"STACCATO_NODE_ID": NODE, "STACCATO_TRANSPORT_BIND": "127.0.0.1"}
    said = {entry["name"]: entry.get("value") or asked[entry["name"]] for entry in one["env"]}
    for mount in one["volumeMounts"]:
        inside = pod / mount["mountPath"].removeprefix("/")
        if "subPathExpr" in mount:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.symlink_to(secrets / "nats" / mount["subPathExpr"].replace("$(STACCATO_NODE_ID)", NODE))
        elif mount["name"] in ("nats-tls", "transport-ca"):
            inside.mkdir(parents=True)
            (inside / "ca.crt").symlink_to(secrets / "nats/ca.crt")
        else:
            inside.mkdir(parents=True)
    for name, value in said.items():
        if value.startswith(("/run/", "/tmp")):
            said[name] = f"{pod}{value}"
    for number, (port, _) in enumerate(ports):
        said["STACCATO_NATS_URL"] = said["STACCATO_NATS_URL"].replace(
            f"st-nats-{number}.st-nats:4222", f"127.0.0.1:{port}"
        )
    said |= {"STACCATO_TRANSPORT_PORT": "0", "STACCATO_DATA": str(pod / "var/lib/staccato")}
    node = start(sys.executable, "-P", DEPLOY / "docker/staccato", *one["args"], **said)
    probe, sign = one["readinessProbe"]["exec"]["command"]
    environment = {"PATH": os.environ["PATH"], "STACCATO_SIGNS": said["STACCATO_SIGNS"]}
    await_sign([DEPLOY / "docker" / probe, sign], environment, node, NODE_S)
    shared = caches(node.pid)
    assert len(shared) == 8 and len(set(shared.values())) == 1
    node.terminate()
    assert node.wait(90) == 0
