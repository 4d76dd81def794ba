"""How long do the driver's calls take: by page size (A), behind a running kernel (B), beside launches (C)?

`python tests/bench/gpu/bench_driver_calls.py [GIB] [ROUNDS]` builds driver_calls.cu with nvcc and runs the program: 8
GiB of pages, 5 rounds, about 90 s. Times are in microseconds, as [least, median, most] of the rounds. In B,
`rounds_the_kernel_outlived` counts the rounds in which the kernel of 200 ms still ran after the last call had returned.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.gpu.report import emit_conditions

SOURCE = Path(__file__).with_name("driver_calls.cu")


def build(program: Path) -> None:
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    subprocess.run([compiler, "-O2", "-std=c++17", "-arch=native", str(SOURCE), "-o", str(program)], check=True)


def main(gib: int = 8, rounds: int = 5) -> None:
    emit_conditions()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "driver_calls"
        build(program)
        subprocess.run([str(program), str(gib), str(rounds)], check=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
