"""The compiled machines decide like the interpreted machines, and never outlive an edit of their sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.sim import compiled

# Prints every request's fate, to the last bit, after the name of the file that ran.
TELL = """
import sys
from pathlib import Path
from runtime.core.ledgers.costs import load_profile
from runtime.core.device.request import Objective
from runtime.sim import fleet, world
from runtime.sim.workload import base


profile = load_profile(Path(sys.argv[1]).read_bytes(), sys.argv[1])
print(world.__file__)
for policy in ("slack", "aegaeon", "prism"):
    spans = []
    print(fleet.simulate(base(16, 1, duration_s=60.0), profile, policy, 2, Objective(), spans, checks=True), spans)
for dispatch in ("gateways", "freest", "in-turns"):
    changes = fleet.Changes(dispatch, migrate=True, scale=(1, 3), faults=3, seed=1)
    work = base(16, 1, duration_s=60.0, rate=0.4)
    print(fleet.simulate(work, profile, "slack", 2, Objective(), checks=True, changes=changes))
"""


def sources(root: Path, text: str) -> Path:
    for package in compiled.PACKAGES:
        (root / package).mkdir(parents=True, exist_ok=True)
    (root / "runtime" / "pages.py").write_text(text)
    return compiled.folder(root)


def told(folder: Path) -> list[str]:
    profile = str(compiled.ROOT / "deploy" / "profiles" / "h100.json")
    command = [sys.executable, "-c", TELL, profile]
    return subprocess.run(
        command, env=compiled.environment(folder), stdout=subprocess.PIPE, text=True, check=True, timeout=200
    ).stdout.splitlines()


def test_sources_that_were_edited_have_another_folder(tmp_path: Path) -> None:
    before, after = sources(tmp_path, "A = 1\n"), sources(tmp_path, "A = 2\n")
    assert before != after
    assert sources(tmp_path, "A = 1\n") == before


def test_what_cannot_be_compiled_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    made = sources(tmp_path, "A: int = 'no number'\n")
    with pytest.raises(ValueError, match="mypyc failed.*compiler"):
        compiled.build(tmp_path)
    assert not made.exists() and not list(made.parent.iterdir())


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_compiled_machines_decide_to_the_last_bit_as_interpreted_ones() -> None:
    (own, *interpreted), (other, *fast) = told(compiled.ROOT), told(compiled.build())
    assert own.endswith(".py") and other.endswith(".so")
    assert fast == interpreted
