"""Makes models' images in the host cache, in a process of its own: `python -m runtime.imaging BEGAN`.

The process reads a model's files, asks the golden question and writes the image; afterwards any device process of the
host builds an engine around the image. A model that ends this process takes no other model along. The node starts the
process (runtime/node/child.py), sends a model's spec as a packet, and reads the end as a packet. The process stays for
further models, since its start takes longer than the image of a small model, and ends when the node hangs up.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys
from functools import partial
from time import monotonic

import msgspec

from runtime.core.engine import EngineError, NoHostRoom
from runtime.device.stepping import Stepping
from store.contract.wire import EngineSpec
from store.telemetry import observe

NICE = 5  # steps of a device on the same cores come first
SLICE_NS = 100_000  # the process runs for so long at a time where a core is short; least that Linux takes
# The system call sched_setattr and its argument: size, policy, flags, nice, priority, runtime, deadline, period.
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
PACKET_MOST = 1 << 20  # bytes


class ImageBegan(msgspec.Struct, frozen=True):
    """Settings of the process, passed as JSON in the command line. File descriptors are inherited."""

    pool_bytes: int  # addresses for pages, as the device has; memory is taken for the weights and a question alone
    pool_percent: int  # of the device's memory, in place of `pool_bytes`; 0: `pool_bytes` is the size
    host_bytes: int
    host_fd: int
    stepping_fd: int
    orders_fd: int  # socket: an EngineSpec comes for each image, an ImageSaid goes back
    disk_folder: str = ""  # images on disk; empty: there are none
    disk_bytes: int = 0  # bound on the images on disk

    def arguments(self) -> list[str]:
        return [msgspec.json.encode(self).decode()]


class ImageSaid(msgspec.Struct, frozen=True):
    """The end of an order. Without an error, the host cache has the image."""

    error: str = ""
    lacks_bytes: int = 0  # room that the host cache lacked for the image


def stand_back() -> None:
    """Let other processes on the same cores come first, and run for a short time at a time.

    A step of a device has a thread on each core, and ends with the last thread: a thread that waits for a core for the
    usual three milliseconds costs the step as much. Linux before 6.12 knows no length of a turn, and ignores the
    length."""
    os.nice(NICE)
    number = SCHED_SETATTR.get(platform.machine())
    if number is not None:
        attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, NICE, 0, SLICE_NS, 0, 0)
        ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0)  # a failure leaves the usual length


def main() -> None:
    began = msgspec.json.decode(sys.argv[1], type=ImageBegan)
    observe.configure_logs("image")
    stand_back()
    from runtime.engine.builder import Builder, freeze_heap  # takes seconds, unless forked
    from runtime.engine.selfcheck import use_threads

    use_threads()
    freeze_heap()
    orders, stepping = socket.socket(fileno=began.orders_fd), Stepping(began.stepping_fd)
    disk = began.disk_folder, began.disk_bytes
    percent = began.pool_percent
    builder = Builder(began.pool_bytes, began.host_bytes, began.host_fd, pool_percent=percent, disk=disk, lazy=True)
    while packet := orders.recv(PACKET_MOST):
        spec, said = msgspec.json.decode(packet, type=EngineSpec), ImageSaid()
        stepping.begin_build(spec.key, since := monotonic())
        try:
            builder.build(spec, partial(stepping.read, spec.key, since)).close()  # and unpins the image
        except NoHostRoom as error:
            said = ImageSaid(str(error), error.lacks_bytes)
        except Exception as error:
            said = ImageSaid(str(error) if isinstance(error, EngineError) else type(error).__name__)
        stepping.end_build()
        orders.send(msgspec.json.encode(said))
    builder.close()  # images are written to disk to the end
    os._exit(0)  # skips vLLM's exit handlers: the process's end tears down everything anyway


if __name__ == "__main__":
    main()
