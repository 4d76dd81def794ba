"""On a machine with far too much to do no living process is taken for dead: the short form of bench_overload.py."""

from __future__ import annotations

import asyncio
import json

import httpx

from tests.bench.gateway.bench_overload import Logs, Overload, overloaded
from tests.e2e.conftest import Platform

SECONDS = 20.0


async def test_three_busy_loops_beside_sixteen_streams_lose_no_gateway_and_no_runtime(platform: Platform) -> None:
    seen = await overloaded(platform, "acme", "faq", streams=16, loops=3, seconds=SECONDS)
    assert seen.streams >= 1 and not seen.failed, seen
    assert seen.events["node.gateway_lost"] == 0, seen
    assert seen.attempt_max <= 3, seen


async def test_a_gateway_whose_loop_is_held_by_one_request_loses_no_stream(platform: Platform) -> None:
    """The largest request within the default bounds, many times at once, beside a stream of another tenant."""
    logs = Logs(platform.data / "logs")
    headers = {"authorization": f"Bearer {platform.keys['acme']}"}
    messages = [{"role": "user", "content": "a"}] * 2048
    async with httpx.AsyncClient(base_url=platform.url, headers=headers, timeout=120) as client:
        large = {"model": "faq", "messages": messages, "max_tokens": 1}
        body = {"model": "poet", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as response:
            asking = [asyncio.create_task(client.post("/v1/chat/completions", json=large)) for _ in range(16)]
            lines = [line async for line in response.aiter_lines() if line]
        answers = await asyncio.gather(*asking)
    assert lines[-1] == "data: [DONE]"
    told = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert sum(len(piece["choices"][0]["token_ids"] or ()) for piece in told) == 400
    assert all(answer.status_code in (200, 400) for answer in answers), {answer.status_code for answer in answers}
    seen = Overload()
    logs.count(seen)
    assert seen.events["node.gateway_lost"] == 0 and seen.attempt_max == 1, seen
