"""Python loads this file at the start of each process of a platform whose steps keep a pace.

A step of an engine ends STEP_MS milliseconds after its beginning, or later if computing takes longer: the device's
thread sleeps, as beside a GPU that computes. Steps make the tokens that vLLM computes, for up to REQUESTS_MOST requests
at a time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

STEP_S = float(os.environ["STEP_MS"]) / 1e3
REQUESTS_MOST = int(os.environ["REQUESTS_MOST"])


def pace(engine: dict[str, Any]) -> None:
    """Let each step of an engine with requests take STEP_S. `engine`: the names of the module of the engine."""
    computed = engine["VllmEngine"].step

    def step(self: Any, ahead: bool = False) -> Any:
        ends_at = time.monotonic() + STEP_S
        outputs = computed(self, ahead)
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return outputs

    engine["VllmEngine"].step = step


def widen(settings: dict[str, Any]) -> None:
    """Let a step take REQUESTS_MOST requests. `settings`: the names of the module of vLLM's settings."""
    settings["engine_args"] = partial(settings["engine_args"], max_num_seqs=REQUESTS_MOST)


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {"runtime.engine.vllm": pace, "runtime.engine.settings": widen}


class AfterLoading:
    """Finds the modules of CHANGES, and changes a module once the module is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in CHANGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            CHANGES[name](vars(module))

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterLoading)
