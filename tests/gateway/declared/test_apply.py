"""`staccato apply` brings a real gateway to the state that a folder declares, and touches no foreign row."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import yaml

from gateway import cli
from gateway.cli.api import CONFLICT, USAGE
from gateway.core.declared.schema import definitions
from tests.conftest import ROOT
from tests.gateway.declared.gateway import Served, gateway

TENANT = """
apiVersion: staccato.dev/v1alpha1
kind: Tenant
metadata: {name: acme}
spec:
  weight: 2
  limits: {tokensPerMinute: 1000, monthlyBudget: {amount: "25.50", currency: EUR}}
  key: {secretName: acme-key, scopes: [inference, control]}
"""
DEPLOYMENT = """
apiVersion: staccato.dev/v1alpha1
kind: ModelDeployment
metadata: {name: chat}
spec: {tenant: acme, model: SOURCE, slo: {ttftMs: 2000}, scaling: {maxReplicas: 2}}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with gateway(tmp_path_factory.mktemp("gateway")) as served:
        yield served
    structlog.reset_defaults()


@pytest.fixture
def folder(served: Served, tmp_path: Path) -> Iterator[Path]:
    """A folder that declares a tenant and a deployment. At the end, tenant and deployment are deleted."""
    declared = tmp_path / "declared"
    declared.mkdir()
    (declared / "tenant.yaml").write_text(TENANT)
    (declared / "chat.yaml").write_text(DEPLOYMENT.replace("SOURCE", served.model("llama")))
    (declared / "kustomization.yaml").write_text("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n")
    yield declared
    for path in declared.iterdir():
        path.unlink()
    assert apply(served, declared, "--prune").code == 0


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def apply(served: Served, folder: Path, *options: str) -> Ran:
    """Run `staccato apply` in this process."""
    out, err = io.StringIO(), io.StringIO()
    arguments = ["apply", "-f", str(folder), "--url", served.url, "--key", served.key]
    code, before = 0, sys.argv
    sys.argv = ["staccato", *arguments, "--keys", str(folder.parent / "keys"), "--timeout", "20", *options]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.argv = before
    return Ran(code, out.getvalue(), err.getvalue())


def applied(served: Served, folder: Path, *options: str) -> Ran:
    ran = apply(served, folder, *options)
    assert ran.code == 0, ran.err + ran.out
    return ran


def shown(served: Served, path: str) -> Any:
    with served.client() as client:
        return client.get(f"/api/v1{path}")


def until(found: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.1)


def test_a_folder_is_applied_and_a_second_apply_makes_no_call(served: Served, folder: Path) -> None:
    first = apply(served, folder)
    assert first.code == 0, first.err
    assert "Tenant default/acme: POST /tenants\n" in first.err
    rows = [line.split()[:6] for line in first.out.splitlines()[1:]]
    assert ["Tenant", "default", "acme", "Active", "True", "True"] in rows
    assert ["ModelDeployment", "default", "chat", "Awake", "True", "True"] in rows
    tenant, deployment = shown(served, "/tenants/acme"), shown(served, "/deployments/chat")
    budget = {"amount": "25.50", "currency": "EUR"}
    assert (tenant["weight"], tenant["managed_by"]) == (2, "staccato/default/acme")
    assert tenant["limits"] == {"tokens_per_minute": 1000, "monthly_budget": budget}
    assert (deployment["slo"]["ttft_ms"], deployment["scaling"]["max_replicas"]) == (2000, 2)
    second = apply(served, folder)
    assert second.code == 0 and second.err == ""


def test_the_key_stands_in_a_private_file_and_opens_the_endpoint(served: Served, folder: Path) -> None:
    applied(served, folder)
    path = folder.parent / "keys/default/acme-key"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    key = path.read_text().strip()
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{served.url}/api/v1/me", headers=headers).json()["tenant"] == "acme"
    path.unlink()  # without the file a new key is made, and the old key ends
    again = apply(served, folder)
    assert again.code == 0 and path.read_text().strip() != key and key not in again.err + again.out
    states = [row["state"] for row in shown(served, "/tenants/acme/keys")["data"]]
    assert sorted(states) == ["revoked", "valid"]


def test_an_edit_makes_a_revision_and_what_a_person_changed_is_set_back(served: Served, folder: Path) -> None:
    applied(served, folder)
    text = (folder / "chat.yaml").read_text()
    (folder / "chat.yaml").write_text(text.replace("ttftMs: 2000", "ttftMs: 3000"))
    applied(served, folder)
    assert shown(served, "/deployments/chat")["status"]["active_revision"] == 2
    with served.client() as client:
        client.patch("/api/v1/tenants/acme", {"weight": 9, "limits": {"concurrent_streams": 1}})
        client.patch("/api/v1/deployments/chat", {"slo": {"ttft_ms": 9000}})
    applied(served, folder)
    assert shown(served, "/tenants/acme")["weight"] == 2
    assert "concurrent_streams" not in shown(served, "/tenants/acme")["limits"]
    assert shown(served, "/deployments/chat")["slo"]["ttft_ms"] == 3000


def test_an_object_without_a_file_goes_with_prune_alone(served: Served, folder: Path) -> None:
    applied(served, folder)
    (folder / "chat.yaml").unlink()
    assert applied(served, folder) and shown(served, "/deployments/chat")["name"] == "chat"
    other = apply(served, folder, "--prune", "--manager", "another")
    assert other.code == CONFLICT, other.err + other.out  # acme is not another's
    assert shown(served, "/deployments/chat")["name"] == "chat"
    applied(served, folder, "--prune")
    with served.client() as client:
        assert client.every("/api/v1/deployments") == []


def test_rows_that_a_person_made_stay_as_they_are(served: Served, folder: Path) -> None:
    with served.client() as client:
        client.post("/api/v1/tenants", {"name": "acme", "weight": 7})
        ran = apply(served, folder, "--prune")
        assert ran.code == CONFLICT and "was made by hand" in ran.out and "Tenant default/acme" in ran.err
        assert shown(served, "/tenants/acme")["weight"] == 7
        assert client.every("/api/v1/deployments") == []
        client.delete("/api/v1/tenants/acme")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ttftMs: 2000", "ttftMs: 0", "spec.slo.ttftMs: write a whole number from 1 to 3600000"),
        ("ttftMs: 2000", "ttft_ms: 2000", "write 'ttftMs'"),
        ("ttftMs: 2000", "ttfMs: 2000", "spec.slo.ttfMs: there is no field"),
        ("kind: ModelDeployment", "kind: Deployment", "Deployment of staccato.dev/v1alpha1 is not known here"),
        ("v1alpha1", "v2", "ModelDeployment of staccato.dev/v2 is not known here"),
        ("{name: chat}", "{}", "has no metadata.name"),
        ("kind: ModelDeployment", "kind: [", "while parsing"),
        ("tenant: acme, ", "", "spec.tenant: the field is missing"),
    ],
)
def test_a_wrong_file_is_one_error_and_nothing_is_applied(
    served: Served, folder: Path, old: str, new: str, said: str
) -> None:
    text = (folder / "chat.yaml").read_text()
    assert old in text
    (folder / "chat.yaml").write_text(text.replace(old, new))
    ran = apply(served, folder)
    assert ran.code == USAGE and said in ran.err and "chat.yaml" in ran.err and ran.err.count("\n") == 1
    with served.client() as client:
        assert client.every("/api/v1/tenants") == []


def test_an_object_that_is_declared_twice_is_refused(served: Served, folder: Path) -> None:
    (folder / "again.yaml").write_text(TENANT)
    ran = apply(served, folder)
    assert ran.code == USAGE and "Tenant default/acme is declared twice" in ran.err


def test_a_refused_source_is_told_with_the_reason(served: Served, folder: Path) -> None:
    """A declared model has the tenant's rights, though the caller is an operator."""
    (folder / "chat.yaml").write_text(DEPLOYMENT.replace("SOURCE", "/etc"))
    ran = apply(served, folder)
    assert ran.code == 1 and "a tenant's models lie below" in ran.out and "ModelDeployment default/chat" in ran.err


def test_watch_follows_edits_and_keeps_the_last_good_state(served: Served, folder: Path) -> None:
    command = [sys.executable, "-c", "from gateway.cli import main; main()", "apply", "-f", str(folder), "--watch"]
    command += ["--prune", "--url", served.url, "--key", served.key, "--keys", str(folder.parent / "keys")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as watching:
        said: list[str] = []
        assert watching.stderr is not None
        reader = threading.Thread(target=lambda: said.extend(watching.stderr or ()))
        reader.start()
        with served.client() as client:
            until(lambda: [row["name"] for row in client.every("/api/v1/deployments")] == ["chat"])
            (folder / "tenant.yaml").write_text(TENANT.replace("weight: 2", "weight: 3"))
            until(lambda: shown(served, "/tenants/acme")["weight"] == 3)
            (folder / "tenant.yaml").write_text("apiVersion: staccato.dev/v1alpha1\nkind: Tenant\n")
            until(lambda: any("the objects read before stay" in line for line in said))
            assert shown(served, "/tenants/acme")["weight"] == 3
            (folder / "tenant.yaml").unlink()
            (folder / "chat.yaml").unlink()
            until(lambda: client.every("/api/v1/tenants") == [])
        watching.terminate()
        watching.wait(30)
        reader.join(30)


def test_crds_prints_the_definitions(served: Served) -> None:
    command = [sys.executable, "-c", "from gateway.cli import main; main()", "crds"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert list(yaml.safe_load_all(out)) == definitions() == json.loads(json.dumps(definitions()))
