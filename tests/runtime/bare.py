"""Answers of bare vLLM, from a separate process: `python -m tests.runtime.bare`, a job on stdin, tokens on stdout.

vLLM makes some process groups only for the first model of a process. In a process with Staccato's engines, bare vLLM
would find groups made by Staccato, or would lack groups of its own. The fork server of the tests, which forks the
process, has imported vLLM and nothing of Staccato but vLLM's settings.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests import forks

Tokens = dict[str, list[list[int]]]
Likeliest = list[list[dict[int, float]]]  # for each prompt and token of the answer: log probabilities of tokens
LIKELIEST = 5
Said = dict[str, list[int]]


class Answer(NamedTuple):
    """An answer to a chat: the length of the prompt, placeholders of pictures included, and the tokens made."""

    prompt_tokens: int
    tokens: list[int]


WITHOUT_AMX = "TEST_WITHOUT_AMX"  # set in the environment: vLLM is told that the processor has no AMX

if os.environ.get(WITHOUT_AMX):
    torch.cpu._is_amx_tile_supported = lambda: False  # by this function vLLM chooses its int8 products


def ask_bare_vllm(
    folders: Mapping[str, Path],
    dtypes: Mapping[str, str],
    prompts: Sequence[Sequence[int]],
    most: int,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Tokens:
    """Ask vLLM's own `LLM` each prompt alone, greedily, and all prompts of a model in one batch.

    A model in 16 bits with settings of its own is not asked in a batch: rounding decides tokens then.

    Args:
        folders: model folders by name; the first should be a mixture of experts if any is.
        dtypes: vLLM's dtypes by name.
        prompts: token ids.
        most: tokens to make for each prompt.
        settings: further settings of vLLM's by name.

    Returns: the tokens made for each prompt asked alone, by the name of the model.

    Raises AssertionError if a model makes different tokens in a batch: rounding then decides the tokens.
    """
    models = {name: [str(path), dtypes[name], (settings or {}).get(name, {})] for name, path in folders.items()}
    job = {"models": models, "prompts": [list(prompt) for prompt in prompts], "chats": [], "most": most}
    said: Tokens = _run(job)
    for name in (name for name in folders if f"{name} in a batch" in said):
        assert said[f"{name} in a batch"] == said[name], f"bare vLLM says otherwise in a batch: another seed for {name}"
    return said


def ask_for_likeliest(
    folder: Path, dtype: str, prompts: Sequence[Sequence[int]], most: int, settings: Mapping[str, Any]
) -> tuple[list[list[int]], Likeliest]:
    """Ask vLLM's own `LLM` each prompt alone, greedily.

    Args:
        folder: the model's folder.
        dtype: vLLM's dtype.
        prompts: token ids.
        most: tokens to make for each prompt.
        settings: further settings of vLLM's.

    Returns: the tokens made for each prompt, and the log probabilities of the LIKELIEST tokens at each place.
    """
    job = {"models": {"": [str(folder), dtype, dict(settings)]}, "prompts": [list(prompt) for prompt in prompts]}
    said = _run(job | {"chats": [], "most": most, "likeliest": LIKELIEST})
    likeliest = [[{int(id): p for id, p in place.items()} for place in answer] for answer in said[" likeliest"]]
    return said[""], likeliest


def chat_with_bare_vllm(folders: Mapping[str, Path], chats: Sequence[Any], most: int) -> dict[str, list[Answer]]:
    """Ask vLLM's own `LLM` each chat alone, greedily, in float32.

    Args:
        folders: model folders by name.
        chats: messages of each chat; their content may have pictures.
        most: tokens to make for each chat.

    Returns: the answers in the order of the chats, by the name of the model.
    """
    models = {name: [str(path), "float32", {}] for name, path in folders.items()}
    said = _run({"models": models, "prompts": [], "chats": list(chats), "most": most})
    return {name: [Answer(*answer) for answer in said[f"{name} in chats"]] for name in folders}


def ask_under_grammars(
    folder: Path, grammars: Mapping[str, Mapping[str, Any]], prompt: Sequence[int], most: int
) -> Said:
    """Ask vLLM's own `LLM` a prompt under each grammar, greedily, in float32. `LLM` compiles grammars itself.

    Args:
        folder: the model's folder.
        grammars: arguments of vLLM's StructuredOutputsParams, by the name of the grammar.
        prompt: token ids.
        most: tokens to make at most; the token 1 ends an answer.

    Returns: the tokens made, by the name of the grammar.
    """
    models = {"": [str(folder), "float32", {}]}
    job = {"models": models, "prompts": [], "chats": [], "grammars": grammars, "prompt": list(prompt), "most": most}
    said: Said = _run(job)[" under grammars"]
    return said


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """Have a process of its own do a job, with as many threads as this process: sums in 16 bits depend on the number.

    Returns what the process said."""
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    answer = forks.ran("tests.runtime.bare", said=json.dumps(job), environment=environment)
    said: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return said


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else a child of vLLM outlives this process and holds its pipes
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry
    from vllm.sampling_params import StructuredOutputsParams

    import runtime.engine.settings  # noqa: F401  (vLLM's environment)

    registry._run_in_subprocess = lambda fn: fn()  # a process to inspect each architecture takes seconds
    os.environ["VLLM_MEDIA_CONNECTOR"] = "http"  # vLLM's own
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a forked process found torch with another number

    job = json.load(sys.stdin)
    said: dict[str, Any] = {}
    sampling = SamplingParams(
        temperature=0, max_tokens=job["most"], ignore_eos=True, detokenize=False, logprobs=job.get("likeliest")
    )
    kept = []
    for name, (path, dtype, settings) in job["models"].items():
        llm = LLM(
            model=path,
            dtype=dtype,
            max_model_len=512,
            kv_cache_memory_bytes=32 << 20,
            disable_log_stats=True,
            seed=0,
            **({"enforce_eager": True} | settings),
        )
        kept.append(llm)  # a collected core would end every process group
        answers = [llm.chat(chat, sampling, use_tqdm=False)[0] for chat in job["chats"]]
        said[f"{name} under grammars"] = {}
        for kind, grammar in job.get("grammars", {}).items():
            params = StructuredOutputsParams(**grammar)
            under = SamplingParams(temperature=0, max_tokens=job["most"], structured_outputs=params, stop_token_ids=[1])
            (made,) = llm.generate([{"prompt_token_ids": job["prompt"]}], under, use_tqdm=False)
            said[f"{name} under grammars"][kind] = list(made.outputs[0].token_ids)
        said[f"{name} in chats"] = [
            (len(answer.prompt_token_ids or ()), list(answer.outputs[0].token_ids)) for answer in answers
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        alone = [llm.generate([one], sampling, use_tqdm=False)[0] for one in asked]
        said[name] = [list(output.outputs[0].token_ids) for output in alone]
        if "likeliest" in job:
            said[f"{name} likeliest"] = [
                [{id: known.logprob for id, known in place.items()} for place in output.outputs[0].logprobs or ()]
                for output in alone
            ]
        if settings and dtype != "float32":
            continue
        llm.reset_prefix_cache()
        together = llm.generate(asked, sampling, use_tqdm=False)
        said[f"{name} in a batch"] = [list(output.outputs[0].token_ids) for output in together]
    print(json.dumps(said), flush=True)
    os._exit(0)  # without vLLM's way out, which takes seconds


if __name__ == "__main__":
    main()
