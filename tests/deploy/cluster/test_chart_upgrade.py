"""A release of the chart is upgraded from 71e32b0 to this tree under streams, in the runbook's order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.cluster.installation import ChartInstallation, cluster
from tests.deploy.helm import helm
from tests.earlier.tree import COMMIT, unpacked

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
RUNTIME = {"accelerator": "cpu", "deviceMemoryMiB": 64, "hostCacheMiB": 128}
BUS = {"enabled": False, "url": "tls://st-nats-0.st-nats:4222", "tlsSecret": "staccato-nats"}
ORDER = ("migrate", "ledger", "gateway", "runtime", "scheduler")  # deploy/RUNBOOK.md, "Upgrade"


def test_an_upgrade_from_71e32b0_costs_no_stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The bus is one server with TLS, as 71e32b0 asks for: the server and the database are no part of the upgrade."""
    tree = unpacked(tmp_path_factory.mktemp("earlier"))
    for above in (tree, *tree.parents[:3]):
        above.chmod(0o755)
    values: dict[str, Any] = {"postgres": {"enabled": True}, "nats": {"replicas": 1}, "pools": [{"name": "cpu"}]}
    with helm(tmp_path_factory.mktemp("helm")) as started:
        old = started.render(
            {"runtime": RUNTIME, "nats": BUS, "image": {"tag": COMMIT}}, chart=tree / "deploy/helm/staccato"
        )
        new = started.render(values | {"runtime": RUNTIME})
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(folder, "st-runtime-0", "st-runtime-cpu-0:1", **{COMMIT: tree}) as running:
        running.apply(new, "nats")
        running.apply(new, "postgres")
        running.apply(old, "migrate")
        running.apply(old)
        installation = ChartInstallation(running)

        def upgrade() -> None:
            for part in ORDER:
                running.apply(new, part)
            running.remove("st-runtime")

        print(installation.under_streams(upgrade), "answers")
        installation.check_books()
