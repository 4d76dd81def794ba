"""What a deployment would be that is not made: where it fits, how cold it starts, its price, and whom it would slow.

By what runtimes say of themselves in their leases. Each time says what it is known by: `measured` with this very
engine, `mean` of the models of that runtime, `profile` of that machine, `guess` where it has none.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.responses import Response

from gateway.api import OF_TENANT, Call, Operation, Shown, answered
from gateway.billing import ShownPrice, show_price
from gateway.deployments import NewDeployment, Serving, model_for, owner_of
from gateway.objectives import objective, unmeetable
from runtime.costs import Law, ModelCosts, model_size, unknown
from store import billing, deployments
from store.db import now_us
from store.deployments import Deployment, Spec, engine_of
from store.wire import EngineSpec, Lease, ModelState, Residency


class Estimate(Shown, frozen=True, kw_only=True):
    ms: float | None  # None: nothing is known of it
    by: Literal["measured", "mean", "profile", "guess", "unknown"]


class ColdStart(Shown, frozen=True, kw_only=True):
    """Until it is on the device, by where its weights are."""

    files: Estimate
    host: Estimate  # in the host's memory
    pages: Estimate  # on the device still, as clean pages


class PlannedRuntime(Shown, frozen=True, kw_only=True):
    id: str
    fits: bool
    reason: str | None  # why not
    memory_bytes: int
    weights_bytes: int  # in whole pages
    kv_tokens: int  # beside the weights, with the device to itself
    longest_requests: int  # of max_model_len, at once, in these
    kv_tokens_now: int  # without taking a page from anybody who is there
    cold_start: ColdStart
    step: Estimate  # of one request alone
    longest_prompt: Estimate
    busy: float  # share of the device's time that those need who are there


class Slowed(Shown, frozen=True, kw_only=True):
    """Who shares a runtime with it and has requests."""

    deployment: str
    tenant: str
    runtime: str
    busy: float  # share of the device's time that it needs


class Plan(Shown, frozen=True, kw_only=True):
    fits: bool
    reasons: list[str]  # why not
    engine: str
    digest: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    runtimes: list[PlannedRuntime]
    slows: list[Slowed]  # as far as the caller may see them
    objective: str | None  # why it could not be kept even by a device of its own; None: nothing says so
    price: ShownPrice | None  # that would hold now; None: there is none


@Operation(Plan, body=NewDeployment, query=(OF_TENANT,), problems=(409,))
async def plan(call: Call, serving: Serving) -> Response:
    """Say what a deployment would be, without making it."""
    body = await call.body(NewDeployment)
    tenant = owner_of(call, body)
    owner = await call.tenant(tenant)
    assert owner.tenant_id is not None
    async with call.database.read() as connection:
        model = await model_for(connection, owner.tenant_id, body.spec(), serving, lock=False)
        prices = await billing.prices_for(connection, {owner.tenant_id})
        others = await deployments.everything(connection)
    if not call.caller.admin:
        others = [other for other in others if other.tenant_id == owner.tenant_id]
    price = billing.price_of(prices, owner.tenant_id, model.id, now_us())
    shown = show_price(price) if price else None
    return answered(planned(body.spec(), engine_of(body.spec(), model), serving.fleet.leases, others, shown))


def planned(
    spec: Spec, engine: EngineSpec, leases: dict[str, Lease], others: list[Deployment], price: ShownPrice | None
) -> Plan:
    runtimes = [on(lease, engine) for lease in leases.values() if lease.pages_total]
    fitting = [runtime for runtime in runtimes if runtime.fits]
    reasons = [f"{runtime.id}: {runtime.reason}" for runtime in runtimes if runtime.reason]
    return Plan(
        fits=bool(fitting),
        reasons=[] if fitting else reasons or ["no runtime is there: start one, and ask again"],
        engine=engine.key,
        digest=engine.digest,
        weight_bytes=engine.weight_bytes,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        max_model_len=engine.max_model_len,
        runtimes=runtimes,
        slows=[slowed for runtime in fitting for slowed in _slowed(leases[runtime.id], others)],
        objective=_unmeetable(spec, engine, fitting),
        price=price,
    )


def on(lease: Lease, engine: EngineSpec) -> PlannedRuntime:
    """The engine on one runtime."""
    weights = -(-engine.weight_bytes // lease.page_bytes)
    longest = -(-engine.kv_bytes_per_token * engine.max_model_len // lease.page_bytes)
    reason = _misfit(lease, engine, weights, longest)
    costs, by = _costs(lease, engine)
    state = lease.models.get(engine.key) or ModelState(residency=Residency.COLD)

    def tokens(pages: int) -> int:
        return max(0, pages) * lease.page_bytes // max(1, engine.kv_bytes_per_token)

    room = tokens(lease.pages_total - weights)
    return PlannedRuntime(
        id=lease.runtime,
        fits=reason is None,
        reason=reason,
        memory_bytes=lease.pages_total * lease.page_bytes,
        weights_bytes=weights * lease.page_bytes,
        kv_tokens=room,
        longest_requests=room // engine.max_model_len,
        kv_tokens_now=tokens(lease.pages_total - lease.pages_used - weights),
        cold_start=ColdStart(
            files=_from_files(lease),
            host=_known(state.fetch_ms, costs.load(engine.weight_bytes) + costs.switch_s, by),
            pages=Estimate(ms=_ms(costs.load_fixed_s + costs.switch_s), by=by),
        ),
        step=_known(state.step_ms, costs.step(1, 1), by),
        longest_prompt=_known(state.prefill_ms, costs.prefill(engine.max_model_len), by),
        busy=round(sum(state.busy for state in lease.models.values()), 4),
    )


def _misfit(lease: Lease, engine: EngineSpec, weights: int, longest: int) -> str | None:
    if lease.draining:
        return "it takes no more requests"
    failed = lease.models.get(engine.key)
    if failed is not None and failed.residency is Residency.FAILED:
        return f"it could not load the same engine: {failed.error}"
    if weights + longest > lease.pages_total:
        return (
            f"the weights take {_mib(weights, lease)} MiB and one request of {engine.max_model_len} tokens "
            f"{_mib(longest, lease)} MiB, and it has {_mib(lease.pages_total, lease)} MiB: lower max_model_len or "
            "choose a smaller dtype"
        )
    return None


def _mib(pages: int, lease: Lease) -> int:
    return -(-pages * lease.page_bytes // (1 << 20))


def _costs(lease: Lease, engine: EngineSpec) -> tuple[ModelCosts, Literal["profile", "guess"]]:
    size = model_size(engine)
    if not lease.law:
        return unknown(size), "guess"
    return msgspec.convert(lease.law, Law).costs(size), "profile"


def _known(measured_ms: float, otherwise_s: float, by: Literal["profile", "guess"]) -> Estimate:
    return Estimate(ms=measured_ms, by="measured") if measured_ms > 0 else Estimate(ms=_ms(otherwise_s), by=by)


def _from_files(lease: Lease) -> Estimate:
    """What models that were read there took: engines of one size or another take most of it to be built."""
    times = lease.wakes.get("disk")
    count = sum(times.counts) if times else 0
    return Estimate(ms=_ms(times.sum_s / count), by="mean") if times and count else Estimate(ms=None, by="unknown")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _slowed(lease: Lease, others: list[Deployment]) -> list[Slowed]:
    """Most first."""
    found = [
        Slowed(deployment=other.name, tenant=other.tenant, runtime=lease.runtime, busy=state.busy)
        for other in others
        if (state := lease.models.get(other.active.engine.key)) is not None and state.busy > 0
    ]
    return sorted(found, key=lambda slowed: (-slowed.busy, slowed.tenant, slowed.deployment))


def _unmeetable(spec: Spec, engine: EngineSpec, fitting: list[PlannedRuntime]) -> str | None:
    """The fastest runtime decides, as in gateway/status.py."""
    if not fitting:
        return None

    def least_s(estimates: list[Estimate]) -> float:
        return min((estimate.ms for estimate in estimates if estimate.ms is not None), default=0.0) / 1e3

    return unmeetable(
        objective(spec.slo, spec.priority, 1.0),
        step_alone_s=least_s([runtime.step for runtime in fitting]),
        prefill_longest_s=least_s([runtime.longest_prompt for runtime in fitting]),
        load_s=0.0 if engine.pinned else least_s([runtime.cold_start.host for runtime in fitting]),
    )
