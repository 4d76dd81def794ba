"""A scrape at any gateway of a host shows the metrics of all: real sockets, and gateways that are dead or silent."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import Settings
from gateway.inference.metrics import Metrics
from gateway.ops import neighbours
from gateway.ops.neighbours import GatewayNeighbours, gathered, own_series
from store.contract.series import METRICS, OF_GATEWAY
from tests.gateway.inference.test_metrics import Leases, lease, used


def metrics(requests: int) -> Metrics:
    made = Metrics(Leases({"r1": lease("r1")}))  # type: ignore[arg-type]
    used(made, requests)
    return made


def of(folder: Path, number: int) -> GatewayNeighbours:
    settings = Settings(data=folder, gateways=3, gateway_number=number)  # type: ignore[call-arg]
    return GatewayNeighbours(settings)


def telling(word: str) -> CollectorRegistry:
    """A registry with a series of a gateway, whose only value is a word in a label."""
    registry = CollectorRegistry()
    Gauge("staccato_build_info", "A word.", ["version"], registry=registry).labels(word).set(1)
    return registry


def text(word: str) -> bytes:
    return own_series(telling(word))


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}
    assert len(values) == len(found), "a series comes twice"
    return values


def test_own_series_are_declared_and_the_sum_over_gateways_is_the_sum_of_each() -> None:
    assert set(METRICS) >= OF_GATEWAY
    one, two = metrics(2), metrics(3)
    both = samples(gathered(one.registry, 1, {2: own_series(two.registry)}))
    tokens = {labels: value for (name, labels), value in both.items() if name == "staccato_tokens_total"}
    assert {dict(labels)["gateway"] for labels in tokens} == {"1", "2"} and sum(tokens.values()) == 3 * (2 + 3)
    alone = samples(own_series(one.registry))
    assert {
        (name, tuple(pair for pair in labels if pair[0] != "gateway")): value
        for (name, labels), value in both.items()
        if ("gateway", "1") in labels
    } == alone


def test_what_every_gateway_shows_alike_comes_once() -> None:
    one, two = metrics(1), metrics(1)
    both = samples(gathered(one.registry, 1, {2: own_series(two.registry)}))
    assert ("staccato_runtimes", ()) in both
    assert not any("gateway" in dict(labels) for name, labels in both if name.startswith("staccato_runtime"))


def test_series_that_only_a_neighbour_has_are_shown() -> None:
    new, busy = metrics(0), metrics(1)
    assert any(
        name == "staccato_requests_total"
        for name, _ in samples(gathered(new.registry, 1, {2: own_series(busy.registry)}))
    )


async def test_gateways_tell_each_other_their_series_over_sockets_with_long_paths(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20) / ("long" * 20)
    folder.mkdir(parents=True)
    one, two, three = (of(folder, number) for number in (1, 2, 3))
    async with one.telling(telling("one")), two.telling(telling("two")):
        assert three.known() == [1, 2] and await three.told() == {1: text("one"), 2: text("two")}
        assert one.known() == [2] and await one.told() == {2: text("two")}
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert three.known() == [] and await three.told() == {}


async def test_a_killed_gateway_is_left_out_and_its_successor_is_heard(tmp_path: Path) -> None:
    one, two = of(tmp_path, 1), of(tmp_path, 2)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "gateway-2.metrics"))
    assert one.known() == [2] and await one.told() == {}
    async with two.telling(telling("two")):
        assert await one.told() == {2: text("two")}


async def test_a_gateway_that_hangs_costs_a_scrape_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "TOLD_S_MOST", 0.05)
    one, two = of(tmp_path, 1), of(tmp_path, 2)
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "gateway-3.metrics"))
        hung.listen()
        async with two.telling(telling("two")), asyncio.timeout(20):
            assert await one.told() == {2: text("two")}


async def test_a_neighbour_without_an_end_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "TOLD_BYTES_MOST", 1000)
    one, two = of(tmp_path, 1), of(tmp_path, 2)
    async with two.telling(telling("x" * 1001)):
        assert await one.told() == {}
