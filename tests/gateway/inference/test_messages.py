"""The gateway's own answers to Anthropic's clients, and to clients that name no model. The test plays the runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.contract.wire import ModelState, Residency
from tests.gateway.plane import Plane, made
from tests.gateway.vllm.test_front import FAQ, asked, runs_of
from tests.store.files.folders import LLAMA, write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front

HELLO = [{"role": "user", "content": "hello"}]
BODY = {"model": "chat", "messages": HELLO, "max_tokens": 1}
RESIDENT = ModelState(residency=Residency.RESIDENT, load_ms=1.0)


async def tenant_key(plane: Plane, scopes: list[str] | None = None, **tenant: object) -> str:
    made(await plane.admin.post("/tenants", json={"name": "acme", **tenant}))
    settings = {"scopes": scopes} if scopes else {}
    return str(made(await plane.admin.post("/tenants/acme/keys", json=settings))["key"])


async def deploy(plane: Plane, *names: str) -> None:
    await plane.model("faq", folder=Path(FAQ))
    for name in names:
        body = {"tenant": "acme", "name": name, "model": "faq"}
        deployment = made(await plane.admin.post("/deployments", json=body))
    await plane.report({deployment["engine"]: RESIDENT})


async def refused(client: httpx.AsyncClient, body: object = BODY, path: str = "/v1/messages", **more: Any) -> Any:
    """Send a request that is to be refused in Anthropic's form, without further fields.

    Returns the status and the type of the error."""
    answer = await client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), **more)
    said = answer.json()
    assert said.keys() == {"type", "error"} and said["type"] == "error", said
    assert said["error"].keys() == {"type", "message"} and said["error"]["message"]
    assert answer.headers["x-request-id"]
    return answer.status_code, said["error"]["type"]


async def test_errors_on_messages_have_anthropics_form(plane: Plane) -> None:
    key = await tenant_key(plane)
    async with asked(plane, key, body_bytes=2000) as client:
        assert await refused(client) == (404, "not_found_error")
        assert await refused(client, path="/v1/messages/nowhere") == (404, "not_found_error")
        assert await refused(client, path="/t/acme/v1/messages/count_tokens") == (404, "not_found_error")
        assert await refused(client, b"{") == (400, "invalid_request_error")
        assert await refused(client, BODY | {"system": "x" * 3000}) == (413, "request_too_large")
        assert await refused(client, headers={"authorization": "Bearer no"}) == (401, "authentication_error")
        openai = await client.post("/v1/chat/completions", json=BODY)
        assert openai.json()["error"]["code"] == "model_not_found", "OpenAI's clients read their own form"


async def test_a_key_without_the_scope_is_told_so_in_anthropics_form(plane: Plane) -> None:
    async with asked(plane, await tenant_key(plane, ["control"])) as client:
        assert await refused(client) == (403, "permission_error")


async def test_a_limit_is_told_in_anthropics_form(plane: Plane) -> None:
    key = await tenant_key(plane, limits={"requests_per_minute": 1})
    await runs_of(plane)
    async with asked(plane, key) as client:
        await deploy(plane, "chat")
        made(await client.post("/v1/messages", json=BODY), 200)
        assert await refused(client) == (429, "rate_limit_error")


async def test_a_model_without_a_runtime_is_told_in_anthropics_form(plane: Plane) -> None:
    key = await tenant_key(plane)
    async with asked(plane, key) as client:
        await plane.model("faq", folder=Path(FAQ))
        made(await plane.admin.post("/deployments", json={"tenant": "acme", "name": "chat", "model": "faq"}))
        assert await refused(client, headers={"prefer": "wait=0"}) == (503, "overloaded_error")


async def test_the_only_deployment_need_not_be_named(plane: Plane) -> None:
    key = await tenant_key(plane)
    runs = await runs_of(plane)
    unnamed = {"messages": HELLO, "max_tokens": 1}
    async with asked(plane, key) as client:
        none = made(await client.post("/v1/chat/completions", json=unnamed), 404)["error"]
        assert (none["code"], none["param"]) == ("no_deployment", "model") and "staccato deploy" in none["message"]
        await deploy(plane, "chat")
        assert made(await client.post("/v1/chat/completions", json=unnamed), 200)["model"] == "chat"
        assert made(await client.post("/v1/messages", json=unnamed), 200)["model"] == "chat"
        assert made(await client.post("/v1/tokenize", json={"prompt": "hello"}), 200)["count"]
        await deploy_more(plane)
        several = made(await client.post("/v1/chat/completions", json=unnamed), 400)["error"]
    assert len(runs) == 2
    assert several["code"] == "missing_model" and "11 deployments" in several["message"]
    assert "chat, d0, d1" in several["message"] and several["message"].endswith("d6 …"), "not all of very many"


async def deploy_more(plane: Plane) -> None:
    for name in (f"d{n}" for n in range(10)):
        made(await plane.admin.post("/deployments", json={"tenant": "acme", "name": name, "model": "faq"}))


async def test_a_batch_is_one_request_with_an_answer_for_each_conversation(plane: Plane) -> None:
    key = await tenant_key(plane)
    runs = await runs_of(plane)
    async with asked(plane, key) as client:
        await deploy(plane, "chat")
        body = {"model": "chat", "messages": [HELLO, HELLO, HELLO], "max_tokens": 1}
        answer = made(await client.post("/v1/chat/completions/batch", json=body), 200)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        refusal = made(await client.post("/v1/chat/completions/batch", json=body | {"messages": [HELLO] * 129}), 400)
    assert len(runs) == 3 and len({run.request for run in runs}) == 1, "one row on the bill"
    assert refusal["error"]["code"] == "request_too_extensive" and "129" in refusal["error"]["message"]


async def test_pictures_for_a_deployment_of_text_alone_are_refused_on_every_route(plane: Plane) -> None:
    folder = write_model(plane.folder / "seeing", LLAMA | {"architectures": ["Gemma3ForConditionalGeneration"]})
    await plane.model("seeing", folder=folder)
    key = await tenant_key(plane)
    body = {"tenant": "acme", "name": "chat", "model": "seeing", "language_model_only": True}
    assert made(await plane.admin.post("/deployments", json=body))["language_model_only"] is True
    url = {"url": "data:image/png;base64,AA=="}
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": url}]}
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    seen = {"role": "user", "content": [{"type": "image", "source": source}]}
    given = {"role": "user", "content": [{"type": "input_image", "image_url": url["url"]}]}
    async with asked(plane, key) as client:
        for path, body in (
            ("/v1/chat/completions", BODY | {"messages": [shown]}),
            ("/v1/responses", {"model": "chat", "input": [given]}),
        ):
            error = made(await client.post(path, json=body), 400)["error"]
            assert error["code"] == "no_pictures", error
            assert error["message"].startswith("'chat' is served as text, and the request has pictures: leave"), error
        assert await refused(client, BODY | {"messages": [seen]}) == (400, "invalid_request_error")


async def test_a_card_says_the_digest_of_the_files_and_no_path(plane: Plane) -> None:
    key = await tenant_key(plane)
    async with asked(plane, key) as client:
        await deploy(plane, "chat")
        answer = await client.get("/v1/models")
    (card,) = answer.json()["data"]
    assert len(card["root"]) == 64 and card["parent"] is None and str(FAQ) not in answer.text
    (permission,) = card["permission"]
    assert permission["object"] == "model_permission" and permission["allow_sampling"] is True
