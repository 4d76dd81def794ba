"""The fleet as Prometheus reads it: how each deployment's requests kept their objective, on each runtime.

Counters of one runtime, never their sum over runtimes: a counter may only fall when its runtime started anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
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
    made.register(_Attainment(fleet))
    return made


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
