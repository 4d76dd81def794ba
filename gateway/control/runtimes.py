"""Routes for runtimes: show the devices, set roles, drain."""

from __future__ import annotations

from starlette.responses import Response

from gateway.core.objectives import label
from gateway.core.status import tier
from gateway.http.api import Body, Call, Operation, Page, Shown, answered
from gateway.http.errors import Problem
from gateway.streams.runtimes import RuntimesView
from runtime.core.ledgers.attainment import AttainedShares, shares
from store.bus import BusError
from store.contract import wire
from store.contract.wire import Lease, Role
from store.db import deployments


class RoleAsked(Body, frozen=True):
    role: Role


class DrainAsked(Body, frozen=True):
    on: bool = True


class Used(Shown, frozen=True, kw_only=True):
    gpu_us: int
    switch_us: int


class ShownTime(Shown, frozen=True, kw_only=True):
    """Time since the device process began. The parts add up to `wall_us`."""

    wall_us: int
    idle_us: int
    platform_us: int
    open_us: int  # not yet charged: waiting requests pay when their model steps
    used: dict[str, Used]


class HostedModel(Shown, frozen=True, kw_only=True):
    deployments: list[str]
    residency: str
    error: str | None
    load_ms: float
    fetches: int
    fetch_ms: float
    weights_bytes: int
    kv_bytes: int
    kv_fragmentation: float
    running: int
    waiting: int
    turns: int
    tokens: int
    warm: bool  # by its schedule, the image stays in the host's memory now
    staged: int  # times that the history of requests brought the image from disk before a request asked
    staged_unused: int  # of these, times that the image left again before a request asked
    attainment: AttainedShares | None


class ShownGpu(Shown, frozen=True, kw_only=True):
    id: str
    engine: str
    draining: bool
    surplus: bool
    role: Role
    holder: str | None
    switches: int
    moved: int
    memory_bytes: int
    used_bytes: int
    time: ShownTime
    models: dict[str, HostedModel]


class ShownFleet(Shown, frozen=True, kw_only=True):
    scheduler: str | None
    runtimes: int
    wanted: int | None
    serving: list[str]  # runtimes that take requests
    draining: list[str]
    surplus: list[str]  # draining runtimes that the scheduler drained for want of load
    removable: list[str]  # surplus runtimes without a request: may be ended now


class ShownRole(RoleAsked, frozen=True):
    id: str


class ShownDrain(Shown, frozen=True, kw_only=True):
    id: str
    draining: bool


@Operation(Page[ShownGpu], operator=("fleet",))
async def listed(call: Call, fleet: RuntimesView) -> Response:
    """Show who holds which device now."""
    served = await users(call)
    gpus = [_gpu(lease, served) for lease in fleet.leases.values()]
    return answered(Page(data=gpus, next_cursor=None))


async def users(call: Call) -> dict[str, dict[str, str]]:
    """Return engine key → names of the deployments that the engine serves → labels of the deployments."""
    async with call.database.read() as connection:
        found = await deployments.everything(connection)
    served: dict[str, dict[str, str]] = {}
    for deployment in found:
        for revision in deployment.live:
            name = f"{deployment.tenant}/{deployment.name}@{revision.number}"
            served.setdefault(revision.engine.key, {})[name] = label(deployment.tenant_id, deployment.id)
    return served


@Operation(ShownFleet, operator=("fleet",))
async def fleet(call: Call, fleet: RuntimesView) -> Response:
    """Show how many runtimes there are, and how many are wanted, for a service that starts and stops runtimes."""
    leases, leader = fleet.leases, fleet.leader
    wish = ShownFleet(
        scheduler=leader.holder if leader else None,
        runtimes=len(leases),
        wanted=(leader.wanted or None) if leader else None,
        serving=sorted(id for id, lease in leases.items() if not lease.draining),
        draining=sorted(id for id, lease in leases.items() if lease.draining),
        surplus=sorted(id for id, lease in leases.items() if lease.surplus),
        removable=sorted(id for id, lease in leases.items() if lease.surplus and not _requests(lease)),
    )
    return answered(wish)


@Operation(ShownRole, 202, body=RoleAsked, operator=("fleet",))
async def set_role(call: Call, fleet: RuntimesView) -> Response:
    """Set the part of a request's work that a runtime does from now on."""
    id, asked = runtime_of(call, fleet), await call.body(RoleAsked)
    await ask(fleet, wire.role_subject(id), wire.SetRole(role=asked.role))
    return answered(ShownRole(id=id, role=asked.role), 202)


@Operation(ShownDrain, 202, body=DrainAsked, operator=("fleet",))
async def drain(call: Call, fleet: RuntimesView) -> Response:
    """Drain a runtime: no more requests, and streams go on at other runtimes, until the order `on: false`."""
    id, asked = runtime_of(call, fleet), await call.body(DrainAsked)
    await ask(fleet, wire.drain_subject(id), wire.Drain(on=asked.on))
    return answered(ShownDrain(id=id, draining=asked.on), 202)


def runtime_of(call: Call, fleet: RuntimesView) -> str:
    """Return the runtime's id in the path. Raises Problem for an unknown runtime."""
    id = call.path("gpu")
    if id not in fleet.leases:
        raise Problem(404, "no_such_gpu", f"there is no runtime {id!r}: `staccato ps` lists them")
    return id


async def ask(fleet: RuntimesView, subject: str, message: wire.Message) -> bytes:
    """Send a message to a runtime and return the answer. Raises Problem if the runtime or the bus refuses."""
    try:
        return await fleet.ask(subject, message)
    except BusError as error:
        raise Problem(503, "runtime_refused", f"{error}: try again", headers={"retry-after": "2"}) from error


def _time(accounts: wire.Accounts) -> ShownTime:
    return ShownTime(
        wall_us=accounts.us,
        idle_us=accounts.idle_us,
        platform_us=accounts.platform_us,
        open_us=accounts.open_us,
        used={label: Used(gpu_us=gpu, switch_us=switch) for label, (gpu, switch) in accounts.labels.items()},
    )


def _gpu(lease: Lease, users: dict[str, dict[str, str]]) -> ShownGpu:
    return ShownGpu(
        id=lease.runtime,
        engine=lease.engine,
        draining=lease.draining,
        surplus=lease.surplus,
        role=lease.role,
        holder=lease.holder or None,
        switches=lease.switches,
        moved=lease.moved,
        memory_bytes=lease.pages_total * lease.page_bytes,
        used_bytes=lease.pages_used * lease.page_bytes,
        time=_time(lease.accounts),
        models={key: _model(lease, state, users.get(key, {})) for key, state in sorted(lease.models.items())},
    )


def _requests(lease: Lease) -> int:
    return sum(state.running + state.waiting for state in lease.models.values())


def _model(lease: Lease, state: wire.ModelState, users: dict[str, str]) -> HostedModel:
    labels = sorted(set(users.values()))
    return HostedModel(
        deployments=sorted(users),
        residency=tier(state),
        error=state.error or None,
        load_ms=state.load_ms,
        fetches=state.fetches,
        fetch_ms=state.fetch_ms,
        weights_bytes=state.weights_pages * lease.page_bytes,
        kv_bytes=state.kv_pages * lease.page_bytes,
        kv_fragmentation=state.kv_fragmentation,
        running=state.running,
        waiting=state.waiting,
        turns=state.turns,
        tokens=state.tokens,
        warm=state.warm,
        staged=state.staged,
        staged_unused=state.staged_unused,
        attainment=shares(lease.attainment[label] for label in labels if label in lease.attainment),
    )
