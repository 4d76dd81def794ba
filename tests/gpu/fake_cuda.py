"""torch.cuda on a machine without a GPU: tensors of the device lie in ordinary memory, the driver is the stand-in.

`csrc/tests/fake_driver.cpp` stands in for the driver: its memory is memory of the host, so torch reads and writes pages
of the pool at their addresses, and an address without a page ends the process, as an illegal address on a GPU would.
No kernel of CUDA runs; everything up to the first kernel does.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

DRIVER, NAME = "libcuda.so.1", "NVIDIA H200"
# Calls that return a tensor's copy on a device, or a device's view of a tensor: here the tensor itself.
AS_THEY_ARE = ("pin_memory", "cuda", "get_cuda_view_from_cpu_tensor")


class StandIn:
    """The calls of the stand-in driver that torch's place needs, in the context of device 0."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL(DRIVER)
        context = ctypes.c_void_p()
        assert self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        self._context = context

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self.driver.cuCtxPushCurrent_v2(self._context)
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def stream(self) -> int:
        handle = ctypes.c_void_p()
        with self._current():
            assert self.driver.cuStreamCreate(ctypes.byref(handle), 0) == 0
        assert handle.value is not None
        return handle.value

    def memory(self, *_: object) -> tuple[int, int]:
        """Free bytes and all bytes of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._current():
            assert self.driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value, total.value


class StreamOfHost:
    """A stream of torch: `cuda_stream` is a stream of the stand-in driver; the host does torch's work at once."""

    def __init__(self, driver: StandIn) -> None:
        self.cuda_stream = driver.stream()

    def wait_stream(self, stream: object) -> None:
        """Work of the other stream is over: the host did the work when the work was put there."""

    def synchronize(self) -> None:
        """See `wait_stream`."""


def is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def has_index(device: object) -> bool:
    return device.index is not None if isinstance(device, torch.device) else ":" in str(device)


class TensorsOnHost(TorchFunctionMode):
    """Within the context, torch makes tensors for CUDA devices in the host's memory, and pins nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.as_tensor and hasattr(args[0], "__cuda_array_interface__"):
            return self._at_address(args[0].__cuda_array_interface__, kwargs["device"])
        if getattr(func, "__name__", "") in AS_THEY_ARE:
            return args[0]
        kwargs.pop("pin_memory", None)
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if is_cuda(value) else value for value in args)
        return func(*args, **kwargs)

    def _at_address(self, array: dict[str, Any], device: object) -> torch.Tensor:
        """Memory of the pool as a tensor, by torch's rule for CUDA: without the device's number, torch asks the driver
        for the owner of the address, and an address without a page has no owner."""
        assert has_index(device), f"a tensor over addresses without pages needs the device's number, not {device!r}"
        (address, _), (size,) = array["data"], array["shape"]
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def says(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextlib.contextmanager
def installed() -> Iterator[StandIn]:
    """torch.cuda over the stand-in driver, until the end of the context."""
    driver = StandIn()
    stream = StreamOfHost(driver)
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=driver.memory()[1], multi_processor_count=132, is_integrated=False
    )
    both = {
        "device_count": says(1),
        "synchronize": says(None),
        "empty_cache": says(None),
        "reset_peak_memory_stats": says(None),
        "memory_reserved": says(0),
    }
    cuda = both | {
        "is_available": says(True),
        "is_initialized": says(True),
        "current_device": says(0),
        "current_stream": says(stream),
        "Stream": lambda *_: StreamOfHost(driver),
        "stream": says(contextlib.nullcontext()),
        "set_stream": says(None),
        "set_device": says(None),
        "manual_seed_all": says(None),
        "mem_get_info": lambda *_: driver.memory(),
        "max_memory_allocated": says(0),
        "memory_allocated": says(0),
        "get_device_name": says(NAME),
        "get_device_properties": says(properties),
        "get_device_capability": says((9, 0)),
    }
    accelerator = both | {
        "set_device_index": says(None),
        "current_device_index": says(0),
        "memory_stats": says({}),
        "get_memory_info": lambda *_: driver.memory(),
    }
    with contextlib.ExitStack() as stack:
        for where, names in ((torch.cuda, cuda), (torch.accelerator, accelerator)):
            for name, value in names.items():
                stack.enter_context(mock.patch.object(where, name, partial(value), create=True))
        stack.enter_context(TensorsOnHost())
        yield driver
