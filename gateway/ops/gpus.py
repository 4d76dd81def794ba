"""GPUs of this host, as NVIDIA's tool and the kernel tell, and the GPUs of each runtime of this host."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gateway.config import Settings
from store.settings import PREFIX

TOOL = "nvidia-smi"
FIELDS = ("index", "uuid", "name", "memory.total", "pci.bus_id")
TOOL_S = 10.0  # a driver that begins takes seconds to answer


class NoSuchGpu(ValueError):
    """The settings ask for GPUs that the host does not have; the message has the remedy."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host."""

    index: str  # the driver's number
    uuid: str
    name: str
    memory_mib: int
    bus: str  # address on the PCI bus, as 0000:3b:00.0
    node: int | None = None  # NUMA node of the host next to the GPU; None: the kernel names no node

    @property
    def shown(self) -> str:
        beside = "" if self.node is None else f", node {self.node}"
        return f"{self.index} {self.name} {self.memory_mib} MiB{beside}"


def found(devices: Path = Path("/sys/bus/pci/devices")) -> list[Gpu]:
    """GPUs of this host in the driver's order; [] without NVIDIA's tool or without a GPU.

    `devices` is the kernel's folder of devices on the PCI bus."""
    command = [TOOL, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(said.splitlines(), skipinitialspace=True)
    return [_gpu(row, devices) for row in rows if len(row) == len(FIELDS)]


def _gpu(row: Sequence[str], devices: Path) -> Gpu:
    index, uuid, name, memory_mib, bus = row
    domain, _, rest = bus.lower().partition(":")
    address = f"{domain[-4:]}:{rest}"  # the tool writes eight digits of the domain, the kernel four
    return Gpu(index, uuid, name, int(memory_mib), address, _node(devices / address / "numa_node"))


def _node(file: Path) -> int | None:
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: a machine with a single node


def engine_for_gpus() -> bool:
    """Whether the installed vLLM is the build for CUDA."""
    try:
        return bool(metadata.version("vllm"))
    except metadata.PackageNotFoundError:
        return False


def chosen(wanted: Sequence[str], there: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs named by number or UUID in `wanted`, or all GPUs if no GPU is named. Raises NoSuchGpu."""
    if not wanted:
        return list(there)
    known = {name: gpu for gpu in there for name in (gpu.index, gpu.uuid)}
    if missing := [name for name in wanted if name not in known]:
        have = ", ".join(gpu.index for gpu in there) or "none that `nvidia-smi` shows"
        raise NoSuchGpu(f"{PREFIX}GPUS: there is no GPU {missing[0]}, this host has {have}")
    if len(set(wanted)) < len(wanted):
        raise NoSuchGpu(f"{PREFIX}GPUS={','.join(wanted)}: name each GPU once, a runtime has a GPU for itself")
    return [known[name] for name in wanted]


def with_gpus(settings: Settings) -> tuple[Settings, list[tuple[Gpu, ...]]]:
    """The settings with as many runtimes as the GPUs bear, and the GPUs of each runtime; [] on a host without.

    A runtime takes `tensor_parallel` GPUs. A number of runtimes that was set stays, and takes the first GPUs. Raises
    NoSuchGpu if the GPUs are too few."""
    if not settings.gpus and not engine_for_gpus():
        return settings, []
    gpus, each = chosen(settings.gpus, found()), settings.tensor_parallel
    if not gpus:
        return settings, []
    shares = [tuple(gpus[first : first + each]) for first in range(0, len(gpus) - each + 1, each)]
    if not shares:
        raise NoSuchGpu(f"{PREFIX}TENSOR_PARALLEL={each} is more than the {len(gpus)} GPUs of this host: lower it")
    if "runtimes" not in settings.model_fields_set:
        least = {"runtimes": len(shares)}
        most = {} if "runtimes_most" in settings.model_fields_set else {"runtimes_most": len(shares)}
        settings = settings.model_copy(update=least | most)
    if settings.runtimes_most > len(shares):
        share = "a GPU" if each == 1 else f"{each} GPUs"
        raise NoSuchGpu(
            f"{settings.runtimes_most} runtimes need {share} each, and there are {len(gpus)}: lower {PREFIX}RUNTIMES, "
            f"or name more with {PREFIX}GPUS"
        )
    return settings, shares


def told(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Variables of the runtime that has `gpus`. A runtime with GPUs beside several nodes is bound to no node."""
    nodes = {gpu.node for gpu in gpus}
    node = nodes.pop() if len(nodes) == 1 else None
    bound = {} if node is None else {PREFIX + "NUMA_NODE": str(node)}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus)} | bound
