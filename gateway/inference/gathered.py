"""The metrics of several gateways as a single text: own series get the label `gateway`, and the rest comes once.

A sum over the gateways would fall when a gateway restarts, and Prometheus would take the fall for a restart of all
gateways. With the label, each series restarts by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from store.contract.series import OF_GATEWAY

GATEWAY = "gateway"


def own_series(registry: CollectorRegistry) -> bytes:
    """Return the series of the gateway of `registry`, without the series that every gateway shows alike."""
    return generate_latest(_Shown([metric for metric in registry.collect() if metric.name in OF_GATEWAY]))


def gathered(registry: CollectorRegistry, number: int, told: Mapping[int, bytes]) -> bytes:
    """Return the metrics of gateway `number` and of its neighbours.

    `told`: text of `own_series` by the number of a neighbour."""
    shown = {metric.name: metric for metric in registry.collect()}
    for metric in shown.values():
        if metric.name in OF_GATEWAY:
            metric.samples = list(_named(metric, number))
    for neighbour, text in told.items():
        for metric in text_string_to_metric_families(text.decode()):
            samples = _named(metric, neighbour)
            if metric.name in shown:
                shown[metric.name].samples.extend(samples)
            elif metric.name in OF_GATEWAY:  # a series that a gateway makes with its first request
                metric.samples = list(samples)
                shown[metric.name] = metric
    return generate_latest(_Shown(list(shown.values())))


def _named(metric: Metric, number: int) -> Iterator[Sample]:
    for sample in metric.samples:
        yield sample._replace(labels={**sample.labels, GATEWAY: str(number)})


class _Shown(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
