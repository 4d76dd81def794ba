"""schemathesis asks the API described requests, and wrong requests: nothing fails, and every answer is as described.

schemathesis asks over HTTP, from a thread, while the test's process serves. Later steps name things made by earlier
steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup, ServerError
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from store.contract import views, wire
from store.contract.wire import ModelState, Residency
from tests.conftest import free_port
from tests.gateway.plane import ADMIN_KEY, Plane, made
from tests.store.files.folders import write_model

pytestmark = pytest.mark.filterwarnings("default")  # for warnings of schemathesis and hypothesis

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
STEPS = 8
SEED = int(os.environ.get("SEED", "7"))


@contextlib.asynccontextmanager
async def served(plane: Plane) -> AsyncIterator[str]:
    """Serve the app over HTTP. Yields the address."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(plane.app, port=port, lifespan="off", log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


async def furnished(plane: Plane) -> tuple[dict[str, str], str]:
    """Make a thing of each kind. Returns the names, by parameter, and a tenant's key."""
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    key = made(await plane.admin.post("/tenants/acme/keys", json={}))
    client = plane.client(key["key"])
    await plane.model("llama", client, write_model(plane.folder / "roots" / "llama", seed="llama"))
    deployment = made(await client.post("/deployments", json={"name": "chat", "model": "llama"}))
    await plane.report({deployment["engine"]: ModelState(residency=Residency.RESIDENT, load_ms=12.0)})

    async def obey(_: bytes) -> wire.Reply:
        return wire.Reply()

    async def timeline(data: bytes) -> views.Timeline:
        asked = wire.decode(views.ShowTimeline, data)
        return views.Timeline(from_us=asked.from_us, to_us=asked.to_us)

    async def pages(_: bytes) -> views.PageMap:
        return views.PageMap(page_bytes=1 << 12)

    for subject in (wire.control_subject("r1"), wire.drain_subject("r1"), wire.role_subject("r1")):
        await plane.bus.respond(subject, obey)  # else the order is answered by 503 after 5 s
    await plane.bus.respond(views.timeline_subject("r1"), timeline)
    await plane.bus.respond(views.pages_subject("r1"), pages)
    return {"tenant": "acme", "key": key["id"], "model": "llama", "deployment": "chat", "gpu": "r1"}, key["key"]


def described(url: str) -> Any:
    """The schema of the operations to ask: without tenants' endpoints (vLLM answers), operations that the app does not
    serve, and streams without an end."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.generation.update(with_security_parameters=False)  # the test sends the key
    schema.config.checks.negative_data_rejection.expected_statuses = ["4xx"]  # If-Match may be refused first
    return schema.include(path_regex="^/api/v1/|organization").exclude(path_regex="/events$")


def limits(examples: int) -> settings:
    return settings(
        max_examples=examples,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )


def each_alone(url: str, key: str, things: dict[str, str], examples: int) -> int:
    """Ask each operation alone, with described and with wrong data. About every second request names a thing that
    exists. Returns the number of operations."""
    operations = [result.ok() for result in described(url).get_all_operations()]
    for operation in sorted(operations, key=lambda one: one.method == "delete"):
        for mode in GenerationMode:

            @seed(SEED)
            @limits(examples)
            @given(case=operation.as_strategy(generation_mode=mode), there=st.booleans())
            def asked(case: Case, there: bool) -> None:
                if there and case.path_parameters:
                    known = {name: things[name] for name in case.path_parameters if name in things}
                    case.path_parameters = {**case.path_parameters, **known}
                # A wrong array in a query, as schemathesis makes arrays, may leave nothing to send.
                refused = [] if "organization" in case.path else [negative_data_rejection]
                case.call_and_validate(headers=bearer(key), checks=[*CHECKS, *refused])

            with contextlib.suppress(*([Unsatisfiable] if mode is GenerationMode.NEGATIVE else [])):
                asked()  # some operations take no data that could be wrong
    return len(operations)


def in_sequence(url: str, key: str, examples: int, restore: Callable[[], None]) -> None:
    """Ask in sequences: later requests name things made by earlier requests. Each sequence begins with a restored
    database."""

    class Machine(described(url).as_state_machine()):  # type: ignore[misc]
        def setup(self) -> None:
            restore()

        def get_call_kwargs(self, case: Case) -> dict[str, Any]:
            return {"headers": bearer(key)}

        def validate_response(self, response: Response, case: Case, **_: Any) -> None:
            case.validate_response(response, checks=CHECKS)

    run = seed(SEED)(Machine)
    run.run(settings=settings(limits(examples), stateful_step_count=STEPS))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("whose", ["admin", "tenant"])
@pytest.mark.parametrize("examples", [6, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(1500)])])
async def test_each_operation_answers_as_described(plane: Plane, whose: str, examples: int) -> None:
    things, key = await furnished(plane)
    async with served(plane) as url:
        asked = await asyncio.to_thread(each_alone, url, ADMIN_KEY if whose == "admin" else key, things, examples)
    assert asked > 30


@pytest.mark.parametrize("examples", [20, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(1500)])])
async def test_sequences_of_operations_answer_as_described(plane: Plane, examples: int) -> None:
    await furnished(plane)
    kept, live = plane.folder / "kept.db", plane.folder / "staccato.db"

    def copy(source: Path, target: Path) -> None:
        with contextlib.closing(sqlite3.connect(source)) as one, contextlib.closing(sqlite3.connect(target)) as other:
            one.backup(other)

    copy(live, kept)

    def restore() -> None:
        copy(kept, live)
        plane.auth.forget()

    async with served(plane) as url:
        await asyncio.to_thread(in_sequence, url, ADMIN_KEY, examples, restore)


async def test_what_is_not_as_described_is_found(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    things, _ = await furnished(plane)
    monkeypatch.setattr("gateway.control.tenants.show", lambda tenant: 1 / 0)
    async with served(plane) as url:
        with pytest.raises(FailureGroup) as found:
            await asyncio.to_thread(each_alone, url, ADMIN_KEY, things, 3)
    assert [type(failure) for failure in found.value.exceptions] == [ServerError]
