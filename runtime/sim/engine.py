"""Simulated engine: steps take the time of a profile instead of computing, and pages are counted by arithmetic."""

from __future__ import annotations

from runtime.core.device.request import Request, RequestId
from runtime.core.engine import AHEAD, Held, Output
from runtime.core.ledgers.costs import ModelCosts
from runtime.core.ledgers.estimate import StepTimes
from store.contract.wire import Finish

TOKENS_MOST = 1 << 40  # a bound for models whose requests do not grow
TOKENS: list[list[int]] = [[0] * count for count in range(AHEAD + 1)]  # placeholders for `count` tokens

_LENGTH = Finish.LENGTH  # bound once: needed for every request


class SimulatedStream:
    """A request in an engine."""

    __slots__ = ("id", "prompt", "context", "left")

    def __init__(self, request: Request, output_tokens: int) -> None:
        self.id = request.id
        self.prompt = request.to_compute  # tokens still to be computed
        self.context = request.context - self.prompt  # tokens with keys and values, or about to have them
        self.left = output_tokens - request.sent  # tokens still to be made


class SimulatedEngine:
    """Engine of a model on a device: pages held of the pool, and durations and outputs of the next steps."""

    __slots__ = (
        "costs",
        "_times",
        "weights_pages",
        "weights",
        "kv",
        "here",
        "held",
        "streams",
        "_aside",
        "_prompts",
        "_prompt_tokens",
        "_context",
        "_page_bytes",
        "_curve",
        "_unused",
        "_kept",
        "_wanted_bytes",
    )

    def __init__(self, costs: ModelCosts, page_bytes: int, block_tokens: int = 1) -> None:
        self.costs, self._times = costs, StepTimes(costs)
        self._page_bytes, self._curve = page_bytes, costs.kv
        self._unused = (block_tokens - 1) // 2  # unused tokens of a request's last block, in the mean
        self._kept = block_tokens if block_tokens > 1 else 0  # tokens of the block that vLLM gives to no request
        self.weights_pages = -(-costs.weight_bytes // page_bytes)
        self.weights = self.kv = 0
        self.here = False
        self.streams: dict[RequestId, SimulatedStream] = {}
        self._aside: dict[RequestId, SimulatedStream] = {}  # streams without room
        self._prompts: list[SimulatedStream] = []
        self._prompt_tokens = 0  # still to be computed
        self._context = 0  # summed over `streams`
        self._wanted_bytes = 0  # size of the pages wanted at the last `tell`
        self.held = self.tell()

    def tell(self) -> Held:
        """Updates and returns the pages held, and the pages wanted for the next tokens."""
        tokens, count = self._context + self._prompt_tokens, len(self.streams)
        if self._aside:
            tokens += sum([stream.context + stream.prompt for stream in self._aside.values()])
            count += len(self._aside)
        wanted = self._pages(tokens + count, count) or 1
        spare = self.kv - (self._pages(tokens + AHEAD * count, count) or 1)
        self._wanted_bytes = wanted * self._page_bytes
        self.held = Held(self.weights, self.kv, wanted, spare if spare > 0 else 0)
        return self.held

    def _pages(self, tokens: int, count: int) -> int:
        """Pages for `tokens` tokens in total of `count` requests."""
        return -(-int(self._curve.bytes(tokens + self._unused * count + self._kept, count)) // self._page_bytes)

    @property
    def kv_bytes(self) -> float:
        """Bytes of KV cache copied when the model is parked or comes back."""
        return self._curve.bytes(self._context, len(self.streams))

    def add(self, request: Request, output_tokens: int) -> None:
        stream = self.streams[request.id] = SimulatedStream(request, output_tokens)
        self._context += stream.context
        if stream.prompt:
            self._prompts.append(stream)
            self._prompt_tokens += stream.prompt

    def parked(self, id: RequestId) -> SimulatedStream | None:
        """The request of that id, if the request waits for room."""
        return self._aside.get(id)

    def abort(self, id: RequestId) -> None:
        stream = self.streams.pop(id, None)
        if stream is not None:
            self._context -= stream.context
            if stream.prompt:
                self._prompts.remove(stream)
                self._prompt_tokens -= stream.prompt
        self._aside.pop(id, None)
        if self._aside:
            self._fit()

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, most: int, batched_tokens: int) -> tuple[int, float]:
        """Number of equal steps to make next, at most `most`, and the seconds of a step. 0 steps if pages are short."""
        count, times = len(self.streams), self._times
        room = self._room(count)
        if self._aside or room < self._prompt_tokens + count - len(self._prompts):
            self._fit()
            count = len(self.streams)
            room = self._room(count)
        if self._prompts:
            tokens, older = self._prompt_tokens, count - len(self._prompts)
            if room < tokens + older:
                return 0, self.costs.step_s
            beside_s = times.step(older, self._context) - self.costs.step_s if older else 0.0
            return 1, times.prefill(min(tokens, batched_tokens), self._squares(batched_tokens)) + beside_s
        if not count:
            return 0, self.costs.step_s
        steps = min(most, AHEAD, max(0, room) // count)
        for stream in self.streams.values():
            steps = min(steps, stream.left)
        return steps, times.step(count, self._context)

    def _squares(self, batched_tokens: int) -> int:
        """Growth of the squared contexts over the next step's prompts; attention takes time in proportion."""
        squares = 0
        for stream in self._prompts:
            taken = min(stream.prompt, batched_tokens)
            squares += taken * (taken + 2 * stream.context)
            batched_tokens -= taken
        return squares

    def run(self, steps: int, batched_tokens: int) -> list[Output]:
        """Makes `steps` steps and returns their outputs."""
        if self._prompts and steps:
            self._prefill(batched_tokens)
        outputs: list[Output] = []
        if not steps:
            return outputs
        tokens, ended = TOKENS[steps], []
        for stream in self.streams.values():
            if stream.prompt:
                continue
            stream.left -= steps
            stream.context += steps
            if stream.left > 0:
                outputs.append(Output(stream.id, tokens))
            else:
                outputs.append(Output(stream.id, tokens, _LENGTH))
                ended.append(stream)
        self._context += steps * len(outputs)
        for stream in ended:
            del self.streams[stream.id]
            self._context -= stream.context
        if ended and self._aside:
            self._fit()
        if ended or self._aside or self._outgrown():
            self.tell()
        return outputs

    def _outgrown(self) -> bool:
        """Whether the engine wants more pages than at the last `tell`."""
        count = len(self.streams)
        tokens = self._context + self._prompt_tokens + count + self._unused * count + self._kept
        return self._curve.bytes(tokens, count) >= self._wanted_bytes + 1

    def _room(self, count: int) -> int:
        """Tokens that still fit the pages held, if the `count` requests of the batch are equally long."""
        taken = self._context + self._unused * len(self.streams) + self._kept
        return self._curve.tokens(float(self.kv * self._page_bytes), count, TOKENS_MOST) - taken

    def _fit(self) -> None:
        """Puts the newest streams aside if the next tokens lack room, as vLLM with this project's scheduler does."""
        everybody = [*self.streams.values(), *self._aside.values()]
        self._context = self._prompt_tokens = 0
        self.streams, self._aside, self._prompts = {}, {}, []
        size, tokens = float(self.kv * self._page_bytes), self._kept
        for stream in everybody:
            tokens += stream.context + max(1, stream.prompt) + self._unused
            if self.streams and tokens > self._curve.tokens(size, len(self.streams) + 1, TOKENS_MOST):
                self._aside[stream.id] = stream
                continue
            self.streams[stream.id] = stream
            self._context += stream.context
            if stream.prompt:
                self._prompts.append(stream)
                self._prompt_tokens += stream.prompt

    def _prefill(self, batched_tokens: int) -> None:
        """Computes a step's part of the prompts, at most `batched_tokens` tokens, in order of arrival."""
        while self._prompts and batched_tokens:
            stream = self._prompts[0]
            taken = min(stream.prompt, batched_tokens)
            stream.prompt -= taken
            stream.context += taken
            self._context += taken
            self._prompt_tokens -= taken
            batched_tokens -= taken
            if not stream.prompt:
                del self._prompts[0]
