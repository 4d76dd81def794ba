"""Prefixes of ended requests, from `staccato up` to the bill: prefixes outlast sleep, and end at a tenant's word."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.e2e.conftest import MODELS, Platform

PROMPT = [random.Random(1).randrange(5, 400) for _ in range(300)]
FULL = 256  # tokens of PROMPT in full blocks of 128


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform that keeps prefixes: tenants `acme` and `globex` have deployments that share an engine."""
    folder: Path = tmp_path_factory.mktemp("prefixes")
    started = Platform(folder / "data", free_port(), {"STACCATO_PREFIX_CACHE": "25%"})
    try:
        started.start()
        started.model("faq", MODELS / "faq")
        for tenant in ("acme", "globex"):
            started.tenant(tenant)
            started.deploy(tenant, "faq")
        started.deploy("acme", "once", "faq", keep_prefixes=False)
        yield started
    finally:
        code = started.stop()
    assert code == 0


class Clients:
    """Clients of the tenants. `heard`: requests so far, and tokens that the answers said to be cached, by tenant."""

    def __init__(self, platform: Platform) -> None:
        self._platform, self.heard = platform, {"acme": (0, 0), "globex": (0, 0)}

    async def ask(self, tenant: str, model: str = "faq") -> int:
        """Ask the prompt. Returns the tokens said to be cached."""
        async with self._platform.async_client(tenant) as client:
            answer = await client.completions.create(model=model, prompt=PROMPT, max_tokens=4, temperature=0)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details is not None else 0
        requests, before = self.heard[tenant]
        self.heard[tenant] = requests + 1, before + cached
        return cached

    async def sleep(self) -> None:
        """Have the engine sleep without a page."""
        for tenant in ("acme", "globex"):
            for name in ("faq", *(("once",) if tenant == "acme" else ())):
                self._platform.post(f"/api/v1/deployments/{name}:sleep?tenant={tenant}", None)
        path = "/api/v1/deployments/faq?tenant=acme"
        await asyncio.to_thread(
            self._platform.until, lambda: self._platform.get(path).json()["status"]["phase"] == "asleep"
        )


def billed(platform: Platform, tenant: str) -> tuple[int, int]:
    """Requests and cached tokens of a tenant, as booked."""
    rows = platform.get("/api/v1/usage?group_by=deployment", key=platform.keys[tenant]).json()["data"]
    return sum(row["requests"] for row in rows), sum(row["cached_tokens"] for row in rows)


def forget(platform: Platform, path: str, key: str | None = None) -> None:
    assert platform.request("DELETE", f"/api/v1{path}/prefixes", key=key).status_code == 204


async def retains_nothing(clients: Clients, platform: Platform, tenant: str) -> None:
    """Let an operator order zero retention for the tenant: later requests leave no prefix, and find none."""
    assert platform.request("PATCH", f"/api/v1/tenants/{tenant}", {"keep_prefixes": False}).status_code == 200
    assert [await clients.ask(tenant) for _ in range(2)] == [0, 0]


async def test_prefixes_outlast_sleep_and_go_at_their_tenants_word(keeping: Platform) -> None:
    clients = Clients(keeping)
    assert [await clients.ask("acme"), await clients.ask("acme")] == [0, FULL]
    await clients.sleep()
    assert await clients.ask("acme") == FULL
    assert await clients.ask("globex") == 0, "a foreign prefix never counts"
    assert await clients.ask("globex") == FULL
    forget(keeping, "/deployments/faq", keeping.keys["acme"])
    assert [await clients.ask("acme"), await clients.ask("globex")] == [0, FULL]
    await clients.sleep()
    forget(keeping, "/tenants/globex")
    assert [await clients.ask("acme"), await clients.ask("globex")] == [FULL, 0]
    refused = keeping.request("DELETE", "/api/v1/deployments/faq/prefixes?tenant=acme", key=keeping.keys["globex"])
    assert refused.status_code in (403, 404)
    assert [await clients.ask("acme", "once") for _ in range(2)] == [0, 0]
    await clients.sleep()
    assert await clients.ask("acme", "once") == 0
    await retains_nothing(clients, keeping, "globex")

    def all_booked() -> bool:
        return {tenant: billed(keeping, tenant) for tenant in clients.heard} == clients.heard

    await asyncio.to_thread(keeping.until, all_booked)
