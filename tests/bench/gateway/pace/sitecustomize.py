"""Python loads this file at the start of each process of a platform whose steps keep a pace.

A step of an engine ends STEP_MS milliseconds after its beginning, or later if computing takes longer: the device's
thread sleeps, as beside a GPU that computes. Steps make the tokens that vLLM computes, for up to REQUESTS_MOST requests
at a time."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from tests.loaded import change_after_loading

STEP_S = float(os.environ["STEP_MS"]) / 1e3
REQUESTS_MOST = int(os.environ["REQUESTS_MOST"])


def pace(module: Any) -> None:
    """Let each step of an engine with requests take STEP_S. `module`: the module of the engine."""
    computed = module.VllmEngine.step

    def step(self: Any, ahead: bool = False) -> Any:
        ends_at = time.monotonic() + STEP_S
        outputs = computed(self, ahead)
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return outputs

    module.VllmEngine.step = step


def widen(module: Any) -> None:
    """Let a step take REQUESTS_MOST requests. `module`: the module of vLLM's settings."""
    module.engine_args = partial(module.engine_args, max_num_seqs=REQUESTS_MOST)


change_after_loading({"runtime.engine.vllm": pace, "runtime.engine.settings": widen})
