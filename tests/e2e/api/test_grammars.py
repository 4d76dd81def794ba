"""A grammar costs only the sender: other tenants keep their turns, and a faulty grammar is a bad request."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.conftest import free_port
from tests.e2e.conftest import MODELS, Platform

WORDS = ["".join(letters) for letters in itertools.islice(itertools.product("abcdefghij", repeat=7), 30_000)]
HUGE = {"choice": WORDS}  # some seconds of a processor
TOO_SLOW_S = 300  # processor time, beyond the need of any grammar in the tests
SETTLED_S = 5.0  # longer than a report of a runtime takes, beside busy loops too


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with bounds wide enough for huge grammars, and a model for each of two tenants."""
    bounds = {
        "STACCATO_GRAMMAR_BYTES_MAX": "4MiB",
        "STACCATO_GRAMMAR_CPU_S": str(TOO_SLOW_S),
        "STACCATO_GRAMMAR_MEMORY": "4GiB",
        "STACCATO_GRAMMAR_COMPILED_MAX": "64MiB",
    }
    platform = Platform(tmp_path_factory.mktemp("grammars") / "data", free_port(), bounds)
    platform.start("--device-memory", "256MiB")
    try:
        for tenant, model in (("acme", "faq"), ("globex", "poet")):
            platform.tenant(tenant)
            platform.model(model, MODELS / model)
            platform.deploy(tenant, model)
        yield platform
    finally:
        platform.stop()


def turns(platform: Platform, tenant: str) -> int:
    """Turns on the device of the model behind the tenant's only deployment, as last told by the runtime."""
    (gpu,) = platform.get("/api/v1/gpus").json()["data"]
    (model,) = [model for model in gpu["models"].values() if model["deployments"][0].startswith(f"{tenant}/")]
    return int(model["turns"])


def settled_turns(platform: Platform, tenant: str) -> int:
    """`turns`, once reports of earlier requests have come."""
    seen = -1
    while (now := turns(platform, tenant)) != seen:
        seen = now
        time.sleep(SETTLED_S)
    return seen


def compiling(platform: Platform) -> bool:
    """Whether any grammar is being compiled: the compiler has a child."""
    return any(process.children() for process in platform.children("runtime.engine.compiling"))


def ask(platform: Platform, tenant: str, model: str, grammar: dict[str, object], timeout_s: float) -> httpx.Response:
    body = {"model": model, "prompt": "a", "max_tokens": 5, "structured_outputs": grammar}
    headers = {"authorization": f"Bearer {platform.keys[tenant]}"}
    return httpx.post(f"{platform.url}/v1/completions", json=body, headers=headers, timeout=timeout_s)


def test_an_unsupported_grammar_is_a_bad_request_that_costs_nothing(raised: Platform) -> None:
    before = raised.usage("acme")
    with pytest.raises(openai.BadRequestError) as refused:
        raised.client("acme", max_retries=0).completions.create(
            model="faq", prompt="a", max_tokens=5, extra_body={"structured_outputs": {"regex": "\\p{L}+"}}
        )
    assert "Unicode character class" in str(refused.value)
    answer = ask(raised, "acme", "faq", {"choice": ["yes", "no"]}, 60)
    assert answer.json()["choices"][0]["text"] in ("yes", "no")
    raised.until(lambda: raised.usage("acme")["requests"] > before["requests"])
    assert raised.usage("acme")["prompt_tokens"] - before["prompt_tokens"] < 5, "the refused request has no prompt"


def test_while_a_huge_grammar_is_compiled_its_model_takes_no_turn_and_another_tenant_goes_on(raised: Platform) -> None:
    ask(raised, "acme", "faq", {"choice": ["yes", "no"]}, 60)
    client = raised.client("globex")
    before = settled_turns(raised, "acme")
    attack = threading.Thread(target=ask, args=(raised, "acme", "faq", HUGE, 300))
    attack.start()
    raised.until(lambda: compiling(raised), 60)
    made = 0
    while compiling(raised) and made < 400:
        stream = client.completions.create(
            model="poet", prompt="a", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        )
        made += sum(1 for _ in stream)
        if compiling(raised):
            assert turns(raised, "acme") == before, "a model whose only request waits for its grammar has no turn"
    assert made >= 40
    attack.join()
    raised.until(lambda: turns(raised, "acme") > before)


def test_a_client_that_leaves_takes_its_grammar_along(raised: Platform) -> None:
    ask(raised, "acme", "faq", {"choice": ["yes", "no"]}, 60)
    with pytest.raises(httpx.TimeoutException):
        ask(raised, "acme", "faq", {"regex": "(" + "|".join(WORDS[::-1]) + "){1,9}"}, 3)
    raised.until(lambda: not compiling(raised), 20)
    assert ask(raised, "acme", "faq", {"choice": ["no", "yes"]}, 60).status_code == 200
