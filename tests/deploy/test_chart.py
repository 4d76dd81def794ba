"""The chart renders, without a cluster, to objects that Kubernetes takes and the platform understands."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Settings
from gateway.ops import certificates
from runtime.config import RuntimeSettings, SchedulerSettings
from runtime.core.turns.registry import POLICIES
from store.db.ledger import LedgerSettings
from tests.deploy.helm import CHART, KUBERNETES, Helm, helm
from tests.deploy.tools import DEPLOY, INSTALL, staccato

DIGEST = "sha256:" + "0" * 64
OWN_MACHINE: dict[str, Any] = {
    "models": {"existingClaim": "", "hostPath": "/srv/models"},
    "postgres": {"enabled": True},
    "runtime": {"accelerator": "cpu", "deviceMemoryMiB": 512, "hostCacheMiB": 1024, "processMiB": 4096, "cpu": "2"},
    "gateway": {"replicas": 1},
}
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "own machine": OWN_MACHINE,
    "own servers": {
        "nats": {"enabled": False, "url": "tls://nats.example.com:4222", "tlsSecret": "ca"},
        "networkPolicy": {"externalCidrs": ["10.0.0.0/8"], "databasePort": 6432, "importCidrs": ["0.0.0.0/0"]},
        "traces": {"endpoint": "http://collector:4318", "share": "0.1"},
        "image": {"digests": {"gateway": DIGEST, "runtime": DIGEST}, "pullSecrets": ["registry"]},
    },
    "keda": {
        "runtime": {"autoscaling": {"kind": "keda", "least": 2, "most": 32, "prometheus": "http://prometheus:9090"}},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "autoscalers": {
        "runtime": {"autoscaling": {"kind": "hpa", "least": 1, "most": 8}, "profile": "h100"},
        "gateway": {"autoscaling": {"enabled": True, "most": 6}},
    },
    "encrypted bus": {"nats": {"tlsSecret": "nats-tls", "storage": {"className": "fast"}}},
    "plaintext": {"tls": {"plaintext": True}},
    "imports": {
        "models": {
            "existingClaim": "shared",
            "imports": {"enabled": True, "sources": ["hf://org/", "s3://models/"], "secrets": ["STACCATO_HF_TOKEN"]},
        },
        "networkPolicy": {"importCidrs": ["0.0.0.0/0"]},
    },
    "controller": {"controller": {"enabled": True, "namespaces": ["models", "team-a"]}},
    "prefill": {
        "runtime": {"role": "prefill", "runtimeClassName": "nvidia", "nodeSelector": {"gpu": "h200"}},
        "networkPolicy": {"enabled": False},
    },
}
KINDS_OF_OTHERS = ("ScaledObject", "ServiceMonitor")  # the schemas come with the controllers of these kinds


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helm]:
    with helm(tmp_path_factory.mktemp("helm")) as started:
        yield started


@pytest.fixture(scope="module")
def rendered(chart: Helm) -> dict[str, list[dict[str, Any]]]:
    return {name: chart.render(values) for name, values in VALUES.items()}


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of a component and its pod's metadata and spec."""
    for found in objects:
        if template := found["spec"].get("template") if "spec" in found else None:
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def of(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [found for found in objects if found["kind"] == kind]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "st-runtime-0") for entry in container.get("env", [])}


def test_helm_has_nothing_against_the_chart(chart: Helm) -> None:
    found = chart.lint()
    assert not found["Errors"], found


@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_takes_what_is_rendered(rendered: dict[str, list[dict[str, Any]]], name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason=f"no kubernetes-validate here: {INSTALL}")
    known = [found for found in rendered[name] if found["kind"] not in KINDS_OF_OTHERS]
    assert len(known) >= 15
    for found in known:
        validate.validate(found, KUBERNETES, strict=True)


def test_the_validation_can_fail(rendered: dict[str, list[dict[str, Any]]]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason=f"no kubernetes-validate here: {INSTALL}")
    broken = copy.deepcopy(of(rendered["default"], "StatefulSet")[0])
    broken["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", VALUES)
def test_every_pod_is_restricted_and_every_container_has_its_measure(
    rendered: dict[str, list[dict[str, Any]]], name: str
) -> None:
    components = dict(pods(rendered[name]))
    assert {"gateway", "scheduler", "ledger", "runtime", "migrate"} <= set(components)
    for component, template in components.items():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert re.search(r":[\w.-]+(@sha256:\w{64})?$", container["image"]) and "latest" not in container["image"]
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert volumes <= {mount["name"] for mount in container["volumeMounts"]}
            probed = {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
            assert probed or component == "migrate"


@pytest.mark.parametrize("name", [name for name in VALUES if name != "prefill"])
def test_every_pod_is_confined_by_a_policy_that_names_its_ports(
    rendered: dict[str, list[dict[str, Any]]], name: str
) -> None:
    policies = {
        policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: policy["spec"]
        for policy in of(rendered[name], "NetworkPolicy")
    }
    components = dict(pods(rendered[name]))
    assert set(policies) == set(components)
    for component, template in components.items():
        ports = {
            port["containerPort"] for container in template["spec"]["containers"] for port in container.get("ports", [])
        }
        allowed = {port["port"] for rule in policies[component]["ingress"] for port in rule["ports"]}
        assert allowed == ports - {8222}, component  # the kubelet's probes come in regardless
        assert policies[component]["policyTypes"] == ["Ingress", "Egress"]


def test_a_process_reaches_what_it_needs_and_nothing_else(rendered: dict[str, list[dict[str, Any]]]) -> None:
    def ports(name: str) -> dict[str, set[int]]:
        found = of(rendered[name], "NetworkPolicy")
        reached = {policy["metadata"]["name"].removeprefix("st-"): policy["spec"]["egress"] for policy in found}
        return {who: {port["port"] for rule in rules for port in rule["ports"]} for who, rules in reached.items()}

    assert ports("own machine") == {
        "gateway": {53, 4222, 5432},
        "scheduler": {53, 4222},
        "ledger": {53, 4222, 5432},
        "migrate": {53, 5432},
        "runtime": {53, 4222, 7000},
        "nats": {53, 6222},
        "postgres": set(),
    }
    assert ports("own servers") == {
        "gateway": {53, 4222, 6432, 4318, 443},
        "scheduler": {53, 4222},
        "ledger": {53, 4222, 6432, 4318},
        "migrate": {53, 6432},
        "runtime": {53, 4222, 7000, 4318},
    }


@pytest.mark.parametrize("name", VALUES)
def test_the_processes_understand_their_settings(
    rendered: dict[str, list[dict[str, Any]]], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificates.make(tmp_path, ["runtime-r1"], [])
    files = {"CERT": "runtime-r1.crt", "KEY": "runtime-r1.key", "CA": "ca.crt"}
    there = {f"STACCATO_TRANSPORT_TLS_{part}": str(tmp_path / file) for part, file in files.items()}
    known = {
        "gateway": Settings,
        "scheduler": SchedulerSettings,
        "ledger": LedgerSettings,
        "runtime": RuntimeSettings,
        "migrate": Settings,
    }
    for component, template in pods(rendered[name]):
        if component not in known:
            continue
        (container,) = template["spec"]["containers"]
        assert container["args"] == [component]
        said = {key: value for key, value in environment(container).items() if key.startswith("STACCATO_")}
        fields = known[component].model_fields
        strange = {key for key in said if key.removeprefix("STACCATO_").lower() not in fields}
        assert strange <= {"STACCATO_SIGNS", "STACCATO_SECRETS", "STACCATO_LOG_LEVEL"}, component
        with monkeypatch.context() as patch:
            patch.setenv("STACCATO_DATABASE_URL", "postgresql://db/staccato")
            here = {key: path for key, path in there.items() if key in said}
            bound = {"STACCATO_TRANSPORT_BIND": "10.0.0.1", "STACCATO_PROFILE": ""}
            for key, value in (said | bound | here).items():
                patch.setenv(key, value) if value else patch.delenv(key, raising=False)
            settings = known[component]()
            if hasattr(settings, "check"):
                settings.check()


def test_each_process_sees_its_own_seed_and_the_secrets_it_needs(
    rendered: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    made = staccato("nats-users", str(tmp_path), "--runtime", "st-runtime-0")
    assert made.returncode == 0, made.stderr
    seeds = {file.name for file in tmp_path.iterdir()}
    secrets = set(re.findall(r"^fresh (\w+) ", (DEPLOY / "secrets.sh").read_text(), re.MULTILINE))
    for component, template in pods(rendered["own machine"]):
        (container,) = template["spec"]["containers"]
        for mount in container["volumeMounts"]:
            if mount["name"] == "nats":
                seed = mount["subPathExpr"].replace("$(STACCATO_RUNTIME_ID)", "st-runtime-0")
                assert seed in seeds and seed.startswith(component)
        wanted = {
            item["key"]
            for volume in template["spec"]["volumes"]
            if volume["name"] == "secrets"
            for item in volume["secret"]["items"]
        }
        assert wanted <= secrets, component
        assert component in ("gateway", "ledger", "migrate", "postgres") or not wanted
        assert component == "gateway" or "STACCATO_ADMIN_KEY" not in wanted


def test_what_crosses_hosts_goes_by_tls_unless_plaintext_is_said(rendered: dict[str, list[dict[str, Any]]]) -> None:
    for name, objects in rendered.items():
        secured = name != "plaintext"
        templates = dict(pods(objects))
        for component in ("gateway", "scheduler", "ledger", "runtime"):
            told = environment(templates[component]["spec"]["containers"][0])
            assert told["STACCATO_NATS_URL"].startswith("tls://") == secured, (name, component)
            assert ("STACCATO_NATS_CA" in told) == secured and "SSL_CERT_FILE" not in told
        told = environment(templates["runtime"]["spec"]["containers"][0])
        assert ("STACCATO_TRANSPORT_TLS_CERT" in told) == secured == ("STACCATO_TRANSPORT_PLAINTEXT" not in told)
        for config in of(objects, "ConfigMap"):
            assert ("tls {" in config["data"]["nats.conf"]) == secured, name


def test_the_certificates_that_pods_mount_are_those_that_the_command_makes(
    rendered: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    made = staccato("nats-users", str(tmp_path), "--runtime", "st-runtime-0", "--host", "st-nats")
    assert made.returncode == 0, made.stderr
    files = {file.name for file in tmp_path.iterdir()}
    for component, template in pods(rendered["default"]):
        for volume in template["spec"]["volumes"]:
            secret = volume.get("secret", {})
            if secret.get("secretName") == "staccato-nats":
                assert {item["key"] for item in secret.get("items", [])} <= files, component


def test_an_own_server_without_tls_has_to_be_allowed(chart: Helm) -> None:
    own = {"nats": {"enabled": False, "url": "nats://nats.example.com:4222"}}
    with pytest.raises(chart.sdk.InstallError, match="or set tls.plaintext=true"):
        chart.render(own)
    assert chart.render(own | {"tls": {"plaintext": True}})


def test_images_of_others_have_the_digest_of_the_lock(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart")
    lock = tmp_path / "chart/images.lock"
    lock.write_text(re.sub(r"^(NATS_IMAGE=\S+)$", rf"\1@{DIGEST}", lock.read_text(), flags=re.MULTILINE))
    with helm(tmp_path) as chart:
        images = {
            component: template["spec"]["containers"][0]["image"]
            for component, template in pods(chart.render(OWN_MACHINE, chart=tmp_path / "chart"))
        }
    assert images["nats"].endswith(f"@{DIGEST}") and "@" not in images["postgres"]


def test_a_runtime_has_time_to_drain_and_memory_for_what_it_keeps(chart: Helm) -> None:
    runtime = {
        "accelerator": "cpu",
        "drainSeconds": 300,
        "deviceMemoryMiB": 100,
        "hostCacheMiB": 200,
        "processMiB": 2048,
    }
    (template,) = (spec for component, spec in pods(chart.render({"runtime": runtime})) if component == "runtime")
    (container,) = template["spec"]["containers"]
    assert template["spec"]["terminationGracePeriodSeconds"] > 300
    assert container["resources"]["limits"] == {"memory": "2348Mi"}


def test_a_runtime_of_two_gpus_has_both_and_memory_for_two_processes(chart: Helm) -> None:
    runtime = {"tensorParallel": 2, "hostCacheMiB": 200, "processMiB": 2048}
    (template,) = (spec for component, spec in pods(chart.render({"runtime": runtime})) if component == "runtime")
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "4296Mi", "nvidia.com/gpu": 2}
    assert environment(container)["STACCATO_TENSOR_PARALLEL"] == "2"


def test_runtimes_follow_the_schedulers_wish_within_its_band(rendered: dict[str, list[dict[str, Any]]]) -> None:
    objects = rendered["keda"]
    (scaled,) = of(objects, "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert scaled["spec"]["scaleTargetRef"]["name"] in [
        found["metadata"]["name"] for found in of(objects, "StatefulSet")
    ]
    assert "staccato_runtimes_wanted" in trigger["metadata"]["query"] and trigger["metadata"]["threshold"] == "1"
    (scheduler,) = (spec for component, spec in pods(objects) if component == "scheduler")
    told = environment(scheduler["spec"]["containers"][0])
    assert (told["STACCATO_RUNTIMES_LEAST"], told["STACCATO_RUNTIMES_MOST"]) == ("2", "32")
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 32)
    (hpa,) = (
        found
        for found in of(rendered["autoscalers"], "HorizontalPodAutoscaler")
        if "runtime" in found["metadata"]["name"]
    )
    assert hpa["spec"]["metrics"][0]["external"]["metric"]["name"] == "staccato_runtimes_wanted"
    for name in ("keda", "autoscalers"):  # with `replicas`, an upgrade would undo a scaling
        (runtime,) = (found for found in of(rendered[name], "StatefulSet") if "runtime" in found["metadata"]["name"])
        assert "replicas" not in runtime["spec"]


def test_the_database_is_migrated_before_anything_new_starts_unless_it_is_installed_with_it(
    rendered: dict[str, list[dict[str, Any]]],
) -> None:
    (before,), (together,) = of(rendered["default"], "Job"), of(rendered["own machine"], "Job")
    assert before["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert "annotations" not in together["metadata"]
    assert "serviceAccountName" not in before["spec"]["template"]["spec"]  # the service account does not exist yet


def test_the_images_are_those_that_the_dockerfile_makes(rendered: dict[str, list[dict[str, Any]]]) -> None:
    targets = re.findall(r"^FROM \S+ AS ([\w-]+)$", (DEPLOY / "docker/Dockerfile").read_text(), re.MULTILINE)
    ours = {
        container["image"].rpartition("/")[2].split(":")[0]
        for objects in rendered.values()
        for _, template in pods(objects)
        for container in template["spec"]["containers"]
        if container["image"].startswith("ghcr.io/staccato/")
    }
    assert ours == {"gateway", "runtime-gpu", "runtime-cpu"} <= set(targets)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gateway": {"replicas": "two"}}, "got string, want integer"),
        ({"gateway": {"replicas": 0}}, "minimum: got 0, want 1"),
        ({"gatway": {}}, "additional properties 'gatway' not allowed"),
        ({"models": {"existingClaim": "", "hostPath": ""}}, "/models"),
        ({"models": {"existingClaim": "a", "hostPath": "/b"}}, "/models"),
        ({"models": {"imports": {"sources": ["ftp://models/"]}}}, "/models/imports/sources/0"),
        ({"models": {"imports": {"secrets": ["STACCATO_ADMIN_KEY"]}}}, "/models/imports/secrets/0"),
        ({"nats": {"enabled": False}}, "minLength: got 0, want 8"),
        ({"nats": {"enabled": False, "url": "nats://user:password@nats:4222"}}, "does not match pattern"),
        ({"runtime": {"policy": "fair"}}, "value must be one of"),
        ({"runtime": {"accelerator": "tpu"}}, "value must be one of 'gpu', 'cpu'"),
        ({"runtime": {"transportPort": 80}}, "minimum: got 80, want 1,024"),
        ({"runtime": {"autoscaling": {"kind": "keda"}}}, "/runtime/autoscaling/prometheus"),
        ({"image": {"tag": "latest"}}, "/image/tag"),
        ({"image": {"digests": {"gateway": "sha256:1"}}}, "does not match pattern"),
        ({"postgres": {"image": "postgres"}}, "/postgres/image"),
        ({"secrets": {"platform": "Not A Name"}}, "/secrets/platform"),
        ({"logLevel": "loud"}, "value must be one of"),
    ],
)
def test_a_bad_value_is_refused_with_its_place(chart: Helm, values: dict[str, Any], said: str) -> None:
    with pytest.raises(chart.sdk.InstallError) as refused:
        chart.render(values)
    assert said in str(refused.value), refused.value


def test_the_schema_knows_what_the_platform_knows() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]["runtime"]["properties"]
    assert schema["policy"]["enum"] == sorted(POLICIES)
    assert schema["profile"]["enum"] == ["", *sorted(file.stem for file in (DEPLOY / "profiles").glob("*.json"))]


def test_every_value_is_bounded_by_the_schema() -> None:
    """A value unknown to the schema is refused; therefore the schema must name every value."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    open_to_all = [
        name for name in values if schema["properties"][name].get("additionalProperties", name != "logLevel")
    ]
    assert set(values) | {"global"} == set(schema["properties"]) and not [n for n in open_to_all if n != "logLevel"]
