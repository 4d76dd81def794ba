"""A stub of the REST API of Kubernetes, with conflicts and compaction on order. test_api_server.py has a real server.

The stub keeps what the controller relies on: versions of objects and conflicts, generations, watches from a version and
410 Gone after compaction, finalizers, the subresources `status` and `scale`, schemas of custom resources with pruning
of unknown fields, tables for `kubectl get`, and discovery, so that kubectl itself can speak to the stub. The stub has
no authentication, no garbage collection and no strategic merge patch.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import yaml

from gateway.core.declared.schema import definitions

Object = dict[str, Any]
NOW = "2026-11-27T12:00:00Z"
BUILT_IN = {("", "v1", "secrets"): "Secret", ("coordination.k8s.io", "v1", "leases"): "Lease"}
PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>status|scale))?$"
)


class Failure(Exception):
    """An answer other than success, in Kubernetes' form."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class StubCluster:
    """Objects by (group, plural, namespace, name). `refuse`: the next so many writes are conflicts."""

    def __init__(self) -> None:
        self.definitions = {crd["spec"]["names"]["plural"]: crd for crd in definitions()}
        self.objects: dict[tuple[str, str, str, str], Object] = {}
        self.events: list[tuple[int, str, tuple[str, str, str], Object]] = []
        self.version, self.compacted, self.refuse = 0, 0, 0
        self.writes: list[str] = []  # verb and path of every write that was done
        self.changed = threading.Condition(threading.RLock())
        self.watches = 0  # watches begun
        self.stopping = False

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, group: str, plural: str, namespace: str, name: str) -> Object:
        with self.changed:
            found = self.objects.get((group, plural, namespace, name))
            if found is None:
                raise Failure(404, "NotFound", f'{plural} "{name}" not found')
            return copy.deepcopy(found)

    def listed(self, group: str, plural: str, namespace: str) -> Object:
        with self.changed:
            items = [found for place, found in sorted(self.objects.items()) if place[:3] == (group, plural, namespace)]
            return {"items": copy.deepcopy(items), "metadata": {"resourceVersion": str(self.version)}}

    def compact(self) -> None:
        """Forget all events, and end every watch."""
        with self.changed:
            self.compacted, self.events = self.version + 1, []
            self.version += 1
            self.changed.notify_all()

    def events_after(self, version: int, kind: tuple[str, str, str]) -> list[tuple[int, str, Object]]:
        return [
            (number, type, found) for number, type, place, found in self.events if number > version and place == kind
        ]

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def create(self, group: str, plural: str, namespace: str, body: Object) -> Object:
        with self.changed:
            place = (group, plural, namespace, body["metadata"]["name"])
            if place in self.objects:
                raise Failure(409, "AlreadyExists", f'{plural} "{place[3]}" already exists')
            made = self._valid(plural, {name: part for name, part in body.items() if name != "status"})
            made["metadata"] |= {"namespace": namespace, "uid": str(uuid.uuid4()), "generation": 1}
            made["metadata"] |= {"creationTimestamp": NOW}
            return self._put(place, made, "ADDED")

    def update(self, place: tuple[str, str, str, str], body: Object, status: bool) -> Object:
        """Replace an object: the status alone, or all but the status (of a custom resource)."""
        with self.changed:
            old = self.get(*place)
            version = body["metadata"].get("resourceVersion")
            if self.refuse > 0 or (version is not None and version != old["metadata"]["resourceVersion"]):
                self.refuse = max(0, self.refuse - 1)
                raise Failure(
                    409, "Conflict", "the object has been modified; please apply your changes to the latest version"
                )
            custom = place[1] in self.definitions
            if status:
                new = old | {"status": body.get("status", {})}
            else:
                new = body | ({"status": old["status"]} if custom and "status" in old else {})
                new = {name: part for name, part in new.items() if name != "status" or not custom or "status" in old}
            new = self._valid(place[1], new)
            for name in ("uid", "creationTimestamp", "deletionTimestamp", "namespace", "name", "generation"):
                if name in old["metadata"]:
                    new["metadata"][name] = old["metadata"][name]
            if new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] += 1
            if _without_version(new) == _without_version(old):
                return old
            if "deletionTimestamp" in new["metadata"] and not new["metadata"].get("finalizers"):
                del self.objects[place]
                return self._put(place, new, "DELETED")
            return self._put(place, new, "MODIFIED")

    def delete(self, place: tuple[str, str, str, str]) -> Object:
        with self.changed:
            old = self.get(*place)
            if old["metadata"].get("finalizers"):
                if "deletionTimestamp" in old["metadata"]:
                    return old
                old["metadata"] |= {"deletionTimestamp": NOW, "generation": old["metadata"]["generation"] + 1}
                return self._put(place, old, "MODIFIED")
            del self.objects[place]
            return self._put(place, old, "DELETED")

    def _put(self, place: tuple[str, str, str, str], found: Object, type: str) -> Object:
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        if type != "DELETED":
            self.objects[place] = copy.deepcopy(found)
        self.events.append((self.version, type, place[:3], copy.deepcopy(found)))
        self.changed.notify_all()
        return copy.deepcopy(found)

    def _valid(self, plural: str, body: Object) -> Object:
        """Return a custom resource without unknown fields. Raises Failure if the schema refuses the object."""
        body = copy.deepcopy(body)
        if plural not in self.definitions:
            return body
        schema = self.definitions[plural]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        pruned = _pruned(body, schema)
        pruned["metadata"] = body["metadata"]
        try:
            jsonschema.validate(pruned, schema)
        except jsonschema.ValidationError as error:
            path = ".".join(map(str, error.absolute_path))
            raise Failure(422, "Invalid", f"{body['kind']} is invalid: {path}: {error.message}") from error
        return pruned


def _pruned(value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        return {name: _pruned(part, known[name]) for name, part in value.items() if name in known and part is not None}
    if isinstance(value, list) and "items" in schema:
        return [_pruned(part, schema["items"]) for part in value]
    return value


def _without_version(found: Object) -> Object:
    metadata = {
        name: part for name, part in found["metadata"].items() if name not in ("resourceVersion", "managedFields")
    }
    return found | {"metadata": metadata}


def merged(old: Any, patch: Any) -> Any:
    """Apply a merge patch, RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    made = dict(old) if isinstance(old, dict) else {}
    for name, part in patch.items():
        if part is None:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), part)
    return made


def at(value: Any, path: str) -> Any:
    """Return the value at a path of Kubernetes, as `.spec.tenant`; a filter of conditions by type is understood."""
    if found := re.fullmatch(r"(.*)\[\?\(@\.type==\"(\w+)\"\)\](.*)", path):
        chosen = [part for part in at(value, found[1]) or [] if part["type"] == found[2]]
        return at(chosen[0], found[3]) if chosen else None
    for name in filter(None, path.split(".")):
        value = value.get(name) if isinstance(value, dict) else None
    return value


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: StubCluster

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_POST(self) -> None:
        self._answered(self._post)

    def do_PUT(self) -> None:
        self._answered(self._write)

    do_PATCH = do_PUT

    def do_DELETE(self) -> None:
        self._answered(self._delete)

    def _answered(self, work: Any) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = json.loads(self.rfile.read(length)) if length else {}
        self.parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(self.parts.query).items()}
        try:
            found = PATH.fullmatch(self.parts.path)
            work(found)
        except Failure as error:
            self._status(error)

    def _get(self, found: re.Match[str] | None) -> None:
        if found is None:
            return self._discovered()
        group, plural, namespace, name = self._place(found)
        if found["sub"] == "scale":
            return self._send(self._scale(self.cluster.get(group, plural, namespace, name)))
        if found["name"]:
            return self._shown([self.cluster.get(group, plural, namespace, name)], one=True)
        if self.query.get("watch") in ("true", "1"):
            return self._watched((group, plural, namespace))
        self._shown(self.cluster.listed(group, plural, namespace), one=False)

    def _place(self, found: re.Match[str]) -> tuple[str, str, str, str]:
        if (found["group"] or "", found["version"] or "v1", found["plural"]) not in _served(self.cluster):
            raise Failure(404, "NotFound", "the server could not find the requested resource")
        return found["group"] or "", found["plural"], found["namespace"], found["name"] or ""

    def _shown(self, found: Any, one: bool) -> None:
        items = found if one else found["items"]
        kind = _served(self.cluster)[self._key()]
        if "as=Table" in self.headers.get("Accept", ""):
            return self._send(self._table(items, {} if one else found["metadata"]))
        self._send(found[0] if one else {"apiVersion": self._api_version(), "kind": f"{kind}List", **found})

    def _key(self) -> tuple[str, str, str]:
        found = PATH.fullmatch(self.parts.path)
        assert found is not None
        return found["group"] or "", found["version"] or "v1", found["plural"]

    def _api_version(self) -> str:
        group, version, _ = self._key()
        return f"{group}/{version}" if group else version

    def _table(self, items: list[Object], metadata: Object) -> Object:
        crd = self.cluster.definitions.get(self._key()[2])
        columns = crd["spec"]["versions"][0]["additionalPrinterColumns"] if crd else []
        named = [{"name": "Name", "type": "string", "format": "name", "description": "", "priority": 0}]
        named += [{**column, "format": "", "description": "", "priority": 0} for column in columns]
        rows = [
            {"cells": [each["metadata"]["name"], *(at(each, column["jsonPath"]) for column in columns)], "object": each}
            for each in items
        ]
        return {
            "kind": "Table",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": metadata,
            "columnDefinitions": named,
            "rows": rows,
        }

    def _watched(self, kind: tuple[str, str, str]) -> None:
        """Send events until the server ends, or the version was compacted away."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        cluster, version = self.cluster, int(self.query.get("resourceVersion") or 0)
        with cluster.changed:
            cluster.watches += 1
        while not cluster.stopping:
            with cluster.changed:
                gone = version < cluster.compacted
                events = [] if gone else cluster.events_after(version, kind)
                if not gone and not events:
                    cluster.changed.wait(0.5)
            if gone:
                failure = Failure(410, "Expired", "too old resource version")
                self._line({"type": "ERROR", "object": _failure(failure)})
                break
            for number, type, each in events:
                version = number
                self._line({"type": type, "object": each})
        self.wfile.write(b"0\r\n\r\n")

    def _line(self, event: Object) -> None:
        data = json.dumps(event).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _post(self, found: re.Match[str] | None) -> None:
        if found is None:
            raise Failure(404, "NotFound", "the server could not find the requested resource")
        group, plural, namespace, _ = self._place(found)
        made = self.cluster.create(group, plural, namespace, self.body)
        self.cluster.writes.append(f"POST {self.parts.path}")
        self._send(made, 201)

    def _write(self, found: re.Match[str] | None) -> None:
        assert found is not None
        place, patch = self._place(found), self.command == "PATCH"
        if patch and "merge-patch" not in self.headers["Content-Type"]:
            raise Failure(415, "UnsupportedMediaType", f"no {self.headers['Content-Type']} here")
        with self.cluster.changed:
            old = self.cluster.get(*place)
            if found["sub"] == "scale":
                scale = merged(self._scale(old), self.body) if patch else self.body
                self.body, patch = {"spec": {"scaling": {"maxReplicas": scale["spec"]["replicas"]}}}, True
            if patch and "resourceVersion" not in self.body.get("metadata", {}):
                old["metadata"].pop("resourceVersion")
            body = merged(old, self.body) if patch else self.body
            done = self.cluster.update(place, body, found["sub"] == "status")
        self.cluster.writes.append(f"{self.command} {self.parts.path}")
        self._send(self._scale(done) if found["sub"] == "scale" else done)

    def _scale(self, found: Object) -> Object:
        (version,) = self.cluster.definitions[self._key()[2]]["spec"]["versions"]
        paths = version["subresources"]["scale"]
        replicas = at(found, paths["specReplicasPath"])
        if replicas is None:
            raise Failure(500, "InternalError", f"the spec replicas field {paths['specReplicasPath']!r} does not exist")
        metadata = {name: found["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
        status = {"replicas": at(found, paths["statusReplicasPath"]) or 0}
        kind = {"apiVersion": "autoscaling/v1", "kind": "Scale"}
        return kind | {"metadata": metadata, "spec": {"replicas": replicas}, "status": status}

    def _delete(self, found: re.Match[str] | None) -> None:
        assert found is not None
        self._send(self.cluster.delete(self._place(found)))

    def _discovered(self) -> None:
        served = _served(self.cluster)
        versions = {f"{group}/{version}" if group else version: None for group, version, _ in served}
        match self.parts.path.strip("/").split("/"):
            case ["version"]:
                self._send({"major": "1", "minor": "37", "gitVersion": "v1.37.0"})
            case ["api"]:
                self._send({"kind": "APIVersions", "versions": ["v1"]})
            case ["apis"]:
                named = [version.split("/") for version in versions if "/" in version]
                groups = [
                    {"name": group, "versions": [said], "preferredVersion": said}
                    for group, version in named
                    for said in [{"groupVersion": f"{group}/{version}", "version": version}]
                ]
                self._send({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
            case ["api" | "apis", *rest] if "/".join(rest) in versions:
                self._send(self._resources("/".join(rest)))
            case _:
                raise Failure(404, "NotFound", "the server could not find the requested resource")

    def _resources(self, version: str) -> Object:
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        listed = []
        for (group, number, plural), kind in _served(self.cluster).items():
            if (f"{group}/{number}" if group else number) != version:
                continue
            entry = {"namespaced": True, "singularName": kind.lower(), "kind": kind}
            listed.append(entry | {"name": plural, "verbs": verbs})
            if crd := self.cluster.definitions.get(plural):
                listed[-1]["shortNames"] = crd["spec"]["names"].get("shortNames", [])
                for sub in crd["spec"]["versions"][0]["subresources"]:
                    scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"} if sub == "scale" else {}
                    listed.append(entry | {"name": f"{plural}/{sub}", "verbs": ["get", "patch", "update"]} | scale)
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": listed}

    def _status(self, error: Failure) -> None:
        self._send(_failure(error), error.code)

    def _send(self, body: Object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _failure(error: Failure) -> Object:
    said = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return said | {"message": str(error), "reason": error.reason, "code": error.code}


def _served(cluster: StubCluster) -> dict[tuple[str, str, str], str]:
    customs = {
        (crd["spec"]["group"], crd["spec"]["versions"][0]["name"], plural): crd["spec"]["names"]["kind"]
        for plural, crd in cluster.definitions.items()
    }
    return BUILT_IN | customs


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[StubCluster]:
    """Serve a cluster. `folder/kubeconfig` is the configuration of clients, with the namespace `models`."""
    cluster = StubCluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "models"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    try:
        yield cluster
    finally:
        cluster.stopping = True
        server.shutdown()
        server.server_close()
