"""The compose file has the specification's form, and names only existing files and services."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from gateway.machine.node import NodeSettings
from tests.conftest import ROOT
from tests.deploy.tools import DEPLOY, program

COMPOSE = DEPLOY / "compose"
FILE = COMPOSE / "compose.yaml"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return found


def test_it_is_of_the_specifications_form(tmp_path: Path) -> None:
    check = [program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    assert subprocess.run([*check, FILE], capture_output=True).returncode == 0
    (tmp_path / "broken.yaml").write_text("services: {a: {imago: b}}\n")
    assert subprocess.run([*check, tmp_path / "broken.yaml"], capture_output=True).returncode == 1


def test_every_service_is_confined_well_or_explained(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service.get("read_only") or name == "postgres"
        ours, others = r"ghcr\.io/\S+:\$\{STACCATO_TAG:-[\d.]+\}", r"\$\{[A-Z]+_IMAGE:-\S+:v?[\d.]+[\w.-]*\}"
        assert re.fullmatch(f"{ours}|{others}", service["image"]), name
        assert "healthcheck" in service or service["image"].startswith("ghcr.io/staccato/"), name


def test_no_secret_stands_in_an_environment(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            secret = re.search(r"PASSWORD|KEY|DATABASE_URL|TOKEN", variable)
            assert not secret or variable.endswith("_FILE") and value.startswith("/run/secrets/"), (name, variable)


def test_what_it_names_is_there(compose: dict[str, Any], secrets: Path) -> None:
    for kind in ("secrets", "configs"):
        for name, source in compose[kind].items():
            if "content" in source:
                continue
            path = source["file"].replace("${STACCATO_SECRET_FILES:-./secrets}", str(secrets))
            assert (COMPOSE / path).resolve().exists(), name
    targets = set(re.findall(r"^FROM \S+ AS ([\w-]+)$", (DEPLOY / "docker/Dockerfile").read_text(), re.MULTILINE))
    for name, service in compose["services"].items():
        if build := service.get("build"):
            assert (COMPOSE / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).exists()
            assert build["target"] in targets and build["target"] in service["image"], name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists(), (name, source)
            elif not source.startswith("${"):
                assert source in compose["volumes"], (name, source)
        for after in service.get("depends_on", {}):
            assert after in compose["services"]


def test_prometheus_reads_what_it_reads_elsewhere(compose: dict[str, Any]) -> None:
    def read(config: str) -> dict[str, str]:
        return {job["job_name"]: job["metrics_path"] for job in yaml.safe_load(config)["scrape_configs"]}

    elsewhere = (DEPLOY / "observability/prometheus.yml").read_text()
    assert read(compose["configs"]["prometheus"]["content"]) == read(elsewhere)


def test_every_variable_has_a_default_and_an_example(compose: dict[str, Any]) -> None:
    examples = dict(re.findall(r"^(\w+)=(.*)$", (COMPOSE / ".env.example").read_text(), re.MULTILINE))
    used = re.findall(r"\$\{(\w+)(:-([^}]*))?\}", FILE.read_text())
    assert all(default for _, default, _ in used)
    assert set(examples) <= {name for name, _, _ in used}


def test_secrets_are_made_once_and_only_their_owner_reaches_them(secrets: Path) -> None:
    url = (secrets / "platform/STACCATO_DATABASE_URL").read_text().strip()
    password = (secrets / "platform/postgres_password").read_text().strip()
    assert url == f"postgresql://staccato:{password}@postgres/staccato" and len(password) == 64
    assert secrets.stat().st_mode & 0o077 == 0
    before = {file: file.read_text() for file in secrets.rglob("*") if file.is_file()}
    make_secrets(secrets, "r1", "r2", "--join")
    after = {file: file.read_text() for file in before}
    changed = [file.name for file in before if before[file] != after[file]]
    assert changed == ["users.conf"] and (secrets / "nats/runtime-r2.nk").exists()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "secrets"
    make_secrets(folder, "r1", "--join")
    return folder


def make_secrets(folder: Path, *runtimes: str) -> None:
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    command = [DEPLOY / "secrets.sh", folder, "postgres", *runtimes]
    subprocess.run(command, env=os.environ | {"PATH": path}, check=True, capture_output=True)


def test_a_node_and_its_join_service_have_the_files_and_the_settings_that_both_need(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, join = compose["services"]["node"], compose["services"]["join"]
    for name, value in node["environment"].items():
        if name.startswith("STACCATO_"):
            monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)))
    own = NodeSettings()
    own.check(8)
    targets = {volume.rpartition(":/")[2].removesuffix(":ro") for volume in node["volumes"]}
    for name in ("STACCATO_NATS_CREDENTIALS", "STACCATO_JOIN_TOKEN_FILE"):
        assert any(own.variables(8)[name].startswith(f"/{target}/") for target in targets), name
    assert own.variables(8)["STACCATO_JOIN_TOKEN_FILE"].endswith(own.runtime_ids(8)[7])
    given = {secret if isinstance(secret, str) else secret["target"] for secret in join["secrets"]}
    files = {Path(value).name for value in join["environment"].values() if str(value).startswith("/run/secrets/")}
    assert files <= {*given, "nats_ca"} and "gateway:/var/lib/staccato:ro" in join["volumes"]


def test_a_node_is_named_as_a_whole_where_secrets_are_made(tmp_path: Path) -> None:
    make_secrets(tmp_path / "made", "st-runtime-gpu-0:2", "r9")
    seeds = {file.name for file in (tmp_path / "made/nats").glob("runtime-*.nk")}
    assert seeds == {"runtime-st-runtime-gpu-0-r1.nk", "runtime-st-runtime-gpu-0-r2.nk", "runtime-r9.nk"}
    names = x509.load_pem_x509_certificate((tmp_path / "made/nats/nats.crt").read_bytes()).extensions
    hosts = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert {"nats", "st-nats", "st-nats-4.st-nats"} <= set(hosts)
