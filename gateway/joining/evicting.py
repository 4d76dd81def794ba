"""Ending of connections of revoked runtimes, at every nats-server, within some seconds after the revocation.

The servers' lists of connections are compared with the bindings in the database, so a revocation during a restart of
the service counts as well. An expiry in the runtime's rights would need no list, but would interrupt every runtime
each few seconds, and frames in flight would be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from gateway.joining.desk import connection_name
from store.bus import BusError
from store.contract.joining.proofs import NAME_PREFIX, JoinedRuntime
from store.db.database import Database, DatabaseError
from store.db.fleet import joining
from store.system import OpenConnection, SystemBus

log = structlog.get_logger()

LOOK_PERIOD_S = 1.0  # between two looks for revocations
LOOK_S = 15.0  # longest look
SWEEP_LOOKS = 30  # looks until the connections are compared without a revocation
AGAIN_LOOKS = 3  # comparisons after a revocation: a login may have been answered just before


def intruders(open_now: Iterable[OpenConnection], bindings: Iterable[JoinedRuntime]) -> list[OpenConnection]:
    """Return the connections of joined runtimes without a living binding."""
    living = {connection_name(each.id, each.public_key) for each in bindings if each.revoked_us is None}
    joined = (each for each in open_now if each.user.startswith(NAME_PREFIX) and "/" in each.user)
    return [each for each in joined if each.user not in living]


async def evict(bus: SystemBus, database: Database) -> None:
    """Endless: end connections of runtimes that were revoked."""
    seen: tuple[int, int] | None = None
    comparisons, idle_looks = 0, 0
    while True:
        try:
            async with asyncio.timeout(LOOK_S):
                async with database.read() as connection:
                    found = await joining.revocations(connection)
                if found != seen:
                    comparisons, seen = AGAIN_LOOKS, found
                idle_looks += 1
                if comparisons or idle_looks >= SWEEP_LOOKS:
                    await sweep(bus, database)
                    comparisons, idle_looks = max(0, comparisons - 1), 0
        except (DatabaseError, BusError, TimeoutError) as error:
            said = str(error) or f"not done within {LOOK_S} s"
            log.warning("join.not_compared", error=said, retry_in_s=LOOK_PERIOD_S)
        await asyncio.sleep(LOOK_PERIOD_S)


async def sweep(bus: SystemBus, database: Database) -> None:
    """End the connections of runtimes without a living binding. Raises BusError, DatabaseError.

    The connections are listed first: a runtime is bound before the runtime is let in."""
    open_now = await bus.connections()
    async with database.read() as connection:
        bindings = await joining.runtimes(connection)
    for intruder in intruders(open_now, bindings):
        runtime, _, public_key = intruder.user.removeprefix(NAME_PREFIX).partition("/")
        try:
            await bus.kick(intruder)
            log.warning("join.evicted", runtime=runtime, public_key=public_key)
        except BusError as error:  # the connection may be gone; the next comparison shows whether it is
            log.warning("join.not_evicted", runtime=runtime, public_key=public_key, error=str(error))
