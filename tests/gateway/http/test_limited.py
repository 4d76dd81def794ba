"""Limited tenants over HTTP, through vLLM's own handlers to the bus and back. The test plays the runtime."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.contract import wire
from store.contract.wire import Delta, Finish, ModelState, Residency
from tests.conftest import soon
from tests.gateway.plane import Plane, made
from tests.gateway.vllm.test_front import FAQ, asked

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front

PRICE = 1_000_000_000  # pico of a token: a thousand are one
STEP_S = 0.005


@dataclass
class Runtime:
    """Runtime r1: a token every few milliseconds for each stream, up to the number asked for or a cancel."""

    plane: Plane
    runs: list[wire.Run] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    seq: int = 0

    async def start(self) -> None:
        await self.plane.bus.respond(wire.run_subject("r1"), self.take)
        await self.plane.bus.subscribe(wire.cancel_subject("r1"), self.cancel)

    async def take(self, data: bytes) -> wire.Reply:
        run = wire.decode(wire.Run, data)
        self.runs.append(run)
        asyncio.ensure_future(self.generate(run))
        return wire.Reply(epoch=1, seq=self.seq)

    async def cancel(self, data: bytes) -> None:
        self.cancelled.update(wire.decode(wire.Cancel, data).streams)

    async def generate(self, run: wire.Run) -> None:
        for at in range(run.max_tokens):
            await asyncio.sleep(STEP_S)
            if run.stream in self.cancelled:
                return
            self.seq += 1
            delta = Delta(run.stream, [5], at, Finish.LENGTH if at + 1 == run.max_tokens else None)
            frame = wire.Frame(runtime="r1", epoch=1, seq=self.seq, deltas=[delta])
            await self.plane.bus.publish(wire.frame_subject("g1"), wire.encode(frame))


@dataclass
class Tenant:
    """`acme` with a deployment `chat`."""

    plane: Plane
    client: httpx.AsyncClient
    runtime: Runtime

    async def limited(self, **limits: object) -> None:
        body = {"limits": limits}
        made(await self.plane.admin.patch("/tenants/acme", json=body), 200)

    async def ask(self, max_tokens: int = 3, **more: object) -> httpx.Response:
        body = {"model": "chat", "prompt": [5, 6, 7, 8], "max_tokens": max_tokens, "ignore_eos": True, **more}
        return await self.client.post("/v1/completions", json=body)

    async def booked(self) -> list[wire.Usage]:
        """Closing usage records, as the ledger will get them."""
        batches = self.plane.bus.usage_batches("test", 100)
        batch = await anext(batches)
        await batches.aclose()
        return [usage for usage in batch.usages if usage.final]


@pytest.fixture
async def tenant(plane: Plane) -> AsyncIterator[Tenant]:
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    key = made(await plane.admin.post("/tenants/acme/keys"))["key"]
    await plane.model("faq", folder=Path(FAQ))
    chat = made(await plane.admin.post("/deployments", json={"tenant": "acme", "name": "chat", "model": "faq"}))
    made(await plane.admin.post("/prices", json={"prompt_pico": PRICE, "output_pico": PRICE}))
    runtime = Runtime(plane)
    await runtime.start()
    async with asked(plane, key) as client:
        reporting = asyncio.create_task(_report(plane, chat["engine"]))
        await asyncio.sleep(0.1)
        yield Tenant(plane, client, runtime)
        reporting.cancel()


async def _report(plane: Plane, engine: str) -> None:
    while True:
        await plane.report({engine: ModelState(residency=Residency.RESIDENT, load_ms=1.0)})
        await asyncio.sleep(1)


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def refused(response: httpx.Response, kind: str, code: str = "rate_limit_exceeded") -> Any:
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == (kind, code) and int(response.headers["retry-after"]) >= 1
    assert len(response.headers["x-request-id"]) == 36
    return error


async def test_answers_of_a_tenant_without_limits_say_nothing_of_limits(tenant: Tenant) -> None:
    answer = await tenant.ask()
    assert answer.status_code == 200 and not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_requests_per_minute_are_counted_said_and_refused(tenant: Tenant) -> None:
    await tenant.limited(requests_per_minute=3)
    remaining = []
    for _ in range(3):
        answer = await tenant.ask()
        assert answer.status_code == 200 and answer.headers["x-ratelimit-limit-requests"] == "3"
        remaining.append(int(answer.headers["x-ratelimit-remaining-requests"]))
    assert remaining == [2, 1, 0] and answer.headers["x-ratelimit-reset-requests"].endswith("s")
    answer = await tenant.ask()
    refused(answer, "requests")
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(answer.headers["retry-after"]) <= 20


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_reserved_before_a_runtime_hears_of_the_request(tenant: Tenant, stream: bool) -> None:
    await tenant.limited(tokens_per_minute=100)
    began_s = time.monotonic()
    answer = await tenant.ask(stream=stream)
    assert answer.status_code == 200 and answer.headers["x-ratelimit-limit-tokens"] == "100"
    filled = math.ceil((time.monotonic() - began_s) * 100 / 60)  # on a busy machine, the bucket fills meanwhile
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) in range(93, 93 + filled)
    answer = await tenant.ask(max_tokens=96, stream=stream)  # with its prompt a whole minute's
    refused(answer, "tokens")
    assert answer.headers.get_list("x-ratelimit-limit-tokens") == ["100"] and len(tenant.runtime.runs) == 1
    assert answer.headers["content-type"] == "application/json"
    assert (await tenant.ask(max_tokens=80, stream=stream)).status_code == 200, "what was not used came back"


async def test_more_output_than_a_request_may_have_is_cut(tenant: Tenant) -> None:
    await tenant.limited(max_output_tokens=5)
    choice = (await tenant.ask(max_tokens=50)).json()["choices"][0]
    assert choice["finish_reason"] == "length" and tenant.runtime.runs[0].max_tokens == 5
    both = (await tenant.ask(max_tokens=50, n=2, min_tokens=20)).json()
    assert both["usage"]["completion_tokens"] == 10
    assert [run.max_tokens for run in tenant.runtime.runs] == [5, 5, 5]


async def test_streams_at_once_are_bounded_and_given_back_however_they_end(tenant: Tenant) -> None:
    await tenant.limited(concurrent_streams=2)
    long = [asyncio.create_task(tenant.ask(max_tokens=400, stream=True)) for _ in range(2)]
    await asyncio.sleep(0.3)
    refused(await tenant.ask(), "streams")
    long[0].cancel()  # the client goes away
    await asyncio.gather(long[0], return_exceptions=True)
    assert (await tenant.ask()).status_code == 200
    assert (await tenant.ask(temperature=-1)).status_code == 400
    assert (await tenant.ask()).status_code == 200, "an error gives it back too"
    assert (await long[1]).status_code == 200


async def test_a_tenant_at_its_limit_does_not_slow_another(tenant: Tenant) -> None:
    await tenant.limited(requests_per_minute=1)
    made(await tenant.plane.admin.post("/tenants", json={"name": "other"}))
    key = made(await tenant.plane.admin.post("/tenants/other/keys"))["key"]
    made(await tenant.plane.admin.post("/deployments", json={"tenant": "other", "name": "chat", "model": "faq"}))
    flood = [asyncio.create_task(tenant.ask()) for _ in range(100)]
    body = {"model": "chat", "prompt": "hello", "max_tokens": 3}
    headers = {"authorization": f"Bearer {key}"}
    assert (await tenant.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert sorted(answer.status_code for answer in await asyncio.gather(*flood)) == [200, *[429] * 99]


async def test_a_budget_ends_a_stream_in_its_middle_and_the_bill_is_what_came(tenant: Tenant) -> None:
    await tenant.limited(monthly_budget={"amount": "0.030"})  # 4 tokens of prompt, 26 of output
    answer = await tenant.ask(max_tokens=200, stream=True, stream_options={"include_usage": True})
    said = events(answer)
    assert said[-1]["usage"] == said[-1]["usage"] | {"prompt_tokens": 4, "completion_tokens": 26}
    last = [event["choices"][0] for event in said if event["choices"]][-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "budget_exhausted")
    assert ": x-staccato-finish: budget_exhausted\n" in answer.text and "data: [DONE]" in answer.text
    await soon(lambda: tenant.runtime.cancelled == {tenant.runtime.runs[0].stream})
    (record,) = await tenant.booked()
    assert (record.prompt_tokens, record.output_tokens, record.finish) == (4, 26, "budget_exhausted")
    answer = await tenant.ask()
    refused(answer, "insufficient_quota", "budget_exhausted")
    assert answer.headers["x-should-retry"] == "false" and len(tenant.runtime.runs) == 1


async def test_a_budget_ends_an_answer_in_one_piece_and_a_header_says_so(tenant: Tenant) -> None:
    await tenant.limited(monthly_budget={"amount": "0.030"})
    answer = await tenant.ask(max_tokens=200)
    assert answer.status_code == 200 and answer.headers["x-staccato-finish"] == "budget_exhausted"
    choice = answer.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "budget_exhausted")
    (record,) = await tenant.booked()
    assert (record.prompt_tokens, record.output_tokens, record.finish) == (4, 26, "budget_exhausted")


async def test_a_prompt_that_the_budget_can_not_pay_is_refused_before_it_begins(tenant: Tenant) -> None:
    await tenant.limited(monthly_budget={"amount": "0.004"})
    for stream in (False, True):
        refused(await tenant.ask(stream=stream), "insufficient_quota", "budget_exhausted")
    assert tenant.runtime.runs == []


async def test_an_answer_in_one_piece_ends_on_the_runtime_when_its_client_leaves(tenant: Tenant) -> None:
    asking = asyncio.create_task(tenant.ask(max_tokens=900))
    await soon(lambda: tenant.runtime.seq > 5)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await soon(lambda: tenant.runtime.cancelled == {run.stream for run in tenant.runtime.runs})
    assert tenant.runtime.seq < 500


async def test_what_only_tokenises_counts_as_a_request_and_takes_no_tokens_and_no_money(tenant: Tenant) -> None:
    async def tokenize(path: str = "/v1/tokenize", **body: object) -> httpx.Response:
        return await tenant.client.post(path, json={"model": "chat", **body})

    await tenant.limited(requests_per_minute=3, tokens_per_minute=10)
    assert (await tenant.ask(max_tokens=6)).status_code == 200  # the tokens of this minute
    counted = made(await tokenize(prompt="a long text " * 50), 200)
    assert counted["count"] > 10
    said = await tokenize("/v1/detokenize", tokens=counted["tokens"])
    assert said.status_code == 200 and said.headers["x-ratelimit-remaining-requests"] == "0"
    refused = await tokenize(prompt="a")
    assert refused.status_code == 429 and "3 requests a minute" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1


async def test_what_only_tokenises_is_one_of_the_requests_at_once(tenant: Tenant) -> None:
    await tenant.limited(concurrent_streams=1)
    stream = asyncio.create_task(tenant.ask(max_tokens=400))
    await soon(lambda: len(tenant.runtime.runs) == 1)
    refused = await tenant.client.post("/v1/tokenize", json={"model": "chat", "prompt": "a"})
    assert refused.status_code == 429 and "at once" in refused.json()["error"]["message"]
    await stream
    assert made(await tenant.client.post("/v1/tokenize", json={"model": "chat", "prompt": "a"}), 200)["count"] >= 1
