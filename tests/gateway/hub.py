"""A hub on loopback that answers the client's requests: a model's info, files with ranges, redirects, and faults.

Everything is real HTTP on sockets. A test sets a fault on the hub before the client asks, by the name of a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
LFS = (".safetensors", "tokenizer.json")  # hubs keep files with these endings by SHA-256, the rest by git's digest


@dataclass
class Asked:
    """A request that the hub heard."""

    path: str
    range: str | None
    authorization: str | None


@dataclass
class Hub:
    """State and faults of a hub. `repos`: org/name → file → bytes. `cuts`: file → for each answer, the number of bytes
    after which the connection breaks."""

    port: int = 0
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, COMMIT: COMMIT})
    gated: set[str] = field(default_factory=set)
    token: str | None = None  # required of clients
    cuts: dict[str, list[int]] = field(default_factory=dict)
    lies: dict[str, int] = field(default_factory=dict)  # file → how many answers have wrong bytes
    redirects: dict[str, str] = field(default_factory=dict)  # file → target
    says: dict[str, dict[str, Any]] = field(default_factory=dict)  # file → replaced fields of the file's entry
    slow_s: float = 0.0  # between two pieces of PIECE bytes
    whole: bool = False  # ranges are not understood
    down: int = 0  # number of answers that are a 503
    asked: list[Asked] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def put(self, repo: str, folder: Path) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.repos[repo] = {str(path.relative_to(folder)): path.read_bytes() for path in files}

    def files_asked(self, name: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.path.endswith("/" + name)]

    def info(self, repo: str, commit: str) -> dict[str, Any]:
        return {"id": repo, "sha": commit, "siblings": [self._entry(*item) for item in self.repos[repo].items()]}

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
        if name.endswith(LFS):
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry | self.says.get(name, {})


PIECE = 1 << 14


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        hub = self.hub
        hub.asked.append(Asked(path, self.headers.get("range"), self.headers.get("authorization")))
        if hub.down:
            hub.down -= 1
            return self._end(503)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            return self._model(found[1], found[2])
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(found[1], found[3])
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):  # where a redirect leads
            return self._send(hub.repos[found[1]][found[2]], found[2])
        self._end(404)

    def _model(self, repo: str, revision: str) -> None:
        if (said := self._refusal(repo)) is not None:
            return self._end(*said)
        if revision not in self.hub.revisions:
            return self._end(404, "RevisionNotFound")
        body = json.dumps(self.hub.info(repo, self.hub.revisions[revision])).encode()
        self._begin(200, {"content-length": str(len(body)), "content-type": "application/json"})
        self.wfile.write(body)

    def _refusal(self, repo: str) -> tuple[int, str] | None:
        if self.hub.token and self.headers.get("authorization") != f"Bearer {self.hub.token}":
            return 401, "GatedRepo" if repo in self.hub.gated else "RepoNotFound"
        if repo not in self.hub.repos:
            return 404, "RepoNotFound"
        return (403, "GatedRepo") if repo in self.hub.gated and not self.hub.token else None

    def _file(self, repo: str, name: str) -> None:
        if (said := self._refusal(repo)) is not None:
            return self._end(*said)
        if name in self.hub.redirects:
            self._begin(302, {"location": self.hub.redirects[name], "content-length": "0"})
            return
        self._send(self.hub.repos[repo][name], name)

    def _send(self, content: bytes, name: str) -> None:
        hub = self.hub
        if hub.lies.get(name):
            hub.lies[name] -= 1
            content = bytes(byte ^ 1 for byte in content)
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        begin = int(found[1]) if found and not hub.whole else 0
        headers = {"content-length": str(len(content) - begin), "etag": '"x"'}
        if found and not hub.whole:
            headers["content-range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._begin(206 if found and not hub.whole else 200, headers)
        cuts = hub.cuts.get(name)
        end = min(len(content), begin + cuts.pop(0)) if cuts else len(content)
        for at in range(begin, end, PIECE):
            self.wfile.write(content[at : min(at + PIECE, end)])
            self.wfile.flush()
            if hub.slow_s:
                time.sleep(hub.slow_s)
        self.close_connection = end < len(content)

    def _end(self, status: int, code: str = "") -> None:
        self._begin(status, {"content-length": "0"} | ({"x-error-code": code} if code else {}))

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing: in several tests the client leaves on purpose."""


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the hub on a free port, or on the port that the hub has already."""
    server = _Server(("127.0.0.1", hub.port), type("Answers", (_Answers,), {"hub": hub}))
    hub.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
