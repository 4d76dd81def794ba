"""Series of the platform for Prometheus: names, units, labels and the number of values of each label. Pure.

Base units, `_total` for counters. Only the two labels that explain ids carry a tenant's own text. No label grows
without bound: deployments and models above a limit are summed up as `other`, and the remaining labels have closed sets
of values. A series of a runtime has no deployment, and a series of a deployment has no runtime: no series multiplies
two large numbers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DEPLOYMENTS_MOST = 500  # deployments with series of their own, in a gateway's life
MODELS_MOST = 500
RUNTIMES_MOST = 64
OTHER = "other"
SERIES_MOST = 65_000  # series of a gateway

# The only bounds of waiting times, in seconds: leases carry histograms over these bounds.
WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)

CODES = ("200", "400", "401", "403", "404", "405", "408", "413", "429", "499", "500", "503", OTHER)  # 499: client left
PARTS = ("queue", "wake", "switch", "prefill", "decode", "wait", "move", "retry", "transport")
WAYS = ("fast", "vllm")  # of a request through the gateway
RESUMPTIONS = ("resumed", "not_kept", "other_request")  # outcomes of a client's wish to resume a stream
OBJECTIVES = ("ttft", "token", "token_rebased", "token_time_weighted")
_DEPLOYMENT = ("tenant_id", "deployment_id")

# Number of a label's values, or the values. A label determined by a further label (tenant by tenant_id) counts as 1.
LABELS: dict[str, int | tuple[str, ...]] = {
    "deployment_id": DEPLOYMENTS_MOST + 1,
    "tenant_id": 1,
    "tenant": 1,
    "deployment": 1,
    "model": 1,
    "model_name": MODELS_MOST + 1,
    "runtime": RUNTIMES_MOST,
    "code": CODES,
    "kind": ("prompt", "cached", "output"),
    "part": PARTS,
    "slo": OBJECTIVES,
    "use": ("step", "switch"),
    "state": ("step", "switch", "idle", "platform"),
    "holds": ("weights", "kv"),
    "from": ("host", "disk"),
    "side": ("client", "platform"),
    "way": WAYS,
    "outcome": RESUMPTIONS,
    "version": 1,
}


class Metric(msgspec.Struct, frozen=True):
    """Declaration of a metric. A counter's name is given without `_total`: Prometheus' formats add the suffix."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def series_most(self) -> int:
        each = len(self.buckets) + 3 if self.kind == "histogram" else 1  # +Inf, _sum, _count
        for label in self.labels:
            values = LABELS[label]
            each *= values if isinstance(values, int) else len(values)
        return each


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "counter", help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "gauge", help, labels)


def _histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...] = WAIT_S) -> Metric:
    return Metric(name, "histogram", help, labels, buckets)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # ── what this gateway did: to be added over gateways ──
        _counter(
            "staccato_requests", "Requests answered, by status; 499: the client left first.", *_DEPLOYMENT, "code"
        ),
        _counter(
            "staccato_tokens",
            "Tokens of prompts, those of them found in a cache, and of outputs delivered.",
            *_DEPLOYMENT,
            "kind",
        ),
        _histogram("staccato_ttft_seconds", "From a request's arrival to its first token.", *_DEPLOYMENT),
        _histogram(
            "staccato_itl_seconds",
            "Between two pieces of a stream that come one after the other.",
            *_DEPLOYMENT,
            buckets=_TOKEN_S,
        ),
        _histogram("staccato_queue_seconds", "What a request waited for others, before its first token.", *_DEPLOYMENT),
        _counter("staccato_request_seconds", "Time of requests that ended, by what it went to.", *_DEPLOYMENT, "part"),
        _counter("staccato_request_ways", "Requests that generate, by the way through the gateway.", "way"),
        _counter("staccato_stream_aborts", "Streams that ended too early, by who ended them.", "side"),
        _counter("staccato_stream_resumptions", "Streams that clients asked to resume, by outcome.", "outcome"),
        _counter("staccato_false_losses", "Runtimes that were taken for dead and heard again."),
        _gauge("staccato_requests_open", "Requests that are not answered yet."),
        _gauge("staccato_usage_pending", "Requests that ended and that JetStream has not acknowledged."),
        _gauge("staccato_bus_connected", "1 while the bus can be reached."),
        _gauge("staccato_build_info", "The version that runs.", "version"),
        # ── what the database says: the same from every gateway ──
        _gauge("staccato_usage_unreconciled", "Requests not heard of that the ledger has not closed."),
        _gauge(
            "staccato_ledger_lag_seconds", "Since when a request of this gateway ended that the ledger has not booked."
        ),
        _gauge(
            "staccato_deployment_info",
            "Names of a deployment, and the model that serves it.",
            *_DEPLOYMENT,
            "tenant",
            "deployment",
            "model",
        ),
        # ── what the runtimes say in their leases: the same from every gateway ──
        _gauge("staccato_runtimes", "Runtimes that are alive."),
        _gauge("staccato_runtimes_wanted", "Runtimes that there should be, as the scheduler has it."),
        _gauge("staccato_runtime_draining", "1 while it takes no requests.", "runtime"),
        _counter("staccato_device_seconds", "Time of a device, by what it went to.", "runtime", "state"),
        _gauge("staccato_device_pages", "Pages of a device's pool.", "runtime"),
        _gauge("staccato_device_pages_used", "Pages that some model holds.", "runtime"),
        _gauge("staccato_device_page_bytes", "Bytes of a page.", "runtime"),
        _gauge("staccato_device_outside_bytes", "Bytes of a GPU used outside the pool.", "runtime"),
        _gauge("staccato_cache_pinned_bytes", "Bytes of the host cache registered with a GPU's driver.", "runtime"),
        _counter("staccato_switches", "Turns that a model began after another one's.", "runtime"),
        _histogram(
            "staccato_switch_seconds", "Between two turns of different models, while somebody waited.", "runtime"
        ),
        _histogram(
            "staccato_wake_seconds",
            "A model's way to the device: from the host's memory, or from disk.",
            "runtime",
            "from",
        ),
        _counter("staccato_moves", "Running requests that went on at another runtime.", "runtime"),
        _gauge("staccato_prefix_bytes", "Bytes of ended requests' KV blocks in the host cache.", "runtime"),
        _counter("staccato_prefix_blocks_kept", "KV blocks of ended requests copied to the host cache.", "runtime"),
        _counter("staccato_prefix_blocks_brought", "Of these, copied back for a later prompt.", "runtime"),
        _counter("staccato_prefix_blocks_dropped", "Of these, given up for room or for age.", "runtime"),
        _counter("staccato_prefix_blocks_wrong", "Of these, found changed and computed again.", "runtime"),
        _counter("staccato_runtime_false_losses", "Gateways that it took for dead and heard again.", "runtime"),
        _counter(
            "staccato_slo",
            "What has an objective: requests for ttft and time-weighted, else tokens.",
            *_DEPLOYMENT,
            "slo",
        ),
        _counter("staccato_slo_good", "Of these, what kept it.", *_DEPLOYMENT, "slo"),
        _counter("staccato_device_seconds_used", "Time of devices that is charged to requests.", *_DEPLOYMENT, "use"),
        _gauge("staccato_model_resident", "Runtimes on whose device it is.", "model_name"),
        _gauge("staccato_model_on_disk", "Runtimes that have it on disk alone.", "model_name"),
        _gauge("staccato_model_failed", "Runtimes that can't serve it.", "model_name"),
        _gauge("staccato_model_pages", "Pages that it holds, over all runtimes.", "model_name", "holds"),
        _counter("staccato_model_turns", "Turns that it had.", "model_name"),
        _counter("staccato_model_staged", "Times that its image came from disk before a request asked.", "model_name"),
        _counter("staccato_model_staged_unused", "Of these, what left again before a request asked.", "model_name"),
        _counter("staccato_model_fetches", "Times that it was brought from the host's memory.", "model_name"),
        # vLLM's metrics, under vLLM's names, by model: vLLM's autoscalers and dashboards find these series.
        _gauge("vllm:num_requests_running", "Requests in the engine.", "model_name"),
        _gauge("vllm:num_requests_waiting", "Requests that wait for the engine.", "model_name"),
        _counter("vllm:generation_tokens", "Tokens made.", "model_name"),
    )
}

# Series of a single gateway. Several gateways on a host show these series separately.
OF_GATEWAY = frozenset(
    (
        *("staccato_requests", "staccato_tokens", "staccato_request_seconds", "staccato_request_ways"),
        *("staccato_ttft_seconds", "staccato_itl_seconds", "staccato_queue_seconds", "staccato_stream_aborts"),
        "staccato_stream_resumptions",
        *("staccato_false_losses", "staccato_requests_open", "staccato_usage_pending", "staccato_bus_connected"),
        *("staccato_ledger_lag_seconds", "staccato_build_info"),
    )
)
