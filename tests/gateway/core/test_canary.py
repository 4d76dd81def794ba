"""A canary gets its share and no more, and is taken out when the canary fails."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from uuid_utils import uuid7

from gateway.core.canary import ERRORS_LEAST, fault, takes
from store.contract import wire
from store.db import usage
from store.db.database import now_us
from tests.gateway.control.test_deployments import FAILED, RESIDENT, deployed, status
from tests.gateway.plane import Plane, made, until

CHANGE = {"dtype": "float32", "canary": {"weight": 25}}


@given(st.text(), st.integers(0, 100))
def test_a_request_is_the_canarys_always_or_never_and_with_more_weight_stays_so(request: str, weight: int) -> None:
    assert takes(request, weight) == takes(request, weight)
    assert takes(request, 100) and not takes(request, 0)
    assert takes(request, min(100, weight + 1)) >= takes(request, weight)


def test_of_many_requests_a_canary_gets_its_weight() -> None:
    taken = sum(takes(str(uuid7()), 10) for _ in range(20_000))
    assert 1_800 < taken < 2_200  # 4.7 standard deviations to each side


@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 1))
def test_more_failures_or_fewer_requests_never_save_a_canary(ended: int, failed: int, most: float) -> None:
    if fault(ended, failed, most):
        assert failed >= ERRORS_LEAST
        assert fault(ended, failed + 1, most) and fault(max(0, ended - 1), failed, most)


# ── over REST ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def canaried(plane: Plane) -> tuple[httpx.AsyncClient, Any, str, str]:
    """A client, the deployment, the tenant's id and the engine of the canary. The first revision is on the device."""
    client, first = await deployed(plane)
    changed = made(await client.patch("/deployments/chat", json=CHANGE), 200)
    assert changed["canary"] == {"weight": 25, "errors_most": 0.05}
    tenant_id = (await plane.admin.get("/tenants/acme")).json()["id"]
    target = await plane.auth.deployment(tenant_id, "chat@2")
    assert target is not None
    await plane.report({first["engine"]: RESIDENT})
    return client, first, tenant_id, target.spec.key


async def kinds(client: httpx.AsyncClient) -> list[str]:
    return [condition["type"] for condition in (await status(client))["conditions"]]


async def share(plane: Plane, tenant_id: str) -> int:
    """Percent of requests that a gateway with a fresh look into the database gives the canary."""
    plane.auth.forget()
    target = await plane.auth.deployment(tenant_id, "chat")
    assert target is not None and target.revision == 1
    return target.canary_weight if target.canary else 0


async def test_a_canary_keeps_its_share_until_it_is_promoted(plane: Plane) -> None:
    client, first, tenant_id, key = await canaried(plane)
    assert await kinds(client) == ["TargetPending"]
    early = await client.post("/deployments/chat:promote")
    assert made(early, 409)["code"] == "not_loadable"
    await plane.report({first["engine"]: RESIDENT, key: RESIDENT})
    await plane.control.rollout.step()
    seen = await status(client)
    assert (seen["active_revision"], seen["target_revision"]) == (1, 2)
    assert await kinds(client) == ["CanaryServing"] and await share(plane, tenant_id) == 25
    promoted = made(await client.post("/deployments/chat:promote"), 200)
    assert (promoted["status"]["active_revision"], promoted["status"]["target_revision"]) == (2, None)
    assert promoted["canary"] is None
    await plane.placed({key})
    assert made(await client.post("/deployments/chat:promote"), 409)["code"] == "no_target"
    back = made(await client.post("/deployments/chat:rollback"), 200)
    assert back["status"]["active_revision"] == 1


async def test_a_canary_that_is_rolled_back_leaves_nothing(plane: Plane) -> None:
    client, first, tenant_id, key = await canaried(plane)
    await plane.report({first["engine"]: RESIDENT, key: RESIDENT})
    back = made(await client.post("/deployments/chat:rollback"), 200)
    assert (back["status"]["active_revision"], back["status"]["target_revision"], back["canary"]) == (1, None, None)
    assert await share(plane, tenant_id) == 0
    await plane.placed({first["engine"]})


async def test_the_share_alone_is_changed_without_a_new_revision(plane: Plane) -> None:
    client, first, tenant_id, key = await canaried(plane)
    more = made(await client.patch("/deployments/chat", json={"canary": {"weight": 50}}), 200)
    assert (more["status"]["target_revision"], more["canary"]["weight"]) == (2, 50)
    assert await share(plane, tenant_id) == 50
    again = made(await client.patch("/deployments/chat", json={"priority": "high"}), 200)
    assert (again["status"]["target_revision"], again["canary"]["weight"]) == (
        3,
        50,
    )  # never 100 % by surprise
    await plane.report({first["engine"]: RESIDENT, key: RESIDENT})
    made(await client.patch("/deployments/chat", json={"canary": None}), 200)

    async def active() -> bool:
        return (await status(client))["active_revision"] == 3

    await until(active)
    refused = await client.patch("/deployments/chat", json={"canary": {"weight": 1}})
    assert made(refused, 409)["code"] == "no_target"


@pytest.mark.parametrize("canary", [{}, {"weight": 101}, {"weight": -1}, {"weight": 1, "errors_most": 2}, 5])
async def test_a_share_that_is_none_is_refused_with_its_place(plane: Plane, canary: object) -> None:
    client, _ = await deployed(plane)
    refused = made(await client.patch("/deployments/chat", json={"dtype": "float32", "canary": canary}), 422)
    assert refused["errors"][0]["pointer"].startswith("/canary")


async def book(plane: Plane, one: Any, tenant_id: str, finishes: list[str], revision: int = 2) -> None:
    """Book requests of `revision` that ended with `finishes`."""
    now = now_us()
    async with plane.database.write() as connection:
        for number, finish in enumerate(finishes):
            said = wire.Usage(
                request=f"{revision}-{now}-{number}",
                attempt=1,
                seq=1,
                final=True,
                tenant_id=tenant_id,
                key_id="k",
                deployment_id=one["id"],
                deployment="chat",
                revision=revision,
                model="e",
                prompt_tokens=1,
                cached_tokens=0,
                output_tokens=1,
                started_at=now / 1e6,
                ended_at=now / 1e6,
                finish=finish,
            )
            await usage.book(connection, [said], now)


async def test_a_canary_that_fails_is_taken_out_and_says_why(plane_on_both: Plane) -> None:
    plane = plane_on_both
    client, one, tenant_id, key = await canaried(plane)
    await plane.report({one["engine"]: RESIDENT, key: RESIDENT})
    await book(plane, one, tenant_id, ["stop"] * 60 + ["error"] * 3 + ["rejected"] * 9 + ["cancelled"] * 9)
    await book(plane, one, tenant_id, ["error"] * 9, revision=1)
    await plane.control.rollout.step()
    assert await share(plane, tenant_id) == 25  # 3 of 81: the bound is 5 %
    await book(plane, one, tenant_id, ["error"] * 2)
    await plane.control.rollout.step()
    await plane.control.rollout.step()
    assert await share(plane, tenant_id) == 0
    (condition,) = (await status(client))["conditions"]
    assert condition["type"] == "CanaryHalted" and condition["message"].startswith("5 of 83 requests failed")
    log = (await plane.admin.get("/audit")).json()["data"]
    assert [(row["by"], row["new"]["revision"]) for row in log if row["kind"] == "canary.halted"] == [("platform", 2)]
    made(await client.patch("/deployments/chat", json={"canary": {"weight": 10}}), 200)  # mended: counted anew
    await plane.control.rollout.step()
    assert await share(plane, tenant_id) == 10


async def test_a_canary_that_does_not_load_says_so_and_can_not_be_promoted(plane: Plane) -> None:
    client, first, _, key = await canaried(plane)
    await plane.report({first["engine"]: RESIDENT, key: FAILED})
    await plane.control.rollout.step()
    assert await kinds(client) == ["TargetFailed"]
    assert made(await client.post("/deployments/chat:promote"), 409)["code"] == "not_loadable"
