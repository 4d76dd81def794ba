"""Tokens that devices computed for a client's request, as far as this gateway has heard.

An answer is metered as pieces go to the socket (gateway/inference/response.py): a call counts tokens delivered.
A client that leaves pays for the prompts and for the tokens made until the devices heard of the cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from gateway.inference.meter import MeteredCall
from store.contract.wire import NOTHING_SPENT, Delta, Finish, Spent


@dataclass(slots=True)
class Prompt:
    """A prompt of a request, shared by the choices of the prompt."""

    tokens: int
    cached_tokens: int = 0
    begun: bool = False  # a device has computed some of the prompt
    answered: bool = False  # a first token came, and with the token how much of the prompt was cached


@dataclass(slots=True)
class Computed:
    """Tokens computed for a call. A call may have several prompts, and a prompt several choices."""

    output_tokens: int = 0
    prompts: dict[str, Prompt] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)  # ids of engine requests still running
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, id: str, prompt: str, tokens: int) -> Prompt:
        """Note an engine's request `id` for the prompt named `prompt`, of `tokens` tokens; returns the prompt."""
        self.open.add(id)
        self._settled.clear()
        return self.prompts.setdefault(prompt, Prompt(tokens))

    def end(self, id: str) -> None:
        """Note the end of the engine's request `id`: no further token of the request will come."""
        self.open.discard(id)
        if not self.open:
            self._settled.set()

    async def settled(self, timeout_s: float) -> None:
        """Return when the last of the call's engine requests has ended, or after `timeout_s` seconds."""
        if self.open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._settled.wait()

    def charge(self, call: MeteredCall) -> None:
        """Raise the call's tokens from the number delivered to the number computed."""
        begun = [prompt for prompt in self.prompts.values() if prompt.begun]
        tokens, cached = sum([prompt.tokens for prompt in begun]), sum([prompt.cached_tokens for prompt in begun])
        call.output_tokens = max(call.output_tokens, self.output_tokens)
        if tokens > call.prompt_tokens:
            call.prompt_tokens, call.cached_tokens = tokens, cached


@dataclass(slots=True)
class Cost:
    """The cost so far of an engine's request."""

    call: MeteredCall
    computed: Computed
    prompt: Prompt
    spent: Spent = NOTHING_SPENT

    def add(self, delta: Delta) -> None:
        """Carry the sums of device time and memory in `delta` into the call, and note whether the prompt is begun."""
        call, before, self.spent = self.call, self.spent, delta.spent
        call.gpu_us += delta.spent.gpu_us - before.gpu_us
        call.switch_us += delta.spent.switch_us - before.switch_us
        call.kv_byte_s += delta.spent.kv_byte_s - before.kv_byte_s
        call.cache_byte_s += delta.spent.cache_byte_s - before.cache_byte_s
        prompt = self.prompt
        if delta.tokens and delta.at == 0 and not prompt.answered:
            prompt.answered, prompt.cached_tokens = True, min(delta.cached_tokens, prompt.tokens)
        answered = bool(delta.tokens) or delta.finish is Finish.STOP  # a vector comes without tokens
        prompt.begun = prompt.begun or answered or bool(delta.spent.gpu_us)

    def count(self, paid: Delta) -> None:
        """Count the tokens of `paid`, a delta without tokens where the tenant's budget lacks the money."""
        self.computed.output_tokens += len(paid.tokens)
