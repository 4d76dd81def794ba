"""What the processes of a running platform take: by name, from the kernel's own counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

# Words of a command line → what we call the process.
NAMES = {
    "nats-server": "nats",
    "store.ledger": "ledger",
    "runtime.node": "node",
    "runtime.device": "device",
    "gateway.app": "gateway",
    "rendering.py": "renderer",
    "up": "supervisor",
}
LIGHT = ("nats", "supervisor", "ledger", "node", "renderer")  # everything that has no business with torch


def processes(supervisor: int) -> dict[str, psutil.Process]:
    """Every process of the tree; what there are several of is numbered from the second on ("renderer 2"). Raises
    KeyError for one that has no name here: then NAMES is not complete."""
    root = psutil.Process(supervisor)
    running: dict[str, psutil.Process] = {}
    kinds = Counter[str]()
    for process in (root, *root.children(recursive=True)):
        try:
            name = _name(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it ended while we looked: renderers come and go
        kinds[name] += 1
        running[name if kinds[name] == 1 else f"{name} {kinds[name]}"] = process
    return running


def _name(process: psutil.Process) -> str:
    line = process.cmdline()
    for word, name in NAMES.items():
        if any(Path(part).name == word for part in line):
            return name
    raise KeyError(f"process {process.pid} of the platform is not known: {line}")


def has_torch(process: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


@dataclass(frozen=True)
class Ticks:
    """What a thread did since it was started."""

    name: str
    cpu_ticks: int
    switches: int  # voluntary: how often it went to sleep, so how often it had been woken


def ticks(process: psutil.Process) -> dict[int, Ticks]:
    """By thread id."""
    found = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        # utime and stime are the 14th and 15th field; the name before them may hold spaces, but ends with ')'.
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        switches = int(status["voluntary_ctxt_switches"])
        found[int(task.name)] = Ticks(status["Name"], int(fields[11]) + int(fields[12]), switches)
    return found
