"""Processes of the runtimes of one machine, which share a host cache, a disk cache and a fork server."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.config import Settings
from gateway.machine.processes import environment, module_command
from gateway.ops import gpus
from gateway.ops.supervise import Child
from store.settings import PREFIX

# Settings told to a runtime. A runtime never learns the database's address or the operator's key.
RUNTIME_SETTINGS = (
    *("nats_url", "nats_ca", "nats_replicas", "device_memory", "host_cache", "disk_cache", "disk_folder", "policy"),
    *("journal", "log_level", "fork_server", "tensor_parallel", "drain_s"),
)
ENDING_S = 10.0  # from the end of a runtime's drain to SIGKILL


@dataclass(frozen=True)
class MachineRuntimes:
    """Makes the child of each runtime of this machine.

    Args:
        names: names that runtimes may have on the bus, in the order of the GPUs.
        cache: file of the host cache, as `host_cache` makes the file.
        forks: socket for orders to the fork server; -1: there is no fork server.
        devices: GPUs of each runtime, in the order of the runtimes; empty: the runtimes have no GPUs.
        own: returns further variables of the runtime with a name: credentials, role, ports."""

    settings: Settings
    names: Sequence[str]
    cache: int
    forks: int
    devices: Sequence[Sequence[gpus.Gpu]]
    own: Callable[[str], dict[str, str]]

    def child(self, name: str) -> Child:
        """Return the child of the runtime `name`, one of `names`. A runtime pins its part of the host cache."""
        settings = self.settings
        told = environment(settings, RUNTIME_SETTINGS)
        told |= {PREFIX + "RUNTIME_ID": name, PREFIX + "HOST_CACHE_FD": str(self.cache)}
        told[PREFIX + "CACHE_PINNED"] = str(settings.cache_pinned // max(1, len(self.names)))
        if self.devices:
            told |= gpus.told(self.devices[self.names.index(name)])
        fds: tuple[int, ...] = (self.cache,)
        if self.forks >= 0:
            told[PREFIX + "FORK_SERVER_FD"] = str(self.forks)
            fds += (self.forks,)
        stop_s = settings.drain_s + ENDING_S
        return Child(name, module_command("runtime.node"), told | self.own(name), stop_s=stop_s, fds=fds)


def host_cache(settings: Settings) -> int:
    """Return the host cache that the runtimes share: a file without a name, with memory allocated on use."""
    cache = os.memfd_create("staccato-host-cache")
    os.ftruncate(cache, settings.host_cache)
    return cache
