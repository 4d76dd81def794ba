"""`staccato up` with eight runtimes over the stand-in for the GPU's driver: one host cache, registered in one place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library

import pytest

from tests.conftest import free_port
from tests.e2e.conftest import AWAKE, MODELS, Platform
from tests.gpu.stand_in import SETTINGS, environment
from tests.gpu.stand_in.frames import Registered, check_copies, check_one_region, registered

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has a CUDA driver"),
]
RUNTIMES, STREAMS, TOKENS = 8, 64, 200


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("stand_in")
    told = environment() | {"STAND_IN_FOLDER": str(folder)}
    limited = ("env", *(f"{name}={value}" for name, value in told.items()))
    started = Platform(folder / "data", free_port(), SETTINGS | {"STACCATO_HOST_CACHE": "256MiB"}, limited=limited)
    try:
        started.start("--runtimes", str(RUNTIMES), "--device-memory", "128MiB")
        started.tenant("acme")
        started.model("faq", MODELS / "faq")
        started.deploy("acme", "faq", **AWAKE)
        yield started
    finally:
        code = started.stop()
    assert code == 0


def pinned(platform: Platform) -> list[int]:
    """Registered bytes of each runtime as the metrics tell."""
    text = platform.get("/api/v1/metrics").text
    return sorted(
        int(float(value)) for value in re.findall(r"^staccato_cache_pinned_bytes{.*} (\S+)$", text, re.MULTILINE)
    )


def test_eight_runtimes_register_the_same_memory(platform: Platform) -> None:
    image_bytes = platform.get("/api/v1/gpus").json()["data"][0]["models"].popitem()[1]["weights_bytes"]
    platform.until(lambda: min(pinned(platform)) > image_bytes)
    devices = registered(platform.children("runtime.device"), str(platform.data.parent))
    assert len(devices) == RUNTIMES and sorted(device.bytes for device in devices) == pinned(platform)
    check_one_region(devices, image_bytes)


def test_the_threads_that_make_the_steps_neither_map_nor_zero_nor_wait(platform: Platform) -> None:
    """Streams grow the KV cache, and are answered alike; no copy touches memory that is not registered."""

    def said(_: int) -> str:
        with platform.client("acme", timeout=300) as client:
            answer = client.completions.create(model="faq", prompt="The platform", max_tokens=TOKENS, temperature=0)
        return answer.choices[0].text

    def devices() -> list[Registered]:
        return registered(platform.children("runtime.device"), str(platform.data.parent))

    before = devices()
    with ThreadPoolExecutor(STREAMS) as threads:
        answers = set(threads.map(said, range(STREAMS)))
    after = devices()
    assert len(answers) == 1 and answers.pop()
    check_copies(after)
    calls = sum((now.calls - old.calls for old, now in zip(before, after, strict=True)), Counter())
    stepping = sum((now.stepping - old.stepping for old, now in zip(before, after, strict=True)), Counter())
    print(f"calls of all threads meanwhile: {dict(calls)}, of the threads that make the steps: {dict(stepping)}")
    assert calls["maps"] > 0, "no KV cache grew"
    assert stepping["maps"] == stepping["zeroes"] == stepping["waits"] == 0
