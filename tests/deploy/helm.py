"""Helm without a cluster: the library installs into a Kubernetes API that agrees to every request and keeps no object.

`helm-sdkpy` brings Helm itself, but no `helm template`. The rendered objects stand in the answer of an install.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.deploy.tools import DEPLOY, INSTALL

CHART = DEPLOY / "helm/staccato"
KUBERNETES = "1.37"
KINDS = {
    "v1": ("ConfigMap", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "apiextensions.k8s.io/v1": ("CustomResourceDefinition",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "batch/v1": ("Job",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "monitoring.coreos.com/v1": ("ServiceMonitor",),
}


class Helm:
    """Helm over the fake API: `render` and `lint`. Both raise HelmError with Helm's own message."""

    def __init__(self, kubeconfig: Path) -> None:
        self.sdk = pytest.importorskip("helm_sdkpy", reason=f"no helm-sdkpy here: {INSTALL}")
        self._configuration = self.sdk.Configuration(namespace="models", kubeconfig=str(kubeconfig))

    def render(self, values: dict[str, Any], release: str = "st", chart: Path = CHART) -> list[dict[str, Any]]:
        """The rendered objects in the order of the templates, with hooks."""
        install = self.sdk.Install(self._configuration)
        done = asyncio.run(install.run(release, str(chart), values=values, wait=False, timeout=20))
        texts = [done["manifest"], *(hook["manifest"] for hook in done.get("hooks") or [])]
        return [document for text in texts for document in yaml.safe_load_all(text) if document]

    def lint(self) -> dict[str, Any]:
        found: dict[str, Any] = asyncio.run(self.sdk.Lint(self._configuration).run(str(CHART)))
        return found


@contextmanager
def helm(folder: Path) -> Iterator[Helm]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    try:
        yield Helm(folder / "kubeconfig")
    finally:
        server.shutdown()
        server.server_close()


class _Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    jobs: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if "watch" in parse_qs(parts.query):
            return self._watched()
        match parts.path.strip("/").split("/"):
            case ["version"]:
                self._answer({"major": "1", "minor": KUBERNETES.split(".")[1], "gitVersion": f"v{KUBERNETES}.0"})
            case ["openapi", "v2"]:
                self._send(b"", 200)  # protobuf without content: describes no resource
            case ["api"]:
                self._answer({"kind": "APIVersions", "versions": ["v1"]})
            case ["apis"]:
                self._answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()})
            case ["api", version]:
                self._answer(_resources(version))
            case ["apis", group, version]:
                self._answer(_resources(f"{group}/{version}"))
            case _:
                self._answer({"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}, 404)

    def do_POST(self) -> None:
        said = self.rfile.read(int(self.headers["Content-Length"]))
        if "json" in self.headers["Content-Type"]:
            created = json.loads(said)
            if created["kind"] == "Job":
                self.jobs.append(created | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
            self._answer(created, 201)
        else:  # Helm's record of the release, in protobuf
            self._answer({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "release"}}, 201)

    do_PUT = do_PATCH = do_POST

    def _watched(self) -> None:
        """Answer a watch with every job, completed: Helm waits for its hooks."""
        bookmark = {"resourceVersion": "2", "annotations": {"k8s.io/initial-events-end": "true"}}
        events = [{"type": "ADDED", "object": job} for job in self.jobs]
        events.append({"type": "BOOKMARK", "object": {"apiVersion": "batch/v1", "kind": "Job", "metadata": bookmark}})
        self._send("\n".join(map(json.dumps, events)).encode(), 200)

    def do_DELETE(self) -> None:
        self.jobs.clear()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _answer(self, body: dict[str, Any], status: int = 200) -> None:
        self._send(json.dumps(body).encode(), status)

    def _send(self, data: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _groups() -> list[dict[str, Any]]:
    named = [version.split("/") for version in KINDS if "/" in version]
    return [
        {"name": group, "versions": [at], "preferredVersion": at}
        for group, version in named
        for at in [{"groupVersion": f"{group}/{version}", "version": version}]
    ]


def _resources(version: str) -> dict[str, Any]:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    listed = [
        {"name": _plural(kind), "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": verbs}
        for kind in KINDS.get(version, ())
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": listed}


def _plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")
