"""vLLM's errors in the words of this platform: a single set of codes, our options for vLLM's flags, names for folders.

vLLM's errors name flags of `vllm serve`, and vLLM has several names for a kind of error. Clients of the gateway read
a single form: OpenAI's, or below /v1/messages Anthropic's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from starlette.types import Message, Send

from gateway.http.errors import Fault, Problem, endpoint_error

ERROR_BYTES_MOST = 1 << 20  # in the body of an error: a longer body is not read
UNREADABLE = "the request failed for a reason that can't be told here: quote the x-request-id to the operator"
CODES = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    422: "not_valid",
    429: "rate_limit_exceeded",
    500: "internal_error",
    501: "not_implemented",
    503: "unavailable",
}
_TOOLS = "a tool parser: deploy the model with `--tool-parser NAME`"
_REASONING = "a reasoning parser: deploy the model with `--reasoning-parser NAME`"
_FOREIGN = r"(?!tool-parser|reasoning-parser)[a-z][a-z0-9]+(?:-[a-z0-9]+)+"
# Sentences of vLLM about flags, and sentences for a person who deploys. The last pattern catches any further flag.
SAID: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"--enable-auto-tool-choice and --tool-call-parser to be set", _TOOLS),
        (r"--tool-call-parser to be set", _TOOLS),
        (
            r"thinking_token_budget is set but .*--reasoning-parser.*--reasoning-config to use \w+\.?",
            f"`thinking_token_budget` requires {_REASONING}",
        ),
        (
            r"--trust-request-chat-template is not set\. Refused.*",
            "templates of requests are not taken here: the model's own is used",
        ),
        (r"You must set `?--enable-(?:prompt|mm)-embeds`? to input (`\w+`)\.?", r"\1 is not offered here"),
        (
            r"Start the server with --trust-request-mm-kwargs only when clients are trusted\.?",
            "They stay disabled here.",
        ),
        (r"Set max_logprobs \(--max-logprobs\) to at least \d+\.?", "Ask for fewer."),
        (rf"`--{_FOREIGN}`|(?<![\w-])--{_FOREIGN}", "a setting of the platform"),
    )
)


class _Said(msgspec.Struct):
    """An error in vLLM's answer, in OpenAI's form or in Anthropic's."""

    message: str = UNREADABLE
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class _Body(msgspec.Struct):
    error: _Said


@dataclass(frozen=True)
class Wording:
    """How errors of a request are worded. `hidden`: vLLM's names of the model; clients read `name` instead."""

    route: str = ""  # vLLM's path of the request; decides between OpenAI's and Anthropic's form
    name: str = ""
    hidden: tuple[str, ...] = ()

    def text(self, said: str) -> str:
        """A sentence of vLLM without flags of vLLM and without paths."""
        for pattern, instead in SAID:
            said = pattern.sub(instead, said)
        for hidden in (*self.hidden, "<path>"):
            said = said.replace(hidden, self.name) if hidden else said
        return said

    def problem(self, body: bytes, status: int | None = None) -> Problem:
        """Return the Problem for `body`, an error of vLLM. Without `status` the error's own code is the status."""
        try:
            said = msgspec.json.decode(body, type=_Body).error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            said = _Said()
        if status is None:
            status = said.code if isinstance(said.code, int) and 400 <= said.code < 600 else 500
        message = self.text(said.message)
        faults = [Fault(f"/{said.param}", message)] if said.param else None
        if isinstance(said.code, str) and not said.code.isdigit():  # an error by gateway/vllm
            return Problem(status, said.code, message, faults, _headers(status), said.type)
        return Problem(status, _code(status), message, faults, _headers(status))

    def body(self, problem: Problem) -> bytes:
        """A Problem as JSON in the form of the route, OpenAI's or Anthropic's."""
        return msgspec.json.encode(endpoint_error(problem, self.route))

    def event(self, problem: Problem) -> bytes:
        """A Problem as the last event of a stream."""
        return (b"event: error\n" if self.event_named else b"") + b"data: " + self.body(problem) + b"\n\n"

    @property
    def event_named(self) -> bool:
        return self.route.startswith("/v1/messages")


PLAIN = Wording()  # OpenAI's form, and no names to hide


def unavailable(status: int, detail: str) -> Problem:
    """Return the Problem of a request that no runtime could serve to its end, or that its runtime refused."""
    return Problem(status, _code(status), detail, headers=_headers(status))


def _code(status: int) -> str:
    return CODES.get(status, CODES[400 if status < 500 else 500])


def _headers(status: int) -> dict[str, str]:
    return {"retry-after": "2"} if status == 503 else {}


class Reworded:
    """An ASGI `send`: passes answers on, and writes vLLM's errors anew in the words of `wording`."""

    def __init__(self, send: Send, wording: Wording) -> None:
        self._send, self._wording = send, wording
        self._head: Message | None = None  # of an error, until the body is complete
        self._body = b""
        self._said = False  # the error is written: the rest of vLLM's body is dropped

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._head = message
        elif self._head is None:
            await self._send(message)
        elif not self._said:
            self._body += message.get("body", b"")
            if not message.get("more_body", False) or len(self._body) > ERROR_BYTES_MOST:
                await self._say(self._head, self._body)

    async def _say(self, head: Message, said: bytes) -> None:
        problem = self._wording.problem(said, head["status"])
        body = self._wording.body(problem)
        mine = {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}
        mine |= {name.encode(): value.encode() for name, value in problem.headers.items()}
        kept = [(name, value) for name, value in head["headers"] if name.lower() not in mine]
        self._said = True
        await self._send({**head, "headers": [*kept, *mine.items()]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
