"""`staccato chat`: talk to a deployment through its own endpoint, and see the time to the first token."""

from __future__ import annotations

import json as json_module
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.api import RETRYABLE, USAGE, CliError, Row
from gateway.cli.deployments import EXAMPLES, Name, find
from gateway.cli.terminal.options import Json, Key, Tenant, Url, connect
from gateway.cli.terminal.output import at, note, print_json, text
from store.contract.series import PARTS
from store.contract.tasks import Task

if TYPE_CHECKING:
    import httpx

    from gateway.cli.terminal.client import GatewayClient

PARTS_MOST = 3  # parts of a time to show, the longest first


@dataclass(frozen=True)
class ChatAnswer:
    """A whole answer."""

    text: str
    ttft_ms: float
    seconds: float
    cold: str  # none | host | disk
    timing_ms: Mapping[str, float]  # parts of the time to the first byte, by Server-Timing
    usage: object

    def summary(self) -> str:
        """`[warm, first token after 41 ms (prefill 38 ms), 12 tokens in 0.5 s, 26 tokens/s]`"""
        start = "warm" if self.cold == "none" else f"cold start from {self.cold}"
        longest = sorted(self.timing_ms.items(), key=lambda part: -part[1])[:PARTS_MOST]
        parts = ", ".join(f"{part} {ms:.0f} ms" for part, ms in longest if ms >= 1)
        first = f"first token after {self.ttft_ms:.0f} ms" + (f" ({parts})" if parts else "")
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.3g} tokens/s"
        return f"[{start}, {first}, {at(self.usage, 'completion_tokens')} tokens in {self.seconds:.2f} s{speed}]"

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None without a second token."""
        tokens, rest_s = at(self.usage, "completion_tokens"), self.seconds - self.ttft_ms / 1e3
        return (tokens - 1) / rest_s if isinstance(tokens, int) and tokens > 1 and rest_s > 0 else None


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
                print_json({**vars(said), "tokens_per_s": said.tokens_per_s})
            else:
                note(said.summary())


def endpoint(gateway: GatewayClient, name: str, tenant: str | None) -> str:
    """Return the path of the endpoint of the deployment's tenant; /v1 with a key that may not look up deployments.

    Raises CliError for a deployment that makes no text.
    """
    try:
        row = find(gateway, name.partition("@")[0], tenant)
    except CliError as error:
        if error.status != 403:
            raise
        return f"/t/{tenant}/v1" if tenant else "/v1"
    path, task = f"/t/{row['tenant']}/v1", Task(text(row["task"]))
    if task.pools:
        remedy = f"send texts to {gateway.url}{path}/{EXAMPLES[task][0]}"
        raise CliError(f"{name} makes vectors or scores, and no text to chat with: {remedy}", USAGE)
    return path


def lines() -> Iterator[str]:
    """Yield the user's lines until the end of input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line


def ask(gateway: GatewayClient, path: str, body: Row, echo: bool) -> ChatAnswer:
    """Stream an answer, with `echo` to the terminal. Raises CliError, also for an error in the stream."""
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
        timing_ms = server_timing(response.headers.get("server-timing", ""))
    if echo:
        typer.echo()
    ended_s = time.monotonic()
    ttft_ms = round(((first_s or ended_s) - began_s) * 1e3, 3)
    return ChatAnswer("".join(pieces), ttft_ms, ended_s - began_s, cold, timing_ms, usage)


def server_timing(header: str) -> dict[str, float]:
    """Return part → milliseconds, without sums and without unknown parts."""
    found = re.findall(r"([\w-]+);dur=(\d+(?:\.\d+)?)", header)
    return {part: float(ms) for part, ms in found if part in PARTS}


def events(response: httpx.Response) -> Iterator[Row]:
    """Yield the events of a stream. Raises CliError if the stream has an error or ends without [DONE]."""
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
