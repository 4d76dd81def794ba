"""Metrics of a gateway for Prometheus: from its own counters, the runtimes' leases and the database.

`store/contract/series.py` declares every series; this module can make no further series. Counters in leases are added
up as they grow, so a sum over runtimes does not fall when a runtime restarts. Each gateway shows the whole sum of the
leases: take the maximum of these series over gateways, and sum only the gateways' own series.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar, cast

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.core.status import tier
from gateway.inference.meter import Meter
from gateway.streams.runtimes import RuntimesView
from store.contract.device_bytes import DeviceBytes
from store.contract.series import CODES, DEPLOYMENTS_MOST, METRICS, MODELS_MOST, OTHER, RESUMPTIONS, WAIT_S, WAYS
from store.contract.wire import Attained, Lease, Residency, Spread
from store.db import deployments, usage
from store.db.database import Database, DatabaseError, now_us

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # a third of all series, and nobody asks when one began

Sums = defaultdict[tuple[str, ...], float]  # by name and labels
M = TypeVar("M", Counter, Gauge, Histogram)
ITL = "staccato_itl_seconds"
_BOUNDS = [*map(str, WAIT_S), "+Inf"]
Numbers = CounterMetricFamily | GaugeMetricFamily


def _numbers(name: str) -> Numbers:
    metric = METRICS[name]
    kind = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[metric.kind]
    family: Numbers = kind(name, metric.help, labels=metric.labels)
    return family


def _histogram(name: str) -> HistogramMetricFamily:
    metric = METRICS[name]
    assert metric.buckets == WAIT_S, f"{name} is not over the bounds of the leases' histograms"
    return HistogramMetricFamily(name, metric.help, labels=metric.labels)


class Labels:
    """Bounds the values of a label: the first `most` values keep their names, later values become `other`."""

    def __init__(self, most: int) -> None:
        self._known: set[str] = set()
        self._most = most

    def of(self, label: str) -> str:
        if label not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(label)
        return label


class DeclaredMetrics:
    """Metrics of the Prometheus library, made on first use as declared in METRICS."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._known: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str) -> Counter:
        return self._get(name, Counter)

    def gauge(self, name: str) -> Gauge:
        return self._get(name, Gauge)

    def histogram(self, name: str) -> Histogram:
        return self._get(name, partial(Histogram, buckets=METRICS[name].buckets))

    def _get(self, name: str, make: Callable[..., M]) -> M:
        known = self._known.get(name)
        if known is None:
            metric = METRICS[name]
            known = self._known[name] = make(name, metric.help, metric.labels, registry=self._registry)
        return cast(M, known)


class Times:
    """A histogram for the loop alone: without locks, since every token of every stream is observed."""

    __slots__ = ("_bounds", "counts", "total_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: upper bounds of the buckets, in seconds."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds


class Neighbours(Protocol):
    """The other gateways of this host: gateway/ops/neighbours.py."""

    def known(self) -> list[int]:
        """Return the numbers of the other gateways."""

    async def shown(self, registry: CollectorRegistry) -> bytes:
        """Return the metrics of `registry`, this gateway's, and of the other gateways."""


class Tally:
    """Metrics of the requests of a deployment; the counters are looked up once."""

    def __init__(self, made: DeclaredMetrics, labels: tuple[str, str]) -> None:
        self._made, self._labels = made, labels
        self.ttft = made.histogram("staccato_ttft_seconds").labels(*labels)
        self.itl = Times(METRICS[ITL].buckets)
        self.queue = made.histogram("staccato_queue_seconds").labels(*labels)

    def part(self, part: str) -> Counter:
        return self._made.counter("staccato_request_seconds").labels(*self._labels, part)

    def tokens(self, kind: str, count: int) -> None:
        self._made.counter("staccato_tokens").labels(*self._labels, kind).inc(count)

    def answered(self, status: int) -> None:
        code = str(status) if str(status) in CODES else OTHER
        self._made.counter("staccato_requests").labels(*self._labels, code).inc()


class Metrics:
    """Metrics of a gateway."""

    def __init__(
        self, fleet: RuntimesView, meter: Meter | None = None, false_losses: Callable[[], int] = lambda: 0
    ) -> None:
        """`meter`: None if the process serves no requests. `false_losses` counts runtimes wrongly taken for dead."""
        self.registry = CollectorRegistry()
        self._made, self._meter, self._fleet = DeclaredMetrics(self.registry), meter, fleet
        self._deployments = Labels(DEPLOYMENTS_MOST)
        self._tallies: dict[tuple[str, str], Tally] = {}
        # An ended request and its end; tells whether the ledger has booked it.
        self._probe: tuple[str, float] | None = None
        self.neighbours: Neighbours | None = None  # None: the gateway is alone on its host
        self._made.gauge("staccato_build_info").labels(importlib.metadata.version("staccato")).set(1)
        self.registry.register(_Itl(self._tallies))
        self.registry.register(_Fleet(fleet))
        self.registry.register(_Leases(fleet, self._deployments, Labels(MODELS_MOST)))
        if meter is not None:
            self._made.gauge("staccato_requests_open").set_function(lambda: meter.open_calls)
            self._made.gauge("staccato_usage_pending").set_function(lambda: meter.pending_calls)
            self.registry.register(_Losses(false_losses))
        for way in WAYS:
            self._made.counter("staccato_request_ways").labels(way)
        for side in ("client", "platform"):
            self._made.counter("staccato_stream_aborts").labels(side)
        for outcome in RESUMPTIONS:
            self._made.counter("staccato_stream_resumptions").labels(outcome)

    def tally(self, tenant_id: str, deployment_id: str) -> Tally:
        """Return the tally of a deployment; both ids are empty for requests that named no deployment."""
        deployment_id = self._deployments.of(deployment_id)
        key = (OTHER, OTHER) if deployment_id == OTHER else (tenant_id, deployment_id)
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = Tally(self._made, key)
        return tally

    def took(self, way: str) -> None:
        """Count a request that generates. `way`: the way that the request took."""
        self._made.counter("staccato_request_ways").labels(way).inc()

    def aborted(self, side: str) -> None:
        self._made.counter("staccato_stream_aborts").labels(side).inc()

    def resumed(self, outcome: str) -> None:
        """Count a client's wish to resume a stream. `outcome`: one of RESUMPTIONS."""
        self._made.counter("staccato_stream_resumptions").labels(outcome).inc()

    async def shown(self, database: Database) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._made.gauge("staccato_bus_connected").set(self._fleet.connected)
        unreconciled, lag = (
            self._made.gauge("staccato_usage_unreconciled"),
            self._made.gauge("staccato_ledger_lag_seconds"),
        )
        info = self._made.gauge("staccato_deployment_info")
        try:
            async with database.read() as connection:
                unreconciled.set(await usage.unreconciled(connection, now_us()))
                if self._probe is not None and await usage.is_final(connection, self._probe[0]):
                    self._probe = None
                known = await deployments.everything(connection)
        except DatabaseError:  # the other metrics are still known
            unreconciled.set(math.nan)
        else:
            info.clear()
            for found in sorted(known, key=lambda found: found.created_us)[:DEPLOYMENTS_MOST]:
                info.labels(found.tenant_id, found.id, found.tenant, found.name, found.active.engine.key).set(1)
        lag.set(time.time() - self._probe[1] if self._probe else 0.0)
        if self._probe is None and self._meter is not None:
            self._probe = self._meter.last_stored
        if self.neighbours is None or not self.neighbours.known():
            return generate_latest(self.registry)
        return await self.neighbours.shown(self.registry)


class _Itl(Collector):
    """Times between two pieces of a stream, by deployment."""

    def __init__(self, tallies: dict[tuple[str, str], Tally]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterable[Metric]:
        metric = METRICS[ITL]
        family = HistogramMetricFamily(ITL, metric.help, labels=metric.labels)
        bounds = [*map(str, metric.buckets), "+Inf"]
        for labels, tally in list(self._tallies.items()):
            counted = itertools.accumulate(tally.itl.counts)
            family.add_metric(labels, list(zip(bounds, counted, strict=True)), tally.itl.total_s)
        yield family


class _Losses(Collector):
    """Number of runtimes that this gateway took for dead and heard again."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def collect(self) -> Iterable[Metric]:
        yield _single("staccato_false_losses", self._count())


# ── what leases say ───────────────────────────────────────────────────────────────────────────────────────────────────


class _Fleet(Collector):
    """Metrics of each runtime. The counters restart with their runtime, as Prometheus expects."""

    def __init__(self, fleet: RuntimesView) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        leases, leader = self._fleet.leases, self._fleet.leader
        yield _single("staccato_runtimes", len(leases))
        if leader and leader.wanted:
            yield _single("staccato_runtimes_wanted", leader.wanted)
        for name, value in _OF_RUNTIMES.items():
            family = _numbers(name)
            for runtime, lease in leases.items():
                family.add_metric([runtime], value(lease))
            yield family
        seconds = _numbers("staccato_device_seconds")
        wakes, switches = _histogram("staccato_wake_seconds"), _histogram("staccato_switch_seconds")
        for runtime, lease in leases.items():
            for state, us in _states(lease).items():
                seconds.add_metric([runtime, state], us / 1e6)
            for source, spread in sorted(lease.wakes.items()):
                _spread(wakes, [runtime, source], spread)
            _spread(switches, [runtime], lease.switch_times)
        yield from (seconds, wakes, switches)


_OF_RUNTIMES: dict[str, Callable[[Lease], float]] = {
    "staccato_runtime_draining": lambda lease: lease.draining,
    "staccato_device_pages": lambda lease: lease.pages_total,
    "staccato_device_pages_used": lambda lease: lease.pages_used,
    "staccato_device_page_bytes": lambda lease: lease.page_bytes,
    "staccato_device_outside_bytes": lambda lease: _device_bytes(lease).outside,
    "staccato_cache_pinned_bytes": lambda lease: _device_bytes(lease).cache_pinned,
    "staccato_switches": lambda lease: lease.switches,
    "staccato_moves": lambda lease: lease.moved,
    "staccato_runtime_false_losses": lambda lease: lease.false_losses,
    "staccato_prefix_bytes": lambda lease: _device_bytes(lease).prefixes.held_bytes,
    "staccato_prefix_blocks_kept": lambda lease: _device_bytes(lease).prefixes.kept,
    "staccato_prefix_blocks_brought": lambda lease: _device_bytes(lease).prefixes.brought,
    "staccato_prefix_blocks_dropped": lambda lease: _device_bytes(lease).prefixes.dropped,
    "staccato_prefix_blocks_wrong": lambda lease: _device_bytes(lease).prefixes.wrong,
}


def _device_bytes(lease: Lease) -> DeviceBytes:
    return lease.device_bytes if isinstance(lease.device_bytes, DeviceBytes) else DeviceBytes()


def _single(name: str, value: float) -> Numbers:
    family = _numbers(name)
    family.add_metric([], value)
    return family


def _states(lease: Lease) -> dict[str, int]:
    accounts = lease.accounts
    step_us, switch_us = (sum(kinds[n] for kinds in accounts.labels.values()) for n in (0, 1))
    return {
        "step": step_us,
        "switch": switch_us,
        "idle": accounts.idle_us,
        "platform": accounts.platform_us,
    }


def _spread(family: HistogramMetricFamily, labels: list[str], spread: Spread) -> None:
    if len(spread.counts) == len(_BOUNDS):  # else the runtime is another version, with other bounds
        counts = itertools.accumulate(spread.counts)
        family.add_metric(labels, buckets=list(zip(_BOUNDS, counts, strict=True)), sum_value=spread.sum_s)


class Growth:
    """Sums of the growth of counters over runtimes, since the gateway began. A runtime's counters begin at 0."""

    def __init__(self, began_ms: int) -> None:
        self.sums: Sums = defaultdict(float)
        self._began_ms = began_ms
        self._seen: dict[str, Sums] = {}

    def take(self, runtime: str, epoch: int, counted: Sums) -> None:
        """Add the growth of a runtime's counters. `epoch` is the runtime's start in ms."""
        before = self._seen.get(runtime, {} if epoch > self._began_ms else counted)
        for key, value in counted.items():
            known = before.get(key, 0.0)
            # A fallen counter: the runtime's device restarted.
            self.sums[key] += value - known if value >= known else value
        self._seen[runtime] = counted


class _Leases(Collector):
    """Metrics of deployments and models, summed over runtimes."""

    def __init__(self, fleet: RuntimesView, deployments: Labels, models: Labels) -> None:
        self._fleet, self._deployments, self._models = fleet, deployments, models
        self._growth = Growth(time.time_ns() // 1_000_000)

    def collect(self) -> Iterable[Metric]:
        gauges: Sums = defaultdict(float)
        for runtime, lease in self._fleet.leases.items():
            counted: Sums = defaultdict(float)
            self._attained(lease, counted)
            self._used(lease, counted)
            self._models_of(lease, counted, gauges)
            self._growth.take(runtime, lease.epoch, counted)
        families: dict[str, Numbers] = {}
        for (name, *labels), value in sorted([*self._growth.sums.items(), *gauges.items()]):
            if name not in families:
                families[name] = _numbers(name)
            families[name].add_metric(labels, value)
        yield from families.values()

    def _deployment(self, label: str) -> tuple[str, str]:
        tenant_id, _, deployment_id = label.partition("/")
        known = self._deployments.of(deployment_id)
        return (OTHER, OTHER) if known == OTHER else (tenant_id, known)

    def _attained(self, lease: Lease, counted: Sums) -> None:
        for label, attained in lease.attainment.items():
            whose = self._deployment(label)
            for slo, (total, good) in _objectives(attained).items():
                counted["staccato_slo", *whose, slo] += total
                counted["staccato_slo_good", *whose, slo] += good

    def _used(self, lease: Lease, counted: Sums) -> None:
        for label, kinds in lease.accounts.labels.items():
            for use, us in zip(("step", "switch"), kinds, strict=True):
                counted["staccato_device_seconds_used", *self._deployment(label), use] += us / 1e6

    def _models_of(self, lease: Lease, counted: Sums, gauges: Sums) -> None:
        for key, state in lease.models.items():
            model = self._models.of(key)
            counted["staccato_model_turns", model] += state.turns
            counted["staccato_model_fetches", model] += state.fetches
            counted["staccato_model_staged", model] += state.staged
            counted["staccato_model_staged_unused", model] += state.staged_unused
            counted["vllm:generation_tokens", model] += state.tokens
            gauges["staccato_model_resident", model] += state.residency is Residency.RESIDENT
            gauges["staccato_model_on_disk", model] += tier(state) == "disk"
            gauges["staccato_model_failed", model] += state.residency is Residency.FAILED
            gauges["staccato_model_pages", model, "weights"] += state.weights_pages
            gauges["staccato_model_pages", model, "kv"] += state.kv_pages
            gauges["vllm:num_requests_running", model] += state.running
            gauges["vllm:num_requests_waiting", model] += state.waiting


def _objectives(attained: Attained) -> dict[str, tuple[float, float]]:
    """Return for each kind of promise: requests or tokens promised, and promises kept."""
    return {
        "ttft": (attained.requests, attained.first_on_time),
        "token": (attained.tokens, attained.on_time),
        "token_rebased": (attained.tokens, attained.on_time_rebased),
        "token_time_weighted": (attained.requests, attained.time_shares),
    }
