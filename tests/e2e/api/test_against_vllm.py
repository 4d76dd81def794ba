"""The gateway held against `vllm serve` with an equal model: equal answers to every request, but for listed cases.

Both servers hear equal requests in equal order, without overlap. Ids, times and fingerprints are masked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.bench.gateway.servers import VllmServer
from tests.e2e.api.beside import Answered, Case, ask, differences
from tests.e2e.api.beside_cases import BATCH, CASES
from tests.e2e.conftest import Platform
from tests.e2e.thinker import write_thinker

MODEL, CONTEXT, KV_BYTES = "thinker", 1024, 64 << 20
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
FLAGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", PARSERS["tool_parser"]),
    *("--reasoning-parser", PARSERS["reasoning_parser"], "--enable-prompt-tokens-details"),
)


@dataclass(frozen=True)
class Allowed:
    """A wanted difference: regular expressions for names of cases and for JSON pointers, and the reason."""

    cases: str
    place: str
    reason: str


ALLOWED = (
    Allowed("models", "/data/0/owned_by", "a deployment is its tenant's"),
    Allowed("models", "/data/0/root", "the digest of the model's files: a tenant does not read paths of the server"),
    Allowed(
        ".*",
        "/error/(type|code)",
        "one set of OpenAI's types and of codes, which are texts: vLLM says `BadRequestError` here and `Bad Request` "
        "there for one status, and its code is the status again",
    ),
    Allowed(
        "messages.*",
        "/type|/error/(param|code)",
        "Anthropic's form for every error: vLLM answers bodies that it can't read in OpenAI's form",
    ),
    Allowed(
        ".*: a (grammar|regular expression) that is none",
        "/error/message",
        "xgrammar's reason: vLLM has two more libraries, whose compiled grammars can't leave their process",
    ),
    Allowed(".*: a model that is not there", "/error/message", "deployments are named so, and nobody's are listed"),
)


@dataclass(frozen=True)
class Servers:
    theirs: httpx.Client
    ours: httpx.Client


@pytest.fixture(scope="module")
def servers(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start `vllm serve`, and deploy the model on the platform for the tenant `beside`."""
    folder = tmp_path_factory.mktemp("beside")
    model = write_thinker(folder / "model")
    vllm = VllmServer(model, MODEL, folder, CONTEXT, KV_BYTES, *FLAGS)
    try:
        vllm.start()
        key = platform.tenant("beside")
        platform.model(MODEL, model)
        deployment = platform.deploy("beside", MODEL, **PARSERS, scaling={"idle": "never"})
        assert deployment["status"]["phase"] == "awake"
        headers = {"authorization": f"Bearer {key}"}
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{vllm.port}") as theirs,
            httpx.Client(base_url=platform.url, headers=headers) as ours,
        ):
            yield Servers(theirs, ours)
        platform.request("DELETE", f"/api/v1/deployments/{deployment['id']}")
    finally:
        vllm.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gateway_answers_as_vllm_does(servers: Servers, case: Case) -> None:
    theirs = ask(servers.theirs, case, MODEL)
    ours = ask(servers.ours, case.below_v1, MODEL)
    assert theirs.status == case.status, f"vLLM answers otherwise than the case says: {theirs.body}"
    wrong = [found for found in differences(theirs, ours) if not allowed(case, found[0])]
    assert not wrong


def allowed(case: Case, place: str) -> bool:
    return any(re.fullmatch(a.cases, case.name) and re.fullmatch(a.place, place) for a in ALLOWED)


def test_without_a_model_the_only_deployment_answers_as_vllms_only_model_does(servers: Servers) -> None:
    for case in (CASES[1], next(case for case in CASES if case.path == "/tokenize")):
        unnamed = Case(case.name, case.path, {"model": None, **case.body}, case.status)
        theirs, ours = ask(servers.theirs, unnamed, MODEL), ask(servers.ours, unnamed.below_v1, MODEL)
        assert (theirs.status, list(differences(theirs, ours))) == (200, [])


def test_a_batch_that_is_to_be_streamed_is_refused_where_vllm_loses_text(servers: Servers) -> None:
    """vLLM takes a batch with `stream`, and answers with the last piece of every text, a piece of random size."""
    given = next(case for case in CASES if case.path == BATCH and case.status == 200)
    refused = ask(servers.ours, Case(given.name, given.below_v1.path, {**given.body, "stream": True}, 400), MODEL)
    assert refused.status == 400 and "a batch is answered in one piece" in refused.body["error"]["message"]


def test_there_are_enough_requests_of_each_kind() -> None:
    paths = {case.path for case in CASES}
    assert len(CASES) >= 60 and len({case.name for case in CASES}) == len(CASES)
    assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    assert paths >= {"/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/chat/completions/batch"}
    assert sum(case.status >= 400 for case in CASES) >= 20
    assert sum(bool(case.body.get("stream")) for case in CASES) >= 10


def test_a_difference_is_found() -> None:
    theirs = Answered(200, "application/json", {"a": [1, {"logprob": -1.0}], "b": None})
    ours = Answered(200, "application/json", {"a": [2, {"logprob": -1.00001}]})
    assert [place for place, _ in differences(theirs, ours)] == ["/a/0", "/b"]
