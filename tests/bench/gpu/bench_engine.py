"""vLLM over the pool on a GPU (F): overhead of a hot model, switches between models, parking, loading from the host.

`python tests/bench/gpu/bench_engine.py`: the benches of the same questions for a CPU, in tests/bench/runtime; the
engines take the GPU where vLLM finds a GPU. The benches need a vLLM of a version known to the runtime, built for CUDA.
Without such a vLLM the bench fails and says why.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.bench.gpu.report import emit, emit_conditions  # noqa: E402

QUESTIONS = ("hot_model", "switch", "park", "load")
LIMIT_S = 120


def why_not() -> str | None:
    try:
        from runtime.engine.settings import check_version

        check_version()
        from vllm.platforms import current_platform
    except Exception as error:  # vLLM is missing, of a wrong version, or does not load on the machine
        return f"{type(error).__name__}: {error}"
    return None if current_platform.is_cuda() else "this vLLM was not built for CUDA"


def main() -> int:
    emit_conditions()
    if reason := why_not():
        emit("not run", reason=reason)
        return 1
    failed = sum(not answered(question) for question in QUESTIONS)
    print(json.dumps({"failed": failed}))
    return int(failed > 0)


def answered(question: str, limit_s: float = LIMIT_S) -> bool:
    """Run the bench of a question and emit its answers.

    Args:
        question: the bench is `tests/bench/runtime/bench_{question}.py`.
        limit_s: seconds after which the bench is ended; the answers given until then are emitted.

    Returns: whether the bench ended by itself, with exit status 0."""
    command = [sys.executable, f"tests/bench/runtime/bench_{question}.py"]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        emit(question, timed_out_s=limit_s, answers=[line for line in said.splitlines() if line])
        return False
    emit(question, exit_status=done.returncode, answers=[line for line in done.stdout.splitlines() if line])
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
