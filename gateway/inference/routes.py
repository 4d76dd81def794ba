"""Paths of a tenant's endpoints, with the openapi.json entry of each path. gateway/inference/endpoint.py serves the
endpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec

from gateway.http.api import Endpoint, Operation, Shown
from gateway.http.errors import MESSAGES
from store.contract.tasks import Task
from store.db.operators import Scope

BATCH = "/v1/chat/completions/batch"
# The platform's path → vLLM's path. A path not listed is not offered: vLLM has routes that are not for tenants.
GENERATING = {
    path: path
    for path in (
        "/v1/chat/completions",
        BATCH,
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
    )
}
COUNT_TOKENS = "/v1/messages/count_tokens"
REPEATING = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize", COUNT_TOKENS: COUNT_TOKENS}
# Paths for vectors and scores. Devices work for such a call, and make no tokens.
EMBEDDINGS, CLASSIFY = "/v1/embeddings", "/v1/classify"
SCORING = {"/v1/rerank": "/rerank", "/v1/score": "/score"}
POOLING = {EMBEDDINGS: EMBEDDINGS, **SCORING, CLASSIFY: "/classify"}
ROUTES = GENERATING | REPEATING | POOLING
# By task: the paths that a deployment answers, besides the paths that every deployment answers.
OF_TASK: dict[Task, tuple[str, ...]] = {
    Task.GENERATE: (*GENERATING, COUNT_TOKENS),
    Task.EMBED: (EMBEDDINGS, *SCORING),
    Task.CLASSIFY: (CLASSIFY, *SCORING),
}
OF_EVERY_TASK = tuple(path for path in REPEATING if path != COUNT_TOKENS)
MODELS = "/v1/models"
OPERATOR: tuple[Scope, ...] = ("tenants",)  # an operator who makes a tenant's keys may do what the keys may

VLLM = "The body and the answer are as OpenAI, or for /v1/messages Anthropic, has them, served by vLLM."


class ModelPermission(Shown, frozen=True, kw_only=True):
    """Permissions of a deployment, in the form OpenAI's first clients read. vLLM's values, for every deployment."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Shown, frozen=True, kw_only=True):
    """A deployment, as OpenAI shows a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str  # digest of the model's files
    parent: str | None = None  # in vLLM, the base model of an adapter: None for a deployment
    max_model_len: int
    permission: list[ModelPermission]


class ModelCards(Shown, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ModelBody(msgspec.Struct, frozen=True):
    """The part of a body that concerns the gateway; vLLM reads the rest."""

    model: str | None = None  # the deployment's name, or name@revision; None: the tenant's only deployment
    service_tier: str | None = None  # priority (high) or flex (batch); others leave the priority to the deployment


class VllmResponse(msgspec.Struct, frozen=True):
    """An answer of vLLM."""


_BODY = (400, 404, 408, 413, 422, 429)  # 422 and 501 are vLLM's alone
_GENERATE = Operation(
    VllmResponse,
    body=ModelBody,
    media=("text/event-stream",),
    problems=(*_BODY, 501),
    openai=True,
    operator=OPERATOR,
    summary=f"Generate. {VLLM}",
)
_REPEAT = Operation(
    VllmResponse,
    body=ModelBody,
    problems=(*_BODY, 501),
    openai=True,
    operator=OPERATOR,
    summary=f"Tokens of a text. {VLLM}",
)
_POOL = replace(_REPEAT, summary=f"Vectors or scores of texts. {VLLM}")
_MESSAGES = {path: replace(said, anthropic=True) for path, said in ((MESSAGES, _GENERATE), (COUNT_TOKENS, _REPEAT))}
_LIST = Operation(
    ModelCards, problems=(404,), openai=True, operator=OPERATOR, summary="List the deployments that can be asked."
)
_SHOW = Operation(ModelCard, openai=True, operator=OPERATOR, summary="Show a deployment that can be asked.")


def endpoints() -> list[Endpoint]:
    """Endpoints for each path, with the tenant from the key and with the tenant in the path."""
    offered = [
        ("GET", MODELS, _LIST),
        ("GET", MODELS + "/{name}", _SHOW),
        *(("POST", path, _MESSAGES.get(path, _GENERATE)) for path in GENERATING),
        *(("POST", path, _MESSAGES.get(path, _REPEAT)) for path in REPEATING),
        *(("POST", path, _POOL) for path in POOLING),
    ]
    return [
        Endpoint(method, before + path, operation, "inference")
        for before in ("", "/t/{tenant}")
        for method, path, operation in offered
    ]
