"""The platform is light where it can be: only what computes or tokenises carries torch."""

from __future__ import annotations

import pytest

from tests.bench.footprint import LIGHT, has_torch, processes
from tests.e2e.conftest import Platform

RSS_BYTES_MOST = 150_000_000


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_process_stays_below_150_mb_and_without_torch(platform: Platform, name: str) -> None:
    assert platform.process is not None
    process = processes(platform.process.pid)[name]
    assert process.memory_info().rss < RSS_BYTES_MOST
    assert not has_torch(process)


def test_the_gateway_and_the_device_process_are_the_only_ones_with_torch(platform: Platform) -> None:
    assert platform.process is not None
    with_torch = {name for name, process in processes(platform.process.pid).items() if has_torch(process)}
    assert with_torch == {"gateway", "device"}
