"""A client that leaves pays for the tokens computed, as counted by the engine: the whole platform over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from store.db.database import now_us
from store.db.usage import period_of
from tests.e2e.conftest import AWAKE, Platform

REQUESTS, TOKENS, LEFT_AT = 10, 400, 300
WITHIN = 0.05


def tokens_made(platform: Platform) -> int:
    """Tokens made by the platform's engines since the runtimes started, counted once the engines are idle."""

    def models() -> list[dict[str, Any]]:
        return [model for gpu in platform.get("/api/v1/gpus").json()["data"] for model in gpu["models"].values()]

    platform.until(lambda: not any(model["running"] + model["waiting"] for model in models()))
    time.sleep(1.5)  # the next lease
    return sum(model["tokens"] for model in models())


def rows_of(platform: Platform, deployment: str) -> list[dict[str, Any]]:
    path = f"/api/v1/billing/export?period={period_of(now_us())}&format=jsonl&detail=rows"
    rows = [json.loads(line) for line in platform.get(path).text.splitlines()]
    return [row for row in rows if row["deployment"] == deployment]


async def left(platform: Platform, deployment: str, number: int, stream: bool, after_s: float) -> bool:
    """Send a request and leave: with `stream` after reading LEFT_AT tokens, else after `after_s` seconds.

    Returns whether the client left before the answer was whole."""
    body = {"model": deployment, "prompt": [5 + number, *range(6, 20)], "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": stream, "return_token_ids": True}
    headers = {"authorization": f"Bearer {platform.keys['leaver']}"}
    async with httpx.AsyncClient(base_url=platform.url, headers=headers, timeout=120) as client:
        if not stream:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(after_s)
            answered = asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return not answered
        read = 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    read += sum(len(c.get("token_ids") or ()) for c in json.loads(line[6:])["choices"])
                    if read >= LEFT_AT:
                        return True
    return False


@pytest.mark.parametrize("stream", [False, True])
async def test_ten_requests_left_at_three_quarters_are_charged_for_what_the_engine_had_made(
    platform: Platform, stream: bool
) -> None:
    name = f"left-{stream}".lower()
    if "leaver" not in platform.keys:
        await asyncio.to_thread(platform.tenant, "leaver")
    await asyncio.to_thread(lambda: platform.deploy("leaver", name, "faq", **AWAKE))
    whole: dict[str, Any] = {"model": name, "prompt": [9, *range(6, 20)], "max_tokens": TOKENS, "ignore_eos": True}
    began = time.monotonic()
    answer = await asyncio.to_thread(platform.post, "/v1/completions", whole, platform.keys["leaver"])
    after_s = (time.monotonic() - began) * LEFT_AT / TOKENS
    prompt = answer["usage"]["prompt_tokens"]

    before = await asyncio.to_thread(tokens_made, platform)
    rows: list[dict[str, Any]] = []  # requests left before the engine had made the whole answer
    sent = 0
    while len(rows) < REQUESTS:
        for _ in range(REQUESTS - len(rows)):
            in_time = await left(platform, name, sent, stream, after_s)
            sent += 1
            after_s *= 1 if in_time else 0.8  # the machine is faster than when the whole request was timed
        await asyncio.to_thread(platform.until, lambda due=1 + sent: len(rows_of(platform, name)) == due)
        rows = [row for row in await asyncio.to_thread(rows_of, platform, name) if row["finish"] == "cancelled"]
        assert sent <= 3 * REQUESTS, "requests are answered before their client leaves"
    made = await asyncio.to_thread(tokens_made, platform) - before - (sent - len(rows)) * TOKENS

    charged = sum(int(row["output_tokens"]) for row in rows)
    print(f"stream={stream}: {made} tokens made, {charged} charged in {REQUESTS} rows")
    assert abs(charged - made) <= WITHIN * made and made > REQUESTS * TOKENS // 10
    assert {int(row["prompt_tokens"]) for row in rows} == {prompt}
    verified = await asyncio.to_thread(
        lambda: platform.get(f"/api/v1/usage:verify?period={period_of(now_us())}").json()
    )
    assert verified["ok"], verified
