"""The chart in a cluster of this machine: secrets, programs for the chart's images, a tenant, a model and streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.demo.random_weights import write_random
from gateway.ops.bus_servers import nats_binary
from tests.conftest import ROOT
from tests.databases import programs
from tests.deploy.cluster.kubelet import Cluster
from tests.deploy.cluster.network import namespaces
from tests.deploy.cluster.pod import Image, Supplies
from tests.deploy.tools import DEPLOY

STREAMS, TOKENS = 8, 300
PARTS = ("gateway", "runtime-cpu")  # images of Staccato
POSTGRES = r"""
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" -A scram-sha-256 --no-sync -E UTF8
    printf 'local all all trust\nhost all all all scram-sha-256\n' > "$PGDATA/pg_hba.conf"
    pg_ctl -D "$PGDATA" -o "-c listen_addresses= -k /var/run/postgresql" -w start
    createdb -h /var/run/postgresql -U "$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl -D "$PGDATA" -w stop
fi
exec postgres -c listen_addresses=* -c unix_socket_directories=/var/run/postgresql
"""  # as the image's entry point does


def images(tree: Path) -> dict[str, Image]:
    """Programs for the chart's images. Programs of Staccato are the tree's."""
    (tree / ".venv").mkdir(exist_ok=True)  # pods have this machine's environment there
    text = (tree / "deploy/docker/Dockerfile").read_text()
    (base,) = re.findall(r"^ENV (HOME=(?:.*\\\n)*.*)$", text, re.MULTILINE)
    settings = dict(word.split("=", 1) for word in base.replace("\\\n", " ").split())
    settings["PATH"] = settings["PATH"].replace("$PATH", os.environ["PATH"])
    settings["STACCATO_HOST"] = "0.0.0.0"
    found = programs()
    if found is None:
        pytest.skip("no PostgreSQL: install Debian's `postgresql`")
    own = Image(
        [f"{settings['PATH'].split(':')[0]}/python", "-P", "/opt/staccato/deploy/docker/staccato"], settings, tree
    )
    nats = Image([str(nats_binary())], {"PATH": os.environ["PATH"]}, tree)
    postgres = Image(["sh", "-ec", POSTGRES], {"PATH": f"{found}:{os.environ['PATH']}"}, tree)
    return {"staccato/": own, "nats:": nats, "postgres:": postgres}


class ChartInstallation:
    """The chart in a cluster: a tenant, a model, and the streams of the tenant's clients."""

    def __init__(self, cluster: Cluster) -> None:
        admin_key = (cluster.folder / "secrets/platform/STACCATO_ADMIN_KEY").read_text().strip()
        self.cluster, self._admin = cluster, {"authorization": f"Bearer {admin_key}"}
        self.url = f"http://127.0.0.1:{cluster.ports['st-gateway']}"
        self.post("/api/v1/tenants", {"name": "acme"})
        self.key = self.post("/api/v1/tenants/acme/keys", {"name": "test"})["key"]
        self.calm: dict[int, list[int]] = {}
        self.answers = 0
        self._deploy("slow")
        for number in range(STREAMS):
            self.calm[number] = asyncio.run(self.stream(number))

    def post(self, path: str, body: object) -> Any:
        answer = httpx.post(self.url + path, json=body, headers=self._admin, timeout=60)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        """The answer's JSON. A gateway without its database for a moment says 503: ask again, for 60 s at most."""
        deadline = time.monotonic() + 60
        while (answer := httpx.get(self.url + path, headers=self._admin, timeout=60)).status_code == 503:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.5)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _deploy(self, name: str) -> None:
        self.post("/api/v1/models", {"name": name, "source": f"/models/{name}"})
        until(lambda: self.get(f"/api/v1/models/{name}")["state"] != "importing")
        assert (model := self.get(f"/api/v1/models/{name}"))["state"] == "ready", model["reason"]
        body = {"name": name, "model": name, "tenant": "acme", "dtype": "float32", "scaling": {"idle": "never"}}
        id = self.post("/api/v1/deployments", body)["id"]
        until(lambda: self.get(f"/api/v1/deployments/{id}")["status"]["phase"] in ("awake", "failed"))
        assert (status := self.get(f"/api/v1/deployments/{id}")["status"])["phase"] == "awake", status

    def usage(self) -> tuple[int, int]:
        """Requests and output tokens that are booked."""
        rows = self.get("/api/v1/usage?group_by=deployment&tenant=acme")["data"]
        return sum(int(row["requests"]) for row in rows), sum(int(row["output_tokens"]) for row in rows)

    async def stream(self, number: int) -> list[int]:
        """Tokens of a stream, to its end. Fails on an error."""
        body = {"model": "slow", "prompt": [5 + number, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "return_token_ids": True}
        said: list[int] = []
        headers = {"authorization": f"Bearer {self.key}"}
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers) as response,
        ):
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    told = json.loads(line.removeprefix("data: "))
                    assert "error" not in told, told
                    said += told["choices"][0].get("token_ids") or []
        self.answers += 1
        return said

    async def streams(self, until_true: Callable[[], bool]) -> int:
        """Keep STREAMS streams open until the condition is true. Returns the number of answers, each of them right."""

        async def keep(number: int) -> int:
            answers = 0
            while not until_true():
                assert await self.stream(number) == self.calm[number], f"stream {number} differs"
                answers += 1
            return answers

        return sum(await asyncio.gather(*map(keep, range(STREAMS))))

    def under_streams(self, work: Callable[[], object]) -> int:
        """Do the work while streams are open, before and after as well. Returns the number of right answers."""

        async def run() -> int:
            done = asyncio.create_task(asyncio.to_thread(self._worked, work))
            try:
                return await self.streams(done.done)
            finally:
                await done

        return asyncio.run(run())

    @staticmethod
    def _worked(work: Callable[[], object]) -> None:
        time.sleep(3)
        work()
        time.sleep(3)

    def check_books(self) -> None:
        """Each answer is booked once, with each of its tokens."""
        until(lambda: self.usage()[0] >= self.answers)
        assert self.usage() == (self.answers, self.answers * TOKENS)


def until(done: Callable[[], bool], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if done():
                return
        assert time.monotonic() < deadline, f"not reached within {timeout_s} s"
        time.sleep(0.3)


@contextlib.contextmanager
def cluster(folder: Path, *runtimes: str, **trees: Path) -> Iterator[Cluster]:
    """A cluster with the secrets of a release `st`, and the model `slow` in the claim of models.

    `runtimes`: as for secrets.sh. `trees`: further trees of the project, by the tag of the tree's images."""
    if why := namespaces():
        pytest.skip(why)
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o755)  # pods have users of their own
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    settings = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "RELEASE": "st"}
    made = [DEPLOY / "secrets.sh", folder / "secrets", "st-postgres", *runtimes]
    subprocess.run(made, env=settings, check=True, capture_output=True)
    (folder / "secrets/staccato").symlink_to("platform")
    (folder / "secrets/staccato-nats").symlink_to("nats")
    (folder / "claims/models").mkdir(parents=True)
    for file in write_random(folder / "claims/models/slow", "llama", hidden=256, layers=4).iterdir():
        file.chmod(0o644)
    own = {f"staccato/{part}:{tag}": images(tree)["staccato/"] for tag, tree in trees.items() for part in PARTS}
    supplies = Supplies(own | images(ROOT), folder / "secrets", {}, folder / "claims")
    with Cluster.running(folder, supplies) as running:
        try:
            yield running
        except BaseException:
            print(*(pod.log() for pods in running.pods.values() for pod in pods), sep="\n")
            raise
