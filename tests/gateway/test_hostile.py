"""What tenants send and register with bad intent: nested bodies, salts of others, templates that are programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from store import wire
from store.wire import ModelState, Residency
from tests.gateway.plane import Plane, made
from tests.gateway.test_front import FAQ, asked, runs_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM and torch, which the front imports

RESIDENT = ModelState(residency=Residency.RESIDENT, load_ms=1.0)


async def deployed(plane: Plane, tenant: str, name: str = "chat", folder: Path = FAQ) -> tuple[str, str]:
    """The tenant's key, and the engine of its deployment."""
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
    folder, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(FAQ, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template.replace("MARK", str(mark))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    key, _ = await deployed(plane, "acme", "evil", folder)
    runs = await runs_of(plane)
    async with asked(plane, key) as client:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        answer = await client.post("/v1/chat/completions", json=body)
        assert 400 <= answer.status_code < 500 or answer.json()["error"]["code"] == "model_failed", answer.text
    assert not mark.exists() and not runs
