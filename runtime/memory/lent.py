"""Memory to build in, below addresses that have no pages yet: the model is loaded where its weights will be.

On the host it is ordinary memory of the machine. A GPU has nothing else below an address than pages of the pool; then
there must be enough free ones while a model is built.
"""

from __future__ import annotations

from runtime.memory.native import Backend, Cache, Direction, Reservation

WAIT_S = 60.0


def lend(reservation: Reservation, offset: int, size: int) -> None:
    """Raises PoolError."""
    if reservation.device.backend is Backend.HOST:
        reservation.scratch(offset, size, True)
    else:
        reservation.map(offset, size, WAIT_S)


def take_back(reservation: Reservation, offset: int, size: int) -> None:
    if reservation.device.backend is Backend.HOST:
        reservation.scratch(offset, size, False)
    else:
        reservation.unmap(offset, size)


def write_out(reservation: Reservation, size: int, cache: Cache, cache_offset: int) -> None:
    """What was built, to the host."""
    if reservation.device.backend is Backend.HOST:
        cache.view(cache_offset, size)[:] = reservation.view(0, size)
    else:
        reservation.copy(0, cache, cache_offset, size, Direction.TO_HOST).wait(WAIT_S)
