"""Host caches of the device processes below a supervisor, counted by what the kernel has mapped."""

from __future__ import annotations

import contextlib
from pathlib import Path


def caches(supervisor: int) -> dict[int, str]:
    """Host cache mapped by each device process below the process `supervisor`: process → the kernel's number of the
    file."""
    found = {}
    for pid in below(supervisor):
        with contextlib.suppress(OSError):
            if "runtime.device" in Path(f"/proc/{pid}/cmdline").read_text():
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    if "staccato-host-cache" in line:
                        found[pid] = line.split()[4]
    return found


def below(pid: int) -> set[int]:
    """Ids of all processes below the process `pid`."""
    parents = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while fresh := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= fresh
    return found
