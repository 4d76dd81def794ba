"""Series read by Prometheus: every series is declared, the number of series is bounded, and counters only grow."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.inference.metrics import ITL, Growth, Labels, Metrics
from store.contract import series, wire
from store.contract.series import DEPLOYMENTS_MOST, LABELS, METRICS, MODELS_MOST, OTHER, SERIES_MOST, WAIT_S
from store.contract.wire import Accounts, Attained, Lease, ModelState, Residency, Spread
from tests.gateway.plane import Plane

SAMPLES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass
class Leases:
    """A fleet that only has leases."""

    leases: dict[str, Lease] = field(default_factory=dict)
    leader: wire.Leader | None = None
    connected: bool = True


def lease(runtime: str, labels: int = 1, models: int = 1, epoch: int = 1 << 60, scale: int = 1) -> Lease:
    spread = Spread([scale] * (len(WAIT_S) + 1), 7.0 * scale)
    return Lease(
        runtime=runtime,
        epoch=epoch,
        engine="test",
        models={f"m{n}": ModelState(residency=Residency.RESIDENT, tokens=5 * scale) for n in range(models)},
        attainment={f"t{n}/d{n}": Attained(2 * scale, scale, 10 * scale, 4 * scale) for n in range(labels)},
        accounts=Accounts(labels={f"t{n}/d{n}": (1000, 10) for n in range(labels)}),
        wakes={"host": spread, "disk": spread},
        switch_times=spread,
    )


def shown(metrics: Metrics) -> dict[str, float]:
    """Values of the samples, by name and labels."""
    return samples(metrics.registry)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    text = generate_latest(registry).decode()
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def used(metrics: Metrics, deployments: int) -> None:
    for n in range(deployments):
        tally = metrics.tally(f"t{n}", f"d{n}")
        for code in (*map(int, series.CODES[:-1]), 599):
            tally.answered(code)
        for kind in ("prompt", "cached", "output"):
            tally.tokens(kind, 1)
        for part in series.PARTS:
            tally.part(part).inc()
        for times in (tally.ttft, tally.itl, tally.queue):
            times.observe(0.1)


@pytest.mark.timeout(600)
def test_five_thousand_deployments_stay_under_the_bound_and_all_series_are_declared() -> None:
    fleet = Leases(
        {f"r{n}": lease(f"r{n}", labels=1000, models=1000) for n in range(4)}, wire.Leader(holder="s", term=1, wanted=3)
    )
    metrics = Metrics(fleet)  # type: ignore[arg-type]
    used(metrics, 5000)
    seen: defaultdict[str, int] = defaultdict(int)
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        metric = METRICS[family.name]
        assert family.type == metric.kind and family.documentation == metric.help
        for sample in family.samples:
            assert sample.name in [metric.name + suffix for suffix in SAMPLES[metric.kind]]
            assert set(sample.labels) - {"le"} == set(metric.labels)
            for label, value in sample.labels.items():
                values = LABELS.get(label)
                assert not isinstance(values, tuple) or value in values, f"{sample.name} has {label}={value}"
            seen[metric.name] += 1
    assert {name: count for name, count in seen.items() if count > METRICS[name].series_most} == {}
    assert seen["staccato_ttft_seconds"] == METRICS["staccato_ttft_seconds"].series_most, (
        "the bound is reached, not more"
    )
    assert sum(seen.values()) < SERIES_MOST


def test_the_bound_holds_whatever_the_platform_does() -> None:
    assert sum(metric.series_most for metric in METRICS.values()) < SERIES_MOST


def test_declarations_follow_prometheus_naming() -> None:
    for metric in METRICS.values():
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket")), f"{metric.name} ends as samples do"
        assert metric.help.endswith(".") and set(metric.labels) <= set(LABELS), metric.name
        assert (metric.kind == "histogram") == bool(metric.buckets) and list(metric.buckets) == sorted(metric.buckets)
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds"), f"{metric.name} says no unit"


def test_what_comes_too_late_is_other() -> None:
    labels = Labels(2)
    assert [labels.of(label) for label in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


@given(seconds=st.lists(st.one_of(st.floats(0, 10), st.sampled_from(METRICS[ITL].buckets)), max_size=30))
def test_times_count_as_the_library_counts(seconds: list[float]) -> None:
    metrics, registry = Metrics(Leases()), CollectorRegistry()  # type: ignore[arg-type]
    metric = METRICS[ITL]
    library = Histogram(ITL, metric.help, metric.labels, buckets=metric.buckets, registry=registry).labels("t", "d")
    times = metrics.tally("t", "d").itl
    for each in seconds:
        times.observe(each)
        library.observe(each)
    expected = {name: value for name, value in samples(registry).items() if name.startswith(ITL)}
    assert {name: value for name, value in samples(metrics.registry).items() if name.startswith(ITL)} == expected


def test_what_is_beyond_the_bound_is_still_counted() -> None:
    fleet = Leases({"r1": lease("r1", labels=DEPLOYMENTS_MOST + 7, models=MODELS_MOST + 3)})
    said = shown(Metrics(fleet))  # type: ignore[arg-type]
    other = [("deployment_id", OTHER), ("slo", "token"), ("tenant_id", OTHER)]
    assert said[f"staccato_slo_total{other}"] == 7 * 10
    assert said[f"vllm:generation_tokens_total{[('model_name', OTHER)]}"] == 3 * 5


def test_a_sum_over_runtimes_does_not_fall_when_one_begins_anew() -> None:
    fleet = Leases({"r1": lease("r1", scale=3), "r2": lease("r2", scale=2)})
    metrics = Metrics(fleet)  # type: ignore[arg-type]
    whose = [("deployment_id", "d0"), ("slo", "token"), ("tenant_id", "t0")]
    assert shown(metrics)[f"staccato_slo_total{whose}"] == 50
    del fleet.leases["r2"]  # gone
    fleet.leases["r1"] = lease("r1", scale=1)  # r1's device process died
    assert shown(metrics)[f"staccato_slo_total{whose}"] == 60
    assert shown(metrics)[f"staccato_slo_total{whose}"] == 60, "who asks twice changes nothing"


def test_what_runtimes_counted_before_this_gateway_came_is_not_a_jump() -> None:
    growth = Growth(began_ms=1000)
    growth.take("old", 999, defaultdict(float, {("a",): 40.0}))
    growth.take("new", 1001, defaultdict(float, {("a",): 2.0}))
    assert growth.sums[("a",)] == 2.0
    growth.take("old", 999, defaultdict(float, {("a",): 41.0, ("b",): 5.0}))
    assert growth.sums == {("a",): 3.0, ("b",): 5.0}


def test_histograms_of_leases_come_out_as_they_went_in() -> None:
    said = shown(Metrics(Leases({"r1": lease("r1")})))  # type: ignore[arg-type]
    wakes = [("from", "disk"), ("runtime", "r1")]
    assert said[f"staccato_wake_seconds_count{wakes}"] == len(WAIT_S) + 1
    assert said[f"staccato_wake_seconds_sum{wakes}"] == 7.0
    assert said[f"staccato_wake_seconds_bucket{[wakes[0], ('le', '0.005'), wakes[1]]}"] == 1


def test_a_runtime_with_other_bounds_is_left_out() -> None:
    old = wire.replace(lease("r1"), switch_times=Spread([1, 2], 3.0))
    assert "staccato_switch_seconds_sum[('runtime', 'r1')]" not in shown(Metrics(Leases({"r1": old})))  # type: ignore[arg-type]


async def test_prometheus_reads_names_sizes_and_what_the_database_says(plane: Plane) -> None:
    tenant = await plane.tenant("acme")
    await plane.model("llama")
    one = (await tenant.post("/deployments", json={"name": "chat", "model": "llama"})).json()
    await plane.report({one["engine"]: ModelState(residency=Residency.RESIDENT, running=2)})
    said = (await plane.admin.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(said)}
    (info,) = families["staccato_deployment_info"].samples
    assert (info.labels["tenant"], info.labels["deployment"], info.labels["model"]) == ("acme", "chat", one["engine"])
    (running,) = families["vllm:num_requests_running"].samples
    assert (running.labels, running.value) == ({"model_name": one["engine"]}, 2.0)
    assert families["staccato_runtimes"].samples[0].value == 1.0
    assert families["staccato_usage_unreconciled"].samples[0].value == 0.0
    assert families["staccato_ledger_lag_seconds"].samples[0].value == 0.0
    assert families["staccato_bus_connected"].samples[0].value == 1.0
