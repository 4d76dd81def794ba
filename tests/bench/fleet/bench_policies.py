"""What does the order of turns do for the requests of one runtime, and does the simulator foresee it?

Ten models of three sizes share a pool with room for two or three models, and are asked in bursts. A process as a
runtime's device process, with real engines (`served.py`), serves the same trace once under every policy; the bench's
own process plays the node and the clients, and records the arrival of tokens.

First the engines are profiled. Then a minute of a second trace is served to measure two quantities missing in a
profile: the time of the device's loop between two steps, and how much slower steps are beside a node and clients. Then
the simulator predicts the runs, and the predictions choose the trace. If slightly shorter steps make a large
difference, a trace cannot be predicted. Therefore the simulator is asked for steps 4.5 % shorter to 4.5 % longer, and
the median is the prediction. Among the traces with the required gain of `slack` over the other policies, by prediction,
the bench takes the trace with the least variation of predictions over step times and policies.

*Goodput*: requests per second with a first token and at least 95 % of all tokens on time.

`python tests/bench/fleet/bench_policies.py --minutes 10 [--policies slack,request,aegaeon]`

A load as high as `slack` bears is beyond the other policies, and little can be foreseen beyond a policy's limit. With
`--own` a policy gets as much load as it can answer instead: the densest trace with 90 % of the tokens on time and a
sure simulator. With `--kind hybrids` the ten models keep windows of tokens, or a state beside attention.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from runtime import ipc  # noqa: E402
from runtime.core.device.request import Objective  # noqa: E402
from runtime.core.ledgers.attainment import ObjectiveProgress  # noqa: E402
from runtime.core.ledgers.costs import ModelCosts, ModelSize, Profile, load_profile, model_size  # noqa: E402
from runtime.core.turns.registry import POLICIES  # noqa: E402
from runtime.sim.capacity import processes  # noqa: E402
from runtime.sim.dispatch.baselines import InTurns  # noqa: E402
from runtime.sim.workload import Workload, base  # noqa: E402
from runtime.sim.world import World  # noqa: E402
from store.contract.wire import EngineSpec, Run  # noqa: E402
from tests.bench.fleet import served  # noqa: E402
from tests.bench.fleet.served import CONTEXT_TYPICAL, MIB, MODELS, SHAPES, Seen  # noqa: E402
from tests.bench.timing import load  # noqa: E402

PROMPT_TOKENS, OUTPUT_TOKENS = (16, 256), (64, 640)  # tokens, least and most
CV, SEED = 4.0, 1
SEEDS = range(1, 81)  # seeds of the traces to choose from
TTFT_STEPS, TBT_STEPS, PATIENCE_STEPS = 200, 10, 100  # objectives, in decode steps of a lone request
DRAIN_S = 20.0  # seconds after the last arrival
ON_TIME = 0.95  # part of the tokens on time in a good request
CAPACITY = 0.9  # part of tokens and of first tokens on time at the most load borne by `slack`, by the simulator
FIRST_S, FIRST_LOAD = 60.0, 0.8  # length and load of the first trace, served only to measure the machine
SLOWER = [1 + 0.015 * n for n in range(-3, 4)]  # steps beside the length measured by the first trace
LOADS = [1.2 * 1.1**n for n in range(10)]  # load of the device, if requests were served alone
# Policy `dedicated` is for a device per model: with a single device for ten models, `dedicated` is `request` without
# end.
ASKED = [policy for policy in POLICIES if policy != "dedicated"]
POINTS, SHARE = 5.0, 0.2  # bounds of a good prediction: points of attainment, part of the TTFT quantiles
SURE = 0.5  # largest doubt about a trace of a policy's own
OWN_SEEDS = range(1, 17)
# as LOADS, densest first; the first load with a sure trace is taken
OWN_LOADS = [1.2 * 1.1**n for n in range(5, -11, -1)]
GAINS = {"request": 2.0, "aegaeon": 1.0}  # goodput of `slack` over the policy's, at least
SAID = 1.1  # the predicted gain must be as many times GAINS
WAIT_S = 120.0


# ── what is asked, and how well it went ───────────────────────────────────────────────────────────────────────────────


def workload(
    sizes: Sequence[ModelSize],
    rate: float,
    duration_s: float,
    cv: float = CV,
    output_tokens: tuple[int, int] = OUTPUT_TOKENS,
    seed: int = SEED,
) -> Workload:
    drawn = base(MODELS, seed, rate, duration_s, cv=cv, sizes=sizes)
    return dataclasses.replace(
        drawn,
        prompt_tokens=np.clip(drawn.prompt_tokens, *PROMPT_TOKENS),
        output_tokens=np.clip(drawn.output_tokens, *output_tokens),
    )


@dataclass
class Asked:
    """A request and its progress."""

    tokens: int
    progress: ObjectiveProgress

    @property
    def kept(self) -> int:
        return self.progress.sent - self.progress.late

    @property
    def good(self) -> bool:
        return self.progress.sent > 0 and not self.progress.first_late and self.kept >= ON_TIME * self.tokens

    @property
    def ttft_s(self) -> float:
        return self.progress.first_at - self.progress.arrived_at


class Answer(msgspec.Struct, frozen=True):
    """Figures of a policy; tokens not made by the end count as late."""

    goodput: float
    good: float  # share of requests
    token_attainment: float
    first_token_attainment: float
    ttft_p50_s: float
    ttft_p99_s: float
    switches: int
    fetches: int
    busy: float  # share of the time spent in steps


def answer(
    work: Workload, objective: Objective, all_asked: Sequence[Asked], switches: int, fetches: int, busy: float
) -> Answer:
    ttfts = [asked.ttft_s for asked in all_asked]
    p50, p99 = (float(np.quantile(ttfts, share, method="lower")) for share in (0.5, 0.99))
    good = sum(asked.good for asked in all_asked)
    return Answer(
        goodput=round(good / work.duration_s, 4),
        good=round(good / len(all_asked), 4),
        token_attainment=round(sum(asked.kept for asked in all_asked) / sum(asked.tokens for asked in all_asked), 4),
        first_token_attainment=round(sum(ttft_s <= objective.ttft_s for ttft_s in ttfts) / len(all_asked), 4),
        ttft_p50_s=round(p50, 3),
        ttft_p99_s=round(p99, 3),
        switches=switches,
        fetches=fetches,
        busy=round(busy, 3),
    )


# ── predicted ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def predicted(work: Workload, profile: Profile, policy: str, objective: Objective) -> Answer:
    world = World(work, profile, POLICIES[policy], InTurns(), devices=1, objective=objective)
    world.run(DRAIN_S)
    (device,) = world.devices
    all_asked = [Asked(request.max_tokens, request.progress) for request in world.requests]
    return answer(work, objective, all_asked, device.instance.switches, device.fetches, device.busy_s / world.now)


def asking(share: float, sizes: Sequence[ModelSize], profile: Profile, duration_s: float, **drawn: Any) -> Workload:
    """A trace with a load of `share` of the device if requests were served alone. `drawn` goes to `workload`."""
    step_s = statistics.mean(profile.costs(size).step(1, CONTEXT_TYPICAL) for size in sizes)
    alone_s = MODELS * step_s * float(workload(sizes, 1.0, duration_s, **drawn).output_tokens.mean())
    return workload(sizes, share / alone_s, duration_s, **drawn)


@dataclass(frozen=True)
class Choice:
    """A trace, and how unsure the simulator is of the trace (see `doubt`)."""

    doubt: float
    seed: int
    share: float


def surest(
    sizes: Sequence[ModelSize], profile: Profile, objective: Objective, duration_s: float, policies: Sequence[str]
) -> Choice:
    """The trace with the least doubt over the seeds. Raises SystemExit if `slack` gains enough in no trace."""
    search = partial(surest_of, sizes, profile, objective, duration_s, policies)
    with processes() as each:
        found = [choice for choice in each(search, SEEDS) if choice is not None]
    if not found:
        raise SystemExit(f"`slack` is said to gain as much in no trace of {duration_s:.0f} s: try more --minutes")
    return min(found, key=lambda choice: choice.doubt)


def surest_of(
    sizes: Sequence[ModelSize],
    profile: Profile,
    objective: Objective,
    duration_s: float,
    policies: Sequence[str],
    seed: int,
) -> Choice | None:
    """The trace of the seed with the least doubt, among traces that `slack` bears and that gain enough; else None."""
    found: list[Choice] = []
    for share in LOADS:
        work = asking(share, sizes, profile, duration_s, seed=seed)
        said = predicted(work, profile, "slack", objective)
        if borne(said) and all(
            said.goodput >= SAID * GAINS[other] * predicted(work, profile, other, objective).goodput
            for other in policies
            if other in GAINS
        ):
            worst = max(doubt(foretold(work, profile, policy, objective)) for policy in policies)
            found.append(Choice(worst, seed, share))
    return min(found, key=lambda choice: choice.doubt, default=None)


def densest(
    sizes: Sequence[ModelSize], profile: Profile, objective: Objective, duration_s: float, policy: str
) -> Choice:
    """The densest trace borne by the policy with a doubt of at most SURE. Raises SystemExit without a trace."""
    with processes() as each:
        for share in OWN_LOADS:
            search = partial(sure_of, sizes, profile, objective, duration_s, policy, share)
            found = [choice for choice in each(search, OWN_SEEDS) if choice is not None]
            if found:
                return min(found, key=lambda choice: choice.doubt)
    raise SystemExit(f"the simulator is sure of no trace of {duration_s:.0f} s under {policy}: try more --minutes")


def sure_of(
    sizes: Sequence[ModelSize],
    profile: Profile,
    objective: Objective,
    duration_s: float,
    policy: str,
    share: float,
    seed: int,
) -> Choice | None:
    """The trace of the seed, or None if the policy does not bear the load or the doubt is above SURE."""
    work = asking(share, sizes, profile, duration_s, seed=seed)
    if predicted(work, profile, policy, objective).token_attainment < CAPACITY:
        return None
    choice = Choice(doubt(foretold(work, profile, policy, objective)), seed, share)
    return choice if choice.doubt <= SURE else None


def foretold(work: Workload, profile: Profile, policy: str, objective: Objective) -> list[Answer]:
    return [predicted(work, as_slow(profile, slower), policy, objective) for slower in SLOWER]


def median(answers: Sequence[Answer]) -> Answer:
    """Medians, figure by figure."""
    each = {name: statistics.median(getattr(answer, name) for answer in answers) for name in Answer.__struct_fields__}
    return msgspec.convert(each | {name: round(each[name]) for name in ("switches", "fetches")}, Answer)


def borne(said: Answer) -> bool:
    return min(said.token_attainment, said.first_token_attainment) >= CAPACITY


def doubt(answers: Sequence[Answer]) -> float:
    """The largest distance of an answer from the median answer, as a part of the distance allowed to a prediction."""
    said = median(answers)
    return max(_part(off(said, answer)) for answer in answers)


# ── the node's end ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Node:
    """The node's end: starts requests when due, and notes when tokens come."""

    end: ipc.NodeEnd
    child: asyncio.subprocess.Process
    specs: list[EngineSpec]
    open: dict[int, Asked] = field(default_factory=dict)  # by stream
    state: ipc.State = ipc.State()
    failures: list[str] = field(default_factory=list)
    streams: int = 0
    asked: list[Asked] = field(default_factory=list)  # requests of the last run

    async def listen(self) -> None:
        async for message in self.end.messages():
            now = time.monotonic()
            if isinstance(message, ipc.State):
                self.state = message
            elif isinstance(message, ipc.Made):
                for delta in message.deltas["bench"]:
                    asked = self.open.get(delta.stream)
                    if asked is not None:
                        asked.progress.deliver(now, len(delta.tokens), 0.0)
                        if delta.finish is not None:
                            del self.open[delta.stream]
                    if delta.error:
                        self.failures.append(delta.error)

    async def heard(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        async for line in self.child.stdout:
            if line.startswith(b"{"):  # vLLM's own threads print as well
                return dict(json.loads(line))
        raise RuntimeError("the device process ended: see its standard error")

    async def run(self, policy: str, work: Workload, objective: Objective) -> tuple[Answer, Seen]:
        """Serve the trace under the policy; returns the policy's figures and the measurements of the device."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"{policy}\n".encode())
        self.state = ipc.State()
        for spec in self.specs:
            self.end.send(ipc.Place(spec))
        await self.until(lambda: len(self.state.models) == len(self.specs))
        await self.prove()
        before = self.state
        began = time.monotonic()
        all_asked = self.asked = await self.ask(work, objective)
        took_s = time.monotonic() - began
        if self.open:
            self.end.send(ipc.Stop("bench", list(self.open)))
            self.open.clear()
        await asyncio.sleep(2.0)  # the node's state comes every second
        after = self.state
        await self.asleep()
        self.end.send(ipc.Quit())
        seen = msgspec.convert(await self.heard(), Seen)
        assert not self.failures, self.failures[0]
        fetches, switches = _fetches(after) - _fetches(before), after.switches - before.switches
        return answer(work, objective, all_asked, switches, fetches, seen.busy_s / took_s), seen

    async def prove(self) -> None:
        """Get the checks over and leave no model on the device: a model's first CHECKED_FIRST arrivals are checked."""
        from runtime.core.device.record import CHECKED_FIRST

        for times in range(1, CHECKED_FIRST + 1):
            for spec in self.specs:
                self.end.send(ipc.Order(spec.key, awake=True))
            await self.until(partial(self._fetched, times))
            await self.asleep()

    def _fetched(self, times: int) -> bool:
        return all(model.fetches >= times for model in self.state.models.values())

    async def asleep(self) -> None:
        await self.until(lambda: all(not model.running + model.waiting for model in self.state.models.values()))
        for spec in self.specs:
            self.end.send(ipc.Order(spec.key, awake=False))
        await self.until(lambda: self.state.pages_used == 0)

    async def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            if time.monotonic() > deadline or self.child.returncode is not None:
                raise RuntimeError(f"what was waited for did not come: {self.state}")
            await asyncio.sleep(0.02)

    async def ask(self, work: Workload, objective: Objective) -> list[Asked]:
        """Send the whole trace; returns the requests with their progress until DRAIN_S after the last arrival."""
        from runtime.engine import probe

        of_tenant = [0] * len(work.at_s) if work.tenant is None else work.tenant
        rows = zip(work.at_s, work.model, work.prompt_tokens, work.output_tokens, of_tenant, strict=True)
        runs = []
        for at_s, model, prompt, output, tenant in rows:
            self.streams += 1
            payload = probe.request([(7919 * n) % 256 + 2 for n in range(int(prompt))], int(output), str(self.streams))
            run = _run(self.streams, self.specs[int(model)].key, int(prompt), int(output), payload, objective)
            name, weight = work.tenants[int(tenant)]
            runs.append((float(at_s), msgspec.structs.replace(run, tenant=name, weight=weight)))
        began, all_asked = time.monotonic(), []
        for at_s, run in runs:
            await asyncio.sleep(began + at_s - time.monotonic())
            asked = Asked(run.max_tokens, ObjectiveProgress(began + at_s, objective.ttft_s, objective.tbt_s))
            self.open[run.stream] = asked
            all_asked.append(asked)
            self.end.send(ipc.Start(run))
        end = time.monotonic() + DRAIN_S
        while self.open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return all_asked


def _run(stream: int, model: str, prompt: int, output: int, payload: bytes, objective: Objective) -> Run:
    return Run(
        gateway="bench",
        stream=stream,
        model=model,
        request="",
        attempt=1,
        prompt_tokens=prompt,
        max_tokens=output,
        payload=payload,
        engine="",
        ttft_s=objective.ttft_s,
        tbt_s=objective.tbt_s,
        patience_s=objective.patience_s,
    )


def _fetches(state: ipc.State) -> int:
    return sum(model.fetches for model in state.models.values())


# ── the bench ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def runtime(kind: str = "llama") -> AsyncIterator[tuple[Node, Profile]]:
    """A process with engines of models of `kind` (served.py), and the profile of the engines."""
    ours, theirs = ipc.pair()
    with tempfile.TemporaryDirectory(prefix="staccato-bench-") as scratch:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, served.__file__, str(theirs.fileno()), scratch, kind),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            limit=16 * MIB,
        )
        theirs.close()
        node = Node(await ipc.NodeEnd.open(ours), child, [])
        first = await node.heard()
        node.specs = msgspec.convert(first["specs"], list[EngineSpec])
        profile = load_profile(json.dumps(first["profile"]), "the bench's profile")
        listening = asyncio.create_task(node.listen())
        try:
            yield node, profile
        finally:
            listening.cancel()
            if child.returncode is None:
                child.kill()
            await child.wait()


def objective_of(sizes: Sequence[ModelSize], profile: Profile, tbt_steps: int = TBT_STEPS) -> Objective:
    step_s = max(profile.costs(size).step(1, CONTEXT_TYPICAL) for size in sizes)
    return Objective(TTFT_STEPS * step_s, tbt_steps * step_s, PATIENCE_STEPS * step_s)


async def bench(policies: Sequence[str], duration_s: float, own: bool, kind: str) -> dict[str, Answer]:
    """Figures by policy on the common trace; if `own`, on the policy's own trace. `kind`: of the models."""
    async with runtime(kind) as (node, measured):
        sizes = [model_size(spec) for spec in node.specs]
        profile = as_seen(measured, await first_seen(node, measured, sizes))
        objective = objective_of(sizes, profile)
        costs = {size.name: msgspec.to_builtins(profile.costs(size)) for size in sizes[: len(SHAPES)]}
        show({"objective": msgspec.to_builtins(objective), "costs": costs})
        if own:
            traces = [([policy], densest(sizes, profile, objective, duration_s, policy)) for policy in policies]
        else:
            traces = [(list(policies), surest(sizes, profile, objective, duration_s, policies))]
        made: dict[str, Answer] = {}
        for under, choice in traces:
            work = asking(choice.share, sizes, profile, duration_s, seed=choice.seed)
            asked = {"models": MODELS, "requests": len(work.at_s), "s": duration_s, "cv": CV}
            show(asked | dataclasses.asdict(choice))
            made |= await compared(node, measured, sizes, objective, work, under)
        return made


async def compared(
    node: Node, measured: Profile, sizes: Sequence[ModelSize], objective: Objective, work: Workload, under: list[str]
) -> dict[str, Answer]:
    """Figures by policy on the trace. The predictions for every policy are printed before the first run."""
    profile = as_seen(measured, await first_seen(node, measured, sizes))  # with the machine's present speed
    said = {policy: foretold(work, profile, policy, objective) for policy in under}
    for policy in under:
        told = {"predicted": msgspec.to_builtins(median(said[policy])), "range": ranges(said[policy])}
        show({"policy": policy, **told})
    made: dict[str, Answer] = {}
    for policy in under:
        made[policy], seen = await node.run(policy, work, objective)
        show({"policy": policy, "real": msgspec.to_builtins(made[policy]), "load": load()})
        show({"policy": policy, "prediction_off": off(median(said[policy]), made[policy])})
        hindsight = median(foretold(work, as_seen(measured, seen), policy, objective))
        show({"policy": policy, "seen": msgspec.to_builtins(seen), "then_off": off(hindsight, made[policy])})
    return made


async def first_seen(node: Node, profile: Profile, sizes: Sequence[ModelSize]) -> Seen:
    work = asking(FIRST_LOAD, sizes, profile, FIRST_S, seed=SEED + 1)
    _, seen = await node.run("slack", work, objective_of(sizes, profile))
    show({"first_seen": msgspec.to_builtins(seen)})
    return seen


def ranges(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Least and most, figure by figure."""
    names = ("goodput", "token_attainment", "first_token_attainment", "ttft_p50_s", "ttft_p99_s")
    values = {name: [getattr(answer, name) for answer in answers] for name in names}
    return {name: [min(each), max(each)] for name, each in values.items()}


def as_seen(profile: Profile, seen: Seen) -> Profile:
    """The profile, adjusted to the speed and the loop time measured in a run."""
    slow = as_slow(profile, seen.slower, seen.prefill_slower)
    models = {
        name: msgspec.structs.replace(costs, step_s=costs.step_s + seen.loop_s, prefill_s=costs.prefill_s + seen.loop_s)
        for name, costs in slow.models.items()
    }
    return msgspec.structs.replace(slow, models=models)


def as_slow(profile: Profile, slower: float, prefill_slower: float | None = None) -> Profile:
    """The profile of a machine `slower` times as slow; prefills are as slow unless `prefill_slower` says otherwise."""
    of_prefill = slower if prefill_slower is None else prefill_slower
    times = {
        name: of_prefill if name.startswith("prefill") else slower
        for name in ModelCosts.__struct_fields__
        if "_s" in name
    }
    del times["step_s_of_windows"]  # times of windows, in a tuple
    models = {
        name: msgspec.structs.replace(
            costs,
            step_s_of_windows=tuple((reach, each_s * slower) for reach, each_s in costs.step_s_of_windows or ())
            or msgspec.UNSET,
            **{time: getattr(costs, time) * by for time, by in times.items()},
        )
        for name, costs in profile.models.items()
    }
    return msgspec.structs.replace(profile, models=models)


def off(said: Answer, made: Answer) -> dict[str, float]:
    points = 100 * (said.token_attainment - made.token_attainment)
    p50, p99 = _apart(said.ttft_p50_s, made.ttft_p50_s), _apart(said.ttft_p99_s, made.ttft_p99_s)
    apart = {"points": round(points, 1), "ttft_p50": round(p50, 3), "ttft_p99": round(p99, 3)}
    return apart | {"met": _part(apart) <= 1}


def _part(apart: dict[str, float]) -> float:
    """The largest deviation as a part of the allowed deviation."""
    return max(abs(apart["points"]) / POINTS, abs(apart["ttft_p50"]) / SHARE, abs(apart["ttft_p99"]) / SHARE)


def _apart(said_s: float, made_s: float) -> float:
    """Relative error of a predicted time; 0 if the times are equal, also where no token came and both are infinite."""
    return 0.0 if said_s == made_s else said_s / made_s - 1


def show(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.5, help="that the trace lasts")
    parser.add_argument("--policies", default=",".join(ASKED))
    parser.add_argument("--own", action="store_true", help="each policy serves a trace that it bears")
    parser.add_argument("--kind", choices=("llama", "hybrids"), default="llama", help="of the models")
    asked = parser.parse_args()
    made = asyncio.run(bench(asked.policies.split(","), 60 * asked.minutes, asked.own, asked.kind))
    if asked.own:
        return
    gains = {other: made["slack"].goodput / made[other].goodput for other in GAINS if {"slack", other} <= made.keys()}
    show({f"slack_over_{other}": round(gain, 2) for other, gain in gains.items()})
    for other, gain in gains.items():
        assert gain >= GAINS[other], f"slack serves {gain:.2f} times the goodput of {other}: {GAINS[other]} is to reach"


if __name__ == "__main__":
    main()
