"""Deployments and revisions: the revision with the traffic, and the engine meant by every revision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from store.contract.deployments import Deployment, Scaling, Spec
from store.contract.kv_curve import KeptLayers, LayerKind
from store.db import deployments, models, tenants
from store.db.database import Database, Taken
from store.db.deployments import engine_of
from store.db.models import ModelInUse, StoredModel
from store.files.artefact import Artefact, File

ARTEFACT = Artefact("ab" * 32, "LlamaForCausalLM", "float32", 1000, 64, 2048, ())
MODEL = StoredModel("m", None, None, "llama", "/m", "/m", "ready", "", ARTEFACT, 1)
SPEC = Spec(model="llama")


@pytest.mark.parametrize(
    ("scaling", "seconds", "pinned"),
    [
        (Scaling(), None, False),
        (Scaling(idle="never"), None, True),
        (Scaling(idle="30s"), 30.0, False),
        (Scaling(idle="250ms"), 0.25, False),
        (Scaling(idle="2h"), 7200.0, False),
        (Scaling(idle="30s", min_resident=1), None, True),
        (Scaling(min_resident=1), None, True),
    ],
)
def test_an_engine_sleeps_under_pressure_or_after_a_time_or_never(
    scaling: Scaling, seconds: float | None, pinned: bool
) -> None:
    engine = engine_of(Spec(model="llama", scaling=scaling), MODEL)
    assert (engine.idle_s, engine.pinned) == (seconds, pinned)


def test_an_engine_is_another_when_a_setting_that_it_is_built_with_is() -> None:
    same = [SPEC, Spec(model="llama", priority="high", tool_parser="hermes"), Spec(model="llama", max_model_len=2048)]
    other = [
        Spec(model="llama", dtype="float32"),
        Spec(model="llama", max_model_len=512),
        Spec(model="llama", scaling=Scaling(idle="never")),
        Spec(model="llama", scaling=Scaling(idle="30s")),
    ]
    assert len({engine_of(spec, MODEL).key for spec in same}) == 1
    assert len({engine_of(spec, MODEL).key for spec in [SPEC, *other]}) == 5


def test_a_limit_of_replicas_makes_another_engine_and_is_known_to_runtimes() -> None:
    limited = engine_of(Spec(model="llama", scaling=Scaling(max_replicas=2)), MODEL)
    assert (engine_of(SPEC, MODEL).replicas, limited.replicas) == (0, 2)
    assert limited.key != engine_of(SPEC, MODEL).key


def test_a_schedule_makes_another_engine_and_is_known_to_runtimes() -> None:
    windows = ("Mon-Fri 8:00-18:00 Europe/Berlin",)
    warm = engine_of(Spec(model="llama", warm=windows), MODEL)
    assert warm.warm == windows and not engine_of(SPEC, MODEL).warm
    assert warm.key != engine_of(SPEC, MODEL).key


def test_equal_files_in_another_folder_are_another_engine() -> None:
    assert engine_of(SPEC, MODEL).key != engine_of(SPEC, replace(MODEL, path="/elsewhere")).key


def test_a_key_has_only_what_a_subject_and_a_bucket_take() -> None:
    key = engine_of(SPEC, MODEL).key
    assert key.startswith("ab" * 8 + "-") and len(key) == 25
    assert set(key) <= set("0123456789abcdef-")


def test_an_engine_weighs_what_its_dtype_makes_of_the_files() -> None:
    whole, half = engine_of(Spec(model="llama", dtype="float32"), MODEL), engine_of(SPEC, MODEL)
    assert (whole.weight_bytes, whole.kv_bytes_per_token) == (1000, 128)
    assert (half.weight_bytes, half.kv_bytes_per_token) == (500, 64)


async def test_a_model_inspected_by_an_earlier_version_keeps_every_token(database: Database) -> None:
    kept = (KeptLayers(LayerKind.STATE, 2, 100, fixed_bytes=60), KeptLayers(LayerKind.FULL, 1, 64))
    for artefact, request_bytes in (
        (replace(ARTEFACT, digest="cd" * 32, kv_layers=kept), 2 * (2 * 40 + 60)),
        (ARTEFACT, 0),
    ):
        async with database.write() as connection:
            made = await models.create(connection, None, artefact.digest, "/m", "/m", 1)
            await models.accept(connection, made.id, artefact, 1)
            model = await models.by_id(connection, made.id)
        assert model is not None and model.artefact == artefact
        curve = engine_of(Spec(model="llama", dtype="float32"), model).kv
        assert curve.request_bytes >= request_bytes and (curve.request_bytes > 0) == (request_bytes > 0)
        assert curve.token_bytes == 128


async def test_a_model_that_is_registered_again_has_what_this_version_finds_in_its_files(database: Database) -> None:
    kept = (KeptLayers(LayerKind.STATE, 2, 100, fixed_bytes=60), KeptLayers(LayerKind.FULL, 1, 64))
    files = (File("model.safetensors", 1100, "00", tower_bytes=400),)
    async with database.write() as connection:
        for name, artefact in (("before", ARTEFACT), ("again", replace(ARTEFACT, kv_layers=kept, files=files))):
            made = await models.create(connection, None, name, "/m", "/m", 1)
            await models.accept(connection, made.id, artefact, 1)
        listed = [await models.find(connection, None, name) for name in ("before", "again")]
    assert [model and model.artefact for model in listed] == [replace(ARTEFACT, kv_layers=kept, files=files)] * 2


def _seeing(architecture: str) -> StoredModel:
    file = File("model.safetensors", 1100, "00", tower_bytes=400)
    return replace(MODEL, artefact=replace(ARTEFACT, architecture=architecture, files=(file,)))


def test_a_deployment_without_pictures_has_an_engine_without_what_sees() -> None:
    model = _seeing("Qwen2_5_VLForConditionalGeneration")
    whole, text = engine_of(SPEC, model), engine_of(Spec(model="llama", language_model_only=True), model)
    assert (bool(whole.language_model_only), whole.weight_bytes) == (False, 500)
    assert (text.language_model_only, text.weight_bytes) == (True, 300)
    assert whole.key != text.key


def test_a_model_that_only_hears_is_always_served_as_text() -> None:
    model = _seeing("Qwen2AudioForConditionalGeneration")
    engine = engine_of(SPEC, model)
    assert engine.language_model_only and engine.weight_bytes == 300
    assert engine == engine_of(Spec(model="llama", language_model_only=True), model)


def test_a_model_of_text_has_one_engine_whether_pictures_are_left_out_or_not() -> None:
    assert engine_of(SPEC, MODEL) == engine_of(Spec(model="llama", language_model_only=True), MODEL)


async def _made(database: Database) -> tuple[Deployment, StoredModel]:
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        model = await models.create(connection, None, "llama", "/m", "/m", 1)
        await models.accept(connection, model.id, ARTEFACT, 1)
        ready = await models.by_id(connection, model.id)
        assert ready is not None
        return await deployments.create(connection, tenant.id, "chat", SPEC, ready, 1), ready


async def test_the_first_revision_has_the_traffic_at_once(database: Database) -> None:
    made, _ = await _made(database)
    async with database.read() as connection:
        target = await deployments.target(connection, made.tenant_id, "chat")
    assert target is not None and (target.revision, target.spec, target.owner) == (1, made.active.engine, "acme")


async def test_a_new_revision_gets_the_traffic_when_it_is_activated_and_not_before(database: Database) -> None:
    made, model = await _made(database)
    async with database.write() as connection:
        revised = await deployments.revise(connection, made, Spec(model="llama", dtype="float32"), model, 2)
        assert (revised.active.number, revised.target and revised.target.number) == (1, 2)
        assert (await deployments.target(connection, made.tenant_id, "chat")).revision == 1  # type: ignore[union-attr]
        assert await deployments.activate(connection, made.id, 2, 3)
        assert not await deployments.activate(connection, made.id, 2, 4)
        after = await deployments.by_id(connection, made.id)
    assert after is not None and (after.active.number, after.target) == (2, None)
    assert after.active.spec.dtype == "float32"


async def test_only_live_revisions_can_be_asked_for_by_number(database: Database) -> None:
    made, model = await _made(database)
    async with database.write() as connection:
        revised = await deployments.revise(connection, made, Spec(model="llama", dtype="float32"), model, 2)
        found = {n: await deployments.target(connection, made.tenant_id, f"chat@{n}") for n in ("1", "2", "3", "x")}
        assert {n: target.revision if target else None for n, target in found.items()} == {
            "1": 1,
            "2": 2,
            "3": None,
            "x": None,
        }
        await deployments.activate(connection, revised.id, 2, 3)
        assert await deployments.target(connection, made.tenant_id, "chat@1") is None


async def test_rolling_back_gives_up_what_waits_and_else_returns_to_what_had_the_traffic(database: Database) -> None:
    made, model = await _made(database)
    async with database.write() as connection:
        assert await deployments.roll_back(connection, made, None) is None
        second = await deployments.revise(connection, made, Spec(model="llama", dtype="float32"), model, 2)
        given_up = await deployments.roll_back(connection, second, None)
        assert given_up is not None and (given_up.active.number, given_up.target) == (1, None)
        third = await deployments.revise(connection, given_up, Spec(model="llama", dtype="float16"), model, 3)
        assert third.target is not None and third.target.number == 3
        await deployments.activate(connection, third.id, 3, 4)
        third = await deployments.by_id(connection, third.id)
        assert third is not None
        assert await deployments.roll_back(connection, third, 2) is None  # the revision never had the traffic
        back = await deployments.roll_back(connection, third, None)
        assert back is not None and back.active.number == 1


async def test_every_change_of_people_raises_the_version(database: Database) -> None:
    made, model = await _made(database)
    async with database.write() as connection:
        asleep = await deployments.desire(connection, made, "asleep")
        revised = await deployments.revise(connection, asleep, Spec(model="llama", dtype="float32"), model, 2)
    assert [d.version for d in (made, asleep, revised)] == [1, 2, 3]


async def test_a_name_is_taken_while_its_deployment_lives(database: Database) -> None:
    made, model = await _made(database)
    with pytest.raises(Taken, match="already a deployment 'chat'"):
        async with database.write() as connection:
            await deployments.create(connection, made.tenant_id, "chat", SPEC, model, 2)
    async with database.write() as connection:
        await deployments.delete(connection, made, 2)
        assert await deployments.target(connection, made.tenant_id, "chat") is None
        assert (await deployments.create(connection, made.tenant_id, "chat", SPEC, model, 3)).id != made.id


async def test_a_model_in_use_is_not_deleted_and_says_by_whom(database: Database) -> None:
    made, model = await _made(database)
    async with database.write() as connection:
        with pytest.raises(ModelInUse, match="is used by acme/chat"):
            await models.delete(connection, model, None, 2)
        await deployments.delete(connection, made, 2)
        await models.delete(connection, model, None, 3)
        assert await models.find(connection, None, "llama") is None


async def test_a_tenants_own_model_hides_the_shared_one_of_its_name(database: Database) -> None:
    made, shared = await _made(database)
    async with database.write() as connection:
        own = await models.create(connection, made.tenant_id, "llama", "/own", "/own", 2)
        other = await tenants.create(connection, "other", 2)

        async def found(tenant_id: str | None, name: str) -> str | None:
            model = await models.find(connection, tenant_id, name)
            return model.id if model else None

        assert await found(made.tenant_id, "llama") == own.id
        assert await found(other.id, "llama") == shared.id
        assert await found(None, "llama") == shared.id
        assert await found(other.id, own.id) is None
        assert await found(other.id, ARTEFACT.digest) == shared.id
