"""House rules over the whole tree: cycles of imports, class names, sizes of folders, weight of imports, prose."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.prose import shares
from tests.test_tidy import PACKAGES, imports, module_path, sources, texts, within

FILES_MAX = 16  # Python files of a folder
PRONOUNS_MAX, OPENERS_MAX = 9.0, 6.0  # percent, in a file
PRONOUNS_MEAN_MAX, OPENERS_MEAN_MAX = 6.5, 4.0  # percent, in all files together
WORDS_MIN = 60  # smaller files are not judged
# Modules on the way of every request, and packages too heavy for these modules.
LIGHT = ("gateway.inference.response", "gateway.streams.relay", "gateway.streams.dispatch")
HEAVY = ("torch", "vllm", "transformers")
# Files of gateway/inference that a request passes, in order: a file imports only files that come later.
STATIONS = ("endpoint", "asking", "serving", "exchange", "context")


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of files with imports in a circle."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, open_ = set[str](), [start]
        while open_:
            for target in graph.get(open_.pop(), set()) - found:
                found.add(target)
                open_.append(target)
        reached[start] = found
    looped = {file for file in graph if file in reached[file]}
    return sorted(
        {
            tuple(sorted(other for other in looped if file in reached[other] and other in reached[file]))
            for file in looped
        }
    )  # type: ignore[arg-type]


@cache
def import_graph() -> dict[str, set[str]]:
    """First-party files by importing file. Imports for type checkers and inside functions count."""
    graph = {}
    for path in sources(*PACKAGES):
        targets = {module_path(name) for name in imports((ROOT / path).read_text()) if within(name, *PACKAGES)}
        graph[path] = {target for target in targets if target.endswith(".py")} - {path}
    return graph


def steps_back(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of a station by a later station: (importing file, imported file)."""
    order = [f"gateway/inference/{name}.py" for name in STATIONS]
    return [(later, sooner) for at, later in enumerate(order) for sooner in order[:at] if sooner in graph[later]]


def class_names(paths: list[str]) -> dict[str, list[str]]:
    """Defining files by class name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return found


def crowded(paths: list[str]) -> dict[str, int]:
    """Folders with too many Python files, with the number of files."""
    counted = Counter(path.rpartition("/")[0] for path in paths)
    return {folder: count for folder, count in counted.items() if count > FILES_MAX}


def written() -> Iterator[Path]:
    """Python and Markdown files with prose to judge."""
    folders = (*PACKAGES, "tests", "deploy")
    for path in texts():
        if path.endswith((".py", ".md")) and path.startswith(tuple(f"{folder}/" for folder in folders)):
            yield ROOT / path
    yield from (ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"))


def test_no_imports_run_in_a_circle() -> None:
    assert cycles(import_graph()) == []


def test_a_request_passes_its_stations_once_and_in_order() -> None:
    assert steps_back(import_graph()) == []


def test_no_class_name_is_used_twice() -> None:
    assert {name: paths for name, paths in class_names(sources(*PACKAGES)).items() if len(paths) > 1} == {}


def test_no_folder_is_crowded() -> None:
    assert crowded(sources(*PACKAGES, "tests", "deploy")) == {}


@pytest.mark.parametrize("module", LIGHT)
def test_the_way_of_a_request_loads_no_model_library(module: str) -> None:
    code = f"import {module}, sys; print(*(set({HEAVY!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_prose_says_nouns() -> None:
    judged = {path: found for path in written() if (found := shares(path)).words >= WORDS_MIN}
    wrong = {
        str(path.relative_to(ROOT)): (round(found.pronouns, 1), round(found.openers, 1))
        for path, found in judged.items()
        if found.pronouns > PRONOUNS_MAX or found.openers > OPENERS_MAX
    }
    assert wrong == {}
    words = sum(found.words for found in judged.values())
    assert sum(found.words * found.pronouns for found in judged.values()) / words <= PRONOUNS_MEAN_MAX
    assert sum(found.words * found.openers for found in judged.values()) / words <= OPENERS_MEAN_MAX


# ── the rules can fail ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cycle_is_found() -> None:
    graph = {"a.py": {"b.py"}, "b.py": {"c.py"}, "c.py": {"b.py"}, "d.py": {"a.py"}}
    assert cycles(graph) == [("b.py", "c.py")]


def test_a_step_back_is_found() -> None:
    graph = {f"gateway/inference/{name}.py": set[str]() for name in STATIONS}
    graph["gateway/inference/exchange.py"] = {"gateway/inference/serving.py"}
    assert steps_back(graph) == [("gateway/inference/exchange.py", "gateway/inference/serving.py")]


def test_a_crowded_folder_is_found() -> None:
    assert crowded([f"runtime/x/{number}.py" for number in range(FILES_MAX + 1)]) == {"runtime/x": FILES_MAX + 1}


def test_a_heavy_import_is_found() -> None:
    code = f"import torch, sys; print(*(set({HEAVY!r}) & sys.modules.keys()))"
    assert "torch" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


def test_a_riddle_is_found(tmp_path: Path) -> None:
    riddle, plain = tmp_path / "riddle.py", tmp_path / "plain.py"
    riddle.write_text('"""Those that it has, of whom nobody asks anything, go on before all others."""\n')
    plain.write_text('"""Resident models without requests are evicted first, the least recently used model first."""\n')
    assert shares(riddle).pronouns > PRONOUNS_MAX and shares(riddle).openers > OPENERS_MAX
    assert shares(plain).pronouns < PRONOUNS_MAX and shares(plain).openers == 0
