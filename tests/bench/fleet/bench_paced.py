"""Does a real fleet do what the simulator says of the fleet, with gateways that choose runtimes by old reports?

Four nodes with the product's device loop and machine, two gateways with the product's dispatch, and a NATS server serve
the simulator's own trace in real time. Only the engines are not real: steps, fetches and copies take as long as the
profile of an H100 says (`paced.py`), so that a few percent of a core are enough for a GPU. The simulator predicts the
run on the same rows, with as many gateways, reports as frequent and the same faults.

`python tests/bench/fleet/bench_paced.py --models-per-gpu 11 [--minutes 2] [--kill] [--drain] [--mixed] [--stretch 2]`

With `--kill` a runtime gets SIGKILL after a third of the trace and is started again after 20 s; with `--drain` another
runtime drains after two thirds. With `--old-rule` gateways choose as they did before: the runtime with the fewest
requests, plus 16 where the model is not resident. Such a run must be far from what the simulator says of the present
rule. `--priority-share 0.1` gives a tenth of the requests high priority. With `--mixed` every second device is an H200.
`--burst 300` sends 300 requests for one model in a second, after a third of the trace, and `--scheduler` has the
scheduler of the product move requests and models. `--long-prompts 8` sends 8 requests a second with the long prompts
and the sharp objective of `bench_roles.py`; with `--roles`, the scheduler gives roles and takes roles back.

Noise of the machine matters less if time is stretched. `--stretch 2` doubles arrivals, costs and objectives. The
fleet's own periods (reports, heartbeats) stay as they are, in the simulator as well, which simulates the stretched
trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from gateway.streams.runtimes import RuntimesView  # noqa: E402
from runtime.core.device.events import MoveStep, Placed  # noqa: E402
from runtime.core.device.model import Phase  # noqa: E402
from runtime.core.device.request import ModelKey, Objective, Request  # noqa: E402
from runtime.core.fleet.cluster import Cluster, Rules  # noqa: E402
from runtime.core.fleet.dispatch import NO_RUNTIMES, SeenFleet  # noqa: E402
from runtime.core.fleet.roles import RoleRule  # noqa: E402
from runtime.core.ledgers.costs import Law, Profile, load_profile  # noqa: E402
from runtime.core.turns.slack import Slack  # noqa: E402
from runtime.sim.device import SimulatedDevice  # noqa: E402
from runtime.sim.dispatch.base import Assigned  # noqa: E402
from runtime.sim.dispatch.gateways import GatewayDispatch, choose_serving, gateway_of  # noqa: E402
from runtime.sim.dispatch.sight import Sight  # noqa: E402
from runtime.sim.engine import SimulatedEngine  # noqa: E402
from runtime.sim.moves import PAUSE_S  # noqa: E402
from runtime.sim.replay import replay_choices  # noqa: E402
from runtime.sim.simulation import Simulation  # noqa: E402
from runtime.sim.workload import RESTART_S, SILENT_S, InjectedFault, Workload, base, prioritised, with_burst  # noqa: E402
from runtime.sim.world import World, kept_of  # noqa: E402
from store.bus import Bus  # noqa: E402
from store.contract import grants, wire  # noqa: E402
from store.contract.priorities import Priority  # noqa: E402
from store.contract.reports import PERIOD_S  # noqa: E402
from store.contract.wire import EngineSpec  # noqa: E402
from store.tasks import ended  # noqa: E402
from tests.bench.fleet import paced, paced_gateway  # noqa: E402
from tests.bench.fleet.bench_roles import PATIENCE_S, TTFT_S, with_long_prompts  # noqa: E402
from tests.bench.fleet.paced import MachineNoise, devices_of, noise_of, quantile  # noqa: E402
from tests.bench.fleet.paced_gateway import ChosenRuntime, PacedGatewayResult, PacedTrace, fewest  # noqa: E402
from tests.bench.timing import load  # noqa: E402
from tests.conftest import NatsServer  # noqa: E402

POINTS, SHARE = 5.0, 0.2  # bounds of a good prediction: points of attainment, part of the fetches
SIGHTS = range(5)  # seeds of the times of reports: the prediction is the median over the seeds
WARM_S, DRAIN_S = 60.0, 60.0  # requests before are not counted, at most a quarter of the trace; after the last arrival
KILLED, DRAINED = 1, 2  # numbers of runtimes
KILL_AT, BURST_AT, DRAIN_AT = 1 / 3, 1 / 3, 2 / 3  # parts of the trace
HOST_CACHE_BYTES = 16 << 20  # holds nothing: paced engines have no images
HIGH = Priority.HIGH.word
QUIET = {"STACCATO_LOG_LEVEL": "error"}  # for processes whose environment says nothing else
READY_S = 60.0  # until a fleet is up, besides the loads of its models


@dataclass(frozen=True)
class Drill:
    """A trace, the fleet that serves the trace, and the faults meanwhile."""

    work: Workload
    profiles: Sequence[Profile]  # devices have profiles in turns, by number
    objective: Objective
    devices: int
    gateways: int
    warm_s: float
    drain_s: float
    kill: bool = False
    drain: bool = False
    old_rule: bool = False
    scheduler: bool = False
    roles: bool = False

    def profile(self, device: int) -> Profile:
        return self.profiles[device % len(self.profiles)]

    @property
    def counted_from_s(self) -> float:
        return min(self.warm_s, self.work.duration_s / 4)


class PacedFigures(msgspec.Struct, frozen=True):
    """Figures of a run, simulated or real. Tokens not made by the end count as late."""

    token_attainment: float
    first_token_attainment: float
    ttft_p50_s: float
    ttft_p99_s: float
    fetches: int
    placements: int
    splits: int
    finished: float  # share of the requests
    high_token_attainment: float = 1.0  # of requests of high priority
    moves: int = 0  # requests moved to other devices, running or waiting


# ── the trace ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def stretched(profile: Profile, by: float) -> Profile:
    """The profile of a device that takes `by` times as long for everything."""
    assert profile.law is not None
    slow = {name: getattr(profile.law, name) * by for name in Law.__struct_fields__}
    return msgspec.structs.replace(profile, law=Law(**slow))


def as_seen(drill: Drill, noise: MachineNoise) -> Drill:
    """The drill on devices that also take the measured time of the loop between two steps."""
    return replace(drill, profiles=[_slower(profile, noise) for profile in drill.profiles])


def _slower(profile: Profile, noise: MachineNoise) -> Profile:
    assert profile.law is not None
    law, loop_s, switch_s = profile.law, noise.loop_ms / 1e3, max(0.0, noise.switch_ms - noise.loop_ms) / 1e3
    slower = msgspec.structs.replace(
        law, step_s=law.step_s + loop_s, prefill_s=law.prefill_s + loop_s, switch_s=law.switch_s + switch_s
    )
    return msgspec.structs.replace(profile, law=slower)


def drill_of(asked: argparse.Namespace) -> Drill:
    by, models = asked.stretch, round(asked.models_per_gpu * asked.gpus)
    work = base(models, asked.seed, duration_s=60 * asked.minutes)
    if asked.long_prompts:
        work = with_long_prompts(models, asked.long_prompts, asked.seed, 60 * asked.minutes)
    work = replace(work, at_s=work.at_s * by, duration_s=work.duration_s * by, rates=[rate / by for rate in work.rates])
    if asked.priority_share:
        work = prioritised(work, asked.priority_share, asked.seed)
    if asked.burst:
        work = with_burst(work, asked.burst, BURST_AT * work.duration_s, asked.seed)
    paths = [ROOT / f"deploy/profiles/{name}.json" for name in ("h100", "h200")[: 1 + asked.mixed]]
    profiles = [stretched(load_profile(path.read_bytes(), str(path)), by) for path in paths]
    objective = Objective(10.0 * by, 0.1 * by, 1.5 * by)
    if asked.long_prompts:
        objective = Objective(TTFT_S * by, 0.03 * by, PATIENCE_S * by)
    faults = {name: getattr(asked, name) for name in ("kill", "drain", "old_rule", "scheduler", "roles")}
    return Drill(work, profiles, objective, asked.gpus, asked.gateways, WARM_S * by, DRAIN_S * by, **faults)


# ── predicted ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class DrillDispatch(GatewayDispatch):
    """The simulator's gateways, which also choose devices for the requests of a device that drains."""

    def attach(self, world: Simulation, devices: list[SimulatedDevice]) -> None:
        super().attach(world, devices)
        self._devices = devices

    def target(self, request: Request, cluster: Cluster, now: float) -> int:
        """The device at which the request should go on, as the node of the draining device would choose."""
        fleet = self._sightings.look(0).fleet
        return choose_serving(fleet, request, cluster, now, decodes=True)[0]


class OldDispatch(DrillDispatch):
    """The simulator's gateways with the old rule. Residents are known at once: leases tell of them without delay."""

    def arrived(self, request: Request, cluster: Cluster, now: float) -> Sequence[Assigned]:
        fleet = self._sightings.look(gateway_of(request, self._count)).fleet
        self._give_back(fleet, request)
        number = self._fewest(fleet, request.model, now)
        self._note_place(request, number)
        self._take(fleet, request, number)
        return [Assigned(request, number)]

    def _fewest(self, fleet: SeenFleet, model: ModelKey, now: float) -> int:
        resident = {str(device.number) for device in self._devices if _resident(device, model)}
        chosen = fewest(fleet, model, resident, now, NO_RUNTIMES)
        assert chosen is not None, "no device of the fleet is lost under the old rule"
        return int(chosen)


def _resident(device: SimulatedDevice, key: ModelKey) -> bool:
    model = device.instance.models.get(key)
    return model is not None and model.phase is Phase.RESIDENT


def simulated(drill: Drill, sight_seed: int) -> PacedFigures:
    dispatch = (OldDispatch if drill.old_rule else DrillDispatch)(Sight(drill.gateways, PERIOD_S, seed=sight_seed))
    duration_s = drill.work.duration_s
    faults = [InjectedFault(KILL_AT * duration_s, KILLED, "hangs")] if drill.kill else []
    rules = Rules(migrate=True, roles=RoleRule() if drill.roles else None) if drill.scheduler else None
    fleet = drill.devices, drill.objective
    world = World(drill.work, drill.profiles, Slack, dispatch, *fleet, rules=rules, faults=faults)
    if drill.kill:
        world.at(KILL_AT * duration_s + SILENT_S + RESTART_S + 1.0, partial(_prove, world), KILLED)
    if drill.drain:
        world.at(DRAIN_AT * duration_s, partial(_drain, world, dispatch), DRAINED)
    world.run(drill.drain_s)
    result = world.result(drill.counted_from_s)
    return PacedFigures(
        token_attainment=result.token_attainment,
        first_token_attainment=result.first_token_attainment,
        ttft_p50_s=result.ttft_p50_s,
        ttft_p99_s=result.ttft_p99_s,
        fetches=round(result.fetches_per_s * drill.devices * world.now),
        placements=result.placements,
        splits=result.splits,
        finished=result.finished,
        high_token_attainment=result.priorities[HIGH].token_attainment if result.priorities else 1.0,
        moves=result.moves,
    )


def _prove(world: World, number: int) -> None:
    """Place every model as a runtime does after its start: each model is loaded once. Paced checks take no time."""
    device = world.devices[number]
    for key, spec in world.specs.items():
        if key not in device.instance.models:
            device.engines[key] = SimulatedEngine(device.costs[key], device.profile.page_bytes)
            device.happen(Placed(spec))
            device.instance.models[key].loads.proved = True


def _drain(world: World, dispatch: DrillDispatch, number: int) -> None:
    """Move all requests of a device away, as a draining node does: at once, even to a device without the model."""
    world.cluster.leaves(number)
    source = world.devices[number]
    for request in source.left_behind():
        target = world.devices[dispatch.target(request, world.cluster, world.now)]
        source.between_steps(request.model, partial(_leave, world, source, target), request)


def _leave(world: World, source: SimulatedDevice, target: SimulatedDevice, request: Request) -> None:
    if source.has(request):
        costs = source.costs[request.model]
        copy_s = request.context * costs.kv_bytes_per_token * costs.copy_s_per_byte
        source.happen(MoveStep("release", request.model, request.id))
        world.cluster.ended(request, source.number)
        world.at(world.now + (PAUSE_S + copy_s if request.computed else 0.0), partial(_land, world, target), request)


def _land(world: World, target: SimulatedDevice, request: Request) -> None:
    moved = replace(request, handed=request.computed)
    moved.progress = request.progress
    world.moved(moved, target.number)
    target.arrive(moved)


def median(all_figures: Sequence[PacedFigures]) -> PacedFigures:
    """Medians, figure by figure."""
    names = PacedFigures.__struct_fields__
    return PacedFigures(**{name: statistics.median_low(getattr(each, name) for each in all_figures) for name in names})


# ── the fleet ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class PacedFleet:
    """A NATS server, nodes with paced engines, and a view of them."""

    folder: Path
    url: str
    drill: Drill
    host_cache: int
    nodes: dict[int, asyncio.subprocess.Process]
    view: RuntimesView

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, drill: Drill) -> AsyncIterator[PacedFleet]:
        """A fleet whose models are proved and lie in the host's memory."""
        server = NatsServer(folder / "nats")
        server.start()
        host_cache = os.memfd_create("bench-host-cache")
        os.ftruncate(host_cache, HOST_CACHE_BYTES)
        for number in range(drill.devices):
            (folder / f"profile-{number}.json").write_bytes(msgspec.json.encode(drill.profile(number)))
        fleet = scheduler = None
        try:
            async with Bus.connect(server.url, "bench", grants.GATEWAY) as bus:
                fleet = cls(folder, server.url, drill, host_cache, {}, RuntimesView(bus))
                await fleet.view.start()
                for number in range(drill.devices):
                    await fleet.start(number)
                await fleet.prove()
                if drill.scheduler:
                    environment = QUIET | os.environ | {"STACCATO_NATS_URL": server.url, "PYTHONPATH": str(ROOT)}
                    environment["STACCATO_ROLES"] = "auto" if drill.roles else "fixed"
                    command = (sys.executable, "-m", "runtime.scheduler")
                    scheduler = await asyncio.create_subprocess_exec(*command, env=environment)
                yield fleet
        finally:
            for process in (scheduler, *(fleet.nodes.values() if fleet else ())):
                if process is not None and process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                if process is not None:
                    await process.wait()
            server.kill()
            os.close(host_cache)

    async def start(self, number: int) -> None:
        environment = (
            QUIET
            | os.environ
            | {
                "STACCATO_NATS_URL": self.url,
                "STACCATO_RUNTIME_ID": str(number),
                "STACCATO_DEVICE_MEMORY": str(self.drill.profile(number).memory_bytes),
                "STACCATO_PROFILE": str(self.folder / f"profile-{number}.json"),
                "STACCATO_HOST_CACHE": str(HOST_CACHE_BYTES),
                "STACCATO_HOST_CACHE_FD": str(self.host_cache),
                "STACCATO_DRAIN_S": "0",
                paced.FOLDER: str(self.folder),
            }
        )
        command = (sys.executable, paced.__file__, "node")
        self.nodes[number] = await asyncio.create_subprocess_exec(*command, env=environment, pass_fds=[self.host_cache])

    async def prove(self) -> None:
        """Have every runtime load every model once, as runtimes do with new models, and put all models to sleep."""
        work, profiles = self.drill.work, self.drill.profiles
        load_s = max(sum(profile.costs(size).load_s for size in work.models) for profile in profiles)
        for size in work.models:
            await self.view.put(spec_of(size.name, size.weight_bytes, size.kv_bytes_per_token))
        await self.until(self._all_proved, READY_S + 2 * load_s)
        for size in work.models:
            reply = await self.view.control(size.name, "sleep")
            assert reply.refusal is None, reply.reason
        await self.until(self._all_asleep, READY_S)

    def _all_proved(self) -> bool:
        leases, count = self.view.leases.values(), len(self.drill.work.models)
        return len(leases) == self.drill.devices and all(
            len(lease.models) == count and all(model.was_resident for model in lease.models.values())
            for lease in leases
        )

    def _all_asleep(self) -> bool:
        return all(lease.pages_used == 0 for lease in self.view.leases.values())

    async def until(self, done: Callable[[], bool], within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while not done():
                died = [number for number, process in self.nodes.items() if process.returncode is not None]
                assert not died, f"nodes {died} ended: see their standard error"
                await self.view.change(1.0)

    async def hurt(self, began: float) -> None:
        """Let the faults of the drill happen."""
        async with asyncio.TaskGroup() as group:
            if self.drill.kill:
                group.create_task(self._kill(began + KILL_AT * self.drill.work.duration_s))
            if self.drill.drain:
                group.create_task(self._drain(began + DRAIN_AT * self.drill.work.duration_s))

    async def _kill(self, when: float) -> None:
        await _until(when)
        self.nodes[KILLED].kill()
        await _until(when + RESTART_S)
        await self.start(KILLED)

    async def _drain(self, when: float) -> None:
        await _until(when)
        reply = await self.view.ask(wire.drain_subject(str(DRAINED)), wire.Drain(on=True))
        assert wire.decode(wire.Reply, reply).refusal is None, "a runtime drains by an operator's order"


def spec_of(name: str, weight_bytes: int, kv_bytes_per_token: float) -> EngineSpec:
    return EngineSpec(
        key=name,
        path=name,
        digest="",
        architecture="",
        dtype="bfloat16",
        max_model_len=8192,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=round(kv_bytes_per_token),
    )


async def _until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - time.monotonic()))


# ── measured ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PacedRun:
    """Results of a real run."""

    figures: PacedFigures
    noise: MachineNoise
    lost: list[str]  # errors of requests
    choices: int  # choices of the gateways that a replay made again


async def measured(drill: Drill) -> PacedRun:
    """Serve the trace with a real fleet."""
    with tempfile.TemporaryDirectory(prefix="staccato-paced-") as scratch:
        folder = Path(scratch)
        async with PacedFleet.running(folder, drill) as fleet:
            trace = PacedTrace(fleet.url, drill.gateways, drill.old_rule, drill.drain_s, drill.objective)
            (folder / "trace.json").write_bytes(msgspec.json.encode(trace))
            (folder / "workload.pickle").write_bytes(pickle.dumps(drill.work))
            began = await played(fleet, folder)
            moves = sum(lease.moved for lease in fleet.view.leases.values())
        return run_of(drill, folder, began, moves)


async def played(fleet: PacedFleet, folder: Path) -> float:
    """Have the gateways play the trace. Returns when the trace began, on the monotonic clock."""
    drill = fleet.drill
    gateways = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, paced_gateway.__file__, str(number), str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=QUIET | os.environ,
        )
        for number in range(drill.gateways)
    ]
    try:
        for process in gateways:
            assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
        began = time.monotonic() + 1.0
        for process in gateways:
            assert process.stdin is not None
            process.stdin.write(f"{began}\n".encode())
        hurting = asyncio.create_task(fleet.hurt(began))
        async with asyncio.timeout(drill.work.duration_s + drill.drain_s + READY_S):
            codes = [await process.wait() for process in gateways]
        if hurting.done():
            hurting.result()
        await ended(hurting)
        assert codes == [0] * drill.gateways, f"gateways ended with {codes}: see their standard error"
        return began
    finally:
        for process in gateways:
            if process.returncode is None:
                process.kill()


def run_of(drill: Drill, folder: Path, began: float, moves: int) -> PacedRun:
    """The results that the processes of a run have left in the folder. `moves`: requests moved, by the leases."""
    results, requests, choices = list[PacedGatewayResult](), list[Request](), 0
    for number in range(drill.gateways):
        results.append(msgspec.json.decode((folder / f"g{number}.json").read_bytes(), type=PacedGatewayResult))
        requests += pickle.loads((folder / f"g{number}.pickle").read_bytes())
        replayed = replay_choices(folder / f"g{number}.journal")
        assert not replayed.difference, replayed.difference
        choices += replayed.chosen
    assert len(requests) == len(drill.work.at_s), "a request of the trace was not sent"
    fetches, devices = devices_of(folder, began)
    counted = [request for request in requests if request.arrived_at - began >= drill.counted_from_s]
    kept, high = kept_of(counted), [request for request in counted if request.objective.high]
    ttfts = sorted(request.progress.first_at - request.arrived_at for request in counted)
    placements, splits = places_of([noted for result in results for noted in result.noted])
    figures = PacedFigures(
        token_attainment=kept.token_attainment,
        first_token_attainment=kept.first_token_attainment,
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p99_s=quantile(ttfts, 0.99),
        fetches=fetches,
        placements=placements,
        splits=splits,
        finished=sum(request.sent >= request.max_tokens for request in requests) / len(requests),
        high_token_attainment=kept_of(high).token_attainment if high else 1.0,
        moves=moves,
    )
    lost = [error for result in results for error in result.errors]
    noise = noise_of(devices, [late_s for result in results for late_s in result.late_s])
    return PacedRun(figures, noise, lost, choices)


def places_of(noted: Iterable[ChosenRuntime]) -> tuple[int, int]:
    """Number of choices for models without requests, and of choices of a runtime without requests of the model though
    other runtimes have some and are not hot by the view of the gateway."""
    there: defaultdict[str, Counter[str]] = defaultdict(Counter)
    placements = splits = 0
    for each in sorted(noted):
        holders = +there[each.model]
        if each.chosen and not holders:
            placements += 1
        elif each.chosen and each.runtime not in holders and not each.hot:
            splits += 1
        there[each.model][each.runtime] += 1 if each.came else -1
    return placements, splits


# ── the bench ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def kept_promise(said: PacedFigures, run: PacedRun) -> bool:
    """Whether the run is as predicted, and no request was lost."""
    real = run.figures
    points = 100 * max(abs(said.token_attainment - real.token_attainment), said.finished - real.finished)
    return points <= POINTS and abs(real.fetches / said.fetches - 1) <= SHARE and not run.lost


def show(before: PacedFigures, seen: Sequence[PacedFigures], run: PacedRun) -> None:
    said = median(seen)
    print(f"{'':24} {'beforehand':>10} {'as seen':>10} {'lowest':>10} {'highest':>10} {'real':>10} {'ratio':>7}")
    for name in PacedFigures.__struct_fields__:
        each, real = [getattr(figures, name) for figures in seen], getattr(run.figures, name)
        columns = (getattr(before, name), getattr(said, name), min(each), max(each), real)
        ratio = f"{real / columns[1]:.3f}" if columns[1] else "-"
        print(f"{name:24}", *(f"{value:10.4g}" for value in columns), f"{ratio:>7}")
    print(f"choices replayed: {run.choices}; errors: {run.lost or 'none'}")
    print(f"machine: {msgspec.json.encode(run.noise).decode()}, load {load()}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    option = parser.add_argument
    option("--models-per-gpu", type=float, default=11.0)
    option("--gpus", type=int, default=4)
    option("--gateways", type=int, default=2)
    option("--minutes", type=float, default=2.0, help="of the trace, before it is stretched")
    option("--stretch", type=float, default=1.0, help="all times of the trace, the objective and the profile")
    option("--seed", type=int, default=7)
    option("--priority-share", type=float, default=0.0, help="part of the requests with high priority")
    option("--kill", action="store_true", help="a runtime is killed, and comes back")
    option("--drain", action="store_true", help="a runtime drains")
    option("--mixed", action="store_true", help="every second device is an H200")
    option("--burst", type=int, default=0, help="requests for one model that come in a second")
    option("--scheduler", action="store_true", help="the scheduler of the product moves requests and models")
    option("--long-prompts", type=float, default=0.0, help="requests per second, with long prompts")
    option("--roles", action="store_true", help="with --scheduler: roles are given and taken back")
    option("--old-rule", action="store_true", help="gateways choose as they did before")
    option("--output", type=Path, help="a file for a line with the answer")
    asked = parser.parse_args()
    drill = drill_of(asked)
    before = median([simulated(drill, seed) for seed in SIGHTS])
    run = asyncio.run(measured(drill))
    seen = [simulated(as_seen(drill, run.noise), seed) for seed in SIGHTS]
    show(before, seen, run)
    present = as_seen(replace(drill, old_rule=False), run.noise)
    met = kept_promise(median([simulated(present, seed) for seed in SIGHTS]), run)
    print("as the simulator says of the present rule:", "yes" if met else "no")
    if asked.output:
        row = {key: value for key, value in vars(asked).items() if key != "output"}
        row |= {"at": datetime.now(UTC).isoformat(timespec="seconds"), "requests": len(drill.work.at_s), "load": load()}
        row |= {"beforehand": msgspec.to_builtins(before), "as_seen": msgspec.to_builtins(seen), "met": met}
        row |= {"real": msgspec.to_builtins(run.figures), "lost": run.lost, "noise": msgspec.to_builtins(run.noise)}
        with asked.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return int(met is asked.old_rule)  # the old rule must not do as well


if __name__ == "__main__":
    sys.exit(main())
