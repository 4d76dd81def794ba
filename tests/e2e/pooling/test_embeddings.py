"""Embeddings, scores and labels on two runtimes: bare vLLM's vectors, beside text, after sleep and after deaths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest

from store.contract.tasks import Task
from tests.conftest import free_port
from tests.e2e.conftest import MODELS, Platform
from tests.runtime.pooling.bare import Vectors, scores_of_bare_vllm, vectors_of_bare_vllm
from tests.runtime.pooling.models import VECTOR_MODELS, write_vector_model

pytestmark = pytest.mark.timeout(600)  # the first test starts a platform and builds four models at two runtimes
AGAIN_S = 240  # longest wait for a device process that starts again on a busy machine
NEAR = 2e-6  # float32: a batch adds in another order
NAMES = {
    "encoder": "BertModel mean",
    "decoder": "Qwen3ForCausalLM",
    "labels": "ModernBertForSequenceClassification",
    "ranker": "BertForSequenceClassification",
}
EMBEDDERS = ("encoder", "decoder")
PROMPTS = [[(31 * n * n + 7 * seed + 3) % 500 + 3 for n in range(10 + 9 * seed)] for seed in range(20)]
DOCUMENTS = ["a cat sat on a mat", "graphs of decode steps", "a dog", "one two three four five six"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vectors")
    labels = {"ranker": 1}
    return {name: write_vector_model(folder / name, of, labels=labels.get(name, 3)) for name, of in NAMES.items()}


@pytest.fixture(scope="module")
def bare(folders: dict[str, Path]) -> Vectors:
    tasks: dict[str, Task] = {name: VECTOR_MODELS[of].task for name, of in NAMES.items()}
    return vectors_of_bare_vllm(folders, tasks, PROMPTS)


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    held = {"STACCATO_HOLD_DEADLINE_S": str(AGAIN_S), "STACCATO_RESUME_DEADLINE_S": str(AGAIN_S)}
    platform = Platform(tmp_path_factory.mktemp("pair") / "data", free_port(), held)
    try:
        platform.start("--runtimes", "2", "--device-memory", "24MiB")
        for tenant in ("acme", "globex", "initech"):
            platform.tenant(tenant)
        for name, folder in {**folders, "faq": MODELS / "faq"}.items():
            platform.model(name, folder)
            status = platform.deploy("acme", name)["status"]
            assert status["phase"] in ("awake", "asleep"), status
        yield platform
    finally:
        code = platform.stop()
    assert code == 0


def ours(platform: Platform) -> openai.OpenAI:
    return platform.client("acme", timeout=AGAIN_S, max_retries=0)


def embedded(client: openai.OpenAI, name: str, prompts: Sequence[Sequence[int]], **more: Any) -> list[list[float]]:
    answer = client.embeddings.create(model=name, input=[list(prompt) for prompt in prompts], **more)
    assert [item.index for item in answer.data] == list(range(len(prompts)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    return [item.embedding for item in answer.data]


def near(made: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> bool:
    return bool(np.abs(np.array(made) - np.array(wanted)).max() <= NEAR)


def asked(platform: Platform, path: str, **body: Any) -> Any:
    response = platform.request("POST", path, body, platform.keys["acme"])
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_those_of_bare_vllm(pair: Platform, bare: Vectors, name: str) -> None:
    client = ours(pair)
    assert near(embedded(client, name, PROMPTS), bare[name])
    assert near(embedded(client, name, PROMPTS[:3], encoding_format="float"), bare[name][:3])
    one = client.embeddings.create(model=name, input=PROMPTS[5])
    assert near([one.data[0].embedding], bare[name][5:6])


def test_labels_are_those_of_bare_vllm(pair: Platform, bare: Vectors) -> None:
    answer = asked(pair, "/v1/classify", model="labels", input=PROMPTS)
    assert near([item["probs"] for item in answer["data"]], bare["labels"])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))


def test_a_rerank_orders_documents_by_bare_vllms_scores(pair: Platform, folders: dict[str, Path]) -> None:
    wanted = scores_of_bare_vllm(folders["ranker"], "a cat", DOCUMENTS)
    ranked = asked(pair, "/v1/rerank", model="ranker", query="a cat", documents=DOCUMENTS)
    scores = asked(pair, "/v1/score", model="ranker", text_1="a cat", text_2=DOCUMENTS)
    by_index = {item["index"]: item["relevance_score"] for item in ranked["results"]}
    assert near([[by_index[n] for n in range(len(DOCUMENTS))]], [wanted])
    assert near([[item["score"] for item in scores["data"]]], [wanted])
    order = [item["relevance_score"] for item in ranked["results"]]
    assert order == sorted(order, reverse=True) and len(set(order)) == len(DOCUMENTS)
    assert ranked["usage"]["total_tokens"] == scores["usage"]["total_tokens"] > sum(map(len, DOCUMENTS))


def test_embeddings_and_text_are_answered_beside_each_other(pair: Platform, bare: Vectors) -> None:
    client, question = ours(pair), [{"role": "user", "content": "Can a model scale to zero?"}]

    def talk() -> str | None:
        chat: Any = client.chat.completions.create(model="faq", messages=question, temperature=0)  # type: ignore[call-overload]
        return str(chat.choices[0].message.content)

    alone = talk()
    with ThreadPoolExecutor(8) as aside:
        talks = [aside.submit(talk) for _ in range(4)]
        calls = [(name, aside.submit(embedded, client, name, PROMPTS)) for name in EMBEDDERS * 4]
        assert all(near(call.result(AGAIN_S), bare[name]) for name, call in calls)
        assert {talk.result(AGAIN_S) for talk in talks} == {alone}


def test_a_sleeping_embedder_wakes_for_a_request(pair: Platform, bare: Vectors) -> None:
    deployments = {one["name"]: one["id"] for one in pair.get("/api/v1/deployments").json()["data"]}
    path = f"/api/v1/deployments/{deployments['encoder']}"
    pair.post(f"{path}:sleep", {})
    pair.until(lambda: pair.get(path).json()["status"]["phase"] == "asleep")
    assert near(embedded(ours(pair), "encoder", PROMPTS), bare["encoder"])


def test_vectors_are_made_again_after_their_devices_died_and_billed_once(pair: Platform, bare: Vectors) -> None:
    pair.deploy("globex", "encoder")
    client = pair.client("globex", timeout=AGAIN_S, max_retries=0)
    with ThreadPoolExecutor(1) as aside:
        call = aside.submit(embedded, client, "encoder", PROMPTS * 4)
        for device in pair.children("runtime.device"):
            with contextlib.suppress(psutil.NoSuchProcess):
                device.kill()
        assert near(call.result(AGAIN_S), bare["encoder"] * 4)
    booked = {"requests": 1, "prompt_tokens": 4 * sum(map(len, PROMPTS)), "output_tokens": 0}
    pair.until(lambda: pair.usage("globex")["requests"] == 1)
    assert pair.usage("globex") == booked


@pytest.mark.parametrize(
    "path, name, body",
    [
        ("/v1/chat/completions", "encoder", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", "faq", {"input": "x"}),
        ("/v1/classify", "encoder", {"input": "x"}),
        ("/v1/embeddings", "labels", {"input": "x"}),
    ],
)
def test_a_request_for_what_a_model_does_not_make_is_refused_with_what_the_model_makes(
    pair: Platform, path: str, name: str, body: dict[str, Any]
) -> None:
    before = pair.usage("acme")["requests"]
    refused = pair.request("POST", path, {"model": name, **body}, pair.keys["acme"])
    said = refused.json()["error"]["message"]
    assert refused.status_code in (400, 404) and name in said and "/v1/" in said
    assert pair.usage("acme")["requests"] == before


def test_a_text_longer_than_the_model_reads_is_refused(pair: Platform) -> None:
    with pytest.raises(openai.BadRequestError, match="256|maximum"):
        embedded(ours(pair), "encoder", [[5] * 300])


def test_a_tenant_without_a_deployment_finds_no_embedder(pair: Platform) -> None:
    with pytest.raises(openai.NotFoundError, match="encoder"):
        embedded(pair.client("initech", max_retries=0), "encoder", PROMPTS[:1])
