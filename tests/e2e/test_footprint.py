"""The platform is light where it can be: only what computes or tokenises carries torch."""

from __future__ import annotations

import psutil
import pytest

from tests.bench.footprint import LIGHT, has_torch, processes
from tests.e2e.conftest import Platform

RSS_BYTES_MOST = 150_000_000


@pytest.fixture(scope="module")
def running(platform: Platform) -> dict[str, psutil.Process]:
    """After one chat at least, so that there is something that renders."""
    body = {"model": "faq", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    platform.post("/v1/chat/completions", body, platform.keys["acme"])
    assert platform.process is not None
    return processes(platform.process.pid)


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_process_stays_below_150_mb_and_without_torch(running: dict[str, psutil.Process], name: str) -> None:
    process = running[name]
    assert process.memory_info().rss < RSS_BYTES_MOST
    assert not has_torch(process)


def test_the_gateway_and_the_device_process_are_the_only_ones_with_torch(
    running: dict[str, psutil.Process],
) -> None:
    with_torch = {name for name, process in running.items() if has_torch(process)}
    assert with_torch == {"gateway", "device"}
