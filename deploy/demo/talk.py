"""Chats through the official `openai` client, with a count of the tokens that the answers report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types import CompletionUsage

ANSWER_TOKENS_MOST = 150


@dataclass(frozen=True)
class Answer:
    """A whole answer, received as a stream."""

    text: str
    first_ms: int  # until the first words
    cold: str  # the place the model came from: none | host | disk
    wake_ms: str | None


class Tenant:
    """A client of the platform, with a book of its own: tokens by model, as reported in the answers."""

    def __init__(self, name: str, url: str, key: str) -> None:
        self.name = name
        # Proxies of the environment are ignored for the local machine.
        self.client = AsyncOpenAI(
            base_url=f"{url}/t/{name}/v1",
            api_key=key,
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        )
        self.counted: dict[str, Counter[str]] = {}

    def count(self, model: str, usage: CompletionUsage | None) -> None:
        assert usage is not None, f"{model} gave no usage"
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        counts = {"prompt": usage.prompt_tokens - cached, "cached": cached, "output": usage.completion_tokens}
        self.counted.setdefault(model, Counter()).update(counts)

    async def ask(self, model: str, question: str, heard: Callable[[str], None] = lambda model: None) -> Answer:
        """Stream an answer; `heard` gets the model's name at every piece of text."""
        began_s, first_s = time.monotonic(), 0.0
        raw = await self.client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=ANSWER_TOKENS_MOST,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces: list[str] = []
        async for chunk in raw.parse():
            if chunk.usage:
                self.count(model, chunk.usage)
            if chunk.choices and (piece := chunk.choices[0].delta.content):
                first_s = first_s or time.monotonic()
                pieces.append(piece)
                heard(model)
        first_ms = round((first_s - began_s) * 1e3)
        return Answer("".join(pieces), first_ms, raw.headers["x-staccato-cold"], raw.headers.get("x-staccato-wake-ms"))

    async def close(self) -> None:
        await self.client.close()
