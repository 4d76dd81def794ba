"""What does the platform cost one hot model? Our device process beside vLLM's own `LLM`, same model, same settings.

Both live in processes of their own and work in turns, A B A B, on the same machine; the answer is the ratio of their
times for the same batch (prefill and decode), pair by pair. `python tests/bench/bench_hot_model.py`
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

BATCH, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 32, 256
KV_BYTES = 64 << 20
PAIRS = 11
SHAPES = {"small (0.6 M)": dict(hidden=128, layers=2), "medium (27 M)": dict(hidden=512, layers=8, heads=8, kv_heads=4)}


def prompts() -> list[list[int]]:
    return [[(7 * n + 3 * i) % 500 + 3 for i in range(PROMPT_TOKENS)] for n in range(BATCH)]


def serve_bare(model: str) -> None:
    """The child with vLLM's `LLM`: a line in, the seconds of a batch out."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    import runtime.engine.settings  # noqa: F401  (the same environment)

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=KV_BYTES,
        async_scheduling=False,
        disable_log_stats=True,
        seed=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    print("ready", flush=True)
    for salt, _ in enumerate(sys.stdin):
        batch = [{"prompt_token_ids": prompt, "cache_salt": str(salt)} for prompt in prompts()]
        started = time.perf_counter()
        outputs = llm.generate(batch, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == BATCH * OUTPUT_TOKENS
        print(seconds, flush=True)
    os._exit(0)


class Bare:
    def __init__(self, model: Path) -> None:
        command = [sys.executable, __file__, "--bare", str(model)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the child with vLLM's LLM ended: run it alone with --bare MODEL to see why")
        return line.strip()

    def batch_s(self) -> float:
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


class Ours:
    """The device process as the node starts it; this process plays the node."""

    @classmethod
    async def start(cls, model: Path) -> Ours:
        from runtime import pipe
        from tests.runtime.engines import spec

        self = cls()
        ours, theirs = pipe.pair()
        with theirs:
            arguments = [str(theirs.fileno()), "round-robin", str(KV_BYTES)]
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "runtime.device", *arguments, pass_fds=[theirs.fileno()], cwd=ROOT
            )
        self._pipe = await pipe.NodeEnd.open(ours)
        self._messages = self._pipe.messages()
        self._pipe.send(pipe.Place(spec(model, key="m")))
        self._stream = 0
        return self

    async def batch_s(self) -> float:
        from runtime import pipe
        from store.wire import Run
        from tests.runtime.engines import payload

        runs = []
        for prompt in prompts():  # the gateway's work, in another process: not the runtime's loop
            self._stream += 1
            data = payload(
                prompt, f"s{self._stream // BATCH}", temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True
            )
            run = Run(
                gateway="g",
                stream=self._stream,
                model="m",
                request="",
                attempt=1,
                prompt_tokens=PROMPT_TOKENS,
                max_tokens=OUTPUT_TOKENS,
                payload=data,
                engine="",
            )
            runs.append(run)
        started = time.perf_counter()
        for run in runs:
            self._pipe.send(pipe.Start(run))
        ended = tokens = 0
        async for message in self._messages:
            if isinstance(message, pipe.Made):
                for delta in message.deltas["g"]:
                    tokens += len(delta.tokens)
                    ended += delta.finish is not None
                if ended == BATCH:
                    break
        seconds = time.perf_counter() - started
        assert tokens == BATCH * OUTPUT_TOKENS
        return seconds

    async def close(self) -> None:
        from runtime import pipe

        self._pipe.send(pipe.Quit())
        await self._child.wait()
        self._pipe.close()


async def measure(name: str, shape: dict[str, int]) -> dict[str, object]:
    from deploy.demo.random_weights import write_random

    with tempfile.TemporaryDirectory() as folder:
        model = write_random(Path(folder) / "m", "llama", **shape)
        bare, ours = Bare(model), await Ours.start(model)
        pairs = []
        for n in range(PAIRS + 2):
            pair = (await ours.batch_s(), bare.batch_s()) if n % 2 else (bare.batch_s(), await ours.batch_s())[::-1]
            if n >= 2:  # both are warm
                pairs.append(pair)
        await ours.close()
        bare.close()
    ratios = sorted(ours_s / bare_s for ours_s, bare_s in pairs)
    return {
        "model": name,
        "ours_step_ms": round(statistics.median(ours_s for ours_s, _ in pairs) / OUTPUT_TOKENS * 1e3, 3),
        "bare_step_ms": round(statistics.median(bare_s for _, bare_s in pairs) / OUTPUT_TOKENS * 1e3, 3),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(ratios[0], 3),
        "ratio_max": round(ratios[-1], 3),
    }


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("STACCATO_LOG_LEVEL", "error")
    for name, shape in SHAPES.items():
        print(json.dumps(asyncio.run(measure(name, shape))), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:
        serve_bare(sys.argv[2])
    else:
        main()
