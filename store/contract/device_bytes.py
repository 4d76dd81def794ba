"""Memory that a runtime uses beside the pool of its device, as leases and views show the memory. Pure."""

from __future__ import annotations

import msgspec


class DeviceBytes(msgspec.Struct, frozen=True):
    """Memory of a GPU and of the host for the GPU; on a device without a GPU every number is 0."""

    total: int = 0  # memory of the device
    outside: int = 0  # used memory beside the pool: contexts, workspaces, tables of engines, further processes
    torch: int = 0  # part of `outside` that torch's allocator of the device process has
    cache_pinned: int = 0  # part of the host cache that is registered with the GPU's driver
