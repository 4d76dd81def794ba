"""Why a request was slow: the reported parts add up to the client's own measure, in every situation. The trace, the
usage and the log know the request by a single id."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from tests.conftest import free_port
from tests.e2e.conftest import MODELS, Platform

SHARE = 0.05  # share of the total by which the parts may be off
CLIENT_S = 0.03  # in a short request: time in the client, and time before the body is read
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAMES = ("faq", "weather", "poet")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A traced platform whose device has room for a model and little more: models come and go."""
    folder = tmp_path_factory.mktemp("traced")
    settings = {"STACCATO_TRACES_TO": str(folder / "spans"), "STACCATO_DEVICE_MEMORY": "12MiB"}
    platform = Platform(folder / "data", free_port(), settings)
    try:
        platform.start()
        platform.tenant("acme")
        for name in NAMES:
            platform.model(name, MODELS / name)
            platform.deploy("acme", name)
        yield platform
    finally:
        platform.stop()


@dataclass
class Asked:
    id: str
    wall_ms: float
    parts: dict[str, float]
    total_ms: float
    cold: str

    @property
    def sum_ms(self) -> float:
        return sum(self.parts.values())


async def ask(platform: Platform, model: str, tokens: int, stream: bool = False) -> Asked:
    """Ask for tokens. Returns the client's measure and the reported parts, from the header or, for a stream, the last
    comment."""
    body = {"model": model, "prompt": list(range(5, 45)), "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    headers = {"authorization": f"Bearer {platform.keys['acme']}", "prefer": "timing", "traceparent": CLIENT}
    async with httpx.AsyncClient(timeout=120) as client:
        await client.get(f"{platform.url}/healthz")  # connected
        began = time.perf_counter()
        answer = await client.post(f"{platform.url}/v1/completions", json=body, headers=headers)
        wall_ms = (time.perf_counter() - began) * 1e3
    assert answer.status_code == 200, answer.text
    said = answer.headers["server-timing"]
    if stream:
        assert "queue" in said and "decode" not in said, "the header has what is known at the first byte"
        said = next(line for line in answer.text.splitlines() if line.startswith(": x-staccato-timing: "))[21:]
    parts = {name: float(ms) for name, _, ms in (part.partition(";dur=") for part in said.split(", ")) if ms}
    total_ms = parts.pop("total")
    return Asked(answer.headers["x-request-id"], wall_ms, parts, total_ms, answer.headers["x-staccato-cold"])


def holds(asked: Asked, clients: int = 1) -> None:
    """Check that the parts add up to the client's own measure: the reported total is only the sum of the parts. Several
    clients of a process take turns, so the allowance grows with `clients`."""
    off_ms = abs(asked.wall_ms - asked.sum_ms)
    assert off_ms <= max(SHARE * asked.wall_ms, clients * CLIENT_S * 1e3), asked
    assert asked.parts.get("transport", 0.0) <= max(0.25 * asked.wall_ms, 100), f"nobody accounts for it: {asked}"


async def test_a_model_that_sleeps_says_how_long_its_way_was(traced: Platform) -> None:
    traced.deploy("acme", "fresh", model="faq", max_model_len=96, scaling={"idle": "1s"})
    await sleeping(traced, "fresh")
    asked = await ask(traced, "fresh", 8)
    holds(asked)
    assert asked.cold == "host" and asked.parts["wake"] > 0


async def sleeping(platform: Platform, name: str) -> None:
    def asleep() -> bool:
        rows = platform.get("/api/v1/deployments", platform.keys["acme"]).json()["data"]
        return any(row["name"] == name and row["status"]["phase"] == "asleep" for row in rows)

    await asyncio.to_thread(platform.until, asleep)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_warm_request_is_prefill_and_decode(traced: Platform, stream: bool) -> None:
    await ask(traced, "poet", 4)
    asked = await ask(traced, "poet", 80, stream)
    holds(asked)
    assert asked.parts["decode"] > asked.parts["prefill"] > 0
    assert asked.parts["decode"] + asked.parts["prefill"] > 0.5 * asked.wall_ms


async def test_contended_requests_wait_for_others_and_still_add_up(traced: Platform) -> None:
    asked = await asyncio.gather(*(ask(traced, model, 80, n % 2 == 0) for n in range(4) for model in NAMES))
    for each in asked:
        holds(each, clients=len(asked))
    assert median(abs(each.wall_ms - each.sum_ms) / each.wall_ms for each in asked) <= SHARE
    waited = [each.parts.get("queue", 0) + each.parts.get("wait", 0) + each.parts.get("switch", 0) for each in asked]
    assert sum(waited) > sum(each.parts["prefill"] for each in asked), "three models share one device"


async def test_one_id_from_the_client_to_the_usage_the_trace_and_the_command(traced: Platform) -> None:
    asked = await ask(traced, "poet", 20, stream=True)

    def show() -> Any:
        return traced.get(f"/api/v1/requests/{asked.id}", traced.keys["acme"]).json()

    # The gateway closes its books of the request after the last byte, which the client may have read by then.
    await asyncio.to_thread(traced.until, lambda: "breakdown" in show())
    shown = show()
    assert shown["breakdown"]["parts"].keys() == asked.parts.keys() and shown["output_tokens"] == 20
    spans = await asyncio.to_thread(spans_of, traced, asked.id)
    names = {span["name"] for span in spans}
    assert {"text_completion poet", "runtime", "prefill", "decode"} <= names
    assert {span["resource"]["attributes"]["service.name"] for span in spans} == {
        "staccato-gateway",
        "staccato-runtime",
    }
    (root,) = [span for span in spans if span["parent_id"] is None]
    assert root["links"][0]["context"]["trace_id"] == "0x" + CLIENT[3:35]
    assert root["attributes"]["gen_ai.usage.output_tokens"] == 20

    def booked() -> list[Any]:
        with sqlite3.connect(traced.data / "staccato.db") as connection:
            query = "SELECT request, output_tokens FROM usage WHERE request = ? AND final"
            return list(connection.execute(query, [asked.id]))

    await asyncio.to_thread(traced.until, lambda: booked() == [(asked.id, 20)])


def spans_of(platform: Platform, request: str) -> list[dict[str, Any]]:
    trace = "0x" + request.replace("-", "")
    found: list[dict[str, Any]] = []

    def complete() -> bool:
        lines = Path(platform.settings["STACCATO_TRACES_TO"]).read_text().splitlines()
        found[:] = [span for span in map(json.loads, lines) if span["context"]["trace_id"] == trace]
        return {"runtime", "text_completion poet"} <= {span["name"] for span in found}

    platform.until(complete)
    return found


def test_no_text_of_a_prompt_or_an_answer_is_in_a_trace(traced: Platform) -> None:
    said = "marmalade7281 for the crocodile"
    body = {"model": "poet", "messages": [{"role": "user", "content": said}], "max_tokens": 10}
    headers = {"authorization": f"Bearer {traced.keys['acme']}"}
    answer = httpx.post(f"{traced.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    trace = "0x" + answer.headers["x-request-id"].replace("-", "")
    spans = Path(traced.settings["STACCATO_TRACES_TO"])
    traced.until(lambda: trace in spans.read_text())
    text = answer.json()["choices"][0]["message"]["content"]
    assert "marmalade" not in spans.read_text() and (len(text) < 8 or text not in spans.read_text())
