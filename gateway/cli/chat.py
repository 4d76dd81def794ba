"""`staccato chat`: talk to a deployment through its own endpoint, and see how long the first token took."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.api import RETRYABLE, CliError, Row
from gateway.cli.deployments import Name, find
from gateway.cli.options import Json, Key, Tenant, Url, connect
from gateway.cli.output import at, note, print_json

if TYPE_CHECKING:
    import httpx

    from gateway.cli.client import Gateway


@dataclass(frozen=True)
class Said:
    """One answer, whole."""

    text: str
    ttft_ms: int
    seconds: float
    cold: str  # none | host | disk
    usage: object

    def summary(self) -> str:
        start = "warm" if self.cold == "none" else f"cold start from {self.cold}"
        tokens = at(self.usage, "completion_tokens")
        return f"[{start}, first token after {self.ttft_ms} ms, {tokens} tokens in {self.seconds:.2f} s]"


def chat(
    name: Name,
    message: Annotated[str | None, typer.Argument(help="Without it: a conversation, a line a turn.")] = None,
    tenant: Tenant = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Talk to a deployment."""
    options = {"max_tokens": max_tokens, "temperature": temperature}
    body: Row = {"model": name, **{option: value for option, value in options.items() if value is not None}}
    messages: list[Row] = [{"role": "system", "content": system}] if system else []
    with connect(url, key) as gateway:
        path = f"{endpoint(gateway, name, tenant)}/chat/completions"
        for line in [message] if message is not None else lines():
            messages.append({"role": "user", "content": line})
            said = ask(gateway, path, {**body, "messages": messages}, echo=not json)
            messages.append({"role": "assistant", "content": said.text})
            if json:
                print_json(vars(said))
            else:
                note(said.summary())


def endpoint(gateway: Gateway, name: str, tenant: str | None) -> str:
    """The tenant's own; whose it is, is looked up where nobody says so. A key without the scope asks at /v1."""
    if tenant is None:
        try:
            tenant = str(find(gateway, name, None)["tenant"])
        except CliError as error:
            if error.status != 403:
                raise
            return "/v1"
    return f"/t/{tenant}/v1"


def lines() -> Iterator[str]:
    """What the person types, until the end of input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line


def ask(gateway: Gateway, path: str, body: Row, echo: bool) -> Said:
    """Streams one answer, to the terminal as it comes with `echo`. Raises CliError, also for an error in the stream."""
    began_s, first_s = time.monotonic(), 0.0
    pieces: list[str] = []
    usage: object = None
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with gateway.stream("POST", path, request) as response:
        for event in events(response):
            usage = event.get("usage") or usage
            if piece := content(event):
                first_s = first_s or time.monotonic()
                pieces.append(piece)
                if echo:
                    typer.echo(piece, nl=False)
        cold = response.headers.get("x-staccato-cold", "none")
    if echo:
        typer.echo()
    ended_s = time.monotonic()
    return Said("".join(pieces), round(((first_s or ended_s) - began_s) * 1e3), ended_s - began_s, cold, usage)


def events(response: httpx.Response) -> Iterator[Row]:
    """Raises CliError when the stream ends without [DONE], or with an error in it."""
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == line:
            continue  # an empty line, or a comment: the model is waking
        if data == "[DONE]":
            return
        event = json_module.loads(data)
        if isinstance(error := event.get("error"), Mapping):
            raise CliError(f"the answer broke off: {error.get('message')}", RETRYABLE)
        yield event
    raise CliError("the answer broke off without an end: try again", RETRYABLE)


def content(event: Row) -> str:
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return str(at(first, "delta.content") or "")
