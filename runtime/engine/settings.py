"""Settings of vLLM for both halves: the runtime's cores and the gateway's fronts must start from equal settings."""

from __future__ import annotations

import os
from typing import Any, NoReturn

# Set before vLLM is imported anywhere: vLLM reads the environment once.
os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"  # overrules the environment: logs of lower levels carry requests
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # if set, overrules the kv_cache_memory_bytes of each engine
os.environ["VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT"] = "8"  # s, waiting for a front's rendering thread included
CONNECTOR = os.environ["VLLM_MEDIA_CONNECTOR"] = "staccato"  # gateway/vllm/pictures.py: vLLM's own fetches any address

import vllm
from transformers import dynamic_module_utils
from vllm.engine.arg_utils import EngineArgs

from runtime.core.engine import EngineError
from store.contract.wire import EngineSpec

RENDER_WAIT_S = int(os.environ["VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT"])
# Most media of a prompt, by vLLM's names. The bound of pictures that clients meet first is in gateway/core/extent.py.
MEDIA_MOST: dict[str, int | dict[str, int]] = {"image": 64, "audio": 0, "video": 0}
STEP_TOKENS = 2048  # of texts for vectors in a step: other models wait meanwhile
VERSION_LEAST, VERSION_BELOW = (0, 32, 0), (0, 34, 0)


def _never(*_: object, **__: object) -> NoReturn:
    raise EngineError("a model asks for program code of its own, which Staccato never runs")


# transformers imports a model's program code with this function alone. `trust_remote_code=False` forbids the import;
# the replacement holds where a caller forgets the argument.
dynamic_module_utils.get_class_in_module = _never


def check_version() -> str:
    """The engine's name on the wire. Raises EngineError if this adapter was not tested with the installed vLLM."""
    parts = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if not VERSION_LEAST <= parts < VERSION_BELOW:
        least, below = (".".join(map(str, version)) for version in (VERSION_LEAST, VERSION_BELOW))
        raise EngineError(f"vLLM {vllm.__version__} is installed, this build needs >= {least}, < {below}: `make setup`")
    return f"vllm-{vllm.__version__.split('+')[0]}"


def _complete(config: Any) -> Any:
    """Add to a model's config what vLLM asks for and this version of transformers no longer writes."""
    if config.model_type == "xlm-roberta" and not hasattr(config, "position_embedding_type"):
        config.position_embedding_type = "absolute"
    return config


def engine_args(spec: EngineSpec, load_format: str = "safetensors", **more: Any) -> EngineArgs:
    settings: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": not spec.pools}
    if spec.pools:
        # vLLM computes no text of an encoder in parts, so a step must take the longest text.
        settings |= {"runner": "pooling", "max_num_batched_tokens": max(STEP_TOKENS, spec.max_model_len)}
    return EngineArgs(
        model=spec.path,
        tokenizer=spec.path,
        dtype=spec.dtype,  # type: ignore[arg-type]
        max_model_len=spec.max_model_len,
        reasoning_parser=spec.reasoning_parser,
        load_format=load_format,
        trust_remote_code=False,
        async_scheduling=False,  # a step is a step: nothing may be in flight when the turn ends
        disable_log_stats=True,
        seed=0,
        limit_mm_per_prompt=MEDIA_MOST,
        language_model_only=bool(spec.language_model_only),
        # vLLM's front half would leave out pictures that its engine has seen: here a request may go to any runtime.
        mm_processor_cache_gb=0,
        hf_overrides=_complete,
        **(settings | more),
    )
