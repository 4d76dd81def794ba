"""Tests of the routes that forget prefixes."""

from __future__ import annotations

from gateway.core.salts import cache_salt
from store.contract import wire
from tests.gateway.control.test_deployments import RESIDENT, deployed
from tests.gateway.plane import PEPPER, Plane

Told = list[tuple[str, str, str | object]]


async def hears(plane: Plane, answer: wire.Reply | None = None) -> Told:
    """Have a runtime answer orders. Returns the list of orders, which grows: model, operation and salt."""
    told: Told = []

    async def obey(data: bytes) -> wire.Reply:
        order = wire.decode(wire.Control, data)
        told.append((order.model, order.op, order.salt))
        return answer or wire.Reply()

    await plane.bus.respond(wire.control_subject("r1"), obey)
    return told


async def test_prefixes_of_a_deployment_are_forgotten_by_its_tenant_and_by_the_operator(plane: Plane) -> None:
    client, one = await deployed(plane)
    tenant = (await plane.admin.get(f"/tenants/{one['tenant']}")).json()["id"]
    told = await hears(plane)
    await plane.report({one["engine"]: RESIDENT})
    for who in (client, plane.admin):
        assert (await who.delete("/deployments/chat/prefixes")).status_code == 204
    assert told == [(one["engine"], "forget", cache_salt(PEPPER, tenant))] * 2
    audit = (await plane.admin.get("/audit")).json()["data"]
    assert [entry["kind"] for entry in audit].count("deployment.prefixes_forgotten") == 2


async def test_prefixes_of_a_tenant_are_forgotten_in_every_engine(plane: Plane) -> None:
    client, one = await deployed(plane)
    tenant = (await plane.admin.get(f"/tenants/{one['tenant']}")).json()["id"]
    told = await hears(plane)
    await plane.report({})
    for who in (client, plane.admin):
        assert (await who.delete(f"/tenants/{one['tenant']}/prefixes")).status_code == 204
    assert told == [("", "forget", cache_salt(PEPPER, tenant))] * 2


async def test_a_runtime_that_does_not_answer_is_a_503(plane: Plane) -> None:
    client, one = await deployed(plane)
    await plane.report({one["engine"]: RESIDENT})
    assert (await client.delete("/deployments/chat/prefixes")).status_code == 503
    await hears(plane, wire.Reply(refusal=wire.Refusal.BAD_MESSAGE, reason="no operation 'forget'"))
    refused = await client.delete("/deployments/chat/prefixes")
    assert refused.status_code == 503 and refused.json()["detail"] == "no operation 'forget': try again"
