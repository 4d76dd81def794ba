"""The runtimes, as the control plane shows and orders them."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from gateway.api import Body, Call
from gateway.errors import Problem
from gateway.fleet import Fleet
from gateway.objectives import label
from gateway.status import attainment
from store import deployments, wire
from store.bus import BusError
from store.wire import Lease, Role


class RoleAsked(Body, frozen=True):
    role: Role


class DrainAsked(Body, frozen=True):
    on: bool = True


async def listed(call: Call, fleet: Fleet) -> Response:
    """Who holds which device now."""
    async with call.database.read() as connection:
        found = await deployments.everything(connection)
    users: dict[str, dict[str, str]] = {}  # engine key → its deployments' names → their labels
    for deployment in found:
        for revision in deployment.live:
            name = f"{deployment.tenant}/{deployment.name}@{revision.number}"
            users.setdefault(revision.engine.key, {})[name] = label(deployment.tenant_id, deployment.id)
    gpus = [_gpu(lease, users) for lease in fleet.leases.values()]
    return JSONResponse({"data": gpus, "next_cursor": None})


async def fleet(call: Call, fleet: Fleet) -> Response:
    """How many runtimes there are, and how many there should be: for whoever starts and stops them."""
    leases, leader = fleet.leases, fleet.leader
    wish = {
        "scheduler": leader.holder if leader else None,
        "runtimes": len(leases),
        "wanted": (leader.wanted or None) if leader else None,
        "draining": sorted(id for id, lease in leases.items() if lease.draining),
    }
    return JSONResponse(wish)


async def set_role(call: Call, fleet: Fleet) -> Response:
    """What a runtime does of requests from now on."""
    id, asked = _runtime(call, fleet), await call.body(RoleAsked)
    await _order(fleet, wire.role_subject(id), wire.SetRole(role=asked.role))
    return JSONResponse({"id": id, "role": asked.role}, 202)


async def drain(call: Call, fleet: Fleet) -> Response:
    """A runtime takes no more requests, and its streams go on elsewhere, until it is told `on: false`."""
    id, asked = _runtime(call, fleet), await call.body(DrainAsked)
    await _order(fleet, wire.drain_subject(id), wire.Drain(on=asked.on))
    return JSONResponse({"id": id, "draining": asked.on}, 202)


def _runtime(call: Call, fleet: Fleet) -> str:
    """Raises Problem."""
    id = call.path("gpu")
    if id not in fleet.leases:
        raise Problem(404, "no_such_gpu", f"there is no runtime {id!r}: `staccato ps` lists them")
    return id


async def _order(fleet: Fleet, subject: str, order: wire.Message) -> None:
    """Raises Problem."""
    try:
        await fleet.order(subject, order)
    except BusError as error:
        raise Problem(503, "runtime_refused", f"{error}: try again", headers={"retry-after": "2"}) from error


def _time(accounts: wire.Accounts) -> dict[str, object]:
    """Since the device process began; all of it adds up to `wall_us`."""
    return {
        "wall_us": accounts.us,
        "idle_us": accounts.idle_us,
        "platform_us": accounts.platform_us,
        "open_us": accounts.open_us,  # of those who wait for their model now
        "used": {label: {"gpu_us": gpu, "switch_us": switch} for label, (gpu, switch) in accounts.labels.items()},
    }


def _gpu(lease: Lease, users: dict[str, dict[str, str]]) -> dict[str, object]:
    return {
        "id": lease.runtime,
        "engine": lease.engine,
        "draining": lease.draining,
        "role": lease.role,
        "holder": lease.holder or None,
        "switches": lease.switches,
        "moved": lease.moved,
        "memory_bytes": lease.pages_total * lease.page_bytes,
        "used_bytes": lease.pages_used * lease.page_bytes,
        "time": _time(lease.accounts),
        "models": {
            key: {
                "deployments": sorted(users.get(key, {})),
                "residency": state.residency.name.lower(),
                "error": state.error or None,
                "load_ms": state.load_ms,
                "fetches": state.fetches,
                "fetch_ms": state.fetch_ms,
                "weights_bytes": state.weights_pages * lease.page_bytes,
                "kv_bytes": state.kv_pages * lease.page_bytes,
                "kv_fragmentation": state.kv_fragmentation,
                "running": state.running,
                "waiting": state.waiting,
                "turns": state.turns,
                "tokens": state.tokens,
                "attainment": attainment(
                    lease.attainment[label]
                    for label in sorted(set(users.get(key, {}).values()))
                    if label in lease.attainment
                ),
            }
            for key, state in sorted(lease.models.items())
        },
    }
