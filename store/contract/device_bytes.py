"""Memory that a runtime uses beside the pool of its device, as leases and views show the memory. Pure."""

from __future__ import annotations

import msgspec


class PrefixCounts(msgspec.Struct, frozen=True):
    """KV blocks of ended requests that a runtime keeps in the host cache, counted since the device process began."""

    kept: int = 0  # copied from the device
    brought: int = 0  # copied back to the device
    dropped: int = 0  # forgotten: for room, for age, or with their engine
    wrong: int = 0  # changed since they were kept, and computed again
    held_bytes: int = 0  # now


class DeviceBytes(msgspec.Struct, frozen=True):
    """Memory of a device beside its pool; on a device without a GPU every number but `prefixes` is 0."""

    total: int = 0  # memory of the device
    outside: int = 0  # used memory beside the pool: contexts, workspaces, tables of engines, further processes
    torch: int = 0  # part of `outside` that torch's allocator of the device process has
    cache_pinned: int = 0  # part of the host cache that is registered with the GPU's driver
    prefixes: PrefixCounts = PrefixCounts()
