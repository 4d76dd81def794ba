"""How long after a restart of the whole platform does a model answer that was deployed before? Beside a bare start.

`staccato up` with many small models of nine architectures: each is deployed, answers a question, and the platform ends.
Then the platform starts again, and as soon as `/readyz` says 200, a model is asked, drawn by chance: a round's time is
from the command to the first answer. A bare platform has no deployment, and a round's time is from the command to
`/readyz`. Bound: 5 s more. At the end every model answers as before the restart, and the log of the devices says from
where each engine was built: no `files`.

`python tests/bench/runtime/bench_restart.py [--models 50] [--rounds 3]`
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from deploy.demo.random_weights import ARCHITECTURES, write_random  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import Platform  # noqa: E402
from tests.runtime.hybrids import write_hybrid  # noqa: E402

HYBRIDS = ("gemma3_text", "nemotron_h")
PROMPT = [5, 6, 7, 8, 9]
SETTINGS = {"STACCATO_HOST_CACHE": "2GiB", "STACCATO_DEVICE_MEMORY": "256MiB", "STACCATO_DISK_CACHE": "4GiB"}


def started_s(platform: Platform) -> float:
    began = time.perf_counter()
    platform.start()
    return time.perf_counter() - began


def answer(platform: Platform, model: str) -> str:
    with platform.client("acme", timeout=120) as client:
        made = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    return str(made.choices[0].text)


def bare(folder: Path, rounds: int) -> list[float]:
    """Seconds from the command to `/readyz` on a platform without deployments; the first start is not counted."""
    platform, found = Platform(folder / "bare", free_port(), SETTINGS), []
    for _ in range(rounds + 1):
        found.append(started_s(platform))
        platform.stop()
    return found[1:]


def deployed(folder: Path, models: int) -> tuple[Platform, dict[str, str], list[float]]:
    """A platform with models, stopped. Returns also the answer of each model and the seconds of each deployment."""
    platform, took_s, answers = Platform(folder / "full", free_port(), SETTINGS), list[float](), dict[str, str]()
    platform.start()
    platform.tenant("acme")
    kinds = (*ARCHITECTURES, *HYBRIDS)
    for number in range(models):
        name, kind = f"m{number}", kinds[number % len(kinds)]
        path = folder / name
        write_hybrid(path, kind) if kind in HYBRIDS else write_random(path, kind, seed=number)
        platform.model(name, path)
        began = time.perf_counter()
        assert platform.deploy("acme", name)["status"]["phase"] != "failed", name
        took_s.append(time.perf_counter() - began)
        answers[name] = answer(platform, name)
    platform.stop()
    return platform, answers, took_s


def sources(platform: Platform) -> Counter[str]:
    """Numbers of engines by the source from which the engines were built, as the logs have them."""
    found: Counter[str] = Counter()
    for path in sorted((platform.data / "logs").iterdir()):
        for line in path.read_text(errors="replace").splitlines():
            if '"device.built"' in line:
                found[json.loads(line)["source"]] += 1
    return found


def measure(folder: Path, models: int, rounds: int) -> dict[str, object]:
    bare_s = bare(folder, rounds)
    platform, answers, took_s = deployed(folder, models)
    before, rng = sources(platform), random.Random(1)
    ready_s, first_s = [], []
    for number in range(rounds):
        began = time.perf_counter()
        ready_s.append(started_s(platform))
        asked = rng.choice(sorted(answers))
        assert answer(platform, asked) == answers[asked]
        first_s.append(time.perf_counter() - began)
        if number == rounds - 1:
            assert {name: answer(platform, name) for name in answers} == answers
            every_s = time.perf_counter() - began
        platform.stop()
    return {
        "models": models,
        "deploy_s": spread(took_s, 2),
        "bare_s": spread(bare_s, 2),
        "ready_s": spread(ready_s, 2),
        "first_answer_s": spread(first_s, 2),
        "more_s": round(sorted(first_s)[rounds // 2] - sorted(bare_s)[rounds // 2], 2),
        "every_model_answered_s": round(every_s, 2),
        "built_before": dict(before),
        "built_after_restarts": dict(sources(platform) - before),
        "load": load(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(measure(Path(made), asked.models, asked.rounds)), flush=True)
