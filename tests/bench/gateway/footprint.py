"""Resources that the processes of a running platform take: by name, from the kernel's own counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

# Words of a command line → the bench's name of the process.
NAMES = {
    "store.fork.server": "fork server",
    "nats-server": "nats",
    "store.db.ledger": "ledger",
    "runtime.node": "node",
    "runtime.device": "device",
    "gateway.app": "gateway",
    "gateway.streams.pulse": "pulse",
    "rendering.py": "renderer",
    "runtime.engine.compiling": "compiler",
    "up": "supervisor",
}
LIGHT = ("nats", "supervisor", "ledger", "node", "pulse", "renderer")  # processes that must not load torch


def processes(everyone: Iterable[psutil.Process]) -> dict[str, psutil.Process]:
    """The processes of a platform by name; further processes of a name are numbered ("renderer 2").

    Raises KeyError for a process without a name: then NAMES is not complete."""
    running: dict[str, psutil.Process] = {}
    kinds = Counter[str]()
    for process in everyone:
        try:
            name = _name(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # the process ended meanwhile: renderers come and go
        kinds[name] += 1
        running[name if kinds[name] == 1 else f"{name} {kinds[name]}"] = process
    return running


def _name(process: psutil.Process) -> str:
    line = " ".join(process.cmdline()).split()  # the title of a forked process is a single word with spaces
    for word, name in NAMES.items():
        if any(Path(part).name == word for part in line):
            return name
    raise KeyError(f"process {process.pid} of the platform is not known: {line}")


def has_torch(process: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


@dataclass(frozen=True)
class Ticks:
    """Counters of a thread since its start."""

    name: str
    cpu_ticks: int
    switches: int  # voluntary: how often the thread went to sleep, and so how often it was woken


def ticks(process: psutil.Process) -> dict[int, Ticks]:
    """Counters of each thread of the process, by thread id."""
    found = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        # utime and stime are the 14th and 15th field; the name before them may hold spaces, but ends with ')'.
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        switches = int(status["voluntary_ctxt_switches"])
        found[int(task.name)] = Ticks(status["Name"], int(fields[11]) + int(fields[12]), switches)
    return found
