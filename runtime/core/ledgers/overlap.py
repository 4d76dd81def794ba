"""What it could be worth at most to run two models on a GPU at once, by the law of a device's costs. Pure.

Two steps at once share the memory's bandwidth and the arithmetic units. Only the fixed part of a step, such as launches
and the host's work, passes beside the second step. A law fitted to single steps says nothing of how steps get in each
other's way, so a GPU can only be slower than the figures of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from runtime.core.ledgers.costs import Law, ModelSize

MODELS = (  # weights and KV cache of 16 bits
    ModelSize("0.6B", 1_200_000_000, 114_688, 0.6e9),
    ModelSize("8B", 16_000_000_000, 131_072, 8e9),
    ModelSize("14B", 28_000_000_000, 163_840, 14e9),
)
REQUESTS = (1, 8, 64)
CONTEXT, PROMPT = 1000, 1024  # tokens of each request that makes a token; of a prompt


class StepParts(NamedTuple):
    """Parts of a step of a model that is alone on the GPU, in seconds."""

    fixed_s: float  # neither memory nor arithmetic units are busy
    memory_s: float  # the memory's bandwidth is used up
    arithmetic_s: float  # the arithmetic units are used up

    @property
    def alone_s(self) -> float:
        return sum(self)


def decode_parts(law: Law, size: ModelSize, requests: int, context: int) -> StepParts:
    """Return the parts of a step that makes a token for each of the requests. `context`: tokens of each request."""
    kv = size.kv
    read_bytes = requests * (kv.token_bytes * context + kv.request_bytes)
    return StepParts(
        law.step_s + law.step_s_per_request * requests,
        law.step_s_per_weight_byte * size.weight_bytes + law.step_s_per_kv_byte * read_bytes,
        law.step_s_per_parameter * size.parameters * requests,
    )


def prefill_parts(law: Law, size: ModelSize, tokens: int) -> StepParts:
    """Return the parts of a step that computes a prompt of `tokens` tokens."""
    computed = law.prefill_s_per_parameter * tokens + law.prefill_s_per_parameter2 * tokens * tokens
    return StepParts(law.prefill_s, 0.0, size.parameters * computed)


def at_once_s(one: StepParts, other: StepParts) -> float:
    """Return the least seconds in which a GPU can make both steps at once."""
    return max(one.alone_s, other.alone_s, one.memory_s + other.memory_s, one.arithmetic_s + other.arithmetic_s)


def worth(one: StepParts, other: StepParts) -> float:
    """Return how many times as fast both steps are at once, at most, as the same steps in turn: 1 to 2."""
    return (one.alone_s + other.alone_s) / at_once_s(one, other)


class StepPair(NamedTuple):
    """Steps of two models. `worth_at_most`: see `worth`."""

    step: str
    beside: str
    in_turn_ms: float
    at_once_ms: float
    worth_at_most: float


def step_pairs(law: Law) -> Iterator[StepPair]:
    """Yield decode steps of MODELS, each beside a decode step and beside a prompt of a second model."""
    prompts = [(f"a prompt of {size.name}", prefill_parts(law, size, PROMPT)) for size in MODELS]
    for requests in REQUESTS:
        decodes = [(f"{requests} of {size.name}", decode_parts(law, size, requests, CONTEXT)) for size in MODELS]
        for at, (step, one) in enumerate(decodes):
            for beside, other in (*decodes[at:], *prompts):
                both_s, least_s = one.alone_s + other.alone_s, at_once_s(one, other)
                yield StepPair(
                    step, beside, round(1e3 * both_s, 2), round(1e3 * least_s, 2), round(worth(one, other), 2)
                )
