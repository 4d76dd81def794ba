"""The controller between a real gateway and a real API server of Kubernetes, which has the chart's definitions and the
chart's roles for the controller. kubectl is the person."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT
from tests.deploy.helm import helm
from tests.gateway.declared.api_server import CONTROLLER, ApiServer, api_server
from tests.gateway.declared.gateway import Served, gateway
from tests.gateway.declared.test_controller import TENANT, deployment, row, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
CHAT, ACME = "modeldeployment/chat", "tenant/acme"
RIGHTS = ("CustomResourceDefinition", "Role", "RoleBinding")


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with the chart's definitions and roles, and the namespace `models`."""
    with api_server(tmp_path_factory.mktemp("kubernetes")) as server:
        with helm(tmp_path_factory.mktemp("helm")) as started:
            objects = started.render({"controller": {"enabled": True, "namespaces": ["models"]}})
        server.done("create", "namespace", "models")
        for kind in RIGHTS:
            server.done("apply", "-f", "-", typed=[found for found in objects if found["kind"] == kind])
        server.done("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        yield server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with gateway(tmp_path_factory.mktemp("gateway")) as served:
        yield served


class Controllers:
    """Processes of the controller with the rights of the chart's roles."""

    def __init__(self, kubernetes: ApiServer, served: Served, folder: Path) -> None:
        self._settings = os.environ | {
            "STACCATO_URL": served.url,
            "STACCATO_KEY": served.key,
            "KUBECONFIG": str(kubernetes.kubeconfig(CONTROLLER)),
            "PYTHONPATH": str(ROOT),
        }
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with (self._folder / f"{len(self.processes)}.log").open("w") as log:
            command = [sys.executable, "-m", "gateway.declared"]
            self.processes.append(subprocess.Popen(command, cwd=ROOT, env=self._settings, stderr=log))

    def log(self, number: int) -> str:
        return (self._folder / f"{number}.log").read_text()

    def leader(self) -> int | None:
        leads = [n for n, one in enumerate(self.processes) if one.poll() is None and "controller.leads" in self.log(n)]
        return leads[0] if leads else None

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


@pytest.fixture
def controllers(kubernetes: ApiServer, served: Served, tmp_path: Path) -> Iterator[Controllers]:
    """A controller's process. At the end, all objects are deleted, and the platform is as empty as before."""
    controllers = Controllers(kubernetes, served, tmp_path)
    controllers.start()
    try:
        yield controllers
        kubernetes.done("delete", "modeldeployments,tenants", "--all", "--timeout=60s")
        with served.client() as client:
            assert client.every("/api/v1/tenants") == [] and client.every("/api/v1/deployments") == []
    except BaseException:
        print(*(controllers.log(number)[-3000:] for number in range(len(controllers.processes))), sep="\n")
        raise
    finally:
        controllers.stop()
        kubernetes.kubectl("delete", "secrets", "--all")  # a cluster's garbage collector would do so


def ready(kubernetes: ApiServer, name: str) -> bool:
    found = kubernetes.shown(name)
    conditions = {one["type"]: one["status"] for one in found.get("status", {}).get("conditions", [])}
    return (
        conditions.get("Ready") == "True" and found["status"]["observedGeneration"] == found["metadata"]["generation"]
    )


def version(kubernetes: ApiServer, name: str) -> str:
    return str(kubernetes.shown(name)["metadata"]["resourceVersion"])


def apply(kubernetes: ApiServer, *bodies: Any) -> None:
    kubernetes.done("apply", "-f", "-", typed=[*bodies])


def test_declared_objects_come_true_and_a_calm_controller_writes_nothing(
    kubernetes: ApiServer, served: Served, controllers: Controllers
) -> None:
    apply(kubernetes, deployment(served.model("llama"), scaling={"maxReplicas": 3}))  # before the tenant
    apply(kubernetes, TENANT)
    until(lambda: ready(kubernetes, ACME) and ready(kubernetes, CHAT))
    said = kubernetes.shown(CHAT)["status"]
    assert (said["phase"], said["revision"], said["replicas"]) == ("Awake", 1, 1)
    secret, tenant = kubernetes.shown("secret/acme-key"), kubernetes.shown(ACME)
    assert secret["metadata"]["ownerReferences"][0]["uid"] == tenant["metadata"]["uid"]
    key = base64.b64decode(secret["data"]["key"]).decode()
    assert httpx.get(f"{served.url}/api/v1/me", headers={"authorization": f"Bearer {key}"}).status_code == 403
    assert kubernetes.done("get", "mdep").split()[:4] == ["NAME", "TENANT", "MODEL", "PHASE"]
    before = version(kubernetes, ACME), version(kubernetes, CHAT)
    time.sleep(5)
    assert before == (version(kubernetes, ACME), version(kubernetes, CHAT))


def test_edits_and_scale_arrive_while_others_write(
    kubernetes: ApiServer, served: Served, controllers: Controllers
) -> None:
    chat = deployment(served.model("edited"), scaling={"maxReplicas": 1})
    apply(kubernetes, TENANT, chat)
    for number in range(10):  # changes by other writers make the controller's versions old
        kubernetes.done("annotate", CHAT, f"example.com/number={number}", "--overwrite")
    until(lambda: ready(kubernetes, CHAT))
    kubernetes.done("scale", CHAT, "--replicas=2")
    until(lambda: row(served, "/deployments/chat")["scaling"]["max_replicas"] == 2)
    none = kubernetes.kubectl("scale", CHAT, "--replicas=0")
    assert none.returncode == 1 and "greater than or equal to 1" in none.stderr
    kubernetes.done("patch", CHAT, "--type=merge", "-p", '{"spec": {"slo": {"ttftMs": 1234}}}')
    until(lambda: row(served, "/deployments/chat")["slo"]["ttft_ms"] == 1234)


def test_an_api_server_that_was_away_is_followed_again(
    kubernetes: ApiServer, served: Served, controllers: Controllers
) -> None:
    apply(kubernetes, TENANT)
    until(lambda: ready(kubernetes, ACME))
    kubernetes.kill()
    time.sleep(3)
    kubernetes.start()
    kubernetes.done("patch", ACME, "--type=merge", "-p", '{"spec": {"weight": 5}}')
    until(lambda: row(served, "/tenants/acme")["weight"] == 5)


def test_a_killed_leader_is_followed(kubernetes: ApiServer, served: Served, controllers: Controllers) -> None:
    until(lambda: controllers.leader() is not None)
    controllers.start()
    leader = controllers.leader()
    assert leader == 0
    apply(kubernetes, TENANT)
    until(lambda: ready(kubernetes, ACME))
    controllers.processes[leader].kill()
    kubernetes.done("patch", ACME, "--type=merge", "-p", '{"spec": {"weight": 8}}')
    until(lambda: row(served, "/tenants/acme")["weight"] == 8)
    assert controllers.leader() == 1


def test_what_is_deleted_while_no_controller_runs_is_cleared_by_the_next(
    kubernetes: ApiServer, served: Served, controllers: Controllers
) -> None:
    apply(kubernetes, TENANT, deployment(served.model("cleared")))
    until(lambda: ready(kubernetes, CHAT))
    controllers.stop()
    kubernetes.done("delete", CHAT, ACME, "--wait=false")
    assert kubernetes.shown(CHAT)["metadata"]["deletionTimestamp"] and kubernetes.shown(ACME), "finalizers wait"
    controllers.start()
    until(lambda: kubernetes.shown(CHAT) is None and kubernetes.shown(ACME) is None)


@pytest.mark.parametrize(
    ("spec", "said"),
    [({"slo": {"ttftMs": 0}}, "ttftMs"), ({"priority": "urgent"}, "priority"), ({"scaling": {"idle": "soon"}}, "idle")],
)
def test_the_schema_refuses_what_the_gateway_would_refuse(kubernetes: ApiServer, spec: Any, said: str) -> None:
    refused = kubernetes.kubectl("apply", "-f", "-", typed=deployment("shared", **spec))
    assert refused.returncode == 1 and said in refused.stderr


def test_the_roles_end_at_what_the_controller_needs(kubernetes: ApiServer) -> None:
    asked = (("patch", "tenants"), ("create", "secrets"), ("list", "secrets"), ("get", "pods"))
    answers = [kubernetes.kubectl("auth", "can-i", *words, user=CONTROLLER).stdout.strip() for words in asked]
    assert answers == ["yes", "yes", "no", "no"]
