"""A deployment's life over HTTP: asleep and back, a bad revision that never gets the traffic, bad models refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploy.demo.corpus import read_corpus
from tests.e2e.conftest import MODELS, Platform

LESSON = read_corpus("faq").lessons[0]
CHAT = {"model": "tune", "messages": [{"role": "user", "content": LESSON.questions[0]}], "temperature": 0}


@pytest.fixture
def tune(platform: Platform):  # type: ignore[no-untyped-def]
    """A deployment of globex that the test may do anything to."""
    deployment = platform.deploy("globex", "tune", "faq", scaling={"idle": "10m"})  # an engine of its own
    path = f"/api/v1/deployments/{deployment['id']}"
    try:
        platform.until(lambda: platform.get(path).json()["status"]["phase"] == "awake")  # the engine may be leaving yet
        yield path
    finally:
        platform.request("DELETE", path)


def answer(platform: Platform, key: str) -> str:
    response = platform.request("POST", "/v1/chat/completions", CHAT, key)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_a_sleeping_deployment_is_healthy_and_wakes_for_a_request(platform: Platform, tune: str) -> None:
    key = platform.keys["globex"]
    platform.request("POST", tune + ":sleep")
    platform.until(lambda: platform.get(tune).json()["status"]["phase"] == "asleep")
    response = platform.request("POST", "/v1/chat/completions", CHAT, key)
    assert response.json()["choices"][0]["message"]["content"] == LESSON.answer
    assert response.headers["x-staccato-cold"] == "host" and int(response.headers["x-staccato-wake-ms"]) > 0
    platform.until(lambda: platform.get(tune).json()["status"]["phase"] == "awake")
    warm = platform.request("POST", "/v1/chat/completions", CHAT, key)
    assert warm.headers["x-staccato-cold"] == "none"


def test_a_bad_revision_never_takes_the_traffic_of_a_good_one(platform: Platform, tune: str, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(MODELS / "faq", folder)
    config = json.loads((folder / "config.json").read_text())
    config["hidden_size"] *= 2  # the weights do not fit: found only by a runtime's load
    (folder / "config.json").write_text(json.dumps(config))
    platform.model("broken", folder)
    changed = platform.request("PATCH", tune, {"model": "broken"})
    assert changed.status_code < 300, changed.text

    def failed() -> bool:
        return any("fail" in json.dumps(c).lower() for c in platform.get(tune).json()["status"]["conditions"])

    platform.until(failed, 60)
    assert answer(platform, platform.keys["globex"]) == LESSON.answer
    assert platform.get(tune).json()["status"]["active_revision"] == 1
    assert platform.request("POST", tune + ":rollback").status_code < 300


def test_a_canary_gets_its_share_of_the_requests_until_it_is_promoted(platform: Platform, tune: str) -> None:
    key, served = platform.keys["globex"], Counter[int]()

    def ask(times: int) -> set[int]:
        """Revisions that answered."""
        asked = [platform.request("POST", "/v1/chat/completions", CHAT, key) for _ in range(times)]
        assert all(one.json()["choices"][0]["message"]["content"] == LESSON.answer for one in asked)
        revisions = [int(one.headers["x-staccato-revision"]) for one in asked]
        served.update(revisions)
        return set(revisions)

    assert ask(2) == {1}
    changed = platform.request("PATCH", tune, {"slo": {"tbt_ms": 80}, "canary": {"weight": 50}})
    assert changed.status_code == 200, changed.text
    platform.until(lambda: "CanaryServing" in json.dumps(platform.get(tune).json()["status"]["conditions"]))
    assert ask(30) == {1, 2}
    promoted = platform.request("POST", tune + ":promote")
    assert promoted.status_code == 200, promoted.text
    platform.until(lambda: ask(1) == {2})
    assert platform.get(tune).json()["status"]["active_revision"] == 2

    def booked() -> Counter[int]:
        month = f"{datetime.now(UTC):%Y-%m}"
        export = platform.get(f"/api/v1/billing/export?period={month}&format=jsonl&detail=rows", key=key).text
        rows = [json.loads(line) for line in export.splitlines()]
        return Counter(row["revision"] for row in rows if tune.endswith(row["deployment_id"]))

    platform.until(lambda: booked() == served)


def test_program_code_beside_a_model_never_runs(platform: Platform, tmp_path: Path) -> None:
    folder, ran = tmp_path / "coded", tmp_path / "ran"
    shutil.copytree(MODELS / "faq", folder)
    for name in ("configuration_own", "modeling_own"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')")
    _edit(folder, auto_map={"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"})
    platform.model("coded", folder)
    deployment = platform.deploy("globex", "coded")
    try:
        response = platform.request("POST", "/v1/chat/completions", CHAT | {"model": "coded"}, platform.keys["globex"])
        assert response.json()["choices"][0]["message"]["content"] == LESSON.answer
    finally:
        platform.request("DELETE", f"/api/v1/deployments/{deployment['id']}")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "pytorch_model.bin is a pickle",
        ),
        (lambda folder: _edit(folder, architectures=["NoSuchForCausalLM"]), "NoSuchForCausalLM"),
        (lambda folder: _edit(folder, model_type="evil", auto_map={"AutoModel": "evil.Model"}), "auto_map"),
        (lambda folder: _truncate(folder / "model.safetensors"), "bytes"),
    ],
    ids=["no weights", "no tokenizer", "pickle", "architecture", "auto_map", "truncated"],
)
def test_a_model_folder_that_is_not_one_is_refused_with_the_reason_and_others_go_on(
    platform: Platform, tmp_path: Path, spoil: object, reason: str
) -> None:
    folder = tmp_path / "spoiled"
    shutil.copytree(MODELS / "faq", folder)
    spoil(folder)  # type: ignore[operator]
    name = f"spoiled-{abs(hash(str(tmp_path))) % 10**8}"
    platform.model(name, folder)
    model = platform.get(f"/api/v1/models/{name}").json()
    assert model["state"] == "refused" and reason in model["reason"], model
    refused = platform.request("POST", "/api/v1/deployments", {"name": name, "model": name, "tenant": "globex"})
    assert refused.status_code in (409, 422) and refused.json()["detail"]
    client = platform.client("acme")
    said = client.chat.completions.create(model="faq", messages=CHAT["messages"], temperature=0)  # type: ignore[arg-type]
    assert said.choices[0].message.content == LESSON.answer


def _edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _truncate(weights: Path) -> None:
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)


def test_an_unknown_field_is_named_by_its_pointer(platform: Platform) -> None:
    response = platform.request("POST", "/api/v1/deployments", {"name": "x", "model": "faq", "slo": {"ttfx_ms": 1}})
    assert response.status_code == 422
    problem = response.json()
    assert problem["errors"][0]["pointer"].startswith("/slo") and problem["request_id"]
    assert response.headers["content-type"].startswith("application/problem+json")
