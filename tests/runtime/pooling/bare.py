"""Vectors of bare vLLM, from a separate process: `python -m tests.runtime.pooling.bare`, a job on stdin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from store.contract.tasks import Task
from tests import forks

Vectors = dict[str, list[list[float]]]
SETTINGS: dict[str, Any] = {
    "runner": "pooling",
    "dtype": "float32",
    "kv_cache_memory_bytes": 32 << 20,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
}


def vectors_of_bare_vllm(
    folders: Mapping[str, Path], tasks: Mapping[str, Task], prompts: Sequence[Sequence[int]]
) -> Vectors:
    """Ask vLLM's own `LLM` for vectors in float32, one prompt after another.

    Args:
        folders: model folders by name.
        tasks: tasks of the models by name.
        prompts: token ids.

    Returns: vectors of the prompts, in order, by the name of the model.
    """
    models = {name: [str(path), tasks[name]] for name, path in folders.items()}
    said: Vectors = _run({"models": models, "prompts": [list(prompt) for prompt in prompts]})
    return said


def scores_of_bare_vllm(folder: Path, query: str, documents: Sequence[str]) -> list[float]:
    """Ask vLLM's own `LLM`, a cross-encoder in `folder`, for scores of documents under a query, in float32."""
    said: list[float] = _run({"cross": str(folder), "query": query, "documents": list(documents)})["scores"]
    return said


def _run(job: dict[str, Any]) -> Any:
    answer = forks.ran("tests.runtime.pooling.bare", said=json.dumps(job), environment=dict(os.environ))
    return json.loads(answer.splitlines()[-1])


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else a child of vLLM outlives this process
    from vllm import LLM
    from vllm.model_executor.models import registry

    import runtime.engine.settings  # noqa: F401  (vLLM's environment)

    registry._run_in_subprocess = lambda fn: fn()  # a process to inspect each architecture takes seconds
    job: dict[str, Any] = json.load(sys.stdin)
    said: dict[str, Any] = {}
    kept = []
    if "cross" in job:
        llm = LLM(model=job["cross"], **SETTINGS)
        answers = llm.score(job["query"], job["documents"], use_tqdm=False)
        said["scores"] = [answer.outputs.score for answer in answers]
    for name, (path, task) in job.get("models", {}).items():
        llm = LLM(model=path, **SETTINGS)
        kept.append(llm)  # a collected core would end every process group
        said[name] = [
            llm.encode([{"prompt_token_ids": prompt}], pooling_task=task, use_tqdm=False)[0].outputs.data.tolist()
            for prompt in job["prompts"]
        ]
    print(json.dumps(said), flush=True)
    os._exit(0)  # without vLLM's way out, which takes seconds


if __name__ == "__main__":
    main()
