"""Any order of edits, failed calls and restarts ends in what is declared, and no row of a person is ever touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.core.declared.objects import DeclaredKey, ModelDeploymentSpec, Ref, TenantSpec
from gateway.core.declared.observed import SeenDeployment, SeenKey, SeenModel, SeenTenant
from gateway.core.declared.status import READY, SYNCED, found
from gateway.declared.reconciling import AGAIN_S_MOST, CALM_S, Reconciler
from store.contract.deployments import Scaling, Share, Spec
from store.contract.limits import Limits
from tests.gateway.declared.playing import STATUS, PlayedPlatform, PlayedSource, Unheard

MANAGER, URL = "staccato", "http://gateway.example.com"
ACME, GLOBEX = Ref("Tenant", "a", "acme"), Ref("Tenant", "a", "globex")
STOLEN = Ref("Tenant", "b", "acme")  # a second namespace declares a tenant of the same name
CHAT, CODE = Ref("ModelDeployment", "a", "chat"), Ref("ModelDeployment", "a", "code")
HAND_TENANT = Ref("Tenant", "a", "byhand")  # the platform has such a tenant, made by a person
HAND_DEPLOYMENT = Ref("ModelDeployment", "a", "byhand")

KEYS = st.none() | st.builds(
    DeclaredKey,
    secret_name=st.sampled_from(["acme-key", "other"]),
    scopes=st.sampled_from([("inference",), ("inference", "control")]),
    priority=st.sampled_from(["normal", "high"]),
)
TENANTS = st.builds(
    TenantSpec,
    weight=st.sampled_from([1.0, 2.0]),
    limits=st.sampled_from([Limits(), Limits(tokens_per_minute=60)]),
    keep_prefixes=st.booleans(),
    key=KEYS,
)
DEPLOYMENTS = st.builds(
    ModelDeploymentSpec,
    tenant=st.sampled_from(["acme", "globex", "byhand"]),
    model=st.sampled_from(["shared", "hf://org/name", "/models/llama"]),
    scaling=st.sampled_from([Scaling(), Scaling(max_replicas=2)]),
    canary=st.sampled_from([None, Share(weight=10)]),
    desired_state=st.sampled_from([None, "awake", "asleep"]),
)
EDITS = st.one_of(
    st.tuples(st.sampled_from([ACME, GLOBEX, STOLEN, HAND_TENANT]), TENANTS),
    st.tuples(st.sampled_from([CHAT, CODE, HAND_DEPLOYMENT]), DEPLOYMENTS),
    st.tuples(st.sampled_from([ACME, GLOBEX, STOLEN, CHAT, CODE, HAND_TENANT, HAND_DEPLOYMENT]), st.none()),
)
FAULTS = st.sampled_from(["", "", "before", "after"])
EVENTS = st.lists(st.one_of(EDITS, st.sampled_from(["pass", "restart", "go on"])), max_size=25)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def by_hand() -> PlayedPlatform:
    """A platform with rows that a person made, and rows of another controller."""
    platform = PlayedPlatform()
    for name, by in (("byhand", None), ("other", "other/a/other")):
        platform.tenants[name] = SeenTenant(id=name, name=name, weight=3.0, limits=Limits(), managed_by=by)
        platform.keys[name] = [SeenKey(id="k" + name, name="mine", scopes=("control",), priority="high", state="valid")]
        platform.models[name, "own"] = SeenModel(
            id="m" + name, name="own", tenant=name, state="ready", reason=None, progress=None, managed_by=by
        )
        platform.deployments[name, "byhand"] = SeenDeployment(
            id="d" + name,
            name="byhand",
            tenant=name,
            managed_by=by,
            active=Spec(model="own"),
            target=None,
            status=STATUS,
        )
    return platform


def foreign(platform: PlayedPlatform) -> Any:
    """Rows without a mark of the controller."""
    rows = [*platform.tenants.values(), *platform.models.values(), *platform.deployments.values()]
    kept = [row for row in rows if not (row.managed_by or "").startswith(f"{MANAGER}/")]
    return kept, [platform.keys["byhand"], platform.keys["other"]]


def reconciler(source: PlayedSource, platform: PlayedPlatform, clock: Clock, prune: bool = False) -> Reconciler:
    return Reconciler(source, platform, MANAGER, URL, clock, Unheard(), prune)


def calm(source: PlayedSource, platform: PlayedPlatform, run: Reconciler, clock: Clock) -> None:
    """Passes without a fault, until a pass makes no call although every earlier call would be due again."""
    platform.fault = source.fault = lambda: ""
    for _ in range(60):
        platform.go_on()
        clock.now_s += AGAIN_S_MOST
        if run.once().calls == 0:
            return
    raise AssertionError("there is no end of calls")


def check_converged(source: PlayedSource, platform: PlayedPlatform) -> None:
    for ref, declared in source.objects.items():
        status = source.statuses[ref]
        synced = found(status, SYNCED)
        assert synced is not None and status.observed_generation == declared.generation
        if synced.status == "False":
            assert synced.reason in ("Conflict", "TenantMissing", "Refused", "Deleting"), synced
        elif isinstance(declared.spec, TenantSpec):
            row = platform.tenants[ref.name]
            assert (row.weight, row.limits) == (declared.spec.weight, declared.spec.limits)
            assert row.keep_prefixes == declared.spec.keep_prefixes
            assert row.managed_by == ref.mark(MANAGER)
            valid = platform.keys.get(ref.name, [])
            assert len(valid) == (declared.spec.key is not None)
            if declared.spec.key:
                secret = source.secrets[ref.namespace, declared.spec.key.secret_name]
                assert secret == (ref, valid[0].id) and set(valid[0].scopes) == set(declared.spec.key.scopes)
        elif isinstance(declared.spec, ModelDeploymentSpec):
            seen = platform.deployments[declared.spec.tenant, ref.name]
            assert seen.newest == declared.spec.spec(seen.newest.model) and seen.managed_by == ref.mark(MANAGER)
            assert declared.spec.desired_state in (None, seen.status.desired_state)
            assert seen.target is None or seen.target.canary == declared.spec.canary
            ready = found(status, READY)
            assert ready is not None and ready.status == "True"
    marks = {ref.mark(MANAGER) for ref in source.objects}
    busy = {tenant for tenant, _ in platform.deployments}  # a tenant with deployments can't be deleted
    tenants = [row for row in platform.tenants.values() if row.name not in busy]
    left = [row.managed_by for row in [*tenants, *platform.deployments.values()]]
    assert {mark for mark in left if mark and mark.startswith(f"{MANAGER}/")} <= marks


@settings(max_examples=60)
@given(EVENTS, st.lists(FAULTS, max_size=60), st.booleans())
def test_any_history_converges_and_touches_no_foreign_row(
    events: list[Any], faults: list[str], by_removal: bool
) -> None:
    """`by_removal`: objects vanish at once, as files do, and the rows are pruned; otherwise a finalizer waits."""
    source, platform, clock = PlayedSource(), by_hand(), Clock()
    kept, left = foreign(platform), list(faults)
    platform.fault = source.fault = lambda: left.pop() if left else ""
    run = reconciler(source, platform, clock, by_removal)
    for event in events:
        match event:
            case "pass":
                clock.now_s += 1
                run.once()
            case "restart":
                run = reconciler(source, platform, clock, by_removal)
            case "go on":
                platform.go_on()
            case (ref, None):
                source.objects.pop(ref, None) if by_removal else source.remove(ref)
            case (ref, spec):
                source.put(ref, spec)
        assert foreign(platform) == kept
    calm(source, platform, run, clock)
    check_converged(source, platform)
    assert foreign(platform) == kept
    platform.calls.clear()
    assert reconciler(source, platform, clock, by_removal).once().calls == 0 and platform.calls == []


def settled(source: PlayedSource, platform: PlayedPlatform, prune: bool = False) -> None:
    calm(source, platform, reconciler(source, platform, clock := Clock(), prune), clock)


def reason(source: PlayedSource, ref: Ref) -> str:
    synced = found(source.statuses[ref], SYNCED)
    assert synced is not None
    return synced.reason


def test_a_tenant_of_another_namespace_is_a_conflict_and_stays() -> None:
    source, platform = PlayedSource(), by_hand()
    source.put(ACME, TenantSpec(weight=2.0))
    settled(source, platform)
    source.put(STOLEN, TenantSpec(weight=5.0))
    source.put(Ref("ModelDeployment", "b", "spy"), ModelDeploymentSpec(tenant="acme", model="shared"))
    settled(source, platform)
    assert platform.tenants["acme"].weight == 2.0 and ("acme", "spy") not in platform.deployments
    assert reason(source, STOLEN) == "Conflict"
    assert reason(source, Ref("ModelDeployment", "b", "spy")) == "TenantMissing"


def test_a_changed_source_is_another_model_and_a_new_revision() -> None:
    source, platform = PlayedSource(), by_hand()
    source.put(ACME, TenantSpec())
    source.put(CHAT, ModelDeploymentSpec(tenant="acme", model="hf://org/name@1"))
    settled(source, platform)
    before = platform.deployments["acme", "chat"].active.model
    source.put(CHAT, ModelDeploymentSpec(tenant="acme", model="hf://org/name@2"))
    settled(source, platform)
    assert before != platform.deployments["acme", "chat"].active.model and len(platform.models) == 2 + 2


def test_a_deleted_tenant_waits_for_the_deployments_of_others() -> None:
    source, platform = PlayedSource(), by_hand()
    source.put(ACME, TenantSpec())
    settled(source, platform)
    platform.deployments["acme", "own"] = structs.replace(
        platform.deployments["byhand", "byhand"], id="x", tenant="acme", name="own"
    )
    source.remove(ACME)
    settled(source, platform)
    assert ACME in source.objects and "acme" in platform.tenants and reason(source, ACME) == "Refused"
    del platform.deployments["acme", "own"]
    settled(source, platform)
    assert ACME not in source.objects and "acme" not in platform.tenants


def test_a_refused_call_is_told_and_waits_ever_longer() -> None:
    source, platform, clock = PlayedSource(), by_hand(), Clock()
    platform.fault = faults(["", "before"] * 100)
    source.put(ACME, TenantSpec())
    run, made_at = reconciler(source, platform, clock), list[float]()
    for _ in range(600):
        before = run._attempts.get(ACME)
        run.once()
        if run._attempts.get(ACME) is not before:
            made_at.append(clock.now_s)
            platform.fault = faults(["", "before"] * 100)
        else:
            platform.fault = faults(["", "before"] * 100)
        clock.now_s += 1
    waits = [later - sooner for sooner, later in zip(made_at, made_at[1:], strict=False)]
    assert waits[:5] == [2, 4, 8, 16, 32] and max(waits) <= AGAIN_S_MOST
    assert reason(source, ACME) == "Unreachable"


def faults(said: list[str]) -> Callable[[], str]:
    return lambda: said.pop(0)


def test_a_platform_that_is_away_keeps_the_statuses() -> None:
    source, platform, clock = PlayedSource(), by_hand(), Clock()
    source.put(ACME, TenantSpec())
    settled(source, platform)
    before = dict(source.statuses)
    platform.fault = lambda: "before"
    done = reconciler(source, platform, clock).once()
    assert source.statuses == before and not done.synced and done.next_s < CALM_S
