"""The part of a runtime's process that registers images: `pinning_process.py FD NAME` finds the image NAME in the host
cache FD, registers the image with the driver, and prints the physical frames of the registered memory."""

from __future__ import annotations

import ctypes
import os
import sys

from runtime.memory.images import Images
from runtime.memory.native import Backend, DevicePool
from tests.gpu.conftest import PAGE, POOL_BYTES, SOON_S
from tests.gpu.stand_in.frames import FRAME, frames
from tests.gpu.test_pinned import key


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
    print(*frames(os.getpid(), address, size), flush=True)
    sys.stdin.read()  # the registration stays until the test has heard every process
    image.release()
    images.close()
    device.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
