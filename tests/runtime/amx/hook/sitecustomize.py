"""Python loads this file at the start of each process with an emulated AMX.

The file AMX_SITES names libraries, and addresses of `cpuid` and `xgetbv` in the libraries. From now on the preloaded
library (`../amx.c`) answers at these addresses in place of the processor."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
from pathlib import Path

emulator = ctypes.CDLL(None)
emulator.amx_patch.argtypes = [ctypes.c_size_t, ctypes.c_int]
for library, instructions in json.loads(Path(os.environ["AMX_SITES"]).read_text()).items():
    if "/torch/" not in library:
        importlib.import_module("torch")  # other libraries need the whole of torch
    ctypes.CDLL(library)
    mapped = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(library))
    begin = int(mapped.split("-")[0], 16)  # address of the library's first byte
    for address, size in instructions:
        if emulator.amx_patch(begin + address, size) != 0:
            raise RuntimeError(f"{library} has no instruction of {size} bytes that asks the processor at {address:#x}")
