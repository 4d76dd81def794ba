"""SIGKILL of a gateway, beside a second gateway, under many streams: resuming clients lose no token and pay once.

Clients that ask anew are served by the second gateway."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.demo.random_weights import write_random
from tests.conftest import free_port
from tests.docs.shell import under
from tests.e2e.conftest import MODELS, Platform

STREAMS, TOKENS = 25, 250  # streams of each of two tenants
RESUMING, ANEW = "acme", "globex"
SILENCE_MOST_S = 60.0


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with two gateways: a test may kill a gateway."""
    folder = tmp_path_factory.mktemp("gates")
    model = write_random(folder / "slow", "llama", hidden=256, layers=4)
    platform = Platform(folder / "data", free_port())
    try:
        platform.start("--gateways", "2")
        platform.model("slow", model)
        platform.model("faq", MODELS / "faq")
        for tenant in (RESUMING, ANEW):
            platform.tenant(tenant)
            for name in ("slow", "faq"):
                assert platform.deploy(tenant, name)["status"]["phase"] in ("awake", "asleep")
        yield platform
    finally:
        code = platform.stop()
    assert code == 0


@dataclass
class StreamRecord:
    """A client's record of a stream, over all connections."""

    text: str = ""
    tokens: int = 0  # delivered, over all connections
    broke: int = 0  # connections
    first_s: float = 0.0  # from the first request to the first event
    again_s: float = 0.0  # from the loss of a connection to the next response
    headers: dict[str, str] = field(default_factory=dict)


async def stream(platform: Platform, tenant: str, number: int, begun: asyncio.Event) -> StreamRecord:
    """Ask for a stream, and ask again when the connection is lost, to the end of the stream."""
    resumes = tenant == RESUMING
    body = {"model": "slow", "prompt": [5 + number, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    told = {"authorization": f"Bearer {platform.keys[tenant]}"} | ({"prefer": "resume"} if resumes else {})
    said, asked_s = StreamRecord(), time.monotonic()
    while True:
        tokens = 0  # of this connection
        try:
            async with (
                httpx.AsyncClient(timeout=SILENCE_MOST_S) as client,
                client.stream(
                    "POST", f"{platform.url}/v1/completions", json=body, headers=told | said.headers
                ) as response,
            ):
                assert response.status_code == 200, await response.aread()
                waited_s = time.monotonic() - asked_s
                said.again_s = waited_s if said.broke else 0.0
                said.first_s = said.first_s or waited_s
                if resumes:
                    assert response.headers["preference-applied"] == "resume"
                    said.headers = {"x-request-id": response.headers["x-request-id"]} | said.headers
                    said.headers.setdefault("last-event-id", "0")
                seen = ""
                async for line in response.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        seen = value
                    elif value == "[DONE]":
                        return said
                    elif name == "data":
                        event = json.loads(value)
                        assert "error" not in event, event
                        said.text += "".join(choice["text"] for choice in event["choices"])
                        made = event["usage"]["completion_tokens"]
                        said.tokens = made if resumes else said.tokens + made - tokens
                        tokens = made
                        if resumes:
                            said.headers["last-event-id"] = seen
                        if made > 5:
                            begun.set()
        except httpx.TransportError:
            assert said.broke < 3
            said.broke += 1
            said.text = said.text if resumes else ""
            asked_s = time.monotonic()


async def streams(platform: Platform, kill: random.Random | None) -> dict[tuple[str, int], StreamRecord]:
    """Run streams of both tenants; with `kill`, a gateway is killed when each stream has begun."""
    await asyncio.to_thread(gateways, platform)
    names = [(tenant, number) for number in range(STREAMS) for tenant in (RESUMING, ANEW)]
    begun = [asyncio.Event() for _ in names]
    tasks = [asyncio.create_task(stream(platform, *name, event)) for name, event in zip(names, begun, strict=True)]
    if kill is not None:
        await asyncio.gather(*(event.wait() for event in begun))
        kill.choice(platform.children("gateway.app")).kill()
    return dict(zip(names, await asyncio.gather(*tasks), strict=True))


def gateways(platform: Platform) -> list[psutil.Process]:
    """The two gateways, once both take connections."""
    found: list[psutil.Process] = []

    def both() -> bool:
        found[:] = platform.children("gateway.app")
        with contextlib.ExitStack() as opened:
            for _ in range(20):
                opened.enter_context(socket.create_connection(("127.0.0.1", platform.port), 10))
            time.sleep(0.1)
            return len(found) == 2 and all(map(functools.partial(serves, platform.port), found))

    platform.until(both, 120)
    return found


def serves(port: int, gateway: psutil.Process) -> bool:
    """Whether the gateway has a client's connection."""
    with contextlib.suppress(psutil.Error):
        return any(each.raddr and each.laddr.port == port for each in gateway.net_connections("tcp"))
    return False


async def survived(platform: Platform, undisturbed: dict[tuple[str, int], StreamRecord], chance: random.Random) -> int:
    """Kill a gateway under the streams; check what clients got and pay. Returns the number of streams that broke."""
    before = {tenant: await asyncio.to_thread(platform.usage, tenant) for tenant in (RESUMING, ANEW)}
    said = await streams(platform, chance)
    broken = {name: outcome for name, outcome in said.items() if outcome.broke}
    assert {name: outcome.text for name, outcome in said.items()} == {
        name: outcome.text for name, outcome in undisturbed.items()
    }
    assert all(said[RESUMING, number].tokens == TOKENS for number in range(STREAMS))
    usual_s = max(outcome.first_s for outcome in said.values())
    slowest_s = max((outcome.again_s for outcome in broken.values()), default=0.0)
    print(f"{len(broken)} streams broke, asked again within {slowest_s:.2f} s; a first answer took {usual_s:.2f} s")
    await paid(platform, before, said)
    return len(broken)


async def paid(
    platform: Platform, before: dict[str, dict[str, int]], said: dict[tuple[str, int], StreamRecord]
) -> None:
    """Return when the bills are right: resumed requests once, others with the tokens that the clients were sent.

    A killed gateway may leave a write unbilled: at most an event of each broken stream."""
    broken = sum(said[ANEW, number].broke for number in range(STREAMS))
    delivered = sum(said[ANEW, number].tokens for number in range(STREAMS))
    right = {
        RESUMING: {"requests": STREAMS, "prompt_tokens": 3 * STREAMS, "output_tokens": TOKENS * STREAMS},
        ANEW: {"requests": STREAMS + broken, "prompt_tokens": 3 * (STREAMS + broken), "output_tokens": delivered},
    }
    deadline = time.monotonic() + 60
    while True:
        now = {tenant: await asyncio.to_thread(platform.usage, tenant) for tenant in (RESUMING, ANEW)}
        booked = {tenant: {name: now[tenant][name] - before[tenant][name] for name in right[tenant]} for tenant in now}
        lacking = delivered - booked[ANEW]["output_tokens"]
        booked[ANEW]["output_tokens"] += lacking if 0 <= lacking <= 4 * broken else 0
        if booked == right:
            return
        assert time.monotonic() < deadline, f"{booked} were booked, and {right} expected"
        await asyncio.sleep(0.5)


def test_a_scrape_of_the_shared_port_shows_both_gateways(gates: Platform) -> None:
    gateways(gates)

    def both() -> bool:
        text = gates.get("/api/v1/metrics").text
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        own = {sample.labels.get("gateway") for sample in found if sample.name == "staccato_requests_open"}
        runtimes = [sample.labels for sample in found if sample.name == "staccato_runtimes"]
        return own == {"1", "2"} and runtimes == [{}]

    gates.until(both, 30)


async def test_a_killed_gateway_costs_streams_their_connection_alone(gates: Platform) -> None:
    undisturbed = await streams(gates, None)
    assert not any(outcome.broke for outcome in undisturbed.values())
    await asyncio.sleep(6)  # the bill of these streams
    chance, broken = random.Random(1), 0
    for _ in range(3):
        broken += await survived(gates, undisturbed, chance)
    assert broken, "nobody was hurt: the test proves nothing"


@pytest.mark.long
@pytest.mark.timeout(7200)
async def test_a_hundred_killed_gateways_cost_streams_their_connection_alone(gates: Platform) -> None:
    undisturbed = await streams(gates, None)
    await asyncio.sleep(6)
    chance, broken = random.Random(2), 0
    for _ in range(100):
        broken += await survived(gates, undisturbed, chance)
    assert broken > 100


def test_the_client_of_the_manual_gets_the_whole_chat_from_two_gateways(gates: Platform) -> None:
    (block,) = under("deploy/docs/manual/endpoints.md", "A lost connection", "run: resumed")
    code: dict[str, Any] = {}
    exec(block.text, code)
    chat = [{"role": "user", "content": "hello"}]
    ask = {"model": "slow", "messages": chat, "temperature": 0, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
    gateways(gates)
    with gates.client(RESUMING) as client:
        whole = [event["choices"][0]["delta"].get("content", "") for event in code["events"](client, **ask)]
        cut, killed = [], 0
        for number, event in enumerate(code["events"](client, **ask)):
            cut.append(event["choices"][0]["delta"].get("content", ""))
            if number == 10:
                for gateway in [each for each in gates.children("gateway.app") if serves(gates.port, each)]:
                    gateway.kill()
                    killed += 1
    assert killed and "".join(cut) == "".join(whole) and len(whole) > 50
