"""A gateway of the bench with paced engines: dispatch, relay and view of the product, and a client for each request.

`python tests/bench/fleet/paced_gateway.py NUMBER FOLDER` plays this gateway's part of the trace in FOLDER. The process
says "ready", reads the time at which the trace begins (monotonic seconds), plays, and leaves requests and choices in
FOLDER. HTTP, vLLM's front half, admission and the meter are left out, because the tokens of paced engines have no text.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from gateway.inference.metrics import Metrics  # noqa: E402
from gateway.inference.timing import Timing  # noqa: E402
from gateway.streams.dispatch import Dispatcher, Unserved  # noqa: E402
from gateway.streams.relay import Relay, RuntimeRefused  # noqa: E402
from gateway.streams.runtimes import RuntimesView  # noqa: E402
from runtime.core.device.request import ModelKey, Objective, Request, request_id  # noqa: E402
from runtime.core.fleet.dispatch import FRESH_S, NO_RUNTIMES, SeenFleet  # noqa: E402
from runtime.sim.dispatch.gateways import gateway_of  # noqa: E402
from runtime.sim.workload import Workload  # noqa: E402
from store.bus import Bus  # noqa: E402
from store.contract import grants, wire  # noqa: E402
from store.contract.priorities import PATIENCE_S, Priority  # noqa: E402
from store.contract.wire import Delta, Residency  # noqa: E402
from store.files.records import RecordFile, appended  # noqa: E402
from tests.bench.fleet import paced  # noqa: E402

OBJECTIVE = Objective()
WAY_IN = 16  # requests that a model's way to the device counts as, in the old rule
HOLD_S = RESUME_S = 120.0  # longest time until a runtime takes a request


class PacedTrace(msgspec.Struct, frozen=True):
    """A trace on its way to the gateways, and how the trace is to be served."""

    url: str
    gateways: int
    old_rule: bool
    drain_s: float  # after the last arrival; then requests without an end are given up
    objective: Objective


class ChosenRuntime(NamedTuple):
    """A request that came to a runtime, by choice or by a move, or that left the runtime."""

    at: float  # monotonic seconds
    model: str
    runtime: str
    came: bool
    chosen: bool = False  # the request came by a choice of the gateway
    hot: bool = False  # by the gateway's view, every runtime with requests of the model is hot


def fewest(fleet: SeenFleet, model: ModelKey, resident: Set[str], now: float, avoid: Set[str]) -> str | None:
    """The old rule of gateways: the runtime with the fewest requests, plus WAY_IN where the model is not resident.

    Args:
        fleet: the fleet as the gateway sees the fleet.
        model: the model of the request.
        resident: runtimes on which the model is RESIDENT.
        now: seconds.
        avoid: runtimes that must not get the request."""
    counts = []
    for id, runtime in fleet.runtimes.items():
        takes = runtime.heard_at >= now - FRESH_S and not runtime.suspect and not runtime.report.draining
        if takes and model in runtime.coldness and id not in avoid:
            reported = sum(seat.requests for seat in runtime.report.seats.values())
            requests = max(reported, sum(runtime.own.values()))
            counts.append((requests + (0 if id in resident else WAY_IN), id))
    return min(counts)[1] if counts else None


class NotingView(RuntimesView):
    """A view that notes the requests that come to runtimes and leave runtimes; with `old_rule` a view of the past."""

    def __init__(self, bus: Bus, record: Callable[[bytes], None] | None, old_rule: bool) -> None:
        super().__init__(bus, record)
        self.noted: list[ChosenRuntime] = []
        self._old_rule = old_rule
        self._choice: tuple[str, str, bool] | None = None

    def choose(self, key: str, objective: Objective = OBJECTIVE, avoid: Set[str] = NO_RUNTIMES) -> str | None:
        model = ModelKey(key)
        holders = [runtime for runtime in self._seen.runtimes.values() if runtime.requests(model)]
        hot = all(runtime.hot(model) for runtime in holders)
        if self._old_rule:
            states = self.states(key).items()
            resident = {id for id, state in states if state.residency is Residency.RESIDENT}
            chosen = fewest(self._seen, model, resident, time.monotonic(), avoid)
        else:
            chosen = super().choose(key, objective, avoid)
        self._choice = None if chosen is None else (key, chosen, hot)
        return chosen

    def took(self, runtime: str, key: str, tbt_s: float) -> None:
        super().took(runtime, key, tbt_s)
        choice, self._choice = self._choice, None
        chosen = choice is not None and choice[:2] == (key, runtime)
        hot = choice is not None and choice[2]
        self.noted.append(ChosenRuntime(time.monotonic(), key, runtime, True, chosen, hot))

    def gave_back(self, runtime: str, key: str) -> None:
        super().gave_back(runtime, key)
        self.noted.append(ChosenRuntime(time.monotonic(), key, runtime, False))


@dataclass
class PacedClients:
    """The clients of a gateway: the requests with the arrivals of their tokens."""

    requests: dict[str, Request] = field(default_factory=dict)  # requests sent so far, by id
    open: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)

    def made(self, deltas: list[tuple[str, Delta]]) -> None:
        now = time.monotonic()
        for id, delta in deltas:
            self.requests[id].progress.deliver(now, len(delta.tokens), 0.0)
            if delta.finish is not None:
                self.open.discard(id)

    def failed(self, request: str, error: str, refused: bool = False) -> None:
        self.open.discard(request)
        self.errors.append(f"{request}: {error}")


class PacedGatewayResult(msgspec.Struct, frozen=True):
    """Notes of a gateway; the requests are pickled in a second file."""

    noted: list[ChosenRuntime]
    errors: list[str]
    late_s: list[float]  # how late requests were sent


async def play(number: int, folder: Path, trace: PacedTrace, work: Workload) -> None:
    """Play the requests of the gateway `number`."""
    gateway = f"g{number}"
    journal = folder / f"{gateway}.journal"
    async with Bus.connect(trace.url, gateway, grants.GATEWAY) as bus:
        view = NotingView(bus, RecordFile(appended(journal)).write, trace.old_rule)
        relay, clients = Relay(bus, gateway), PacedClients()
        await view.start()
        await relay.start()
        dispatcher = Dispatcher(relay, view, clients, RESUME_S)
        print("ready", flush=True)
        began = float(await asyncio.to_thread(sys.stdin.readline))
        tally = Metrics(view).tally("bench", "trace")
        late_s: list[float] = []
        async with asyncio.TaskGroup() as group:
            for request in own_requests(number, trace, work, began, gateway):
                await asyncio.sleep(request.arrived_at - time.monotonic())
                late_s.append(time.monotonic() - request.arrived_at)
                clients.requests[request.id] = request
                clients.open.add(request.id)
                group.create_task(_submit(dispatcher, clients, request, Timing(time.monotonic(), tally)))
        end = began + work.duration_s + trace.drain_s
        while clients.open and time.monotonic() < end:
            await asyncio.sleep(0.05)
        result = PacedGatewayResult(view.noted, clients.errors, late_s)
        (folder / f"{gateway}.json").write_bytes(msgspec.json.encode(result))
        (folder / f"{gateway}.pickle").write_bytes(pickle.dumps(list(clients.requests.values())))
        await dispatcher.cancel(list(clients.open))
        relay.stop()


async def _submit(dispatcher: Dispatcher, clients: PacedClients, request: Request, timing: Timing) -> None:
    objective = request.objective
    run = wire.Run(
        gateway=request.gateway,
        stream=0,  # the dispatcher gives each attempt its number
        model=request.model,
        request=request.id,
        attempt=1,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        payload=request.payload,
        engine=paced.VERSION,
        label="bench/trace",
        tenant="bench",
        ttft_s=objective.ttft_s,
        tbt_s=objective.tbt_s,
        patience_s=objective.patience_s,
        priority=objective.priority,
    )
    due_at = request.arrived_at + objective.ttft_s
    try:
        await dispatcher.submit(request.id, run, due_at, request.arrived_at + HOLD_S, timing)
    except (Unserved, RuntimeRefused) as error:
        clients.failed(request.id, str(error))


def own_requests(number: int, trace: PacedTrace, work: Workload, began: float, gateway: str) -> list[Request]:
    """The gateway's requests, in order of arrival. The simulator divides requests among gateways equally."""
    due = trace.objective
    high_due = Objective(due.ttft_s, due.tbt_s, PATIENCE_S[Priority.HIGH], Priority.HIGH)  # as in the simulator
    ranks = [False] * len(work.at_s) if work.high is None else work.high.tolist()
    columns = (work.at_s.tolist(), work.model.tolist(), work.prompt_tokens.tolist(), work.output_tokens.tolist(), ranks)
    made = []
    for stream, (at_s, model, prompt, output, high) in enumerate(zip(*columns, strict=True)):
        key = ModelKey(work.models[model].name)
        asked = paced.payload(prompt, output)
        request = Request(
            *(request_id(gateway, stream), gateway, stream, key, asked, began + at_s, prompt, output),
            high_due if high else due,
        )
        if gateway_of(request, trace.gateways) == number:
            made.append(request)
    return made


def main() -> None:
    import uvloop

    from store.telemetry import observe

    observe.configure_logs("gateway")
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    trace = msgspec.json.decode((folder / "trace.json").read_bytes(), type=PacedTrace)
    work = pickle.loads((folder / "workload.pickle").read_bytes())
    uvloop.run(play(number, folder, trace, work))


if __name__ == "__main__":
    main()
