"""A real API server of Kubernetes over a real etcd, in a folder, on loopback. No controller of Kubernetes runs.

`make_api_server.sh` makes the program from Debian's sources. The caller of the tests names the program's folder in
PATH."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import free_ports

ADMIN, CONTROLLER = "admin", "system:serviceaccount:models:st-controller"
READY_S = 90.0


def programs() -> tuple[str, str, str]:
    """Paths of kube-apiserver, etcd and kubectl. Skips the test without the programs."""
    found = tuple(shutil.which(name) for name in ("kube-apiserver", "etcd", "kubectl"))
    if not all(found):
        pytest.skip("no kube-apiserver, etcd or kubectl in PATH: see tests/gateway/declared/make_api_server.sh")
    return found  # type: ignore[return-value]


class ApiServer:
    """A running API server with two users: `admin` may do everything, the controller what roles permit."""

    def __init__(self, folder: Path) -> None:
        self._folder, (self._program, self._etcd, self._kubectl) = folder, programs()
        self._port, store, peers = free_ports(3)
        self._store = f"http://127.0.0.1:{store}"
        self._tokens = {user: secrets.token_hex(16) for user in (ADMIN, CONTROLLER)}
        rows = [f"{token},{user},{n}" + ',"system:masters"' * (user == ADMIN) for n, (user, token) in self._numbered()]
        (folder / "tokens.csv").write_text("\n".join(rows) + "\n")
        subprocess.run(["openssl", "genrsa", "-out", folder / "accounts.key"], check=True, capture_output=True)
        for user in self._tokens:
            self.kubeconfig(user).write_text(yaml.safe_dump(self._config(user)))
        peer = f"http://127.0.0.1:{peers}"
        self._stores = self._started(
            [self._etcd, "--data-dir", folder / "etcd", "--listen-client-urls", self._store]
            + ["--advertise-client-urls", self._store, "--listen-peer-urls", peer]
            + ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        )
        self.start()

    def _numbered(self) -> list[tuple[int, tuple[str, str]]]:
        return [*enumerate(self._tokens.items())]

    def kubeconfig(self, user: str) -> Path:
        return self._folder / f"kubeconfig-{user.rpartition(':')[2]}"

    def start(self) -> None:
        """Start the API server. Returns when the server is ready."""
        accounts = self._folder / "accounts.key"
        self._server = self._started(
            [self._program, "--etcd-servers", self._store, "--secure-port", f"{self._port}"]
            + ["--bind-address", "127.0.0.1", "--cert-dir", self._folder / "certificates", "--insecure-port", "0"]
            + ["--token-auth-file", self._folder / "tokens.csv", "--authorization-mode", "RBAC"]
            + ["--service-account-issuer", "https://kubernetes", "--service-account-key-file", accounts]
            + ["--service-account-signing-key-file", accounts, "--disable-admission-plugins", "ServiceAccount"]
        )
        deadline = time.monotonic() + READY_S
        while not self._ready():
            assert self._server.poll() is None and time.monotonic() < deadline, (self._folder / "log").read_text()[
                -3000:
            ]
            time.sleep(0.2)

    def kill(self) -> None:
        """End the API server at once. Objects stay in etcd."""
        self._server.kill()
        self._server.wait(30)

    def close(self) -> None:
        for process in (self._server, self._stores):
            process.kill()
            process.wait(30)

    def kubectl(self, *words: str, typed: Any = None, user: str = ADMIN) -> subprocess.CompletedProcess[str]:
        """Run kubectl in the namespace `models`. `typed`: objects for the standard input."""
        command = [
            self._kubectl,
            "--kubeconfig",
            str(self.kubeconfig(user)),
            "--cache-dir",
            str(self._folder / "cache"),
        ]
        text = None if typed is None else yaml.safe_dump_all(typed if isinstance(typed, list) else [typed])
        return subprocess.run([*command, *words], input=text, capture_output=True, text=True, timeout=120)

    def done(self, *words: str, typed: Any = None) -> str:
        """Run kubectl as the admin. Fails if kubectl fails. Returns the output."""
        ran = self.kubectl(*words, typed=typed)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def shown(self, *words: str) -> Any:
        """An object, or a list of objects; None if there is no such object."""
        ran = self.kubectl("get", *words, "-o", "json")
        if ran.returncode and "NotFound" in ran.stderr:
            return None
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    def _config(self, user: str) -> dict[str, Any]:
        server = {"server": f"https://127.0.0.1:{self._port}", "insecure-skip-tls-verify": True}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"token": self._tokens[user]}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "models"}}],
            "current-context": "x",
        }

    def _ready(self) -> bool:
        headers = {"authorization": f"Bearer {self._tokens[ADMIN]}"}
        with contextlib.suppress(httpx.HTTPError):
            url = f"https://127.0.0.1:{self._port}/readyz"
            return httpx.get(url, headers=headers, verify=False, timeout=5).status_code == 200
        return False

    def _started(self, command: list[str | Path]) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, env={"PATH": os.environ["PATH"]})


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    server = ApiServer(folder)
    try:
        yield server
    finally:
        server.close()
