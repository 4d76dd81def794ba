"""The golden question: a check of a model before the model serves.

The question is a short prompt that no tenant wrote, answered greedily. A model is asked as built by vLLM, again
once the tensors have moved, and after every fetch: the tokens must not change. The prompt twice in a batch finds models
that disagree with themselves, and the prompt at the last positions of the context finds tables of positions that end
too early. The question asked while its KV cache moves to other blocks finds models with state outside the blocks.

A model that makes vectors answers in one step, with numbers instead of tokens: the first numbers of the vector, each as
a multiple of 2^-20. Rounding may change the numbers a little, so answers are compared with `same`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from vllm import PoolingParams, SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.tasks import PoolingTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from runtime.core.engine import EngineError
from runtime.engine.scheduler import PooledScheduler
from runtime.engine.worker import pause, pause_between_layers

PROMPT, TOKENS = 16, 8
BATCH = 2  # requests with the question in a batch
INTERRUPTED_AFTER = 4  # tokens of an answer
# Two greedy answers of a sound model part only where rounding decides: where the log probabilities of both tokens
# differ by at most so many nats. A fault makes an unrelated token, and unrelated tokens are far less likely.
TIE, TIE_16_BITS = 0.05, 0.5
NUMBERS = 64  # of a vector
UNIT = 1 << 20  # a number of a vector is kept as a whole multiple of 1/UNIT
NEAR, NEAR_16_BITS = UNIT // 10_000, UNIT // 100  # most that rounding changes a number of a vector
LIKELIEST = 5  # tokens per step with log probabilities, for comparing answers


class Golden(msgspec.Struct, frozen=True):
    """Answers to the golden question by a model freshly read from files: token ids, or numbers of a vector."""

    first: list[int]  # at the first positions
    last: list[int]  # at the last positions of the context


class GoldenAnswer(msgspec.Struct):
    """An answer: the tokens, and for each token, if asked for, the log probabilities of the likeliest tokens."""

    tokens: list[int]
    likeliest: list[dict[int, float]]

    def take(self, output: EngineCoreOutput) -> None:
        self.tokens += output.new_token_ids
        if output.pooling_output is not None:
            first = output.pooling_output.detach().float().flatten()[:NUMBERS]
            self.tokens += [int(number) for number in (first * UNIT).nan_to_num().round().tolist()]
        if (found := output.new_logprobs) is not None:
            rows = zip(found.logprob_token_ids, found.logprobs, strict=True)
            self.likeliest += [dict(zip(map(int, ids), map(float, logs), strict=True)) for ids, logs in rows]


def prompt_and_tokens(max_model_len: int, pools: bool = False) -> tuple[int, int]:
    """Lengths of the question's prompt and of the answer, in tokens, in a context of `max_model_len` tokens.

    `pools`: whether the answer is a vector, which takes no place in the context."""
    if pools:
        return min(PROMPT, max_model_len), 0
    prompt = min(PROMPT, max_model_len // 2)
    return prompt, min(TOKENS, max_model_len - prompt)


def ask(
    core: EngineCore, ids: Sequence[str], likeliest: int | None = None, interrupt: Callable[[], None] | None = None
) -> list[GoldenAnswer]:
    """Put the question once for each id, in a single batch, while no other request runs in the engine.

    Args:
        core: an engine with weights and with free blocks of KV cache; no request runs.
        ids: names of the requests. A name is the request's salt as well, so no two requests share prefix blocks.
        likeliest: number of tokens per step to return with log probabilities; None: no log probabilities.
        interrupt: called once between two steps, after INTERRUPTED_AFTER tokens of the first answer.

    Returns: the answers, in the order of the ids.

    Raises errors of steps; the requests are still in the engine then."""
    config, scheduler = core.vllm_config.model_config, core.scheduler
    assert isinstance(scheduler, PooledScheduler)
    said = {id: GoldenAnswer([], []) for id in ids}
    task = _task(core) if scheduler.pools else None
    with scheduler.alone(ids):
        for id in ids:
            core.add_request(*core.preprocess_add_request(_question(config, id, likeliest, task)))
        while any(id in scheduler.requests for id in ids):
            if interrupt is not None and len(said[ids[0]].tokens) >= INTERRUPTED_AFTER:
                interrupt()
                interrupt = None
            outputs, executed = core.step()
            core.post_step(executed)
            for output in (output for made in outputs.values() for output in made.outputs):
                said[output.request_id].take(output)
            assert executed, "there is no block of KV cache for the golden question"
            pause()
    return list(said.values())


def _task(core: EngineCore) -> PoolingTask:
    """vLLM's name of what the model makes of a whole text."""
    return next(task for task in core.get_supported_tasks() if task in ("embed", "classify"))


def _question(config: Any, id: str, likeliest: int | None, task: PoolingTask | None) -> EngineCoreRequest:
    """The question as vLLM's request. `task`: set if the model makes vectors."""
    prompt, tokens = prompt_and_tokens(config.max_model_len, task is not None)
    vocabulary = config.get_vocab_size()
    sampling = SamplingParams(
        temperature=0, max_tokens=max(1, tokens), ignore_eos=True, detokenize=False, logprobs=likeliest
    )
    return EngineCoreRequest(
        request_id=id,
        prompt_token_ids=[(7919 * n + 1) % vocabulary for n in range(prompt)],
        mm_features=None,
        sampling_params=None if task else sampling,
        pooling_params=PoolingParams(task=task) if task else None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=id,
        data_parallel_rank=None,
    )


@contextmanager
def pausing(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, a step of the model on the CPU may pause before each layer, if a `Sliced` call steps."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = [layer for layers in lists for layer in layers] if current_platform.is_cpu() else []
    hooks = [layer.register_forward_pre_hook(pause_between_layers) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def at_last_positions(model: torch.nn.Module, max_model_len: int, pools: bool = False) -> Iterator[None]:
    """Within the context, positions given to the model are shifted to the end of the longest sequence.

    Args:
        model: the model.
        max_model_len: tokens of the longest sequence.
        pools: whether the model makes vectors.

    Only values computed from positions change: tables of rotary or
    learned positions are read where the tables end. KV cache is used as for a short request, so the question costs as
    little for a long context. Raises RuntimeError if the model was not called with positions meanwhile."""
    forward, shifted = model.forward, 0
    by = max_model_len - sum(prompt_and_tokens(max_model_len, pools))

    def forward_later(*args: Any, **kwargs: Any) -> Any:
        nonlocal shifted
        shifted += 1
        return forward(*args, **kwargs | {"positions": kwargs["positions"] + by})

    model.forward = forward_later
    try:
        yield
    finally:
        del model.forward
    if not shifted:
        raise RuntimeError("vLLM's runner did not call the model's forward: another vLLM?")


@contextmanager
def watching_attention(layers: Iterable[object]) -> Iterator[None]:
    """Within the context, keys must have the size of the layers' KV cache; layers without attention are left alone.

    vLLM takes the number of KV heads from config.json. Where the model's code makes another number of heads, vLLM's
    kernel for CPUs goes through rows beyond the rows of the step, and writes into other requests' blocks.
    Raises EngineError with both numbers, out of the model's forward."""
    watched = [layer for layer in layers if isinstance(layer, Attention)]
    for layer in watched:
        layer.forward = _watched(layer, layer.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in watched:
            del layer.forward


def _watched(layer: Attention, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def watched(query: torch.Tensor, key: torch.Tensor | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept = layer.num_kv_heads * layer.head_size
        if key is not None and key.numel() != kept * query.shape[0]:
            raise EngineError(
                f"the model makes keys of {key.numel() // query.shape[0]} numbers a token, and its KV cache keeps "
                f"{kept}: num_key_value_heads or head_dim in config.json is not what the model's code goes by: give "
                "the model's own file"
            )
        return forward(query, key, *args, **kwargs)

    return watched


def disagrees(alone: GoldenAnswer, other: GoldenAnswer, tie: float) -> bool:
    """Whether `other` parts from `alone`, the answer to a lone request, at a token that rounding can't explain.

    `tie`: nats of log probability within which rounding may decide."""
    for token, instead, likeliest in zip(alone.tokens, other.tokens, alone.likeliest, strict=True):
        if token != instead:
            return likeliest[token] - likeliest.get(instead, float("-inf")) > tie
    return False


def same(said: Sequence[int], before: Sequence[int], dtype: object, pools: bool) -> bool:
    """Whether two answers to the same question are equal: tokens exactly, numbers of a vector within rounding.

    Args:
        said, before: the answers.
        dtype: torch's type of the model's numbers.
        pools: whether the answers are vectors.
    """
    if not pools:
        return said == before
    most = NEAR if dtype == torch.float32 else NEAR_16_BITS
    return len(said) == len(before) and all(abs(a - b) <= most for a, b in zip(said, before, strict=True))


def tie(dtype: object) -> float:
    """Greatest distance of two log probabilities, in nats, at which rounding may decide between the tokens."""
    return TIE if dtype == torch.float32 else TIE_16_BITS
