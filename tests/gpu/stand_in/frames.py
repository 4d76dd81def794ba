"""Memory that processes have registered with the stand-in driver, and the physical frames below that memory."""

from __future__ import annotations

import json
import re
import signal
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

FRAME = 4096  # bytes of physical memory, the kernel's smallest page
NUMBER = (1 << 55) - 1  # the bits of an entry of the page map that hold the number of the frame
ANSWER_S = 30.0


def frames(pid: int, address: int, size: int) -> list[int]:
    """Numbers of the physical frames below the bytes at an address of a process; zeros without privileges."""
    with open(f"/proc/{pid}/pagemap", "rb") as file:
        file.seek(address // FRAME * 8)
        entries = struct.unpack(f"<{size // FRAME}Q", file.read(size // FRAME * 8))
    return [entry & NUMBER for entry in entries]


@dataclass(frozen=True)
class Registered:
    """Memory that a device process has registered with the driver, and counts of the driver's calls by kind.

    Among the kinds are `refused_copies`, from memory that was not registered, and `late_copies`, which came after the
    end of the registration. `stepping`: the calls of the thread that makes the steps."""

    bytes: int
    frames: frozenset[int]
    calls: Counter[str]
    stepping: Counter[str]


def registered(devices: Sequence[psutil.Process], folder: str) -> list[Registered]:
    """Ask device processes with the hook for the registered memory.

    Args:
        devices: the processes; each hears SIGUSR2.
        folder: the setting STAND_IN_FOLDER of the processes.

    Returns: an answer for each process. Fails without an answer after ANSWER_S seconds.
    """
    files = [Path(f"/proc/{device.pid}/root{folder}/{_own_number(device.pid)}.json") for device in devices]
    for device, file in zip(devices, files, strict=True):
        file.unlink(missing_ok=True)
        device.send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + ANSWER_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "a device process does not tell what is registered"
        time.sleep(0.05)
    answers = []
    for device, file in zip(devices, files, strict=True):
        told = json.loads(file.read_text())
        below = frozenset(frame for range in told["ranges"] for frame in frames(device.pid, *range))
        size = sum(size for _, size in told["ranges"])
        answers.append(Registered(size, below, Counter(told["calls"]), Counter(told["stepping"])))
    return answers


def check_one_region(devices: Sequence[Registered], image_bytes: int) -> None:
    """Check that devices have registered one region of physical memory together.

    Every device has registered the image of `image_bytes` or more, in the same frames. Beside the image, each device
    has registered memory for parked requests of the device, in frames of the host cache that no other device has."""
    image = frozenset.intersection(*(device.frames for device in devices))
    together = frozenset.union(*(device.frames for device in devices))
    own = [device.frames - image for device in devices]
    print(f"registered {sum(device.bytes for device in devices)} bytes, {len(together) * FRAME} of physical memory")
    assert 0 not in together, "the kernel tells the numbers of frames to root alone"
    assert len(image) * FRAME >= image_bytes
    assert len(together) == len(image) + sum(map(len, own)), "two devices registered memory of the same requests"
    assert all(device.bytes == len(device.frames) * FRAME for device in devices)


def check_copies(devices: Sequence[Registered]) -> None:
    """Check that each device has copied, and never from or to memory that was not registered."""
    for device in devices:
        assert device.calls["copies"] > 0 == device.calls["refused_copies"] == device.calls["late_copies"]


def _own_number(pid: int) -> int:
    """Number of a process in the innermost namespace of processes."""
    told = re.search(r"^NSpid:.*\s(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert told is not None
    return int(told[1])
