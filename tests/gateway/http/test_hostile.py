"""Hostile requests and models of tenants: nested bodies, foreign salts, templates that are programs."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path

import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from store.contract import wire
from store.contract.wire import ModelState, Residency
from tests.gateway.plane import Plane, made
from tests.gateway.vllm.test_front import FAQ, asked, completed, runs_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
RESIDENT = ModelState(residency=Residency.RESIDENT, load_ms=1.0)


async def deployed(plane: Plane, tenant: str, name: str = "chat", folder: Path = FAQ) -> tuple[str, str]:
    """Make a tenant with a deployment. Returns the tenant's key and the engine of the deployment."""
    made(await plane.admin.post("/tenants", json={"name": tenant}))
    key = made(await plane.admin.post(f"/tenants/{tenant}/keys"))["key"]
    if not (await plane.admin.get(f"/models/{name}")).is_success:
        await plane.model(name, folder=folder)
    chat = made(await plane.admin.post("/deployments", json={"tenant": tenant, "name": "chat", "model": name}))
    await plane.report({chat["engine"]: RESIDENT})
    return key, chat["engine"]


@pytest.mark.parametrize("depth", [900, 100_000])
async def test_a_body_nested_deep_is_a_bad_request(plane: Plane, depth: int) -> None:
    key, _ = await deployed(plane, "acme")
    await runs_of(plane)
    nested = "[" * depth + "]" * depth
    async with asked(plane, key) as client:
        for body in (f'{{"model": "chat", "prompt": {nested}}}', f'{{"model": "chat", "x": {nested}}}', nested):
            headers = {"content-type": "application/json"}
            answer = await client.post("/v1/completions", content=body, headers=headers)
            assert 400 <= answer.status_code < 500, answer.text


EXTENSIVE: dict[str, tuple[str, dict[str, object], str]] = {
    "16,384 answers": ("/v1/chat/completions", CHAT | {"n": 16384}, "16384 answers"),
    "100,000 messages": ("/v1/chat/completions", CHAT | {"messages": CHAT["messages"] * 100_000}, "bytes of text"),
    "10,000 messages": ("/v1/chat/completions", CHAT | {"messages": CHAT["messages"] * 10_000}, "10000 messages"),
    "logprobs of a prompt": ("/v1/completions", {"model": "chat", "prompt": "a", "prompt_logprobs": 20}, "20 logprobs"),
    "7.9 MB to tokenise": (
        "/v1/tokenize",
        {"model": "chat", "prompt": "a" * 7_900_000},
        "7900028 bytes without a picture",
    ),
    "300 KB to tokenise": ("/v1/tokenize", {"model": "chat", "prompt": "a" * 300_000}, "300002 bytes of text"),
    "a regex of 180 kB": (
        "/v1/completions",
        {"model": "chat", "prompt": "a", "structured_outputs": {"regex": "|".join(["word"] * 36_000)}},
        "bytes of a grammar",
    ),
    "100,000 choices": (
        "/v1/chat/completions",
        CHAT | {"structured_outputs": {"choice": [f"word {n}" for n in range(100_000)]}},
        "bytes of a grammar",
    ),
}


@pytest.mark.parametrize("attack", EXTENSIVE)
async def test_a_request_for_too_much_is_a_400_with_the_number_and_costs_no_runtime_anything(
    plane: Plane, attack: str
) -> None:
    path, body, said = EXTENSIVE[attack]
    key, _ = await deployed(plane, "acme")
    runs = await runs_of(plane)
    async with asked(plane, key, body_bytes=8 << 20) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == "request_too_extensive" and said in error["message"]
        assert "raise STACCATO_" in error["message"]
    assert runs == []


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/responses", {"input": [{"role": "nobody"}] * 2048}, "input"),
        ("/v1/completions", {"prompt": [1] + [None] * 200_000}, "prompt"),
        ("/v1/chat/completions", CHAT | {"allowed_token_ids": [None] * 1_500_000}, "allowed_token_ids"),
    ],
)
async def test_of_a_request_with_a_million_faults_a_few_are_told(
    plane: Plane, path: str, body: dict[str, object], field: str
) -> None:
    """vLLM makes a list of every fault, a kilobyte each, and tells of ten: the list took seconds and gigabytes."""
    key, _ = await deployed(plane, "acme")
    runs = await runs_of(plane)
    async with asked(plane, key, body_bytes=8 << 20) as client:
        answer = await client.post(path, json=CHAT | body)
    error = answer.json()["error"]
    assert (answer.status_code, runs) == (400, []) and field in error["param"]
    assert 0 < int(error["message"].split()[0]) < 300


async def test_tenants_of_one_engine_have_salts_of_their_own_whatever_they_ask_for(plane: Plane) -> None:
    keys = {tenant: await deployed(plane, tenant) for tenant in ("acme", "globex")}
    assert len({engine for _, engine in keys.values()}) == 1, "they share it"
    runs = await runs_of(plane)
    body = {"model": "chat", "prompt": "hello", "max_tokens": 1}
    for key, _ in keys.values():
        async with asked(plane, key) as client:
            for asks in ({}, {"cache_salt": "guess"}):
                made(await client.post("/v1/completions", json=body | asks), 200)
    salts = [_salt(run) for run in runs]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert all(len(salt) == 32 for salt in salts)


@pytest.mark.parametrize(("of", "model"), [("/deployments/chat", "chat@2"), ("/tenants/acme", "chat")])
async def test_requests_to_a_deployment_or_of_a_tenant_that_keeps_no_prefixes_have_salts_for_once(
    plane: Plane, of: str, model: str
) -> None:
    key, engine = await deployed(plane, "acme")
    made(await plane.admin.patch(of, json={"keep_prefixes": False}), 200)
    plane.auth.forget()
    await plane.report({engine: RESIDENT})
    runs, body = await runs_of(plane), {"model": model, "prompt": "hello", "max_tokens": 1}
    async with asked(plane, key) as client:
        for _ in range(2):
            made(await client.post("/v1/completions", json=body), 200)
    salts = {_salt(run) for run in runs}
    assert len(salts) == 2 and all(salt.startswith(wire.ONCE) and len(salt) > 32 for salt in salts)


def _salt(run: wire.Run) -> str:
    request: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode([run.payload])
    assert request.cache_salt
    return request.cache_salt


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{{ self.__init__.__globals__.__builtins__.open('MARK', 'w') }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{% include 'MARK' %}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
async def test_a_template_is_no_program(plane: Plane, tmp_path: Path, template: str) -> None:
    mark = tmp_path / "mark"
    key, _ = await deployed(
        plane, "acme", "evil", with_template(tmp_path / "model", template.replace("MARK", str(mark)))
    )
    runs = await runs_of(plane)
    async with asked(plane, key) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 400, answer.text
    assert not mark.exists() and not runs


def with_template(folder: Path, template: str) -> Path:
    """A copy of the model FAQ with the given chat template."""
    shutil.copytree(FAQ, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOP, "did not end within 3 s"),
        ("{% if messages[0].content == 'hello' %}" + LOOP + "{% endif %}", "did not end within 3 s"),
        ("{% if messages | length == 4 %}" + LOOP + "{% endif %}", "did not end within 3 s"),
        ("{% set a = messages %}{% set messages = a %}{% for m in messages %}{% endfor %}", "in no circle"),
    ],
    ids=["always", "when asked so", "when vLLM tries it on the event loop", "for its readers"],
)
async def test_a_template_without_an_end_harms_its_own_chats_alone(
    plane: Plane, tmp_path: Path, template: str, why: str
) -> None:
    good, engine = await deployed(plane, "globex")
    key, evil = await deployed(plane, "acme", "evil", with_template(tmp_path / "model", template))
    renewing = asyncio.create_task(renewed(plane, {engine: RESIDENT, evil: RESIDENT}))
    await runs_of(plane)
    globex = {"authorization": f"Bearer {good}"}
    async with asked(plane, key) as acme:
        made(await acme.post("/v1/chat/completions", json=CHAT, headers=globex), 200)
        began = time.monotonic()
        bad = [asyncio.create_task(acme.post("/v1/chat/completions", json=CHAT)) for _ in range(4)]
        answered = 0
        while not all(task.done() for task in bad):
            made(await acme.post("/v1/chat/completions", json=CHAT, headers=globex), 200)
            answered += 1
        took_s = time.monotonic() - began
        assert took_s < 15
        assert answered >= 2 * (took_s - 1), "globex waits for templates of acme, each of which takes 3 s"
        first, *others = (task.result() for task in bad)
        assert first.status_code == 400 and why in first.text, first.text
        assert all(why in answer.text or "come again" in answer.text for answer in others)
        await completed(acme, "chat")  # needs no template
    renewing.cancel()


async def renewed(plane: Plane, states: dict[str, ModelState]) -> None:
    """Keep renewing a runtime's lease."""
    while True:
        await plane.report(states)
        await asyncio.sleep(0.5)
