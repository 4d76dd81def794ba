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

from gateway.config import Settings, load
from gateway.joining.service import JoinSettings
from gateway.machine.node import NodeSettings
from gateway.ops import certificates
from runtime.config import RuntimeSettings, SchedulerSettings
from runtime.core.turns.registry import POLICIES
from store.db.ledger import LedgerSettings
from tests.deploy.helm import CHART, KUBERNETES, Helm, helm
from tests.deploy.tools import DEPLOY, INSTALL, staccato

DIGEST = "sha256:" + "0" * 64
NODE = "st-runtime-gpu-0"  # name of a pod
OWN_MACHINE: dict[str, Any] = {
    "models": {"existingClaim": "", "hostPath": "/srv/models"},
    "postgres": {"enabled": True},
    "runtime": {"accelerator": "cpu", "deviceMemoryMiB": 512, "hostCacheMiB": 1024, "processMiB": 4096, "cpu": "2"},
    "pools": [{"name": "cpu"}],
    "gateway": {"replicas": 1},
}
KEDA = {"kind": "keda", "least": 2, "most": 32, "prometheus": "http://prometheus:9090"}
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
        "runtime": {"perNode": 8},
        "pools": [
            {"name": "h100", "autoscaling": KEDA, "profile": "h100"},
            {"name": "h200", "nodes": 2, "perNode": 4, "profile": "h200"},
        ],
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "autoscalers": {
        "runtime": {"profile": "h100", "perNode": 8},
        "pools": [{"name": "gpu", "autoscaling": {"kind": "hpa", "least": 1, "most": 8}}],
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
    "pools": {
        "runtime": {"perNode": 8, "runtimeClassName": "nvidia", "diskCache": {"sizeMiB": 1048576}},
        "pools": [
            {"name": "prefill", "nodes": 1, "role": "prefill", "nodeSelector": {"gpu": "h200"}, "transportPort": 7100},
            {
                "name": "decode",
                "nodes": 3,
                "role": "decode",
                "perNode": 4,
                "tensorParallel": 2,
                "priorityClassName": "serving",
                "diskCache": {"className": "local-nvme"},
                "tolerations": [],
            },
        ],
    },
    "join": {
        "join": {"enabled": True, "replicas": 2},
        "runtime": {"perNode": 2},
        "pools": [{"name": "gpu", "nodes": 4}],
    },
    "no policies": {"networkPolicy": {"enabled": False}},
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
    return {entry["name"]: entry.get("value", NODE) for entry in container.get("env", [])}


def runtime_pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Specs of the pods by pool."""
    found = [template for component, template in pods(objects) if component == "runtime"]
    return {template["metadata"]["labels"]["staccato/pool"]: template["spec"] for template in found}


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


@pytest.mark.parametrize("name", [name for name in VALUES if name != "no policies"])
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
        allowed = opened(policies[component]["ingress"])
        assert ports - {8222} <= allowed, component  # the kubelet's probes come in regardless
        assert component == "runtime" or allowed == ports - {8222}
        assert policies[component]["policyTypes"] == ["Ingress", "Egress"]


def opened(rules: list[dict[str, Any]]) -> set[int]:
    """Ports named by the rules of a policy."""
    ports = [port for rule in rules for port in rule["ports"]]
    return {number for port in ports for number in range(port["port"], port.get("endPort", port["port"]) + 1)}


def test_a_process_reaches_what_it_needs_and_nothing_else(rendered: dict[str, list[dict[str, Any]]]) -> None:
    def ports(name: str) -> dict[str, set[int]]:
        found = of(rendered[name], "NetworkPolicy")
        reached = {policy["metadata"]["name"].removeprefix("st-"): policy["spec"]["egress"] for policy in found}
        return {who: opened(rules) for who, rules in reached.items()}

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
    assert ports("pools")["runtime"] == {53, 4222, *range(7000, 7004), *range(7100, 7108)}
    assert ports("join")["join"] == {53, 4222, 5432}


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
        "runtime": NodeSettings,
        "join": JoinSettings,
        "migrate": Settings,
    }
    arguments = {"runtime": "node", "join": "join-service"}
    for component, template in pods(rendered[name]):
        if component not in known:
            continue
        (container,) = template["spec"]["containers"]
        assert container["args"] == [arguments.get(component, component)]
        said = {key: value for key, value in environment(container).items() if key.startswith("STACCATO_")}
        fields = set(known[component].model_fields)
        if component in arguments:
            fields |= Settings.model_fields.keys()
        if component == "runtime":
            fields |= RuntimeSettings.model_fields.keys()
        strange = {key for key in said if key.removeprefix("STACCATO_").lower() not in fields}
        assert strange <= {"STACCATO_SIGNS", "STACCATO_SECRETS", "STACCATO_LOG_LEVEL"}, component
        with monkeypatch.context() as patch:
            patch.setenv("STACCATO_DATABASE_URL", "postgresql://db/staccato")
            here = {key: path for key, path in there.items() if key in said}
            bound = {"STACCATO_TRANSPORT_BIND": "10.0.0.1", "STACCATO_PROFILE": ""}
            for key, value in (said | bound | here).items():
                patch.setenv(key, value) if value else patch.delenv(key, raising=False)
            settings = known[component]()
            if isinstance(settings, NodeSettings):
                settings.check(load().runtimes)
                for key, value in settings.variables(1).items():
                    patch.setenv(key, value)
                RuntimeSettings().check()
            elif isinstance(settings, SchedulerSettings):
                settings.check()


def test_each_process_sees_its_own_seed_and_the_secrets_it_needs(
    rendered: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    users = [word for number in range(1, 9) for word in ("--runtime", f"{NODE}-r{number}")]
    made = staccato("nats-users", str(tmp_path), *users)
    assert made.returncode == 0, made.stderr
    seeds = {file.name for file in tmp_path.iterdir()}
    secrets = set(re.findall(r"^fresh (\w+) ", (DEPLOY / "secrets.sh").read_text(), re.MULTILINE))
    for component, template in (*pods(rendered["own machine"]), *pods(rendered["autoscalers"])):
        (container,) = template["spec"]["containers"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        if component == "runtime":
            told = environment(container)
            keys = Path(told["STACCATO_NATS_CREDENTIALS"])
            own = NodeSettings(node_id=NODE, nats_credentials=keys).variables
            paths = {
                own(number)["STACCATO_NATS_CREDENTIALS"] for number in range(1, int(told["STACCATO_RUNTIMES"]) + 1)
            }
            assert paths <= mounted
        for mount in container["volumeMounts"]:
            if mount["name"] == "nats":
                seed = mount["subPathExpr"].replace("$(STACCATO_NODE_ID)", NODE)
                assert seed in seeds and seed.startswith(component)
        wanted = {
            item["key"]
            for volume in template["spec"]["volumes"]
            if volume["name"] == "secrets"
            for item in volume["secret"]["items"]
        }
        assert wanted <= secrets, component
        assert component in ("gateway", "ledger", "migrate", "postgres", "join") or not wanted
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
    made = staccato("nats-users", str(tmp_path), "--runtime", f"{NODE}-r1", "--host", "st-nats")
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


def test_a_node_has_time_to_drain_and_memory_for_one_host_cache_and_its_runtimes(chart: Helm) -> None:
    runtime = {
        "accelerator": "cpu",
        "perNode": 3,
        "drainSeconds": 300,
        "deviceMemoryMiB": 100,
        "hostCacheMiB": 200,
        "processMiB": 2048,
        "cpu": "1.5",
    }
    (spec,) = runtime_pods(chart.render({"runtime": runtime})).values()
    (container,) = spec["containers"]
    assert spec["terminationGracePeriodSeconds"] > 300
    probed = {name: container[name]["exec"]["command"] for name in container if name.endswith("Probe")}
    assert probed["startupProbe"] == probed["livenessProbe"] == ["probe", "alive"], "one runtime must not end all"
    assert probed["readinessProbe"] == ["probe", "ready"]
    assert container["resources"] == {
        "requests": {"cpu": "4500m", "memory": f"{200 + 3 * 2148}Mi"},
        "limits": {"memory": f"{200 + 3 * 2148}Mi"},
    }


def test_pools_of_a_release_have_their_own_nodes_gpus_and_roles(rendered: dict[str, list[dict[str, Any]]]) -> None:
    found = runtime_pods(rendered["pools"])
    prefill, decode = found["prefill"], found["decode"]
    told = {name: environment(spec["containers"][0]) for name, spec in found.items()}
    gpus = {name: spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for name, spec in found.items()}
    assert gpus == {"prefill": 8, "decode": 8}
    assert [told[name]["STACCATO_RUNTIMES"] for name in found] == ["8", "4"]
    assert [told[name]["STACCATO_TENSOR_PARALLEL"] for name in found] == ["1", "2"]
    assert [told[name]["STACCATO_ROLE"] for name in found] == ["prefill", "decode"]
    assert prefill["nodeSelector"] == {"gpu": "h200"} and "nodeSelector" not in decode
    assert prefill["tolerations"] and not decode["tolerations"] and decode["priorityClassName"] == "serving"
    sets = {
        made["metadata"]["name"]: made["spec"]
        for made in of(rendered["pools"], "StatefulSet")
        if "runtime" in made["metadata"]["name"]
    }
    assert {name: spec["replicas"] for name, spec in sets.items()} == {"st-runtime-prefill": 1, "st-runtime-decode": 3}
    selectors = [frozenset(spec["selector"]["matchLabels"].items()) for spec in sets.values()]
    assert len(set(selectors)) == len(selectors), "a pool selects no pod of another pool"
    services = {made["metadata"]["name"] for made in of(rendered["pools"], "Service")}
    assert {spec["serviceName"] for spec in sets.values()} <= services
    assert [volume["name"] for volume in prefill["volumes"]].count("images") == 1  # an emptyDir
    (claim,) = sets["st-runtime-decode"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "local-nvme"
    assert claim["spec"]["resources"] == {"requests": {"storage": "1048576Mi"}}


def test_runtimes_that_join_keep_their_keys_and_need_no_seed(
    rendered: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    made = staccato("nats-users", str(tmp_path), "--join", "--host", "st-nats")
    assert made.returncode == 0, made.stderr
    files = {file.name for file in tmp_path.iterdir()}
    templates = dict(pods(rendered["join"]))
    for component in ("runtime", "join"):
        (container,) = templates[component]["spec"]["containers"]
        mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "nats"]
        assert mounts and {mount["subPathExpr"] for mount in mounts} <= files
    (container,) = templates["runtime"]["spec"]["containers"]
    told = environment(container)
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounted[str(Path(told["STACCATO_NATS_CREDENTIALS"]).parent)] == "keys"
    assert told["STACCATO_JOIN_TOKEN_FILE"] == "/run/join/$(STACCATO_NODE_ID)-r{n}" and "/run/join" in mounted
    names = [entry["name"] for entry in container["env"]]
    assert names.index("STACCATO_NODE_ID") < names.index("STACCATO_JOIN_TOKEN_FILE"), "the kubelet reads in order"
    (claims,) = (spec["spec"] for spec in of(rendered["join"], "StatefulSet") if "runtime" in spec["metadata"]["name"])
    assert [claim["metadata"]["name"] for claim in claims["volumeClaimTemplates"]] == ["keys"]
    told = environment(templates["join"]["spec"]["containers"][0])
    assert told["STACCATO_JOIN_ISSUER"] == "/run/nats/issuer.nk"
    assert "join" not in dict(pods(rendered["default"]))


def test_nodes_follow_the_schedulers_wish_within_its_band(rendered: dict[str, list[dict[str, Any]]]) -> None:
    objects = rendered["keda"]
    (scaled,) = of(objects, "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == "st-runtime-h100"
    # The other pool has 8 runtimes in two nodes, and a node of this pool has 8 runtimes.
    assert trigger["metadata"]["query"] == 'max(staccato_runtimes_wanted{namespace="models"}) - 8'
    assert trigger["metadata"]["threshold"] == "8"
    (scheduler,) = (spec for component, spec in pods(objects) if component == "scheduler")
    told = environment(scheduler["spec"]["containers"][0])
    assert (told["STACCATO_RUNTIMES_LEAST"], told["STACCATO_RUNTIMES_MOST"]) == ("24", "264")
    assert (told["STACCATO_NODES_SCALED"], told["STACCATO_NODE_RUNTIMES"]) == ("st-runtime-h100", "8")
    fixed = dict(pods(rendered["default"]))["scheduler"]["spec"]["containers"][0]
    assert "STACCATO_NODES_SCALED" not in environment(fixed)
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 32)
    (hpa,) = (
        found
        for found in of(rendered["autoscalers"], "HorizontalPodAutoscaler")
        if "runtime" in found["metadata"]["name"]
    )
    assert hpa["spec"]["metrics"][0]["external"] == {
        "metric": {"name": "staccato_runtimes_wanted"},
        "target": {"type": "AverageValue", "averageValue": "8"},
    }
    sets = {made["metadata"]["name"]: made["spec"] for made in of(objects, "StatefulSet")}
    assert "replicas" not in sets["st-runtime-h100"], "an upgrade would undo a scaling"
    assert sets["st-runtime-h200"]["replicas"] == 2


def test_the_runbooks_values_make_the_nodes_that_the_runbook_names(chart: Helm) -> None:
    text = (DEPLOY / "RUNBOOK.md").read_text()
    (values,) = re.findall(r"^cat > values\.yaml <<END\n(.*?)^END$", text, re.MULTILINE | re.DOTALL)
    (named,) = re.findall(r"^deploy/secrets\.sh cluster db\.example\.com (.*)$", text, re.MULTILINE)
    rendered = chart.render(yaml.safe_load(values), release="staccato")
    found = runtime_pods(rendered)
    nodes = {
        f"{made['metadata']['name']}-{number}"
        for made in of(rendered, "StatefulSet")
        if "runtime" in made["metadata"]["name"]
        for number in range(made["spec"]["replicas"])
    }
    each = {environment(spec["containers"][0])["STACCATO_RUNTIMES"] for spec in found.values()}
    assert each == {"8"} and {f"{node}:8" for node in nodes} == set(named.split())


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
        ({"runtime": {"replicas": 4}}, "runtime.replicas is no value any more: pools[].nodes says"),
        (
            {"runtime": {"autoscaling": {"kind": "hpa"}}},
            "runtime.autoscaling is no value any more: pools",
        ),
        ({"pools": []}, "minItems: got 0, want 1"),
        ({"pools": [{"nodes": 1}]}, "missing property 'name'"),
        ({"pools": [{"name": "a", "accelerator": "cpu"}]}, "additional properties 'accelerator' not allowed"),
        ({"pools": [{"name": "a"}, {"name": "a"}]}, "two are called a: give each pool a name of its own"),
        ({"pools": [{"name": "a", "autoscaling": {"kind": "keda"}}]}, "missing property 'prometheus'"),
        ({"pools": [{"name": "a", "autoscaling": KEDA}, {"name": "b", "autoscaling": KEDA}]}, "a and b are scaled"),
        ({"pools": [{"name": "a", "autoscaling": {"kind": "hpa", "least": 9}}]}, "at least 9 and at most 8 nodes"),
        ({"pools": [{"name": "a", "autoscaling": {"kind": "hpa"}}, {"name": "b"}]}, "use keda, or one pool"),
        ({"pools": [{"name": "a", "role": "decode"}], "scheduler": {"roles": "auto"}}, "leave one of the two out"),
        ({"pools": [{"name": "a" * 30, "transportPort": 80}]}, "minimum: got 80, want 1,024"),
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
    properties = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]
    schema = properties["runtime"]["properties"]
    of_pools = set(properties["pools"]["items"]["properties"]) - {"name", "nodes"}
    assert of_pools == set(schema) - {"replicas", "accelerator"}, "a pool may have a value of its own for the rest"
    assert schema["policy"]["enum"] == sorted(POLICIES)
    assert schema["profile"]["enum"] == ["", *sorted(file.stem for file in (DEPLOY / "profiles").glob("*.json"))]


def test_every_value_is_bounded_by_the_schema() -> None:
    """A value unknown to the schema is refused; therefore the schema must name every value."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    open_to_all = [
        name
        for name in values
        if name not in ("logLevel", "pools") and schema["properties"][name].get("additionalProperties", True)
    ]
    assert set(values) | {"global"} == set(schema["properties"]) and not open_to_all
