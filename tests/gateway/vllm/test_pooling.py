"""Embeddings, rerank, scores and labels by vLLM's handlers, through the whole gateway. The test plays the runtime."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx2  # the library below OpenAI's client
import openai
import pytest
import torch
from starlette.responses import JSONResponse
from starlette.types import Message
from vllm import PoolingParams
from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
from vllm.outputs import PoolingOutput, PoolingRequestOutput
from vllm.v1.engine import EngineCoreRequest

from gateway.core.extent import ExtentLimits
from gateway.inference.computed import Computed, Cost
from gateway.inference.context import TEXTS_AT_ONCE, RequestContext
from gateway.inference.meter import MeteredCall
from gateway.streams import relay
from gateway.vllm.bus_core import BusCore, Deps
from gateway.vllm.front import known
from gateway.vllm.pooling import PIECE_BYTES, vectors_response
from gateway.vllm.threads import WAITING_MOST
from store.contract import wire
from store.contract.limits import Account
from store.contract.tasks import Task
from store.contract.wire import Delta, Finish
from tests.conftest import soon
from tests.gateway import plane as planes
from tests.gateway.inference.test_response import TALLY
from tests.gateway.plane import Plane, made, until
from tests.gateway.vllm.vectors import US, VectorStage, scores, vector, vector_stage
from tests.store.test_bus import usage

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front

PRICE = 1_000_000_000  # price of a token in pico: a thousand tokens cost 1
LONG = "word " * 60  # with a byte for a token, longer than any model of the stage takes


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the control plane register models of every architecture, and the runtime be silent on a busy machine."""
    monkeypatch.setattr(relay, "SILENCE_S", 60.0)
    monkeypatch.setattr(planes, "ENGINES", planes.Engines(known(), frozenset(), frozenset()))


@pytest.fixture
async def embedder(engines: None, plane: Plane) -> AsyncIterator[VectorStage]:
    async with vector_stage(plane, ["embedder"]) as made_stage:
        yield made_stage


@pytest.fixture
async def scorer(engines: None, plane: Plane) -> AsyncIterator[VectorStage]:
    async with vector_stage(plane, ["scorer"]) as made_stage:
        yield made_stage


def tokens(stage: VectorStage) -> list[list[int]]:
    """The tokens of each text that the runtime was asked for."""
    return [list(text.prompt_token_ids or ()) for text in stage.runtime.texts]


async def limit(stage: VectorStage, **limits: object) -> str:
    """Give the tenant limits. Returns the tenant's id."""
    return str(made(await stage.plane.admin.patch("/tenants/acme", json={"limits": limits}), 200)["id"])


async def test_openais_client_gets_the_vector_of_each_text(embedder: VectorStage) -> None:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(embedder.app))
    client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=embedder.key, http_client=http, max_retries=0)
    texts = ["hello", "a longer text"]
    packed = await client.embeddings.create(model="embedder", input=texts)  # the client asks for base64
    plain = await client.embeddings.create(model="embedder", input=texts, encoding_format="float")
    of_tokens = await client.embeddings.create(model="embedder", input=[7, 8, 9], encoding_format="float")
    asked = tokens(embedder)
    assert [len(prompt) for prompt in asked] == [5, 13, 5, 13, 3] and asked[-1] == [7, 8, 9]
    for answer in (packed, plain):
        assert [item.index for item in answer.data] == [0, 1] and answer.model == "embedder"
        for item, prompt in zip(answer.data, asked[:2], strict=True):
            assert item.embedding == pytest.approx(vector(prompt), abs=1e-6)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (18, 18)
    assert of_tokens.data[0].embedding == pytest.approx(vector([7, 8, 9]), abs=1e-6)
    for run, text in zip(embedder.runtime.runs, embedder.runtime.texts, strict=True):
        assert (run.max_tokens, run.prompt_tokens) == (0, len(text.prompt_token_ids or ()))
        assert text.sampling_params is None and text.pooling_params is not None
        assert text.pooling_params.task == "embed" and text.cache_salt


async def test_a_decoder_embeds_texts_and_conversations(plane: Plane) -> None:
    async with vector_stage(plane, ["decoder"]) as stage:
        said = await stage.post("/v1/embeddings", "decoder", input="hello")
        talk = await stage.post("/v1/embeddings", "decoder", messages=[{"role": "user", "content": "hello"}])
        asked = tokens(stage)
        assert said["data"][0]["embedding"] == pytest.approx(vector(asked[0]), abs=1e-6)
        assert talk["data"][0]["embedding"] == pytest.approx(vector(asked[1]), abs=1e-6)
        assert len(asked[1]) > len(asked[0]), "the chat template of the model says who speaks"


async def test_a_call_has_a_row_of_prompt_tokens_alone_and_a_time(embedder: VectorStage) -> None:
    answer = await embedder.client.post("/v1/embeddings", json={"model": "embedder", "input": ["hello", "you"]})
    assert made(answer, 200)["usage"]["prompt_tokens"] == 8
    assert {"x-request-id", "x-staccato-cold", "x-staccato-queue-ms", "server-timing"} <= set(answer.headers)
    row = await embedder.row()
    assert (row.finish, row.prompt_tokens, row.output_tokens, row.gpu_us) == ("stop", 8, 0, 2 * US)
    assert row.elapsed is not None and row.elapsed.first_token_us is not None
    assert abs(sum(row.elapsed.parts_us.values()) - row.elapsed.total_us) <= len(row.elapsed.parts_us)
    seen = embedder.plane.recent.find(row.tenant_id, row.request)
    assert seen is not None and seen.breakdown is not None and seen.breakdown.first_token_ms is not None


async def test_documents_are_compared_with_a_query_by_the_vectors_of_an_embedder(embedder: VectorStage) -> None:
    documents = ["one", "two two", "and three"]
    ranked = await embedder.post("/v1/rerank", "embedder", query="q", documents=documents, top_n=2)
    vectors = [torch.tensor(vector(prompt)) for prompt in tokens(embedder)]
    expected = {index: float(torch.cosine_similarity(vectors[0], vectors[1 + index], 0)) for index in range(3)}
    best = sorted(expected, key=expected.__getitem__, reverse=True)[:2]
    assert [result["index"] for result in ranked["results"]] == best
    for result in ranked["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
        assert result["document"]["text"] == documents[result["index"]]
    assert ranked["usage"]["prompt_tokens"] == 1 + 3 + 7 + 9 == (await embedder.row()).prompt_tokens


async def test_a_cross_encoder_scores_each_pair_once(scorer: VectorStage) -> None:
    documents = ["one", "two two"]
    ranked = await scorer.post("/v1/rerank", "scorer", query="q", documents=documents)
    asked = tokens(scorer)
    assert len(asked) == 2, "a request for each pair"
    by_index = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    assert by_index == {index: pytest.approx(scores(prompt, 1)[0]) for index, prompt in enumerate(asked)}
    assert (await scorer.row()).prompt_tokens == sum(map(len, asked)) == ranked["usage"]["prompt_tokens"]
    scored = await scorer.post("/v1/score", "scorer", text_1="q", text_2=documents)
    assert [item["score"] for item in scored["data"]] == [by_index[0], by_index[1]]
    one = await scorer.post("/v1/classify", "scorer", input="hello")
    assert one["data"][0]["num_classes"] == 1 and one["data"][0]["probs"]


async def test_a_model_with_labels_classifies_and_scores_no_pairs(plane: Plane) -> None:
    async with vector_stage(plane, ["labeller"]) as stage:
        said = await stage.post("/v1/classify", "labeller", input=["hello", "you"])
        (first, second) = tokens(stage)
        assert [item["probs"] for item in said["data"]] == [
            pytest.approx(scores(prompt, 3)) for prompt in (first, second)
        ]
        assert said["usage"]["prompt_tokens"] == 8
        refused = await stage.post("/v1/score", "labeller", 501, text_1="q", text_2="d")
        assert "does not support Score API" in refused["error"]["message"]
        assert len(stage.runtime.runs) == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": LONG}, "maximum context length"),
        ({"input": ["a", LONG]}, "maximum context length"),
        ({"input": "a", "dimensions": 64}, "'embedder' does not support Matryoshka embeddings"),
        ({"input": []}, "at least one prompt"),
        ({"input": [[]]}, "empty"),
        ({"input": "a", "chat_template": "x", "messages": [{"role": "user", "content": "a"}]}, ""),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({}, ""),
    ],
)
async def test_a_faulty_call_is_refused_in_vllms_words_before_any_text_is_sent(
    embedder: VectorStage, body: dict[str, Any], says: str
) -> None:
    answer = await embedder.client.post("/v1/embeddings", json={"model": "embedder", **body})
    message = made(answer, 400)["error"]["message"]
    assert says in message and not embedder.runtime.runs
    assert str(embedder.plane.folder) not in message and embedder.engines[0] not in message and "--" not in message
    assert (await embedder.row()).prompt_tokens == 0


@pytest.mark.parametrize("fields", [{"max_tokens_per_doc": 4}, {"max_tokens_per_query": 2}])
async def test_texts_are_cut_in_a_thread_of_the_front(
    embedder: VectorStage, fields: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM alone would cut on the event loop, where each text is tokenised again and again."""
    from vllm.entrypoints.pooling.scoring import io_processor

    cut: list[bool] = []
    original = io_processor.truncate_text_to_tokens

    def noted(*args: Any) -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        cut.append(True)
        return original(*args)

    monkeypatch.setattr(io_processor, "truncate_text_to_tokens", noted)
    await embedder.post("/v1/rerank", "embedder", query="which", documents=["a long one", "b"], **fields)
    assert cut and sorted(map(len, tokens(embedder))) == ([1, 4, 5] if "max_tokens_per_doc" in fields else [1, 2, 10])


async def test_a_bulk_call_has_few_texts_with_runtimes_at_a_time(plane: Plane) -> None:
    """More texts than a tenant may have waiting for the threads of a front are prepared all the same."""
    count = WAITING_MOST + 100
    lengths = [1 + number % 9 for number in range(count)]
    async with vector_stage(plane, ["embedder"], extent=ExtentLimits(inputs_max=count)) as stage:
        runtime = stage.runtime
        runtime.answers = False
        texts = ["a" * length for length in lengths]
        asking = asyncio.create_task(stage.post("/v1/embeddings", "embedder", input=texts))
        await soon(lambda: len(runtime.runs) == TEXTS_AT_ONCE)
        await asyncio.sleep(0.2)
        assert len(runtime.runs) == TEXTS_AT_ONCE
        runtime.go_on()
        answer = await asking
        assert [round(item["embedding"][0] * 100) for item in answer["data"]] == lengths
        assert runtime.most == TEXTS_AT_ONCE and len(runtime.runs) == count
        row = await stage.row()
        assert (row.prompt_tokens, row.gpu_us) == (sum(lengths), US * count)


async def test_more_inputs_than_the_bound_are_refused_with_the_number(embedder: VectorStage) -> None:
    refused = await embedder.post("/v1/embeddings", "embedder", 400, input=["a"] * 1025)
    assert "1025 inputs" in refused["error"]["message"] and "STACCATO_INPUTS_MAX" in refused["error"]["message"]
    refused = await embedder.post("/v1/rerank", "embedder", 400, query="q", documents=["a"] * 1025)
    assert "`documents`: 1025 inputs" in refused["error"]["message"] and not embedder.runtime.runs


async def test_a_request_that_the_task_does_not_answer_is_refused_at_once(scorer: VectorStage) -> None:
    """No limit is touched and no front is built: the request of a minute is still there."""
    await limit(scorer, requests_per_minute=1)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/embeddings", {"input": "a"}), ("/v1/messages", chat)):
        error = (await scorer.post(path, "scorer", 404, **body))["error"]
        assert "'scorer' has the task `classify`" in error["message"] and "/v1/rerank" in error["message"]
    assert "`embed`" in (await scorer.post("/v1/embeddings", "scorer", 404, input="a"))["error"]["message"]
    assert not scorer.app.serving.fronts._fronts
    await scorer.post("/v1/score", "scorer", text_1="a", text_2="b")


async def test_texts_are_tokenised_for_a_deployment_of_every_task(embedder: VectorStage) -> None:
    said = await embedder.post("/v1/tokenize", "embedder", prompt="hello")
    assert said["count"] == 5
    assert (await embedder.post("/v1/detokenize", "embedder", tokens=said["tokens"]))["prompt"] == "hello"
    assert not embedder.runtime.runs


async def test_a_call_beyond_the_tokens_of_a_minute_is_refused_before_any_text_is_sent(embedder: VectorStage) -> None:
    await limit(embedder, tokens_per_minute=100)
    never = await embedder.post("/v1/embeddings", "embedder", 400, input=["a" * 60, "b" * 60])
    assert never["error"]["code"] == "request_too_large" and "texts have 120 tokens" in never["error"]["message"]
    answer = await embedder.client.post("/v1/embeddings", json={"model": "embedder", "input": ["a" * 60, "b" * 20]})
    assert made(answer, 200) and int(answer.headers["x-ratelimit-remaining-tokens"]) <= 21
    later = await embedder.client.post("/v1/embeddings", json={"model": "embedder", "input": ["a" * 30, "b" * 30]})
    assert made(later, 429)["error"]["code"] == "rate_limit_exceeded" and "retry-after" in later.headers
    assert len(embedder.runtime.runs) == 2, "no half of a call was computed"
    await embedder.post("/v1/embeddings", "embedder", input="a" * 20)


async def test_a_budget_pays_for_prompts_alone_and_then_lets_no_call_in(embedder: VectorStage) -> None:
    made(await embedder.plane.admin.post("/prices", json={"prompt_pico": PRICE, "output_pico": PRICE}))
    tenant = await limit(embedder, monthly_budget={"amount": "0.10", "currency": "USD"})  # for a hundred tokens
    await embedder.post("/v1/embeddings", "embedder", input=["a" * 50, "b" * 30])

    async def settled() -> bool:
        account, _ = await embedder.plane.bus.read(wire.QUOTAS, tenant, Account)
        return account is not None and int(account.spent) == 80 * PRICE

    await until(settled)
    refused = await embedder.client.post("/v1/embeddings", json={"model": "embedder", "input": ["a" * 15, "b" * 15]})
    assert made(refused, 429)["error"]["code"] == "budget_exhausted" and len(embedder.runtime.runs) == 2
    await embedder.post("/v1/embeddings", "embedder", input="a" * 20)  # the rest of the budget, to the last token
    assert sorted(row.prompt_tokens for row in await embedder.rows(3)) == [0, 20, 80]


async def test_a_text_that_its_runtime_fails_fails_the_call(embedder: VectorStage) -> None:
    embedder.runtime.fails_after = 2
    failed = await embedder.post("/v1/embeddings", "embedder", 503, input=["a", "b", "c", "d"])
    assert "the device failed" in failed["error"]["message"] and "data" not in failed
    assert (await embedder.row()).finish == "error"
    embedder.runtime.fails_after = None
    await embedder.post("/v1/embeddings", "embedder", input=["a", "b"])


async def test_an_answer_without_a_vector_fails_its_call_alone(embedder: VectorStage) -> None:
    embedder.runtime.empty = True
    failed = await embedder.post("/v1/embeddings", "embedder", 503, input=["a", "b"])
    assert "sent no vector" in failed["error"]["message"]
    embedder.runtime.empty = False
    await embedder.post("/v1/embeddings", "embedder", input=["a", "b"])


async def left(stage: VectorStage, body: dict[str, object], when: asyncio.Event) -> None:
    """Send a request whose client leaves at `when`."""
    bodies = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    headers = [(b"authorization", f"Bearer {stage.key}".encode()), (b"content-type", b"application/json")]
    path = "/v1/embeddings"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": ""}

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        await when.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(f"nobody hears {message['type']}")

    await stage.app({**scope, "query_string": b"", "headers": headers}, receive, send)


async def test_a_client_that_leaves_pays_for_the_texts_begun(embedder: VectorStage) -> None:
    embedder.runtime.answers_most, gone = 10, asyncio.Event()
    body = {"model": "embedder", "input": ["ab"] * 100}
    leaving = asyncio.create_task(left(embedder, body, gone))
    begun = 10 + TEXTS_AT_ONCE
    await soon(lambda: len(embedder.runtime.runs) == begun)
    await asyncio.sleep(0.1)
    gone.set()
    await leaving
    row = await embedder.row()
    assert (row.finish, row.prompt_tokens, row.output_tokens) == ("cancelled", 2 * begun, 0)
    assert row.gpu_us == US * begun
    assert not embedder.runtime.waiting and len(embedder.runtime.runs) == begun, "the rest was never sent"


def in_32_bits(answer: Any) -> Any:
    """The answer with numbers of 32 bits, as vectors have: versions of vLLM write numbers with more or fewer digits."""
    for item in answer["data"]:
        if isinstance(item["embedding"], list):
            item["embedding"] = torch.tensor(item["embedding"], dtype=torch.float32).tolist()
    return answer


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_vectors_are_written_one_by_one_as_vllm_writes_them_at_once(form: Any) -> None:
    outputs = [
        PoolingRequestOutput(str(n), PoolingOutput(torch.rand(4096) * 10.0**-n), [n] * 3, 0, finished=True)
        for n in range(12)
    ]
    asked = (outputs, "embd-1", 7, "model", form, "float32", "native")
    own = ServingEmbedding._openai_json_response(SimpleNamespace(json_response_cls=JSONResponse), *asked)
    pieces = [bytes(piece) async for piece in vectors_response(*asked).body_iterator]
    assert in_32_bits(json.loads(b"".join(pieces))) == in_32_bits(json.loads(bytes(own.body)))
    assert len(pieces) > 3 and max(map(len, pieces)) < 4 * PIECE_BYTES


async def test_a_call_is_answered_in_pieces(embedder: VectorStage) -> None:
    answer = await embedder.client.post("/v1/embeddings", json={"model": "embedder", "input": ["a", "b"]})
    assert len(made(answer, 200)["data"]) == 2 and "content-length" not in answer.headers


def test_a_prompt_answered_with_a_vector_is_begun_also_where_no_device_time_is_told() -> None:
    call, computed = MeteredCall(usage("a"), 0), Computed()
    cost = Cost(call, computed, computed.begin("a", "a", 7))
    cost.add(Delta(1, [], 0, Finish.ABORT))
    computed.charge(call)
    assert call.prompt_tokens == 0
    cost.add(Delta(1, [], 0, Finish.STOP))
    computed.charge(call)
    assert (call.prompt_tokens, call.output_tokens) == (7, 0)


class Reserving:
    """Stands where the admission of a tenant with limits is, and notes what is reserved."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    async def begin_texts(self, tokens: int) -> None:
        self.tokens.append(tokens)


async def test_a_text_reserves_what_was_not_reserved_for_the_call() -> None:
    """However a text comes to the core, no token passes the limits."""
    core = BusCore(Deps(None, None, "g1", 60.0), "k", Task.EMBED)  # type: ignore[arg-type]
    context = RequestContext("a", TALLY)
    context.admission = reserving = Reserving()  # type: ignore[assignment]
    text = EngineCoreRequest("a", [7] * 5, None, None, PoolingParams(task="embed"), 0.0, None, None, None)
    await core.reserve(context, 8)
    for _ in range(3):
        await core._reserve(context, text)
    assert reserving.tokens == [8, 2, 5] and context.reserved_tokens == 0
