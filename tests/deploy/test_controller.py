"""The chart's controller: the definitions of the code, narrow rights, and settings that the process understands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from gateway.core.declared.schema import PLURALS, definitions
from gateway.declared.controller import ControllerSettings
from store.settings import read
from tests.deploy.helm import CHART, Helm, helm

Objects = list[dict[str, Any]]
ON = {"enabled": True, "namespaces": ["team-a", "team-b"], "publicUrl": "https://llm.example.com"}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helm]:
    with helm(tmp_path_factory.mktemp("helm")) as started:
        yield started


@pytest.fixture(scope="module")
def rendered(chart: Helm) -> Objects:
    return chart.render({"controller": ON, "networkPolicy": {"clients": [{"podSelector": {}}]}})


def of(objects: Objects, kind: str, name: str = "st-controller") -> Objects:
    return [found for found in objects if found["kind"] == kind and found["metadata"]["name"] == name]


def test_the_definitions_of_the_chart_are_those_of_the_code(rendered: Objects) -> None:
    text = (CHART / "files/crds.yaml").read_text()
    assert list(yaml.safe_load_all(text)) == definitions(), "run: staccato crds > deploy/helm/staccato/files/crds.yaml"
    found = [each for each in rendered if each["kind"] == "CustomResourceDefinition"]
    for each in found:
        assert each["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert found == definitions()


def test_without_the_switch_there_is_no_controller_and_no_definition(chart: Helm) -> None:
    kinds = {found["kind"] for found in chart.render({})}
    assert not kinds & {"CustomResourceDefinition", "Role", "RoleBinding"}
    without = chart.render({"controller": ON | {"crds": False}})
    assert not [found for found in without if found["kind"] == "CustomResourceDefinition"]


def test_the_rights_are_those_that_the_controller_uses_and_end_at_its_namespaces(rendered: Objects) -> None:
    roles = of(rendered, "Role")
    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-b"]
    for role in roles:
        rights = {
            (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
        }
        kinds = {(plural, verb) for plural in PLURALS.values() for verb in ("get", "list", "watch", "patch")}
        statuses = {(f"{plural}/status", "patch") for plural in PLURALS.values()}
        assert rights == kinds | statuses | {("secrets", verb) for verb in ("get", "create", "patch")}
    (lease,) = of(rendered, "Role", "st-controller-lease")
    assert lease["metadata"]["namespace"] == "models"
    assert lease["rules"][1]["resourceNames"] == ["staccato-controller"]
    assert not [found for found in rendered if found["kind"].startswith("ClusterRole")]
    accounts = {
        subject["name"] for found in rendered if found["kind"] == "RoleBinding" for subject in found["subjects"]
    }
    assert accounts == {"st-controller"}


def test_the_controller_understands_its_settings(rendered: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    (deployment,) = of(rendered, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["controller"]
    for entry in container["env"]:
        monkeypatch.setenv(entry["name"], entry["value"])
    monkeypatch.delenv("STACCATO_SECRETS")  # the test has no mounted file
    monkeypatch.setenv("STACCATO_KEY", "sk-op-1")
    settings = read(ControllerSettings)
    assert settings.namespaces == ("team-a", "team-b") and settings.url == "http://st-gateway:80"
    assert settings.public_url == "https://llm.example.com"
    names = {entry["name"].removeprefix("STACCATO_").lower() for entry in container["env"]}
    assert names <= {*ControllerSettings.model_fields, "log_level", "signs", "secrets"}


def test_the_gateways_let_the_controller_in_where_clients_are_named(rendered: Objects) -> None:
    (policy,) = of(rendered, "NetworkPolicy", "st-controller-gateway")
    (rule,) = policy["spec"]["ingress"]
    labels = rule["from"][0]["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == "controller" and rule["ports"][0]["port"] == 8080
    (own,) = of(rendered, "NetworkPolicy")
    assert {port["port"] for rule in own["spec"]["egress"] for port in rule["ports"]} == {53, 8080, 443, 6443}
