"""Processes in which Intel's matrix instructions (AMX) are emulated, for processors without AMX."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from itertools import starmap
from pathlib import Path

from tests.conftest import ROOT, with_hook

HERE = Path(__file__).parent
BUILT = ROOT / "build/amx"
ASKING = {"cpuid": 2, "xgetbv": 3}  # bytes of the instructions by which a program asks for instruction sets
# Libraries with such instructions: the description of the processor, and oneDNN twice.
LIBRARIES = (("torch", "lib/libc10.so"), ("torch", "lib/libtorch_cpu.so"), ("vllm", "_C.abi3.so"))


def environment() -> dict[str, str]:
    """Build the emulator and find the instructions to answer, within a minute at the first call.

    Returns: variables for a process of Python that is to have AMX.
    """
    BUILT.mkdir(parents=True, exist_ok=True)
    emulator = BUILT / "amx.so"
    build = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", emulator, HERE / "amx.c"]
    subprocess.run(build, check=True, timeout=60)
    found = {str(library): _instructions(library) for library in starmap(_library, LIBRARIES)}
    sites = BUILT / "sites.json"
    sites.write_text(json.dumps(found))
    return {"LD_PRELOAD": str(emulator), "AMX_SITES": str(sites), "PYTHONPATH": with_hook(HERE / "hook")}


def _library(package: str, name: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / name


def _instructions(library: Path) -> list[tuple[int, int]]:
    """Return address and size of each `cpuid` and `xgetbv` of a library."""
    stat = library.stat()
    known = BUILT / f"{library.name}-{stat.st_size}-{stat.st_mtime_ns}.json"
    if not known.exists():
        command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
        found = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"LC_ALL": "C"}) as listing:
            assert listing.stdout is not None
            for line in listing.stdout:
                address, _, instruction = line.partition(":")
                if (size := ASKING.get(instruction.strip())) is not None:
                    found.append((int(address, 16), size))
        assert listing.returncode == 0 and found, f"objdump finds no cpuid in {library}"
        known.write_text(json.dumps(found))
    return [(address, size) for address, size in json.loads(known.read_text())]
