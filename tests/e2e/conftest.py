"""The whole platform as started by users: `staccato up` in a new folder, reached over HTTP alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.conftest import ROOT, free_port
from tests.forks import forked_for
from tests.forks import shared as forks_of_tests

MODELS = ROOT / "deploy" / "demo" / "models"
READY_S = 240  # at most: libraries of 2 GB may have to be read from a slow disk, by four processes at once
AWAKE = {"scaling": {"idle": "never"}}
OPENED: list[openai.OpenAI] = []  # clients that the test may have left open
DEPLOYMENTS = {"faq": AWAKE, "weather": AWAKE | {"tool_parser": "hermes"}, "poet": AWAKE}


@dataclass
class Platform:
    """A running `staccato up`."""

    data: Path
    port: int
    settings: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    keys: dict[str, str] = field(default_factory=dict)
    limited: tuple[str, ...] = ()  # a command before `staccato up` that limits resources of the processes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> None:
        forks = None if self.limited else forks_of_tests()  # limits are inherited, and a shared server has none
        environment = {k: v for k, v in os.environ.items() if not k.startswith("STACCATO_")} | self.settings
        if forks:
            environment["STACCATO_FORK_SERVER_FD"] = str(forks.fd)
        command = [
            *self.limited,
            str(Path(sys.executable).with_name("staccato")),
            "up",
            "--data",
            str(self.data),
            "--port",
            str(self.port),
        ]
        with (self.data.parent / f"{self.data.name}.up.log").open("a") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdout=log,
                stderr=log,
                env=environment,
                text=True,
                pass_fds=(forks.fd,) if forks else (),
            )
        self.until(lambda: httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200, READY_S)

    def until(self, done: Any, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if done():
                    return
            assert self.process is not None and self.process.poll() is None, "`staccato up` ended"
            assert time.monotonic() < deadline, f"not reached within {timeout_s} s; logs in {self.data}/logs"
            time.sleep(0.1)

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def child(self, *words: str) -> psutil.Process:
        """The only process of the tree whose command line contains every word of `words`."""
        found = self.children(*words)
        assert len(found) == 1, f"{words}: {len(found)} processes"
        return found[0]

    def everyone(self) -> list[psutil.Process]:
        """The processes of the platform, `staccato up` first."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        tree = [root, *root.children(recursive=True)]
        forked = forked_for({process.pid for process in tree})
        return [*tree, *forked, *(below for fork in forked for below in fork.children(recursive=True))]

    def children(self, *words: str) -> list[psutil.Process]:
        found = []
        for child in self.everyone()[1:]:
            with contextlib.suppress(psutil.Error):  # the process may just have ended
                if all(any(word in part for part in child.cmdline()) for word in words):
                    found.append(child)
        return found

    def runtime(self, id: str) -> psutil.Process | None:
        """The node process of the runtime `id`; None while the process is being started again."""
        for child in self.children("runtime.node"):
            with contextlib.suppress(psutil.Error):
                if child.environ().get("STACCATO_RUNTIME_ID") == id:
                    return child
        return None

    # ── the control plane ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def admin_key(self) -> str:
        return (self.data / "admin.key").read_text().strip()

    def request(self, method: str, path: str, body: object = None, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.admin_key}"}
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=30)

    def get(self, path: str, key: str | None = None) -> httpx.Response:
        return self.request("GET", path, key=key)

    def post(self, path: str, body: object, key: str | None = None) -> Any:
        response = self.request("POST", path, body, key)
        assert response.status_code < 300, response.text
        return response.json()

    def tenant(self, name: str) -> str:
        """Create a tenant. Returns the tenant's key."""
        self.post("/api/v1/tenants", {"name": name})
        self.keys[name] = self.post(f"/api/v1/tenants/{name}/keys", {"name": "test"})["key"]
        return self.keys[name]

    def model(self, name: str, folder: Path) -> None:
        self.post("/api/v1/models", {"name": name, "source": str(folder)})
        self.until(lambda: self.get(f"/api/v1/models/{name}").json()["state"] != "importing")

    def deploy(self, tenant: str, name: str, model: str | None = None, **spec: object) -> Any:
        body = {"name": name, "model": model or name, "tenant": tenant, "dtype": "float32", **spec}
        deployment = self.post("/api/v1/deployments", body)
        path = f"/api/v1/deployments/{deployment['id']}"
        self.until(lambda: self.get(path).json()["status"]["phase"] in ("awake", "asleep", "failed"), READY_S)
        return self.get(path).json()

    # ── the tenants' endpoints ────────────────────────────────────────────────────────────────────────────────────────

    def client(self, tenant: str, **settings: Any) -> openai.OpenAI:
        """A client of the tenant, which is closed at the end of the test at the latest."""
        OPENED.append(openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], **settings))
        return OPENED[-1]

    def async_client(self, tenant: str, **settings: Any) -> openai.AsyncOpenAI:
        """A client of the tenant, for the caller to close."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], **settings)

    def usage(self, tenant: str) -> dict[str, int]:
        """Totals over all deployments."""
        rows = self.get("/api/v1/usage?group_by=deployment", key=self.keys[tenant]).json()["data"]
        names = ("requests", "prompt_tokens", "output_tokens")
        return {name: sum(int(row[name]) for row in rows) for name in names}


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    """Close the clients of the test: clients that are collected open leave their warnings in a later test."""
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform shared by tests that leave no change: tenants `acme` and `globex`, models of the demo for `acme`."""
    started = Platform(tmp_path_factory.mktemp("platform") / "data", free_port())
    try:
        started.start()
        for tenant in ("acme", "globex"):
            started.tenant(tenant)
        for name, spec in DEPLOYMENTS.items():
            started.model(name, MODELS / name)
            assert started.deploy("acme", name, **spec)["status"]["phase"] == "awake"
        yield started
    finally:
        code = started.stop()
    assert code == 0
