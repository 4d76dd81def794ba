"""Plan of a deployment without making it: devices where the deployment fits, cold starts, price, slowed deployments.

The plan uses the runtimes' leases. Each estimate names its basis: `measured` with the same engine, `mean` of the
runtime's models, `profile` of the runtime's machine, `guess` without a profile.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from starlette.responses import Response

from gateway.billing.routes import ShownPrice, show_price
from gateway.control.deployments import NewDeployment, Serving, model_for, owner_of
from gateway.core.objectives import objective, unmeetable
from gateway.http.api import OF_TENANT, Call, Operation, Shown, answered
from runtime.core.ledgers.costs import Law, ModelCosts, model_size, unknown
from store.contract.deployments import Deployment, Spec
from store.contract.kv_curve import BLOCK_TOKENS, KvBlocks
from store.contract.priorities import priority
from store.contract.wire import EngineSpec, Lease, ModelState, Residency
from store.db import billing, deployments
from store.db.database import now_us
from store.db.deployments import engine_of

PIECE_TOKENS = 2048  # most tokens of a prompt in a step: vLLM's default for engines


class Estimate(Shown, frozen=True, kw_only=True):
    ms: float | None  # None: unknown
    by: Literal["measured", "mean", "profile", "guess", "unknown"]


class ColdStart(Shown, frozen=True, kw_only=True):
    """Time until the model is on the device, by the place of its weights."""

    files: Estimate
    host: Estimate  # in host memory
    pages: Estimate  # still on the device, as clean pages


class PlannedRuntime(Shown, frozen=True, kw_only=True):
    id: str
    fits: bool
    reason: str | None  # reason if the model does not fit
    memory_bytes: int
    weights_bytes: int  # in whole pages
    longest_request_bytes: int  # KV cache that a request of max_model_len tokens holds at its end
    # In requests of max_model_len tokens beside the weights, with the whole device for the model. None, as in the next
    # two fields: the model is an encoder, whose requests keep nothing on the device.
    kv_tokens: int | None
    longest_requests: int | None  # requests of max_model_len tokens that kv_tokens hold at once
    kv_tokens_now: int | None  # without taking a page from a present model
    cold_start: ColdStart
    step: Estimate  # one step of one request alone
    longest_prompt: Estimate
    busy: float  # share of the device's time used by present models


class Slowed(Shown, frozen=True, kw_only=True):
    """A deployment with requests on a runtime where the planned deployment fits."""

    deployment: str
    tenant: str
    runtime: str
    busy: float  # share of the device's time used by the deployment


class Plan(Shown, frozen=True, kw_only=True):
    fits: bool
    reasons: list[str]  # reasons if the model fits on no runtime
    engine: str
    digest: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    runtimes: list[PlannedRuntime]
    slows: list[Slowed]  # only deployments that the caller may see
    objective: str | None  # reason why even a dedicated device can't meet the objective; None: no such reason is known
    price: ShownPrice | None  # price valid now; None: no price is set


@Operation(Plan, body=NewDeployment, query=(OF_TENANT,), problems=(409,), operator=("deployments",))
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
    """Plan the engine on one runtime."""
    weights, longest = -(-engine.weight_bytes // lease.page_bytes), _longest(lease, engine)
    reason = _misfit(lease, engine, weights, -(-longest.peak_bytes // lease.page_bytes))
    costs, by = _costs(lease, engine)
    state = lease.models.get(engine.key) or ModelState(residency=Residency.COLD)

    def tokens(pages: int) -> int | None:
        if engine.pools and not longest.held_bytes:
            return None
        room = max(0, pages * lease.page_bytes - longest.idle_bytes)
        return room * engine.max_model_len // max(1, longest.held_bytes)

    room = tokens(lease.pages_total - weights)
    return PlannedRuntime(
        id=lease.runtime,
        fits=reason is None,
        reason=reason,
        memory_bytes=lease.pages_total * lease.page_bytes,
        weights_bytes=weights * lease.page_bytes,
        longest_request_bytes=longest.held_bytes,
        kv_tokens=room,
        longest_requests=None if room is None else room // engine.max_model_len,
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


class Longest(NamedTuple):
    """KV cache of a request of max_model_len tokens, in bytes."""

    held_bytes: int  # at the end of the request
    peak_bytes: int  # that the model must have
    idle_bytes: int  # of the block that no request gets


def _longest(lease: Lease, engine: EngineSpec) -> Longest:
    """Count whole blocks as the runtime's engines do.

    The count is exact if the runtime says the length of its blocks, and if the model keeps vLLM's default. Otherwise
    the count is wrong by at most a block of each group of layers, of the longer of the two lengths. An engine spec of
    an earlier version has bytes for each token instead of layers."""
    tokens = engine.max_model_len
    if not engine.kv_layers:
        size = engine.kv_bytes_per_token * tokens
        return Longest(size, size, 0)
    blocks = KvBlocks.of(engine.kv_layers, lease.block_tokens or BLOCK_TOKENS)
    peak_bytes = (1 + blocks.peak(tokens, PIECE_TOKENS)) * blocks.block_bytes
    return Longest(blocks.bytes(tokens), peak_bytes, blocks.block_bytes)


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
    """Mean time of models read from files by the runtime: building takes most of the time, for any size."""
    times = lease.wakes.get("disk")
    count = sum(times.counts) if times else 0
    return Estimate(ms=_ms(times.sum_s / count), by="mean") if times and count else Estimate(ms=None, by="unknown")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _slowed(lease: Lease, others: list[Deployment]) -> list[Slowed]:
    """Return the slowed deployments of a runtime, the busiest first."""
    found = [
        Slowed(deployment=other.name, tenant=other.tenant, runtime=lease.runtime, busy=state.busy)
        for other in others
        if (state := lease.models.get(other.active.engine.key)) is not None and state.busy > 0
    ]
    return sorted(found, key=lambda slowed: (-slowed.busy, slowed.tenant, slowed.deployment))


def _unmeetable(spec: Spec, engine: EngineSpec, fitting: list[PlannedRuntime]) -> str | None:
    """Return why the objective can't be met; the fastest runtime decides, as in gateway/core/status.py."""
    if not fitting:
        return None

    def least_s(estimates: list[Estimate]) -> float:
        return min((estimate.ms for estimate in estimates if estimate.ms is not None), default=0.0) / 1e3

    return unmeetable(
        objective(spec.slo, priority(spec.priority), 1.0),
        step_alone_s=least_s([runtime.step for runtime in fitting]),
        prefill_longest_s=least_s([runtime.longest_prompt for runtime in fitting]),
        load_s=0.0 if engine.pinned else least_s([runtime.cold_start.host for runtime in fitting]),
    )
