"""The process that imports a page: `second_process.py FD BYTES` maps the page, prints its bytes, fills it with 0x5a."""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

POSIX_FILE_DESCRIPTOR = 1
DEVICE, READ_WRITE = 1, 3


def main(fd: int, size: int) -> None:
    context, page, address = c_void_p(), c_uint64(), c_uint64()
    access = (c_int * 3)(DEVICE, 0, READ_WRITE)
    content = ctypes.create_string_buffer(size)
    call("cuInit", c_uint(0))
    call("cuDevicePrimaryCtxRetain", byref(context), c_int(0))
    call("cuCtxSetCurrent", context)
    call("cuMemImportFromShareableHandle", byref(page), c_void_p(fd), c_int(POSIX_FILE_DESCRIPTOR))
    call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
    call("cuMemMap", address, c_size_t(size), c_size_t(0), page, c_uint64(0))
    call("cuMemSetAccess", address, c_size_t(size), access, c_size_t(1))
    call("cuMemcpyDtoH_v2", content, address, c_size_t(size))
    call("cuMemsetD8_v2", address, ctypes.c_ubyte(0x5A), c_size_t(size))
    call("cuCtxSynchronize")
    call("cuMemUnmap", address, c_size_t(size))
    call("cuMemAddressFree", address, c_size_t(size))
    call("cuMemRelease", page)
    sys.stdout.buffer.write(content.raw)


def call(name: str, *arguments: object) -> None:
    result = getattr(driver, name)(*arguments)
    if result:
        sys.exit(f"{name}: CUDA error {result}")


if __name__ == "__main__":
    driver = ctypes.CDLL("libcuda.so.1")
    main(int(sys.argv[1]), int(sys.argv[2]))
