"""Python loads this file at the start of each process of a platform over the stand-in for the GPU's driver.

The processes that build engines then keep weights and KV cache in the stand-in's memory, as on a GPU: pages are mapped
by the driver's calls, the host cache is registered, and copies run behind on the driver's streams. The stand-in's
memory is memory of the host, so vLLM's build for CPUs computes on it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.loaded import change_after_loading

BUILDER = "runtime.engine.builder"
PAGE_BYTES = 2 << 20  # as on a host; a GPU's pages of 32 MiB hold several of the tests' models

CALLS = (
    "maps",
    "zeroes",
    "waits",
    "unmaps",
    "registrations",
    "copies",
    "refused_copies",
    "late_copies",
)  # as counted there
RANGES_MOST = 4096


def change(builder: Any) -> None:
    """Let a loaded builder take the machine for one with a GPU, and torch's calls for a GPU reach the stand-in."""
    import torch

    from tests.gpu.fake_cuda import NAME, StandIn, StreamOfHost, has_index

    driver = StandIn()
    stream = cache(
        partial(StreamOfHost, driver)
    )  # made at the first call: a thread of a fork server has no copy in a fork
    as_tensor, ones = torch.as_tensor, torch.ones

    def as_tensor_of_host(data: Any, *args: Any, device: object = None, **more: Any) -> torch.Tensor:
        if not hasattr(data, "__cuda_array_interface__"):
            return as_tensor(data, *args, device=device, **more)
        assert has_index(device), f"the device's number is missing: {device!r}"
        return tensor_at(data.__cuda_array_interface__)

    pool = builder.DevicePool
    more = int(
        os.environ.get("STAND_IN_BUILD_BYTES", 0)
    )  # a GPU builds a model in the pool, and a host beside the pool
    builder.DevicePool = lambda size, **settings: pool(size + more, page_bytes=PAGE_BYTES, **settings)
    builder.current_platform = SimpleNamespace(is_cpu=lambda: False)
    torch.as_tensor = as_tensor_of_host
    torch.ones = lambda *size, device=None, **more: ones(*size, **more)
    calls = {
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda: 0,
        "memory_snapshot": lambda: [],
        "current_device": lambda: 0,
        "current_stream": stream,
        "mem_get_info": driver.memory,
        "get_device_name": lambda: NAME,
    }
    for name, call in calls.items():
        setattr(torch.cuda, name, call)
    if "STAND_IN_FOLDER" in os.environ:
        report(driver.driver)


def report(driver: Any) -> None:
    """On signal SIGUSR2, write the registered memory and the driver's calls to the folder STAND_IN_FOLDER.

    Python calls the handler on the main thread, which makes the steps."""

    def signalled(*_: object) -> None:
        addresses, sizes = (ctypes.c_size_t * RANGES_MOST)(), (ctypes.c_size_t * RANGES_MOST)()
        count = driver.fake_registered(addresses, sizes, ctypes.c_size_t(RANGES_MOST))
        assert count <= RANGES_MOST
        told = {
            "ranges": list(zip(addresses, sizes, strict=True))[:count],
            "calls": {name: driver.fake_calls(kind, 0) for kind, name in enumerate(CALLS)},
            "stepping": {name: driver.fake_calls(kind, 1) for kind, name in enumerate(CALLS)},
        }
        written = Path(os.environ["STAND_IN_FOLDER"]) / f"{os.getpid()}.json"
        written.with_suffix(".new").write_text(json.dumps(told))
        written.with_suffix(".new").rename(written)

    signal.signal(signal.SIGUSR2, signalled)


def tensor_at(array: dict[str, Any]) -> Any:
    import torch

    (address, _), (size,) = array["data"], array["shape"]
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


change_after_loading({BUILDER: change})
