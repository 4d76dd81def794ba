"""How much does the platform cost a hot model? The device process beside vLLM's own `LLM`, same model, same settings.

Every candidate lives in a separate process. The processes work in turns, A B A B, on the same machine; the answer is
the ratio of the times for the same batch (prefill and decode), pair by pair. A second device process has eight sleeping
models of further tenants beside the hot model. `python tests/bench/runtime/bench_hot_model.py`
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from runtime import ipc  # noqa: E402
from store.contract.wire import EngineSpec, Residency  # noqa: E402
from tests.bench.timing import load, milliseconds, one_thread, ratios  # noqa: E402

BATCH, PROMPT_TOKENS = 8, 32
KV_BYTES = 64 << 20
POLICY = "slack"  # as a runtime without settings
MEMORY = 256 << 20, 1 << 30  # pool and host cache: the hot model, its KV cache, and room for a sleeper to be checked
SLEEPERS = 8
SLEEPER_SHAPE: dict[str, Any] = dict(hidden=128, layers=2)
PAIRS = 9
SHAPES: dict[str, dict[str, Any]] = {
    "small (0.6 M)": dict(hidden=128, layers=2),
    "medium (27 M)": dict(hidden=512, layers=8, heads=8, kv_heads=4),
}
OUTPUT_TOKENS = {"small (0.6 M)": 256, "medium (27 M)": 64}


AS_THE_RUNTIME: dict[str, Any] = dict(enforce_eager=True, kv_cache_memory_bytes=KV_BYTES, async_scheduling=False)
AS_THE_RUNTIME |= dict(dtype="float32", max_model_len=512)


def prompts(batch: int) -> list[list[int]]:
    return [[(7 * n + 3 * i) % 500 + 3 for i in range(PROMPT_TOKENS)] for n in range(batch)]


class Batch(NamedTuple):
    """A batch that was served: the time until the last token, and the tokens of each request, in order."""

    seconds: float
    tokens: list[list[int]]


def serve_bare(model: str, settings: dict[str, Any]) -> None:
    """The child with vLLM's `LLM`: reads lines with a number of tokens and of requests, and answers with a `Batch`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    import runtime.engine.settings  # noqa: F401  (the same environment)

    llm = LLM(model=model, disable_log_stats=True, seed=0, **settings)
    print("ready", flush=True)
    for salt, line in enumerate(sys.stdin):
        tokens, requests = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        batch: Any = [{"prompt_token_ids": prompt, "cache_salt": str(salt)} for prompt in prompts(requests)]
        started = time.perf_counter()
        outputs = llm.generate(batch, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        said = [list(output.outputs[0].token_ids) for output in outputs]
        assert all(len(one) == tokens for one in said)
        print(json.dumps([seconds, said]), flush=True)
    os._exit(0)


class Bare:
    """vLLM's `LLM` in a child process.

    Args:
        settings: arguments of `LLM`; the defaults of vLLM stand for further arguments.
        log: file descriptor for the child's log, as of subprocess."""

    def __init__(self, model: Path, settings: dict[str, Any], log: int | None = subprocess.DEVNULL) -> None:
        command = [sys.executable, __file__, "--bare", str(model), json.dumps(settings)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def wait(self) -> None:
        """Return when the child is ready for a batch."""
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the child with vLLM's LLM ended: run it alone with --bare MODEL to see why")
        return line.strip()

    def batch(self, tokens: int, requests: int = BATCH) -> Batch:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{json.dumps([tokens, requests])}\n")
        self._child.stdin.flush()
        return Batch(*json.loads(self._line()))

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


class Ours:
    """The device process as started by the node; the bench's own process plays the node."""

    def __init__(self, child: asyncio.subprocess.Process, end: ipc.NodeEnd) -> None:
        self._child, self._pipe, self._messages = child, end, end.messages()
        self._stream, self._salt, self._model = 0, 0, ""

    @classmethod
    async def start(
        cls, model: EngineSpec, sleepers: Sequence[EngineSpec] = (), memory: tuple[int, int] = MEMORY, **more: Any
    ) -> Ours:
        """Start a device process with a model to be served, beside models that sleep.

        `memory`: bytes of the pool and of the host cache. `more`: further settings of `ipc.Began`."""
        ours, theirs = ipc.pair()
        with theirs:
            arguments = ipc.Began(theirs.fileno(), POLICY, *memory, **more).arguments()
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "runtime.device", *arguments, pass_fds=[theirs.fileno()], cwd=ROOT
            )
        self = cls(child, await ipc.NodeEnd.open(ours))
        for sleeper in sleepers:
            self._pipe.send(ipc.Place(sleeper))
            await self.until(sleeper.key, Residency.RESIDENT)
            self._pipe.send(ipc.Order(sleeper.key, awake=False))
            await self.until(sleeper.key, Residency.STAGED)
        self._model = model.key
        self._pipe.send(ipc.Place(model))
        return self

    async def until(self, model: str, residency: Residency) -> None:
        async for message in self._messages:
            if isinstance(message, ipc.State) and model in message.models:
                if message.models[model].residency is residency:
                    return
        raise RuntimeError(f"the device process ended before {model} was {residency}")

    async def batch(self, tokens: int, requests: int = BATCH) -> Batch:
        from store.contract.wire import Run
        from tests.runtime.engines import payload

        runs: list[Run] = []
        self._salt += 1
        for prompt in prompts(requests):  # the gateway's work, done elsewhere: not part of the runtime's loop
            self._stream += 1
            data = payload(
                prompt, f"s{self._salt}", temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            run = Run(
                gateway="g",
                stream=self._stream,
                model=self._model,
                request="",
                attempt=1,
                prompt_tokens=PROMPT_TOKENS,
                max_tokens=tokens,
                payload=data,
                engine="",
            )
            runs.append(run)
        started = time.perf_counter()
        for run in runs:
            self._pipe.send(ipc.Start(run))
        said: dict[int, list[int]] = {run.stream: [] for run in runs}
        ended = 0
        async for message in self._messages:
            if isinstance(message, ipc.Made):
                for delta in message.deltas["g"]:
                    said[delta.stream] += delta.tokens
                    ended += delta.finish is not None
                if ended == requests:
                    break
        seconds = time.perf_counter() - started
        assert all(len(one) == tokens for one in said.values())
        return Batch(seconds, list(said.values()))

    async def close(self) -> None:
        self._pipe.send(ipc.Quit())
        await self._child.wait()
        self._pipe.close()


async def measure(name: str, shape: dict[str, Any]) -> dict[str, object]:
    from deploy.demo.random_weights import write_random
    from tests.runtime.engines import spec

    with tempfile.TemporaryDirectory() as folder:
        model = write_random(Path(folder) / "m", "llama", **shape)
        sleepers = [
            write_random(Path(folder) / f"s{n}", "llama", seed=n, **SLEEPER_SHAPE) for n in range(1, SLEEPERS + 1)
        ]
        hot = spec(model, key="m")
        bare, ours = Bare(model, AS_THE_RUNTIME), await Ours.start(hot)
        crowded = await Ours.start(hot, [spec(path, key=path.name) for path in sleepers])
        bare.wait()
        tokens, rounds = OUTPUT_TOKENS[name], []
        for n in range(PAIRS + 2):
            if n % 2:
                crowded_s, ours_s, bare_s = (
                    (await crowded.batch(tokens)).seconds,
                    (await ours.batch(tokens)).seconds,
                    bare.batch(tokens).seconds,
                )
            else:
                bare_s, ours_s, crowded_s = (
                    bare.batch(tokens).seconds,
                    (await ours.batch(tokens)).seconds,
                    (await crowded.batch(tokens)).seconds,
                )
            if n >= 2:  # every process is warm
                rounds.append((bare_s / tokens, ours_s / tokens, crowded_s / tokens))
        await ours.close()
        await crowded.close()
        bare.close()
    bare_steps, ours_steps, crowded_steps = zip(*rounds, strict=True)
    return {
        "model": name,
        "bare_step_ms": milliseconds(bare_steps),
        "ours_step_ms": milliseconds(ours_steps),
        "ratio": ratios(ours_steps, bare_steps),
        f"ratio_beside_{SLEEPERS}_that_sleep": ratios(crowded_steps, bare_steps),
        "load": load(),
    }


def main() -> None:
    one_thread()
    for name, shape in SHAPES.items():
        print(json.dumps(asyncio.run(measure(name, shape))), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:
        serve_bare(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
