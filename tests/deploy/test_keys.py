"""Every program of an installation has the least key: only gateways hold the root key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_compose import FILE, make_secrets
from tests.deploy.tools import DEPLOY

ROOT_KEY, METRICS_KEY = "STACCATO_ADMIN_KEY", "STACCATO_METRICS_KEY"
TEMPLATES = DEPLOY / "helm/staccato/templates"
# Where the root key may be named: files that run a gateway, and files that tell an operator how to read the key.
NAMES_THE_ROOT_KEY = {
    "secrets.sh",
    "RUNBOOK.md",
    "compose/compose.yaml",
    "systemd/staccato-gateway@.service",
    "helm/staccato/values.yaml",
    "helm/staccato/templates/gateway.yaml",
    "helm/staccato/templates/NOTES.txt",
}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
    return found


def secrets_of(service: dict[str, Any]) -> set[str]:
    return {said if isinstance(said, str) else said["source"] for said in service.get("secrets", [])}


def test_no_service_of_compose_but_the_gateway_gets_the_root_key(services: dict[str, dict[str, Any]]) -> None:
    assert {name for name, service in services.items() if ROOT_KEY in secrets_of(service)} == {"gateway"}


def test_prometheus_has_the_key_that_reads_metrics_and_no_other_secret(services: dict[str, dict[str, Any]]) -> None:
    assert secrets_of(services["prometheus"]) == {METRICS_KEY}
    assert METRICS_KEY in secrets_of(services["gateway"]), "else no gateway would know the key"
    scrapes = yaml.safe_load(yaml.safe_load(FILE.read_text())["configs"]["prometheus"]["content"])["scrape_configs"]
    files = [scrape["authorization"]["credentials_file"] for scrape in scrapes if "authorization" in scrape]
    assert files == [f"/run/secrets/{METRICS_KEY}"]


def test_grafanas_password_is_nobodys_key(services: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    grafana = services["grafana"]
    assert secrets_of(grafana) == {"grafana_password"}
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"
    assert [name for name, one in services.items() if "grafana_password" in secrets_of(one)] == ["grafana"]
    make_secrets(tmp_path / "secrets", "r1")
    texts = {file.name: file.read_text().strip() for file in (tmp_path / "secrets/platform").iterdir()}
    assert len(set(texts.values())) == len(texts) >= 6, "no two secrets are the same"
    assert texts[METRICS_KEY].startswith("sk-st-metrics-") and not texts["grafana_password"].startswith("sk-st")


def test_the_service_monitor_reads_with_the_metrics_key() -> None:
    text = (TEMPLATES / "servicemonitor.yaml").read_text()
    assert re.findall(r"credentials: .*key: (\w+)}", text) == [METRICS_KEY]


def test_keda_asks_prometheus_and_needs_no_key_of_the_platform() -> None:
    keda = (TEMPLATES / "runtime.yaml").read_text().partition('define "staccato.keda"')[2].partition("{{- end }}")[0]
    assert "type: prometheus" in keda and not re.search(r"authenticationRef|secret|_KEY", keda, re.IGNORECASE)


def test_no_other_file_of_an_installation_names_the_root_key() -> None:
    # The tour starts a platform, as `staccato up` does; the manual tells people of the key, as README did.
    beside = (DEPLOY / "demo", DEPLOY / "docs")
    kinds = (".safetensors", ".pyc")
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix not in kinds]
    named = {
        str(path.relative_to(DEPLOY))
        for path in files
        if not any(map(path.is_relative_to, beside))
        and re.search(rf"{ROOT_KEY}|admin\.key", path.read_text(errors="replace"))
    }
    assert named <= NAMES_THE_ROOT_KEY


def test_prometheus_outside_of_containers_is_given_a_key_of_its_own() -> None:
    text = (DEPLOY / "observability/prometheus.yml").read_text()
    assert "operator-key create prometheus --scope metrics:read" in text and "credentials_file: metrics.key" in text
