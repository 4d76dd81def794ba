"""Processors of the host beside a GPU: memory that these processors write first is near the GPU."""

from __future__ import annotations

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def processors(node: int, nodes: Path = NODES) -> set[int]:
    """Numbers of the node's processors; empty if the kernel does not know the node."""
    try:
        written = (nodes / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, written.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def bind(node: int, nodes: Path = NODES) -> set[int]:
    """Let the calling thread, and threads begun later, run on the node's processors alone, as far as allowed.

    Returns the processors; empty, and nothing is changed, for a node below 0 or without allowed processors."""
    allowed = os.sched_getaffinity(0) & processors(node, nodes) if node >= 0 else set()
    if allowed:
        os.sched_setaffinity(0, allowed)
    return allowed
