"""Memory is saved where possible: only processes that compute or tokenise load torch."""

from __future__ import annotations

import psutil
import pytest

from tests.bench.gateway.footprint import LIGHT, has_torch, processes
from tests.e2e.conftest import Platform

RSS_BYTES_MOST = 150_000_000
IMAGING_S = 150.0  # images are made by a process with torch, which ends 60 s after the last image


@pytest.fixture(scope="module")
def running(platform: Platform) -> dict[str, psutil.Process]:
    """Processes of the platform by name, after a chat at least, so that a renderer runs."""
    body = {"model": "faq", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    platform.post("/v1/chat/completions", body, platform.keys["acme"])
    platform.until(lambda: not platform.children("runtime.imaging"), IMAGING_S)
    return processes(platform.everyone())


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_process_stays_below_150_mb_and_without_torch(running: dict[str, psutil.Process], name: str) -> None:
    process = running[name]
    assert process.memory_info().rss < RSS_BYTES_MOST
    assert not has_torch(process)


def test_the_gateway_the_device_process_and_the_compiler_of_grammars_are_the_only_ones_with_torch(
    running: dict[str, psutil.Process],
) -> None:
    """The first grammar starts the compiler, so an earlier test decides whether the compiler runs."""
    with_torch = {name.split()[0] for name, process in running.items() if has_torch(process)}
    assert with_torch - {"compiler"} == {"gateway", "device"}
