"""Deploying over REST, and the orders that runtimes get."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from store.contract import wire
from store.contract.wire import Attained, ModelState, Residency
from tests.conftest import soon
from tests.gateway.plane import Plane, made, until

RESIDENT = ModelState(residency=Residency.RESIDENT, load_ms=12.0)
ASLEEP = ModelState(residency=Residency.COLD, load_ms=12.0)
FAILED = ModelState(residency=Residency.FAILED, error="out of memory")


async def deployed(plane: Plane, **spec: object) -> tuple[httpx.AsyncClient, Any]:
    """A tenant's client, and its deployment of a model."""
    await plane.model("llama")
    client = await plane.tenant("acme", priority="high")
    return client, made(await client.post("/deployments", json={"name": "chat", "model": "llama"} | spec))


async def status(client: httpx.AsyncClient) -> Any:
    return (await client.get("/deployments/chat")).json()["status"]


async def test_a_deployment_is_given_to_the_runtimes_and_shown_as_they_report(plane: Plane) -> None:
    client, made_one = await deployed(plane, dtype="float32", max_model_len=256, scaling={"idle": "30s"})
    assert made_one["status"]["phase"] == "deploying" and made_one["tenant"] == "acme"
    await plane.placed({made_one["engine"]})
    phases = []
    for state in (ModelState(residency=Residency.LOADING), RESIDENT, ASLEEP, FAILED):
        await plane.report({made_one["engine"]: state})
        phases.append((await status(client))["phase"])
    assert phases == ["waking", "awake", "asleep", "failed"]
    assert (await status(client))["conditions"] == [
        {"type": "RevisionFailed", "revision": 1, "runtime": "r1", "message": "out of memory"}
    ]


async def told(plane: Plane, deployment: Any) -> wire.EngineSpec:
    """The spec of the deployment's engine, as told to the runtimes."""
    heard: dict[str, wire.EngineSpec] = {}

    def hear(key: str, value: bytes | None) -> None:
        if value:
            heard[key] = wire.decode(wire.EngineSpec, value)

    async def arrived() -> bool:
        return deployment["engine"] in heard

    await plane.bus.watch(wire.MODELS, hear)
    await until(arrived)
    return heard[deployment["engine"]]


async def test_the_runtimes_are_told_all_that_an_engine_needs(plane: Plane) -> None:
    _, one = await deployed(plane, dtype="float32", max_model_len=256, scaling={"idle": "30s"})
    spec = await told(plane, one)
    assert (spec.path, spec.digest) == (str(plane.folder / "llama"), one["digest"])
    assert (spec.dtype, spec.max_model_len, spec.idle_s, spec.pinned) == ("float32", 256, 30.0, False)
    assert (spec.weight_bytes, spec.kv_bytes_per_token) == (136, 2048)


@pytest.mark.parametrize(
    ("scaling", "idle_s", "pinned"),
    [({}, None, False), ({"idle": "never"}, None, True), ({"min_resident": 1}, None, True)],
)
async def test_without_a_time_of_its_own_an_engine_sleeps_under_pressure_or_never(
    plane: Plane, scaling: dict[str, object], idle_s: float | None, pinned: bool
) -> None:
    _, one = await deployed(plane, scaling=scaling)
    spec = await told(plane, one)
    assert (spec.idle_s, spec.pinned) == (idle_s, pinned)


async def test_a_new_revision_takes_the_traffic_only_when_a_runtime_has_loaded_it(plane: Plane) -> None:
    client, first = await deployed(plane)
    await plane.report({first["engine"]: RESIDENT})
    changed = made(await client.patch("/deployments/chat", json={"dtype": "float32"}), 200)
    assert (changed["status"]["active_revision"], changed["status"]["target_revision"]) == (1, 2)
    assert (changed["dtype"], changed["target"]["dtype"], changed["target"]["revision"]) == ("auto", "float32", 2)
    assert changed["engine"] == first["engine"] != changed["target"]["engine"]
    tenant_id = (await plane.admin.get("/tenants/acme")).json()["id"]
    target = await plane.auth.deployment(tenant_id, "chat@2")
    assert target is not None
    await plane.placed({first["engine"], target.spec.key})
    await plane.report({first["engine"]: RESIDENT, target.spec.key: RESIDENT})

    async def active() -> bool:
        return (await status(client))["active_revision"] == 2

    await until(active)
    serving = await plane.auth.deployment(tenant_id, "chat")
    assert serving is not None and serving.revision == 2
    await plane.placed({target.spec.key})


async def test_a_bad_revision_never_takes_the_traffic_of_a_good_one(plane: Plane) -> None:
    client, first = await deployed(plane)
    made(await client.patch("/deployments/chat", json={"dtype": "float32"}), 200)
    tenant_id = (await plane.admin.get("/tenants/acme")).json()["id"]
    bad = await plane.auth.deployment(tenant_id, "chat@2")
    assert bad is not None
    await plane.report({first["engine"]: RESIDENT, bad.spec.key: FAILED})
    await plane.control.rollout.step()
    seen = await status(client)
    assert (seen["phase"], seen["active_revision"], seen["target_revision"]) == ("awake", 1, 2)
    assert seen["conditions"] == [{"type": "TargetFailed", "revision": 2, "runtime": "r1", "message": "out of memory"}]
    back = made(await client.post("/deployments/chat:rollback"), 200)
    assert (back["status"]["active_revision"], back["status"]["target_revision"]) == (1, None)
    await plane.placed({first["engine"]})


async def test_a_change_that_needs_no_other_engine_is_active_at_once(plane: Plane) -> None:
    client, first = await deployed(plane)
    await plane.report({first["engine"]: RESIDENT})
    made(await client.patch("/deployments/chat", json={"tool_parser": "hermes", "slo": {"tbt_ms": 50}}), 200)

    async def active() -> bool:
        return (await status(client))["active_revision"] == 2

    await until(active)
    seen = (await client.get("/deployments/chat")).json()
    assert (seen["engine"], seen["tool_parser"]) == (first["engine"], "hermes")
    assert seen["slo"] == {"ttft_ms": 10_000, "tbt_ms": 50}


async def test_a_patch_that_says_nothing_new_makes_no_revision(plane: Plane) -> None:
    client, first = await deployed(plane)
    same = made(await client.patch("/deployments/chat", json={"dtype": "auto", "max_model_len": None}), 200)
    assert same["status"]["target_revision"] is None


async def test_a_change_of_what_somebody_else_changed_is_refused(plane_on_both: Plane) -> None:
    client, _ = await deployed(plane_on_both)
    tag = (await client.get("/deployments/chat")).headers["etag"]
    made(await client.patch("/deployments/chat", json={"priority": "high"}, headers={"if-match": tag}), 200)
    for method, json in (("PATCH", {"priority": "batch"}), ("DELETE", None)):
        answer = await client.request(method, "/deployments/chat", json=json, headers={"if-match": tag})
        assert made(answer, 412)["code"] == "precondition_failed"
    assert (await client.get("/deployments/chat")).json()["target"]["priority"] == "high"


@pytest.mark.parametrize(
    ("spec", "pointer", "says"),
    [
        ({"max_model_len": 4096}, "/max_model_len", "4096 tokens, 'llama' takes 2048"),
        ({"tool_parser": "nonesuch"}, "/tool_parser", "one of hermes is"),
        ({"warm": ["Mon-Fri 8:00-18:00 Europe/Bonn"]}, "/warm", "the time zone 'Europe/Bonn'"),
        ({"warm": ["Mon 8:00-9:00 UTC"] * 17}, "/warm", "17 windows, at most 16"),
        ({"reasoning_parser": "nonesuch"}, "/reasoning_parser", "one of qwen3 is"),
        ({"model": "refused"}, "/model", "was refused: architecture 'X' is not one"),
    ],
)
async def test_what_the_model_can_not_do_is_refused(
    plane: Plane, spec: dict[str, object], pointer: str, says: str
) -> None:
    from tests.store.files.folders import LLAMA, write_model

    await plane.model("llama")
    folder = write_model(plane.folder / "refused", LLAMA | {"architectures": ["X"]})
    await plane.model("refused", folder=folder)
    client = await plane.tenant("acme")
    problem = made(await client.post("/deployments", json={"name": "chat", "model": "llama"} | spec), 422)
    assert problem["errors"][0]["pointer"] == pointer and says in problem["detail"]


async def test_a_schedule_is_shown_told_to_the_runtimes_and_taken_back_by_a_new_revision(plane: Plane) -> None:
    windows = ["Mon-Fri 8:00-18:00 Europe/Berlin", "Sat 9:00-12:00 UTC"]
    client, one = await deployed(plane, warm=windows)
    assert one["warm"] == windows and (await told(plane, one)).warm == tuple(windows)
    changed = made(await client.patch("/deployments/chat", json={"warm": []}), 200)
    assert changed["target"]["warm"] == [] and changed["target"]["engine"] != one["engine"]


async def test_an_engine_knows_the_reasoning_parser_and_is_another_one_with_it(plane: Plane) -> None:
    client, plain = await deployed(plane)
    thinking = {"name": "thinking", "model": "llama", "reasoning_parser": "qwen3"}
    made_one = made(await client.post("/deployments", json=thinking))
    assert made_one["engine"] != plain["engine"]
    await plane.placed({plain["engine"], made_one["engine"]})
    told = [await plane.bus.read(wire.MODELS, row["engine"], wire.EngineSpec) for row in (plain, made_one)]
    assert [spec.reasoning_parser for spec, _ in told if spec] == ["", "qwen3"]


async def test_two_deployments_of_one_engine_share_it_until_the_last_is_gone(plane: Plane) -> None:
    client, one = await deployed(plane)
    two = made(await client.post("/deployments", json={"name": "chat2", "model": "llama", "priority": "batch"}))
    assert one["engine"] == two["engine"]
    await plane.placed({one["engine"]})
    assert (await client.delete("/deployments/chat")).status_code == 204
    await plane.control.rollout.step()
    await plane.placed({one["engine"]})
    assert (await client.delete("/deployments/chat2")).status_code == 204
    await plane.placed(set())


async def test_what_no_deployment_wants_is_taken_back_at_the_start(plane: Plane) -> None:
    stray = wire.EngineSpec(
        key="stray",
        path="/",
        digest="d",
        architecture="L",
        dtype="auto",
        max_model_len=1,
        weight_bytes=1,
        kv_bytes_per_token=1,
    )
    await plane.bus.put(wire.MODELS, stray.key, stray)
    await plane.control.rollout.step()
    await plane.placed(set())


async def test_a_runtime_is_told_to_sleep_and_to_wake(plane: Plane) -> None:
    told: list[tuple[str, str]] = []

    async def obey(data: bytes) -> wire.Reply:
        order = wire.decode(wire.Control, data)
        told.append((order.model, order.op))
        return wire.Reply()

    client, one = await deployed(plane)
    await plane.bus.respond(wire.control_subject("r1"), obey)
    await plane.report({one["engine"]: RESIDENT})
    asleep = made(await client.post("/deployments/chat:sleep"), 202)
    awake = made(await client.post("/deployments/chat:wake"), 202)
    assert [seen["status"]["desired_state"] for seen in (asleep, awake)] == ["asleep", "awake"]
    assert told == [(one["engine"], "sleep"), (one["engine"], "wake")]


async def test_nobody_puts_anothers_shared_engine_to_sleep(plane: Plane) -> None:
    client, one = await deployed(plane)
    other = await plane.tenant("other")
    made(await other.post("/deployments", json={"name": "chat", "model": "llama"}))
    told: list[bytes] = []

    async def obey(data: bytes) -> wire.Reply:
        told.append(data)
        return wire.Reply()

    await plane.bus.respond(wire.control_subject("r1"), obey)
    await plane.report({one["engine"]: RESIDENT})
    kept = made(await client.post("/deployments/chat:sleep"), 202)
    assert told == [] and [one["type"] for one in kept["status"]["conditions"]] == ["EngineShared"]
    done = made(await other.post("/deployments/chat:sleep"), 202)
    assert len(told) == 1 and done["status"]["conditions"] == []


async def test_the_order_stands_when_a_request_wakes_what_was_put_to_sleep(plane: Plane) -> None:
    client, one = await deployed(plane)

    async def obey(data: bytes) -> wire.Reply:
        return wire.Reply()

    await plane.bus.respond(wire.control_subject("r1"), obey)
    await plane.report({one["engine"]: RESIDENT})
    made(await client.post("/deployments/chat:sleep"), 202)
    await plane.report({one["engine"]: ASLEEP})
    assert (await status(client))["phase"] == "asleep"
    await plane.report({one["engine"]: RESIDENT})  # a request came
    seen = await status(client)
    assert (seen["phase"], seen["desired_state"]) == ("awake", "asleep")
    described = plane.described.document["components"]["schemas"]["ShownDeployment"]["description"]
    assert "is the last order" in described


async def test_waking_before_any_runtime_is_there_is_kept(plane: Plane) -> None:
    client, _ = await deployed(plane)
    assert made(await client.post("/deployments/chat:wake"), 202)["status"]["desired_state"] == "awake"


async def test_the_operator_deploys_for_a_tenant_and_names_it_where_names_meet(plane: Plane) -> None:
    await deployed(plane)
    other = await plane.tenant("other")
    body = {"name": "chat", "model": "llama", "tenant": "other"}
    made(await plane.admin.post("/deployments", json=body))
    assert made(await other.post("/deployments", json=body), 409)["code"] == "deployment_exists"
    assert made(await plane.admin.get("/deployments/chat"), 409)["code"] == "ambiguous_name"
    assert (await plane.admin.get("/deployments/chat?tenant=other")).json()["tenant"] == "other"
    assert [d["tenant"] for d in (await plane.admin.get("/deployments")).json()["data"]] == ["acme", "other"]
    assert len((await plane.admin.get("/deployments?tenant=other")).json()["data"]) == 1


async def test_a_tenant_can_not_deploy_for_another(plane: Plane) -> None:
    client, _ = await deployed(plane)
    await plane.tenant("other")
    for tenant in ("other", "nobody"):
        answer = await client.post("/deployments", json={"name": "x", "model": "llama", "tenant": tenant})
        assert made(answer, 404)["code"] == "tenant_not_found"


async def test_the_operator_sees_who_holds_the_device(plane: Plane) -> None:
    _, one = await deployed(plane)
    await plane.report({one["engine"]: RESIDENT, "unknown-1": ASLEEP})
    (gpu,) = (await plane.admin.get("/gpus")).json()["data"]
    assert (gpu["id"], gpu["engine"], gpu["holder"]) == ("r1", "test", None)
    assert {key: (m["residency"], m["deployments"]) for key, m in gpu["models"].items()} == {
        one["engine"]: ("resident", ["acme/chat@1"]),
        "unknown-1": ("cold", []),
    }


async def test_the_rollout_goes_on_after_nats_was_away(plane: Plane, nats_server: Any) -> None:
    client, one = await deployed(plane)
    await plane.placed({one["engine"]})
    nats_server.kill()
    second = made(await client.post("/deployments", json={"name": "chat2", "model": "llama", "dtype": "float32"}))
    nats_server.start()
    await plane.placed({one["engine"], second["engine"]})


async def test_a_model_that_no_device_has_room_for_is_refused_with_the_numbers(plane: Plane) -> None:
    await plane.model("llama")
    client = await plane.tenant("acme")
    await plane.report({}, "small", pool_bytes=1 << 12)
    wish = {"name": "chat", "model": "llama", "dtype": "float32"}
    refused = await client.post("/deployments", json=wish)
    assert refused.status_code == 422
    assert "'llama' takes 1 MiB for its weights" in refused.text and "the largest device has 1 MiB" in refused.text
    assert refused.json()["errors"][0]["pointer"] == "/model"
    await plane.report({}, "large", pool_bytes=1 << 30)
    made(await client.post("/deployments", json=wish))


# ── objectives ────────────────────────────────────────────────────────────────────────────────────────────────────────

KEPT = Attained(requests=2, first_on_time=2, tokens=20, on_time=20, on_time_rebased=20, time_shares=2.0)
LATE = Attained(requests=2, first_on_time=1, tokens=20, on_time=5, on_time_rebased=15, time_shares=1.0)


async def attained(plane: Plane, one: Any) -> str:
    """Let two runtimes report how requests of the deployment fared. Returns the deployment's label."""
    tenant_id = (await plane.admin.get(f"/tenants/{one['tenant']}")).json()["id"]
    label = f"{tenant_id}/{one['id']}"
    await plane.report({one["engine"]: RESIDENT}, "r1", attainment={label: KEPT, f"{tenant_id}/other": LATE})
    await plane.report({one["engine"]: RESIDENT}, "r2", attainment={label: LATE})
    return label


async def test_attainment_is_summed_over_the_runtimes_in_three_definitions(plane: Plane) -> None:
    client, one = await deployed(plane)
    assert one["status"]["attainment"] is None
    await attained(plane, one)
    assert (await status(client))["attainment"] == {
        "token": 0.625,
        "token_rebased": 0.875,
        "token_time_weighted": 0.75,
        "first_token": 0.75,
        "requests": 4,
    }


async def test_another_tenants_attainment_is_not_seen(plane: Plane) -> None:
    _, one = await deployed(plane)
    await attained(plane, one)
    other = await plane.tenant("other")
    made(await other.post("/deployments", json={"name": "chat", "model": "llama"}))
    assert (await status(other))["attainment"] is None
    assert (await other.get(f"/deployments/{one['id']}")).status_code == 404
    assert made(await other.get("/metrics"), 403)["code"] == "admin_only"


async def test_the_operator_sees_the_attainment_of_each_device(plane: Plane) -> None:
    _, one = await deployed(plane)
    await attained(plane, one)
    gpus = (await plane.admin.get("/gpus")).json()["data"]
    assert [gpu["models"][one["engine"]]["attainment"]["token"] for gpu in gpus] == [1.0, 0.25]


async def test_who_starts_runtimes_sees_how_many_there_should_be(plane: Plane) -> None:
    await plane.report({}, "r1")
    assert (await plane.admin.get("/fleet")).json() == {
        "scheduler": None,
        "runtimes": 1,
        "wanted": None,
        "serving": ["r1"],
        "draining": [],
        "surplus": [],
        "removable": [],
    }
    leader = wire.Leader(holder="s", term=1, wanted=3)
    await plane.bus.put(wire.LEADER, "scheduler", leader)
    await soon(lambda: plane.fleet.leader == leader)
    assert (await plane.admin.get("/fleet")).json()["wanted"] == 3
    said = (await plane.admin.get("/metrics")).text.splitlines()
    assert "staccato_runtimes 1.0" in said and "staccato_runtimes_wanted 3.0" in said
    other = await plane.tenant("other")
    assert made(await other.get("/fleet"), 403)["code"] == "admin_only"


async def test_who_ends_runtimes_sees_which_runtimes_may_go(plane: Plane) -> None:
    """Runtimes drained by an operator, and surplus runtimes with a request, may not go."""
    for id, requests, surplus in (("r1", 0, False), ("r2", 1, True), ("r3", 0, True)):
        models = {"m": wire.ModelState(residency=wire.Residency.RESIDENT, waiting=requests)}
        lease = wire.Lease(runtime=id, epoch=1, engine="e", draining=True, surplus=surplus, models=models)
        await plane.bus.put(wire.LEASES, id, lease)
    await soon(lambda: len(plane.fleet.leases) == 3)
    fleet = (await plane.admin.get("/fleet")).json()
    assert fleet["serving"] == [] and fleet["draining"] == ["r1", "r2", "r3"]
    assert fleet["surplus"] == ["r2", "r3"] and fleet["removable"] == ["r3"]
    gpus = (await plane.admin.get("/gpus")).json()["data"]
    assert {gpu["id"]: gpu["surplus"] for gpu in gpus} == {"r1": False, "r2": True, "r3": True}


async def test_an_objective_that_no_runtime_can_keep_is_a_warning_and_no_refusal(plane: Plane) -> None:
    client, one = await deployed(plane, slo={"tbt_ms": 1})
    await plane.report({one["engine"]: RESIDENT})
    assert (await status(client))["conditions"] == []  # not measured yet
    slow, slower = (msgspec.structs.replace(RESIDENT, step_ms=ms) for ms in (8.0, 20.0))
    await plane.report({one["engine"]: slow}, "r1")
    await plane.report({one["engine"]: slower}, "r2")
    await plane.report({one["engine"]: RESIDENT}, "r3")  # r3 has not measured the model
    (condition,) = (await status(client))["conditions"]
    assert (condition["type"], condition["revision"]) == ("ObjectiveUnmeetable", 1)
    assert "every 1 ms" in condition["message"] and "takes 8 ms" in condition["message"]
    assert (await status(client))["phase"] == "awake"
    await plane.report({one["engine"]: msgspec.structs.replace(RESIDENT, step_ms=0.5)}, "r2")
    assert (await status(client))["conditions"] == []  # a single fast runtime suffices


async def test_a_model_that_disagrees_with_itself_in_a_batch_is_served_and_its_deployment_says_how(
    plane: Plane,
) -> None:
    client, one = await deployed(plane)
    await plane.report({one["engine"]: msgspec.structs.replace(RESIDENT, sequential=True)}, "r1")
    await plane.report({one["engine"]: RESIDENT}, "r2")
    said = await status(client)
    (condition,) = said["conditions"]
    assert said["phase"] == "awake"
    assert (condition["type"], condition["revision"]) == ("ServedSequentially", 1)
    assert "one at a time" in condition["message"]


async def test_a_context_beyond_the_table_of_positions_is_refused_at_registering_and_at_deploying(plane: Plane) -> None:
    """vLLM reads past the end of a YaRN table without a word, and answers wrongly."""
    from tests.store.files.folders import LLAMA, write_model

    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 256, "factor": 4.0}
    beyond = write_model(plane.folder / "beyond", LLAMA | {"rope_parameters": yarn})
    refused = await plane.model("beyond", folder=beyond)
    assert refused["state"] == "refused" and "2048 positions" in refused["reason"] and "1024" in refused["reason"]
    within = LLAMA | {"rope_parameters": yarn, "max_position_embeddings": 1024}
    await plane.model("within", folder=write_model(plane.folder / "within", within))
    client = await plane.tenant("acme")
    asked = {"name": "chat", "model": "within", "max_model_len": 1100}
    problem = made(await client.post("/deployments", json=asked), 422)
    assert problem["errors"][0]["pointer"] == "/max_model_len"
    assert "1100 tokens, 'within' takes 1024" in problem["detail"]
    made(await client.post("/deployments", json=asked | {"max_model_len": 1024}))
    longer = await client.patch("/deployments/chat", json={"max_model_len": 1100})
    assert "1100 tokens, 'within' takes 1024" in made(longer, 422)["detail"]


@pytest.mark.parametrize(("idle", "said"), [("auto", ["ObjectiveUnmeetable"]), ("never", [])])
async def test_how_long_waking_takes_counts_for_what_may_sleep(plane: Plane, idle: str, said: list[str]) -> None:
    client, one = await deployed(plane, slo={"ttft_ms": 100}, scaling={"idle": idle})
    await plane.report({one["engine"]: msgspec.structs.replace(RESIDENT, fetch_ms=300.0, prefill_ms=40.0)})
    assert [condition["type"] for condition in (await status(client))["conditions"]] == said


async def test_a_key_gives_a_deployment_no_higher_priority_than_requests_of_the_key_may_ask_for(plane: Plane) -> None:
    await deployed(plane, priority="batch")
    client = plane.client(made(await plane.admin.post("/tenants/acme/keys"))["key"])
    refused = made(await client.patch("/deployments/chat", json={"priority": "high"}), 403)
    assert (refused["code"], refused["errors"][0]["pointer"]) == ("priority_too_high", "/priority")
    made(await client.post("/deployments", json={"name": "two", "model": "llama", "priority": "high"}), 403)
    made(await client.patch("/deployments/chat", json={"priority": "normal"}), 200)
    made(await plane.admin.patch("/deployments/chat?tenant=acme", json={"priority": "high"}), 200)
    changed = made(await client.patch("/deployments/chat", json={"slo": {"ttft_ms": 5000}}), 200)
    assert changed["target"]["priority"] == "high", "a priority once given stays"
