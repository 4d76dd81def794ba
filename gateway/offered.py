"""What a tenant's own endpoints offer: their paths, and what is said of them. gateway/inference.py serves them."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.api import Endpoint, Operation, Shown

# Our path → vLLM's. What is not here is not offered: vLLM has routes that are not for tenants.
GENERATING = {path: path for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")}
REPEATING = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize"}
MODELS = "/v1/models"

VLLM = "The body and the answer are as OpenAI, or for /v1/messages Anthropic, has them, served by vLLM."


class ModelCard(Shown, frozen=True, kw_only=True):
    """A deployment, as OpenAI shows a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelCards(Shown, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Asked(msgspec.Struct, frozen=True):
    """The part of a body that concerns us; vLLM reads the rest."""

    model: str  # the deployment's name, or name@revision


class Answered(msgspec.Struct, frozen=True):
    """vLLM's."""


_BODY = (400, 404, 408, 413, 422, 429)  # 422 and 501 are vLLM's alone
_GENERATE = Operation(
    Answered,
    body=Asked,
    media=("text/event-stream",),
    problems=(*_BODY, 501),
    openai=True,
    summary=f"Generate. {VLLM}",
)
_REPEAT = Operation(Answered, body=Asked, problems=(*_BODY, 501), openai=True, summary=f"Tokens of a text. {VLLM}")
_LIST = Operation(ModelCards, openai=True, summary="List the deployments that can be asked.")
_SHOW = Operation(ModelCard, openai=True, summary="Show a deployment that can be asked.")


def endpoints() -> list[Endpoint]:
    """With the tenant from the key, and with the tenant in the path."""
    offered = [
        ("GET", MODELS, _LIST),
        ("GET", MODELS + "/{name}", _SHOW),
        *(("POST", path, _GENERATE) for path in GENERATING),
        *(("POST", path, _REPEAT) for path in REPEATING),
    ]
    return [
        Endpoint(method, before + path, operation, "inference")
        for before in ("", "/t/{tenant}")
        for method, path, operation in offered
    ]
