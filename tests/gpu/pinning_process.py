"""The part of a runtime's process that registers images: `pinning_process.py FD NAME` finds the image NAME in the host
cache FD, registers the image with the driver, and prints the physical frames of the registered memory."""

from __future__ import annotations

import ctypes
import struct
import sys

from runtime.memory.images import Images
from runtime.memory.native import Backend, DevicePool
from tests.gpu.conftest import PAGE, POOL_BYTES, SOON_S
from tests.gpu.test_pinned import FRAME, key


def frames(address: int, size: int) -> list[int]:
    """Numbers of the physical frames below the bytes at an address of this process; zeros without privileges."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // FRAME * 8)
        entries = struct.unpack(f"<{size // FRAME}Q", file.read(size // FRAME * 8))
    return [entry & (1 << 55) - 1 for entry in entries]


def main(fd: int, name: str) -> None:
    device = DevicePool(POOL_BYTES, backend=Backend.CUDA, page_bytes=PAGE)
    images = Images.open(fd)
    images.pin_for(device)
    image = images.find(key(name))
    assert image is not None
    device.await_pins(SOON_S)
    size = device.stats().pinned_bytes
    view = images.cache.view(image.offset, size)
    assert sum(view[::FRAME])  # each frame is there
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    print(*frames(address, size), flush=True)
    sys.stdin.read()  # the registration stays until the test has heard every process
    image.release()
    images.close()
    device.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
