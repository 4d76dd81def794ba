"""The controller between custom resources and a real gateway. The API server is a stub.

tests/gateway/declared/cluster.py says what the stub keeps. kubectl speaks to the stub, where kubectl is installed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.core.declared.schema import definitions
from gateway.declared.controller import Controller, ControllerSettings
from tests.conftest import ROOT
from tests.gateway.declared.cluster import Failure, Object, StubCluster, at, serving
from tests.gateway.declared.gateway import Served, gateway

GROUP = "staccato.dev"
LEASE = ("coordination.k8s.io", "leases", "models", "staccato-controller")
TENANT: Object = {
    "apiVersion": "staccato.dev/v1alpha1",
    "kind": "Tenant",
    "metadata": {"name": "acme"},
    "spec": {"weight": 2, "limits": {"tokensPerMinute": 1000}, "key": {"secretName": "acme-key"}},
}


def deployment(model: str, **spec: Any) -> Object:
    body = {"apiVersion": "staccato.dev/v1alpha1", "kind": "ModelDeployment", "metadata": {"name": "chat"}}
    return body | {"spec": {"tenant": "acme", "model": model, **spec}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with gateway(tmp_path_factory.mktemp("gateway")) as served:
        yield served


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubCluster]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with serving(tmp_path) as cluster:
        yield cluster


@contextlib.contextmanager
def controlled(served: Served, manager: str = "staccato") -> Iterator[Controller]:
    """Run a controller in a thread."""
    settings = ControllerSettings(url=served.url, key=served.key, manager=manager, public_url="https://llm.example.com")  # type: ignore[arg-type]
    controller = Controller(settings)
    thread = threading.Thread(target=controller.run)
    thread.start()
    try:
        yield controller
    finally:
        controller.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def controller(served: Served, cluster: StubCluster) -> Iterator[Controller]:
    """A controller. At the end, all objects are deleted, and the platform is as empty as before."""
    with controlled(served) as controller:
        yield controller
        for place in list(cluster.objects):
            if place[0] == GROUP:
                with contextlib.suppress(Failure):
                    cluster.delete(place)
        until(lambda: not [place for place in cluster.objects if place[0] == GROUP])
    with served.client() as client:
        assert client.every("/api/v1/tenants") == []


def until(found: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 60
    while not (seen := found()):
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.05)
    return seen


def plural(body: Object) -> str:
    return body["kind"].lower() + "s"


def put(cluster: StubCluster, body: Object) -> None:
    """Create an object, or change the spec of an object."""
    place = (GROUP, plural(body), "models", body["metadata"]["name"])
    if place in cluster.objects:
        with cluster.changed:
            old = cluster.get(*place)
            cluster.update(place, old | {"spec": body["spec"]}, status=False)
    else:
        cluster.create(*place[:3], body)


def status(cluster: StubCluster, body: Object) -> Object:
    with contextlib.suppress(Failure):
        found = cluster.get(GROUP, plural(body), "models", body["metadata"]["name"])
        if at(found, ".status.observedGeneration") == found["metadata"]["generation"]:
            return found["status"]
    return {}


def condition(said: Object, type: str) -> Object:
    return next((each for each in said.get("conditions", []) if each["type"] == type), {"status": "", "reason": ""})


def ready(cluster: StubCluster, body: Object) -> bool:
    said = status(cluster, body)
    return condition(said, "Ready")["status"] == condition(said, "Synced")["status"] == "True"


def row(served: Served, path: str) -> Any:
    with served.client() as client:
        return client.get(f"/api/v1{path}")


def test_declared_objects_come_true_and_a_calm_controller_writes_nothing(
    served: Served, cluster: StubCluster, controller: Controller
) -> None:
    chat = deployment(served.model("llama"), scaling={"maxReplicas": 3})
    put(cluster, chat)  # before the tenant: the order does not matter
    until(lambda: condition(status(cluster, chat), "Synced")["reason"] == "TenantMissing")
    put(cluster, TENANT)
    until(lambda: ready(cluster, TENANT) and ready(cluster, chat))
    said = status(cluster, chat)
    assert (said["phase"], said["revision"], said["replicas"]) == ("Awake", 1, 1)
    assert said["url"] == "https://llm.example.com/t/acme/v1"
    assert row(served, "/deployments/chat")["managed_by"] == "staccato/models/chat"
    secret = cluster.get("", "secrets", "models", "acme-key")
    tenant = cluster.get(GROUP, "tenants", "models", "acme")
    assert secret["metadata"]["ownerReferences"][0]["uid"] == tenant["metadata"]["uid"]
    key = base64.b64decode(secret["data"]["key"]).decode()
    answer = httpx.get(f"{served.url}/api/v1/me", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 403  # the key is for inference alone, as declared
    time.sleep(1)
    before = (len(cluster.events), [write for write in cluster.writes if "leases" not in write])
    time.sleep(2)
    events = [event for event in cluster.events[before[0] :] if event[2][0] == GROUP]
    assert events == [] and [write for write in cluster.writes if "leases" not in write] == before[1]


def test_edits_scale_and_orders_arrive(served: Served, cluster: StubCluster, controller: Controller) -> None:
    source = served.model("edited")
    chat = deployment(source)
    put(cluster, TENANT)
    put(cluster, chat)
    until(lambda: ready(cluster, chat))
    since = condition(status(cluster, chat), "Ready")["lastTransitionTime"]
    put(cluster, deployment(source, slo={"ttftMs": 1234}, desiredState="asleep"))
    until(lambda: row(served, "/deployments/chat")["slo"]["ttft_ms"] == 1234)
    until(lambda: row(served, "/deployments/chat")["status"]["desired_state"] == "asleep")
    until(lambda: ready(cluster, chat))
    assert condition(status(cluster, chat), "Ready")["lastTransitionTime"] >= since
    put(cluster, TENANT | {"spec": {"weight": 5}})
    until(lambda: row(served, "/tenants/acme")["limits"] == {} and row(served, "/tenants/acme")["weight"] == 5)
    until(lambda: all(key["state"] == "revoked" for key in row(served, "/tenants/acme/keys")["data"]))


def test_conflicts_compaction_and_a_restart_change_nothing_in_the_end(
    served: Served, cluster: StubCluster, controller: Controller
) -> None:
    chat = deployment(served.model("compacted"))
    cluster.refuse = 3  # the first writes of the controller meet conflicts
    put(cluster, TENANT)
    put(cluster, chat)
    until(lambda: ready(cluster, chat))
    watches = cluster.watches
    cluster.compact()  # every watch is answered 410 Gone, and lists anew
    until(lambda: cluster.watches >= watches + 2)
    put(cluster, TENANT | {"spec": TENANT["spec"] | {"weight": 4}})
    until(lambda: row(served, "/tenants/acme")["weight"] == 4)


def test_a_row_that_a_person_made_is_a_conflict_and_goes_on(
    served: Served, cluster: StubCluster, controller: Controller
) -> None:
    with served.client() as client:
        client.post("/api/v1/tenants", {"name": "acme", "weight": 7})
        put(cluster, TENANT)
        said = until(
            lambda: condition(status(cluster, TENANT), "Synced")["reason"] == "Conflict" and status(cluster, TENANT)
        )
        assert said["phase"] == "Conflict" and "made by hand" in condition(said, "Synced")["message"]
        cluster.delete((GROUP, "tenants", "models", "acme"))
        until(lambda: (GROUP, "tenants", "models", "acme") not in cluster.objects)
        assert client.get("/api/v1/tenants/acme")["weight"] == 7
        client.delete("/api/v1/tenants/acme")


def test_a_secret_of_others_is_not_overwritten(served: Served, cluster: StubCluster, controller: Controller) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "acme-key"}, "data": {"key": "bWluZQ=="}}
    cluster.create("", "secrets", "models", body)
    put(cluster, TENANT)
    until(lambda: condition(status(cluster, TENANT), "Synced")["reason"] == "Conflict")
    assert cluster.get("", "secrets", "models", "acme-key")["data"] == {"key": "bWluZQ=="}
    cluster.delete(("", "secrets", "models", "acme-key"))
    until(lambda: ready(cluster, TENANT))


def test_what_is_deleted_while_no_controller_runs_is_cleared_by_the_next(served: Served, cluster: StubCluster) -> None:
    chat = deployment(served.model("cleared"))
    with controlled(served):
        put(cluster, TENANT)
        put(cluster, chat)
        until(lambda: ready(cluster, chat))
    for kind, name in (("tenants", "acme"), ("modeldeployments", "chat")):
        cluster.delete((GROUP, kind, "models", name))
        assert (GROUP, kind, "models", name) in cluster.objects  # the finalizer waits
    with controlled(served):
        until(lambda: not [place for place in cluster.objects if place[0] == GROUP])
    with served.client() as client:
        assert client.every("/api/v1/tenants") == [] and client.every("/api/v1/deployments") == []


def test_a_killed_leader_is_followed(served: Served, cluster: StubCluster, tmp_path: Path) -> None:
    """Two processes: one acts. After SIGKILL of the leader, the other takes the Lease and acts."""
    environment = os.environ | {"STACCATO_URL": served.url, "STACCATO_KEY": served.key, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gateway.declared"]

    def started(log: Path) -> subprocess.Popen[bytes]:
        with log.open("w") as file:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file)

    logs = [tmp_path / f"{number}.log" for number in range(2)]
    processes = [started(log) for log in logs]
    try:
        leads = until(lambda: [number for number, log in enumerate(logs) if "controller.leads" in log.read_text()])
        put(cluster, TENANT)
        until(lambda: ready(cluster, TENANT))
        assert len(leads) == 1 and "controller.called" not in logs[1 - leads[0]].read_text()
        processes[leads[0]].kill()
        put(cluster, TENANT | {"spec": TENANT["spec"] | {"weight": 8}})
        until(lambda: row(served, "/tenants/acme")["weight"] == 8)
        assert cluster.get(*LEASE)["spec"]["leaseTransitions"] == 1
        cluster.delete((GROUP, "tenants", "models", "acme"))
        until(lambda: not [place for place in cluster.objects if place[0] == GROUP])
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert cluster.get(*LEASE)["spec"]["holderIdentity"] == ""  # the second resigned, so that a third need not wait
    assert served.key not in "".join(log.read_text() for log in logs)


# ── kubectl against the stub ──────────────────────────────────────────────────────────────────────────────────────────


def kubectl(*arguments: str, typed: Object | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl here (Debian's kubernetes-client)")
    text = None if typed is None else yaml.safe_dump(typed)
    with tempfile.TemporaryDirectory() as cache:  # else kubectl leaves its cache in the home folder
        command = [program, "--cache-dir", cache, *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def test_kubectl_applies_scales_shows_and_deletes(served: Served, cluster: StubCluster, controller: Controller) -> None:
    chat = deployment(served.model("kubectl"), scaling={"maxReplicas": 1})
    for body in (TENANT, chat):
        done = kubectl("apply", "--validate=false", "-f", "-", typed=body)
        assert done.returncode == 0, done.stderr
    until(lambda: ready(cluster, chat))
    shown = kubectl("get", "mdep")
    assert shown.stdout.split()[:8] == ["NAME", "TENANT", "MODEL", "PHASE", "REVISION", "REPLICAS", "READY", "AGE"]
    assert "Awake" in shown.stdout
    scaled = kubectl("scale", "modeldeployment/chat", "--replicas=2")
    assert scaled.returncode == 0, scaled.stderr
    until(lambda: row(served, "/deployments/chat")["scaling"]["max_replicas"] == 2)
    none = kubectl("scale", "modeldeployment/chat", "--replicas=0")
    assert none.returncode == 1 and "less than the minimum of 1" in none.stderr
    assert kubectl("delete", "modeldeployment/chat", "tenant/acme").returncode == 0
    assert json.loads(kubectl("get", "tenants", "-o", "json").stdout)["items"] == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [({"slo": {"ttftMs": 0}}, "ttftMs"), ({"priority": "urgent"}, "priority"), ({"scaling": {"idle": "soon"}}, "idle")],
)
def test_the_schema_refuses_what_the_gateway_would_refuse(cluster: StubCluster, spec: Object, said: str) -> None:
    with pytest.raises(Failure) as refused:
        cluster.create(GROUP, "modeldeployments", "models", deployment("shared", **spec))
    assert refused.value.code == 422 and said in str(refused.value)


def test_the_definitions_are_what_kubernetes_takes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="`make deploy-tools` installs it")
    for definition in definitions():
        validate.validate(definition, "1.37", strict=True)
