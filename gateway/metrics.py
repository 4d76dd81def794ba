"""The fleet as Prometheus reads it: how many runtimes there are and should be, where the time of devices goes, and
how each deployment's requests kept their objective, on each runtime.

Counters of one runtime, never their sum over runtimes: a counter may only fall when its runtime started anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.fleet import Fleet
from store.wire import Attained

_LABELS = ("runtime", "tenant_id", "deployment_id")
_COUNTERS: dict[str, tuple[str, Callable[[Attained], float]]] = {
    "staccato_requests": ("Requests that ended.", lambda a: a.requests),
    "staccato_first_tokens_on_time": ("Requests whose first token was on time.", lambda a: a.first_on_time),
    "staccato_tokens": ("Tokens made, or owed and never made.", lambda a: a.tokens),
    "staccato_tokens_on_time": ("By arrival + TTFT + (k - 1) * TBT.", lambda a: a.on_time),
    "staccato_tokens_on_time_rebased": ("With a new clock after each late one.", lambda a: a.on_time_rebased),
    "staccato_time_shares": ("Sum of the requests' time-weighted attainment.", lambda a: a.time_shares),
}


def registry(fleet: Fleet) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(_Size(fleet))
    made.register(_Attainment(fleet))
    made.register(_Time(fleet))
    return made


class _Time(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[CounterMetricFamily]:
        used = CounterMetricFamily(
            "staccato_device_seconds_used", "Of devices, by whom and what for.", labels=(*_LABELS, "kind")
        )
        others = CounterMetricFamily(
            "staccato_device_seconds_unused", "Of devices, by nobody or the platform.", labels=("runtime", "kind")
        )
        for runtime, lease in self._fleet.leases.items():
            accounts = lease.accounts
            for label, kinds in sorted(accounts.labels.items()):
                tenant_id, _, deployment_id = label.partition("/")
                for kind, us in zip(("step", "switch"), kinds, strict=True):
                    used.add_metric([runtime, tenant_id, deployment_id, kind], us / 1e6)
            others.add_metric([runtime, "idle"], accounts.idle_us / 1e6)
            others.add_metric([runtime, "platform"], accounts.platform_us / 1e6)
        yield used
        yield others


def unreconciled(made: CollectorRegistry) -> Gauge:
    """For whoever asks the database before it is read."""
    return Gauge("staccato_usage_unreconciled", "Requests not heard of that the ledger has not closed.", registry=made)


class _Size(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        leader = self._fleet.leader
        yield GaugeMetricFamily("staccato_runtimes", "Runtimes that are alive.", value=len(self._fleet.leases))
        if leader and leader.wanted:
            wanted = "Runtimes that there should be, as the scheduler has it."
            yield GaugeMetricFamily("staccato_runtimes_wanted", wanted, value=leader.wanted)


class _Attainment(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[CounterMetricFamily]:
        leases = self._fleet.leases
        for name, (meaning, value) in _COUNTERS.items():
            counter = CounterMetricFamily(name, meaning, labels=_LABELS)
            for runtime, lease in leases.items():
                for label, attained in sorted(lease.attainment.items()):
                    tenant_id, _, deployment_id = label.partition("/")
                    counter.add_metric([runtime, tenant_id, deployment_id], value(attained))
            yield counter
