"""Changes to modules of processes that a test or a bench starts, made as soon as a module is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Change = Callable[[Any], None]


class AfterLoading:
    """Finds some modules in place of Python, and changes a module once the module is loaded."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        """`changes`: by name of the module, a function that gets the loaded module."""
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            self._changes[name](module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def change_after_loading(changes: Mapping[str, Change]) -> None:
    """Have modules of this process changed: see AfterLoading."""
    sys.meta_path.insert(0, AfterLoading(changes))  # type: ignore[arg-type]
