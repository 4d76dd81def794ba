"""`staccato up --roles auto`: while prompts make tokens late, a runtime computes prompts alone, and later both again.

No stream pays for a change: tokens equal the tokens of the same requests alone, and exactly the delivered tokens are
booked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from deploy.demo.random_weights import write_random
from tests.e2e.faults.test_elastic import until
from tests.e2e.fleet import SILENCE_MOST_S, Fleet

# A prompt of 1,500 tokens takes longer than the time to the first token, so prompts make tokens late.
CONTEXT, PROMPT_TOKENS, TOKENS = 2048, 1500, 48
SHARP = {"ttft_ms": 20, "tbt_ms": 60}
DIFFERENT, TOGETHER = 4, 6  # streams with different prompts, streams at a time


async def stream(fleet: Fleet, number: int) -> list[int]:
    """Return the tokens of a stream with a long prompt. Fails on an error or a silence."""
    prompt = [5 + (number + 7 * index) % 400 for index in range(PROMPT_TOKENS)]
    body = {"model": "sharp", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body |= {"temperature": 0, "return_token_ids": True, "cache_salt": f"{number}-{fleet.tokens}"}
    headers = {"authorization": f"Bearer {fleet.platform.keys['acme']}"}
    said: list[int] = []
    async with (
        httpx.AsyncClient(timeout=SILENCE_MOST_S) as client,
        client.stream("POST", f"{fleet.platform.url}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                made = event["choices"][0]["token_ids"] or ()
                said += made
                fleet.tokens += len(made)
    return said


@pytest.mark.timeout(600)
async def test_a_role_is_given_and_taken_back_at_no_cost_for_a_stream(tmp_path: Path) -> None:
    with Fleet.running(tmp_path, 0, "--roles", "auto", runtimes=2) as fleet:
        shape = dict(hidden=384, heads=6, layers=6, context=CONTEXT)
        fleet.platform.model("llama", write_random(tmp_path / "llama", "llama", **shape))
        fleet.platform.deploy("acme", "sharp", "llama", slo=SHARP)
        fleet.models.append("llama")
        await fleet.ready(2)
        alone = [await stream(fleet, number) for number in range(DIFFERENT)]
        said: list[tuple[int, list[int]]] = []
        enough = asyncio.Event()

        async def again(number: int) -> None:
            while not enough.is_set():
                said.append((number, await stream(fleet, number)))

        async def roles() -> list[str]:
            return sorted(gpu["role"] for gpu in await fleet.gpus())

        async def given() -> bool:
            return await roles() == ["decode", "prefill"]

        async def taken_back() -> bool:
            return await roles() == ["both", "both"]

        async with asyncio.TaskGroup() as group:
            for number in range(TOGETHER):
                group.create_task(again(number % DIFFERENT))
            await until(given)
            before, moved = len(said), sum((await fleet.moved()).values())

            async def handed_on() -> bool:
                return len(said) >= before + 2 * TOGETHER and sum((await fleet.moved()).values()) > moved

            await until(handed_on)
            enough.set()
        await until(taken_back)
        assert [(number, tokens) for number, tokens in said if tokens != alone[number]] == []
        await fleet.booked(fleet.tokens)
