"""Errors of vLLM in the platform's words: options for flags of vLLM, names for folders, a fixed code for a status."""

from __future__ import annotations

import json

import pytest
from starlette.types import Message

from gateway.http.vllm_errors import PLAIN, Reworded, Wording

SAID = {
    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set': (
        '"auto" tool choice requires a tool parser: deploy the model with `--tool-parser NAME`'
    ),
    'tool_choice="required" requires --tool-call-parser to be set': (
        'tool_choice="required" requires a tool parser: deploy the model with `--tool-parser NAME`'
    ),
    "thinking_token_budget is set but reasoning_config is not configured. Please set --reasoning-parser "
    "and/or --reasoning-config to use thinking_token_budget.": (
        "`thinking_token_budget` requires a reasoning parser: deploy the model with `--reasoning-parser NAME`"
    ),
    "You must set `--enable-prompt-embeds` to input `prompt_embeds`.": "`prompt_embeds` is not offered here",
    "You must set `--enable-mm-embeds` to input `image_embeds`": "`image_embeds` is not offered here",
    "max_logprobs is 20. Set max_logprobs (--max-logprobs) to at least 30.": "max_logprobs is 20. Ask for fewer.",
    "Pass --some-new-flag with care": "Pass a setting of the platform with care",
    "/models/abc/faq is not a multimodal model": "chat is not a multimodal model",
    "3f2a-11 is not a multimodal model": "chat is not a multimodal model",
    "<path> is not a multimodal model": "chat is not a multimodal model",
    "a -- b, 4--5 and max-len stay": "a -- b, 4--5 and max-len stay",
}
WORDING = Wording("/v1/chat/completions", "chat", ("/models/abc/faq", "3f2a-11"))


@pytest.mark.parametrize("said", SAID)
def test_flags_of_vllm_and_paths_reach_nobody(said: str) -> None:
    assert WORDING.text(said) == SAID[said]


def body(status: int, kind: str, code: object) -> bytes:
    return json.dumps({"error": {"message": "no", "type": kind, "param": "n", "code": code}}).encode()


@pytest.mark.parametrize(
    ("said", "status", "code", "kind"),
    [
        (body(400, "BadRequestError", 400), 400, "invalid_request", "invalid_request_error"),
        (body(400, "Bad Request", 400), 400, "invalid_request", "invalid_request_error"),
        (body(404, "invalid_request_error", 404), 404, "not_found", "not_found_error"),
        (body(503, "Service Unavailable", 503), 503, "unavailable", "server_error"),
        (body(503, "server_error", "template_busy"), 503, "template_busy", "server_error"),
        (body(429, "requests", "rate_limit_exceeded"), 429, "rate_limit_exceeded", "requests"),
        (body(418, "Teapot", 418), 418, "invalid_request", "invalid_request_error"),
        (b'{"error": "?"}', 500, "internal_error", "server_error"),
        (b"\xff", 500, "internal_error", "server_error"),
    ],
)
def test_a_status_has_one_type_and_one_code_whatever_vllm_calls_the_error(
    said: bytes, status: int, code: str, kind: str
) -> None:
    problem = PLAIN.problem(said, status)
    error = json.loads(PLAIN.body(problem))["error"]
    assert (problem.status, error["code"], error["type"]) == (status, code, kind)


def test_an_event_says_its_own_status() -> None:
    assert PLAIN.problem(body(503, "Service Unavailable", 503)).status == 503
    assert PLAIN.problem(body(0, "x", "abc")).status == 500


async def reworded(wording: Wording, status: int, *pieces: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    write = Reworded(send, wording)
    length = str(sum(map(len, pieces))).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"x-own", b"1")]
    await write({"type": "http.response.start", "status": status, "headers": headers})
    for at, piece in enumerate(pieces, 1):
        await write({"type": "http.response.body", "body": piece, "more_body": at < len(pieces)})
    head, *rest = sent
    return head["status"], dict(head["headers"]), b"".join(message["body"] for message in rest)


async def test_an_error_that_comes_in_pieces_is_written_anew_with_its_own_length() -> None:
    said = body(400, "BadRequestError", 400)
    status, headers, text = await reworded(WORDING, 400, said[:9], said[9:])
    assert status == 400 and headers[b"x-own"] == b"1"
    assert int(headers[b"content-length"]) == len(text)
    assert json.loads(text)["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_request",
    }


async def test_an_error_below_messages_has_anthropics_form() -> None:
    said = json.dumps({"type": "error", "error": {"type": "BadRequestError", "message": "no"}}).encode()
    _, _, text = await reworded(Wording("/v1/messages"), 400, said)
    assert json.loads(text) == {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}


async def test_of_an_error_without_end_nothing_is_kept() -> None:
    status, _, text = await reworded(WORDING, 400, b"x" * (1 << 20), b"y", b"z")
    assert status == 400 and "x-request-id" in json.loads(text)["error"]["message"]


async def test_an_answer_passes_as_it_is() -> None:
    assert (await reworded(WORDING, 200, b"<path>", b" --some-flag"))[2] == b"<path> --some-flag"
