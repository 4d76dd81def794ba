"""The description of the API: every route and nothing else, and answers as described.

tests/gateway/plane.py checks the answers, whenever a test asks the control plane.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from gateway.control.openapi import document
from gateway.http.api import Endpoint, Operation, Shown
from gateway.http.reserve import Reserve
from gateway.inference import routes as offered
from gateway.ops.health import Health
from tests.gateway.http.described import METHODS, Described
from tests.gateway.plane import Plane, made


@pytest.fixture
async def described(plane: Plane) -> dict[str, Any]:
    answer = await plane.client(None).get("http://gateway/openapi.json")
    shown: dict[str, Any] = made(answer, 200)
    return shown


async def test_the_document_is_openapi_3_1(described: dict[str, Any]) -> None:
    assert described["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(described).validate()


async def test_every_route_is_described_and_every_described_one_is_there(
    plane: Plane, described: dict[str, Any]
) -> None:
    reserve = Reserve([plane.folder], 0)
    health = Health(plane.database, plane.bus, plane.fleet, 0, plane.auth, reserve, plane.folder)
    routes = [route for route in (*plane.app.routes, *health.routes()) if isinstance(route, Route)]
    served = {(method, route.path) for route in routes for method in (route.methods or {"GET"}) - {"HEAD"}}
    served = {(method, path) for method, path in served if path != "/api/v1/{path:path}"}
    named = offered.ROUTES
    for before in ("", "/t/{tenant}"):
        served |= {("POST", before + path) for path in named}
        served |= {("GET", before + path) for path in (offered.MODELS, offered.MODELS + "/{name}")}
    told = {(method.upper(), path) for path, item in described["paths"].items() for method in item}
    assert told == served


async def test_every_operation_says_what_it_is_for_and_has_an_id_of_its_own(described: dict[str, Any]) -> None:
    operations = [item[method] for item in described["paths"].values() for method in METHODS if method in item]
    assert all(re.fullmatch(r"[A-Z].*\.", operation["summary"]) for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


async def test_only_what_probes_ask_needs_no_key(described: dict[str, Any]) -> None:
    open_paths = {path for path, item in described["paths"].items() for said in item.values() if not said["security"]}
    assert open_paths == {"/healthz", "/readyz", "/metrics", "/openapi.json"}


def test_a_parameter_of_a_path_that_nobody_described_is_refused() -> None:
    with pytest.raises(KeyError, match="colour"):
        document([Endpoint("GET", "/paints/{colour}", Operation(summary="Show."))])


class Dog(Shown, frozen=True, kw_only=True):
    name: str


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, {}), (200, {"name": 1}), (200, {"name": "Rex", "age": 3}), (418, {"name": "Rex"})],
)
async def test_an_answer_that_is_not_as_described_is_found(status: int, body: dict[str, Any]) -> None:
    described = Described(document([Endpoint("GET", "/dogs", Operation(Dog, summary="Show."))]))
    request = httpx.Request("GET", "http://gateway/api/v1/dogs")
    await described.check(httpx.Response(200, json={"name": "Rex"}, request=request))
    with pytest.raises(AssertionError):
        await described.check(httpx.Response(status, json=body, request=request))


async def test_a_parameter_that_is_not_described_is_refused(plane: Plane) -> None:
    problem = made(await plane.admin.get("/deployments?tenent=acme"), 422)
    assert problem["errors"] == [
        {"pointer": "?tenent", "message": "it is not known here, one of cursor, limit, tenant is"}
    ]


async def test_the_document_is_the_same_every_time(plane: Plane) -> None:
    one, other = [msgspec.json.encode(document(plane.control.endpoints())) for _ in range(2)]
    assert one == other


async def test_what_was_made_can_be_asked_for_by_its_links(plane: Plane, described: dict[str, Any]) -> None:
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    links = described["paths"]["/api/v1/tenants/{tenant}/keys"]["post"]["responses"]["201"]["links"]
    key = made(await plane.admin.post("/tenants/acme/keys", json={}))
    assert links == {
        name: {
            "operationId": name,
            "parameters": {"tenant": "$request.path.tenant", "key": "$response.body#/id"},
        }
        for name in ("post_tenants_tenant_keys_key_rotate", "delete_tenants_tenant_keys_key")
    }
    made(await plane.admin.post(f"/tenants/acme/keys/{key['id']}:rotate", json={}))
