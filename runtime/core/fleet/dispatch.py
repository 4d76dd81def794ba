"""Dispatch: the runtime that a request goes to, chosen by what one dispatcher has heard of the fleet. Pure.

Gateways choose runtimes for prompts and for requests that lost their runtime, nodes choose targets for requests that
move, and the simulator runs the same class. A dispatcher hears leases and reports of runtimes, some time old, and knows
its own open requests exactly. No dispatcher hears of the requests of other dispatchers before runtimes report them.

The rule: a model stays where the model has requests, since requests of one model share steps. A model without requests
goes to the cheapest of a few runtimes. The few are the same for every dispatcher, so two dispatchers that place a model
at the same moment choose the same runtime, and different models spread over a large fleet. A model that needs more
than half of an overloaded runtime is hot, and flows over to a further runtime.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Set
from enum import IntEnum

from runtime.core.device.request import ModelKey, Objective
from runtime.core.ledgers.costs import ModelCosts
from store.contract.reports import Report
from store.contract.wire import Residency, Role

CANDIDATES = 4  # runtimes, besides those with the model's weights, among which a model without requests is placed
FRESH_S = 3.0  # a runtime whose last report is older gets no requests
HOT_LOAD, HOT_FULL = 1.0, 0.9  # a runtime above either bound is overloaded: in time, or in memory for keys and values
HOT_SHARE = 0.5  # a model with more than this share of an overloaded runtime's time or memory is hot there
LOAD_SHARE = 0.5 / 8.0  # share of a device's time per second of a model's load time: half of it, once in a lead of 8 s
RELOAD_SHARE = 0.15  # share of a device's time counted for a model with weights that takes its TTFT to load again
LOAD_LEAST = 0.08  # least cost of bringing a model in, however short the load time: the switch delays other models
LOADING = 1.6  # factor on the cost of bringing a model in while the weights of another model are coming in
TTFT_S_LEAST = 0.1  # a request whose first token is nearly due is placed as if so much time were left
READ_S_PER_BYTE = 0.5e-9  # guess for weights that lie on disk: 2 GB/s
BUILD_S = 5.0  # guess for an engine that is not built
NO_RUNTIMES: frozenset[str] = frozenset()
POINTS = 32  # of a runtime on the ring of runtimes
_MASK = (1 << 64) - 1


class Coldness(IntEnum):
    """Where a model has to be read from before the model can make a token."""

    NONE = 0
    HOST = 1
    DISK = 2


COLDNESS = {
    Residency.RESIDENT: Coldness.NONE,
    Residency.LOADING: Coldness.HOST,
    Residency.STAGED: Coldness.HOST,
    Residency.LEAVING: Coldness.HOST,
    Residency.COLD: Coldness.DISK,
}


class SeenRuntime:
    """A runtime as one dispatcher sees the runtime: last lease, last report, and the dispatcher's open requests."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.points = _points(id)  # on the ring of runtimes, equal for every dispatcher
        self.coldness: Mapping[ModelKey, Coldness] = {}  # of every model that the runtime can serve
        self.costs: Mapping[ModelKey, ModelCosts] = {}
        self.report = Report(runtime=id, epoch=0, seq=0)
        self.heard_at = -float("inf")  # seconds; arrival of the last report
        self.gone = False  # the lease ended; own requests are still to be given back
        self.suspect = False  # the runtime refused a request, or did not answer, after the last report
        self.own: dict[ModelKey, int] = {}  # open requests of this dispatcher
        self.tbt_s: dict[ModelKey, float] = {}  # objective of the last of them
        self.ahead: dict[ModelKey, float] = {}  # load of own requests that the report does not count, by model

    def requests(self, model: ModelKey) -> int:
        """Return the number of the model's requests: as reported, or this dispatcher's own if these are more."""
        seat = self.report.seats.get(model)
        own = self.own.get(model, 0)
        return own if seat is None or own > seat.requests else seat.requests

    @property
    def load(self) -> float:
        """Share of the device's time that the runtime's requests need to keep their pace."""
        return self.report.load + sum(self.ahead.values()) if self.ahead else self.report.load

    def weigh(self, model: ModelKey) -> None:
        """Compute the load of own requests of the model that the report does not count."""
        own, seat = self.own.get(model, 0), self.report.seats.get(model)
        reported = 0 if seat is None else seat.requests
        if own <= reported or model not in self.coldness:
            self.ahead.pop(model, None)
            return
        costs, tbt_s = self.costs[model], self.tbt_s[model]
        if reported:
            self.ahead[model] = (costs.step(own, 0) - costs.step(reported, 0)) / tbt_s
        else:
            away_s = 0.0 if model in self.report.here else seconds(costs, self.coldness[model])
            self.ahead[model] = costs.step(own, 0) / tbt_s + LOAD_SHARE * away_s

    def weigh_all(self) -> None:
        """Compute the load of own requests that the report does not count, after a new report or with new costs."""
        seats, ahead = self.report.seats, self.ahead
        for model, own in self.own.items():
            seat = seats.get(model)
            if seat is None or own > seat.requests:
                self.weigh(model)
            elif ahead:
                ahead.pop(model, None)

    @property
    def loading(self) -> bool:
        """Whether weights of some model are coming in, by the report or since."""
        if self.report.loading:
            return True
        here, seats = self.report.here, self.report.seats
        return any([model not in here and model not in seats for model in self.ahead])

    def hot(self, model: ModelKey) -> bool:
        """Return whether the runtime is overloaded and the model needs most of what is short."""
        seat, load, full = self.report.seats.get(model), self.load, self.report.full
        if load > HOT_LOAD:
            busy = (0.0 if seat is None else seat.busy) + self.ahead.get(model, 0.0)
            if busy > HOT_SHARE * load:
                return True
        return full > HOT_FULL and seat is not None and seat.kv > HOT_SHARE * full

    def cost(self, model: ModelKey, objective: Objective) -> float:
        """Return the cost of placing the model here: the runtime's load, the model's step, and the model's way in."""
        costs = self.costs[model]
        cost = self.load + costs.step(1, 0) / objective.tbt_s
        if model in self.report.here:
            return cost
        way_in_s = seconds(costs, self.coldness[model])
        way_in = max(LOAD_LEAST, way_in_s / max(objective.ttft_s, TTFT_S_LEAST))
        return cost + RELOAD_SHARE * self.report.reload + way_in * (LOADING if self.loading else 1.0)


class SeenFleet:
    """The runtimes as one dispatcher sees the runtimes. A choice costs a few lookups, however many runtimes there are.

    `fresh_s`: a runtime whose last report is older, in seconds, gets no requests."""

    def __init__(self, fresh_s: float = FRESH_S) -> None:
        self.runtimes: dict[str, SeenRuntime] = {}
        self._fresh_s = fresh_s
        self._holders: dict[str, set[str]] = {}  # model → runtimes with requests of the model
        self._here: dict[str, set[str]] = {}  # model → runtimes that report weights of the model
        self._ring: list[int] = []  # points of all runtimes, sorted; empty: to be made again
        self._on_ring: list[SeenRuntime] = []  # the runtime of each point

    # ── told ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def hosts(
        self, id: str, coldness: Mapping[ModelKey, Coldness], costs: Mapping[ModelKey, ModelCosts]
    ) -> SeenRuntime:
        """Note which models a runtime can serve, where their weights lie, and what models cost on the runtime."""
        runtime = self.runtimes.get(id)
        if runtime is None:
            runtime = self.runtimes[id] = SeenRuntime(id)
            self._ring = []
        runtime.coldness, runtime.costs, runtime.gone = coldness, costs, False
        runtime.weigh_all()
        return runtime

    def hear(self, report: Report, now: float) -> bool:
        """Take the report of a known runtime. Returns whether the runtime takes requests again, or from now on no more.

        A report older than the last report of the runtime is passed over. `now`: seconds."""
        runtime = self.runtimes.get(report.runtime)
        if runtime is None or (report.epoch, report.seq) < (runtime.report.epoch, runtime.report.seq):
            return False
        last, runtime.report = runtime.report, report
        changed = runtime.suspect or last.draining != report.draining or now - runtime.heard_at > self._fresh_s
        runtime.suspect, runtime.heard_at = False, now
        before, after = last.seats, report.seats
        came = [model for model in after if model not in before]
        if came or len(before) != len(after):
            for model in came:
                self._holders.setdefault(model, set()).add(runtime.id)
            for model in [model for model in before if model not in after]:
                if model not in runtime.own:
                    _drop(self._holders, model, runtime.id)
        if last.here != report.here:
            for model in last.here - report.here:
                _drop(self._here, model, runtime.id)
            for model in report.here - last.here:
                self._here.setdefault(model, set()).add(runtime.id)
        runtime.weigh_all()
        return changed

    def gone(self, id: str) -> None:
        """Note that a runtime's lease ended. Own requests at the runtime are given back one by one, before or after."""
        runtime = self.runtimes.get(id)
        if runtime is None:
            return
        for model in runtime.report.seats:
            if model not in runtime.own:
                _drop(self._holders, model, id)
        for model in runtime.report.here:
            _drop(self._here, model, id)
        runtime.coldness, runtime.report, runtime.gone = {}, Report(runtime=id, epoch=0, seq=0), True
        runtime.weigh_all()
        self._forget(runtime)

    def _forget(self, runtime: SeenRuntime) -> None:
        """Forget a runtime that is gone and has no own request."""
        if runtime.gone and not runtime.own:
            del self.runtimes[runtime.id]
            self._ring = []

    def refused(self, id: str) -> None:
        """Note that a runtime refused a request for a reason of the runtime's, or did not answer.

        The runtime gets no requests of this dispatcher until the next report."""
        if id in self.runtimes:
            self.runtimes[id].suspect = True

    def took(self, id: str, model: ModelKey, tbt_s: float) -> None:
        """Count a request of this dispatcher at the runtime."""
        runtime = self.runtimes.get(id)
        if runtime is None:
            return
        runtime.own[model] = runtime.own.get(model, 0) + 1
        runtime.tbt_s[model] = tbt_s
        runtime.weigh(model)
        self._holders.setdefault(model, set()).add(id)

    def gave_back(self, id: str, model: ModelKey) -> None:
        """Note that a request of this dispatcher ended at the runtime, was lost, or moved away."""
        runtime = self.runtimes.get(id)
        if runtime is None or model not in runtime.own:  # the runtime was not known when the request was sent
            return
        runtime.own[model] -= 1
        runtime.weigh(model)
        if not runtime.own[model]:
            del runtime.own[model], runtime.tbt_s[model]
            if model not in runtime.report.seats:
                _drop(self._holders, model, id)
            self._forget(runtime)

    # ── asked ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def choose(
        self,
        model: ModelKey,
        objective: Objective,
        now: float,
        decodes: bool = False,
        avoid: Set[str] = NO_RUNTIMES,
    ) -> str | None:
        """Return the runtime that should take a request of the model; None if no runtime can take the request.

        Args:
            model: the model of the request.
            objective: when tokens of the request are due.
            now: seconds.
            decodes: the request's prompt is computed: runtimes that only compute prompts come last. Otherwise runtimes
                that only decode come last.
            avoid: runtimes that must not get the request."""
        last = Role.PREFILL if decodes else Role.DECODE
        chosen = self._choose(model, objective, now, avoid, last)
        return chosen if chosen is not None else self._choose(model, objective, now, avoid, None)

    def _choose(
        self, model: ModelKey, objective: Objective, now: float, avoid: Set[str], without: Role | None
    ) -> str | None:
        oldest = now - self._fresh_s
        runtimes = self.runtimes
        holding = self._holders.get(model)
        holders = []
        if holding:
            for id in holding:
                if _takes(runtimes[id], model, oldest, avoid, without):
                    holders.append(runtimes[id])
        if holders:
            cool = [runtime for runtime in holders if not runtime.hot(model)]
            if len(cool) == len(holders):
                return min([(-runtime.requests(model), _rank(model, runtime), runtime.id) for runtime in cool])[2]
            if cool:
                return min([(runtime.load, runtime.id) for runtime in cool])[1]
        best: tuple[float, str] | None = None
        looked = 0
        here = self._here.get(model, set())
        for runtime in self.in_order(model):
            if looked == CANDIDATES:
                break
            if not _takes(runtime, model, oldest, avoid, without) or (holders and not _spare(runtime, holding)):
                continue
            looked += 1
            cost = (runtime.cost(model, objective), runtime.id)
            if best is None or cost < best:
                best = cost
        for id in here:
            runtime = runtimes[id]
            if not _takes(runtime, model, oldest, avoid, without) or (holders and not _spare(runtime, holding)):
                continue
            cost = (runtime.cost(model, objective), runtime.id)
            if best is None or cost < best:
                best = cost
        if best is not None:
            return best[1]
        return min([(runtime.load, runtime.id) for runtime in holders])[1] if holders else None

    def in_order(self, model: ModelKey) -> Iterator[SeenRuntime]:
        """Yield each runtime once, in the model's own order, the same for every dispatcher.

        The order is that of the runtimes' points on a ring, from the model's point on. A dispatcher finds the first
        few runtimes without a look at the further ones, also for a model that was never asked for."""
        if not self._ring:
            placed = sorted([(point, seen.id) for seen in self.runtimes.values() for point in seen.points])
            self._ring = [point for point, _ in placed]
            self._on_ring = [self.runtimes[id] for _, id in placed]
        on_ring, found, missing = self._on_ring, set[str](), len(self.runtimes)
        index = bisect_left(self._ring, _point(model))
        while missing:
            if index == len(on_ring):
                index = 0
            runtime = on_ring[index]
            index += 1
            if runtime.id not in found:
                found.add(runtime.id)
                missing -= 1
                yield runtime


def seconds(costs: ModelCosts, coldness: Coldness) -> float:
    """Return the seconds of a model's way to the device from where the weights lie."""
    if coldness is Coldness.DISK:
        return costs.load_s + BUILD_S + READ_S_PER_BYTE * costs.weight_bytes
    return costs.load_s


def _takes(runtime: SeenRuntime, model: ModelKey, oldest: float, avoid: Set[str], without: Role | None) -> bool:
    report = runtime.report
    return (
        runtime.heard_at >= oldest
        and not runtime.suspect
        and not report.draining
        and model in runtime.coldness
        and runtime.id not in avoid
        and report.role is not without
    )


def _spare(runtime: SeenRuntime, holding: set[str] | None) -> bool:
    """Return whether a hot model may flow over to the runtime."""
    return (holding is None or runtime.id not in holding) and runtime.load < HOT_LOAD and runtime.report.full < HOT_FULL


def _drop(index: dict[str, set[str]], model: str, id: str) -> None:
    ids = index.get(model)
    if ids is not None:
        ids.discard(id)
        if not ids:
            del index[model]


def _points(id: str) -> list[int]:
    """Return the points of a runtime on the ring, sorted: 64 bits each, equal in every process."""
    digest = hashlib.shake_128(id.encode()).digest(8 * POINTS)
    return sorted([int.from_bytes(digest[at : at + 8], "big") for at in range(0, len(digest), 8)])


_model_points: dict[ModelKey, int] = {}


def _point(model: ModelKey) -> int:
    """Return the point of a model on the ring, equal in every process."""
    known = _model_points.get(model)
    if known is None:
        if len(_model_points) > 100_000:
            _model_points.clear()
        digest = hashlib.blake2b(model.encode(), digest_size=8).digest()
        known = _model_points[model] = int.from_bytes(digest, "big")
    return known


def _rank(model: ModelKey, runtime: SeenRuntime) -> int:
    """Return the way on the ring from the model's point to the runtime's next point: the order of `in_order`."""
    point, points = _point(model), runtime.points
    return points[bisect_left(points, point) % POINTS] - point & _MASK
