"""Lent memory for building a model: memory at addresses without pages, so that weights load at the final addresses.

On the host, lent memory is ordinary memory of the machine. A GPU can put only pages of the pool below an address, so
the pool must have enough free pages while a model is built.
"""

from __future__ import annotations

from runtime.memory.native import Backend, CacheMemory, Direction, Reservation

WAIT_S = 60.0


def lend(reservation: Reservation, offset: int, size: int) -> None:
    """Lend memory to `size` bytes of the reservation from `offset` on, until `take_back`. Raises PoolError."""
    if reservation.device.backend is Backend.HOST:
        reservation.scratch(offset, size, True)
    else:
        reservation.map(offset, size, WAIT_S)


def take_back(reservation: Reservation, offset: int, size: int) -> None:
    if reservation.device.backend is Backend.HOST:
        reservation.scratch(offset, size, False)
    else:
        reservation.unmap(offset, size)


def write_out(reservation: Reservation, size: int, cache: CacheMemory, cache_offset: int) -> None:
    """Copy the first `size` bytes of a reservation, a built model's weights, into the cache at `cache_offset`."""
    if reservation.device.backend is Backend.HOST:
        cache.view(cache_offset, size)[:] = reservation.view(0, size)
    else:
        reservation.copy(0, cache, cache_offset, size, Direction.TO_HOST).wait(WAIT_S)
