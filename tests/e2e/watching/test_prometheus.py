"""A real Prometheus scrapes the platform under load: every expression of rules and dashboards returns data."""

from __future__ import annotations

import asyncio
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import free_port
from tests.e2e.conftest import Platform
from tests.observability.expressions import alerts, copy, panels, plain, recorded, selectors, tool

# Expressions without data on a healthy platform.
ABSENT = {
    "staccato_runtimes_wanted": "the scheduler says it only with STACCATO_RUNTIMES_MOST",
    'deployment_id="other"': "there are fewer deployments than have series of their own",
    'code=~"5..': "nothing failed",
}
DATA_S = 60
LOAD_S = 15


class Prometheus:
    def __init__(self, folder: Path, platform: Platform) -> None:
        body = {"name": "prometheus", "scopes": ["metrics:read"]}
        key = platform.post("/api/v1/operator-keys", body)["key"]
        config = copy(folder / "installed", key, f"127.0.0.1:{platform.port}")
        self.url = f"http://127.0.0.1:{free_port()}"
        listen = self.url.removeprefix("http://")
        command = [tool("prometheus"), f"--config.file={config}", f"--web.listen-address={listen}"]
        command.append(f"--storage.tsdb.path={folder / 'data'}")
        with (folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def data(self, expression: str) -> list[float]:
        """Values of the expression now, without NaN."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", (expression, answer)
        result = answer["data"]["result"]
        values = [float(series["value"][1]) for series in result] if answer["data"]["resultType"] == "vector" else [1.0]
        return [value for value in values if not math.isnan(value)]


@pytest.fixture
def prometheus(platform: Platform, tmp_path: Path) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path, platform)
    platform.until(lambda: httpx.get(f"{started.url}/-/ready", timeout=5).status_code == 200)
    yield started
    started.process.terminate()
    started.process.wait(20)


async def load(platform: Platform) -> None:
    """Ask models in turns for LOAD_S. An operator puts the deployment `sleeper`, which has its own engine, to sleep
    again and again."""
    sleeper = await asyncio.to_thread(platform.deploy, "acme", "sleeper", "faq", max_model_len=100)
    path = f"/api/v1/deployments/{sleeper['id']}"
    until = time.monotonic() + LOAD_S
    async with platform.async_client("acme") as client:
        while time.monotonic() < until:
            asked = [
                client.completions.create(model=model, prompt=[5, 6, 7, 8], max_tokens=30, temperature=0, stream=stream)
                for model in ("faq", "weather", "poet", "sleeper")
                for stream in (False, True)
            ]
            for answer in await asyncio.gather(*asked):
                if hasattr(answer, "__aiter__"):
                    async for _ in answer:
                        pass
            await asyncio.to_thread(platform.request, "POST", f"{path}:sleep")
            await asyncio.to_thread(platform.until, lambda: platform.get(path).json()["status"]["phase"] == "asleep")
    await asyncio.to_thread(platform.request, "DELETE", path)


def expected() -> dict[str, str]:
    """Place → expression. For an alert, which is empty on a healthy platform, every series that the alert reads."""
    read = {
        f"{alert['alert']} reads {selector}": selector for alert in alerts() for selector in selectors(alert["expr"])
    }
    asked = {where: plain(expression, "30s") for where, expression in {**recorded(), **panels(), **read}.items()}
    return {where: expression for where, expression in asked.items() if not is_absent(expression)}


def is_absent(expression: str) -> bool:
    return " or" not in expression and any(absent in expression for absent in ABSENT)


async def test_every_expression_returns_data_on_a_working_platform(platform: Platform, prometheus: Prometheus) -> None:
    loading = asyncio.create_task(load(platform))
    missing = expected()
    assert len(missing) > 80
    deadline = time.monotonic() + DATA_S
    while missing and time.monotonic() < deadline:
        await asyncio.sleep(2)
        for where, expression in list(missing.items()):
            if await asyncio.to_thread(prometheus.data, expression):
                del missing[where]
    await loading
    assert missing == {}
    assert await asyncio.to_thread(prometheus.data, "sum(ALERTS{alertstate='firing'}) or vector(0)") == [0.0]


async def test_what_prometheus_read_is_what_was_done(platform: Platform, prometheus: Prometheus) -> None:
    """Counters of the gateway equal the client's own count."""

    def read(expression: str) -> float:
        return sum(prometheus.data(expression))

    answered = 'sum(staccato_requests_total{code="200",deployment_id!=""})'
    await asyncio.to_thread(platform.until, lambda: read(answered) > 0 or read("up{job='staccato'}") > 0)
    requests, tokens = read(answered), read('sum(staccato_tokens_total{kind="output"})')
    async with platform.async_client("acme") as client:
        asked = [
            client.completions.create(
                model="poet", prompt=[5, 6, 7], max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
            )
            for _ in range(5)
        ]
        await asyncio.gather(*asked)
    await asyncio.to_thread(platform.until, lambda: read(answered) == requests + 5)
    assert read('sum(staccato_tokens_total{kind="output"})') == tokens + 45
