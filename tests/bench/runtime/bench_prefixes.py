"""What do prefixes of ended requests in the host cache bring, and cost? Does the time tell of a foreign prefix?

Six models share a device with room for two, and are asked in turn. Two device processes get the same prompts, one after
the other: a process that keeps prefixes in a twentieth of the host cache, and a process that keeps none. A time is from
the question to the end of an answer of twelve tokens.

`agents`: conversations in which each prompt repeats everything before. The cached tokens stand beside those of an
engine that keeps every block for good. `strangers`: no prompt repeats any, so that keeping is a cost alone.

`foreign`: how long the first token takes for a prompt that a different tenant has asked, and for a new prompt. The
order is random, and the foreign prefix lies in the host cache. A test by 10,000 permutations tells how often chance
alone makes as large a difference of the means of logarithms. A prompt that the tenant itself has asked is the control.

`python tests/bench/runtime/bench_prefixes.py [agents|strangers|foreign ...] [--size 6x4] [--rounds 60]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from runtime import ipc  # noqa: E402
from store.contract.wire import Residency  # noqa: E402
from tests.bench.timing import load, milliseconds, one_thread, ratios  # noqa: E402
from tests.runtime.device.test_agents import (  # noqa: E402
    CONTEXT,
    HEARD,
    HOST_BYTES,
    MODELS,
    ROOM_FOR_TWO,
    SAID,
    SYSTEM,
    kept_for_good,
    words,
    write_models,
)
from tests.runtime.engines import spec  # noqa: E402
from tests.runtime.processes import DeviceProcess  # noqa: E402

TTL_S = 900.0
SHARE = 20  # a part of the host cache of one in SHARE
FOREIGN_WORDS, PERMUTATIONS = 1500, 10_000


@dataclass
class Arm:
    """A device process and its answers."""

    device: DeviceProcess
    took_s: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    @classmethod
    async def start(cls, folder: Path, models: int, prefix_bytes: int, pool_bytes: int = ROOM_FOR_TWO) -> Arm:
        device = await DeviceProcess.start(pool_bytes, HOST_BYTES, prefixes=(prefix_bytes, TTL_S))
        for key, path in list(write_models(folder).items())[:models]:
            device.end.send(ipc.Place(spec(path, CONTEXT, key)))
        await device.until(lambda: sum(model.load_ms > 0 for model in device.state.models.values()) == models)
        return cls(device)

    async def ask(self, model: str, prompt: list[int], tenant: str, tokens: int = SAID) -> None:
        began = time.perf_counter()
        stream = self.device.ask(model, dict(prompt=prompt, temperature=0, max_tokens=tokens), tenant)
        self.answers.append(await self.device.answer(stream))
        self.took_s.append(time.perf_counter() - began)
        self.cached.append(self.device.cached[stream])


async def beside(folder: Path, conversations: int, turns: int, again: bool) -> dict[str, object]:
    """Let conversations go on by turns, on both devices. `again`: each prompt repeats the conversation so far."""
    keeping, plain = [await Arm.start(folder, MODELS, size) for size in (HOST_BYTES // SHARE, 0)]
    heard = [words(f"system {number}", SYSTEM) for number in range(conversations)]
    for turn in range(turns):
        for number in range(conversations):
            heard[number] = heard[number] if again else words(f"other {number} {turn}", len(heard[number]))
            heard[number] += words(f"{number} {turn}", HEARD)
            for arm in (keeping, plain) if (turn + number) % 2 else (plain, keeping):
                await arm.ask(f"m{number % MODELS}", heard[number], f"tenant {number}")
            heard[number] += keeping.answers[-1]
    counts = keeping.device.state.device_bytes.prefixes
    for arm in (keeping, plain):
        await arm.device.stop()
    assert keeping.answers == plain.answers
    return {
        "trace": "agents" if again else "strangers",
        "size": f"{conversations}x{turns}",
        "cached_at_best": conversations * sum(kept_for_good(turn) for turn in range(turns)) if again else 0,
        "cached": sum(keeping.cached),
        "cached_without": sum(plain.cached),
        "blocks": {"kept": counts.kept, "brought": counts.brought, "dropped": counts.dropped},
        "answer_ms": milliseconds(keeping.took_s, 1),
        "answer_ms_without": milliseconds(plain.took_s, 1),
        "time_over_without": ratios(keeping.took_s, plain.took_s),
        "sum_over_without": round(sum(keeping.took_s) / sum(plain.took_s), 3),
        "load": load(),
    }


async def foreign(folder: Path, rounds: int) -> dict[str, object]:
    """Time first tokens of new, foreign and own prompts, on a model that slept since the prefixes were computed."""
    arm, rng = await Arm.start(folder, 1, HOST_BYTES // SHARE), random.Random(1)
    found: dict[str, list[float]] = {"new": [], "foreign": [], "own": []}
    for number in range(rounds):
        await arm.ask("m0", words(f"known {number}", FOREIGN_WORDS), "victim", tokens=1)
        await arm.ask("m0", words(f"mine {number}", FOREIGN_WORDS), "prober", tokens=1)
        arm.device.end.send(ipc.Order("m0", False))
        await arm.device.until(lambda: arm.device.state.models["m0"].residency is Residency.STAGED)
        await arm.ask("m0", words("awake", 10), "prober", tokens=1)
        for kind in rng.sample(sorted(found), len(found)):
            seed = {"new": f"new {number}", "foreign": f"known {number}", "own": f"mine {number}"}[kind]
            await arm.ask("m0", words(seed, FOREIGN_WORDS), "prober", tokens=1)
            found[kind].append(arm.took_s[-1])
            assert bool(arm.cached[-1]) == (kind == "own")
    await arm.device.stop()
    return {
        "trace": "foreign",
        "rounds": rounds,
        **{f"{kind}_ms": milliseconds(took_s, 2) for kind, took_s in found.items()},
        "foreign_over_new": round(statistics.median(found["foreign"]) / statistics.median(found["new"]), 4),
        "chance_of_foreign": chance(found["foreign"], found["new"]),
        "chance_of_own": chance(found["own"], found["new"]),
        "load": load(),
    }


def chance(some: list[float], others: list[float]) -> float:
    """Share of random exchanges within the pairs that make as large a difference as was measured."""
    difference = np.log(some) - np.log(others)
    signs = np.random.default_rng(1).choice([-1, 1], (PERMUTATIONS, len(difference)))
    return float(np.mean(np.abs((signs * difference).mean(axis=1)) >= abs(difference.mean())))


async def main(asked: argparse.Namespace) -> None:
    conversations, turns = map(int, asked.size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        for trace in asked.traces or ("agents", "strangers", "foreign"):
            if trace == "foreign":
                answer = await foreign(Path(folder), asked.rounds)
            else:
                answer = await beside(Path(folder), conversations, turns, trace == "agents")
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    one_thread()
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="*", choices=["agents", "strangers", "foreign"])
    parser.add_argument("--size", default="6x4")
    parser.add_argument("--rounds", type=int, default=60)
    asyncio.run(main(parser.parse_args()))
