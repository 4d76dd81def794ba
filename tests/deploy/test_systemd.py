"""The units load in a system with the named files, and are confined."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.config import load
from gateway.machine.node import NodeSettings
from runtime.config import RuntimeSettings
from tests.deploy.tools import DEPLOY, program

UNITS = DEPLOY / "systemd"
NAMES = ["gateway@1", "join-service", "ledger", "migrate", "node", "runtime@r1", "scheduler"]
EXPOSURE_MOST = 20  # of 100, as `systemd-analyze security` counts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A system with Staccato's units and systemd's own."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(UNITS, root / "etc/systemd/system")
    shutil.copytree("/usr/lib/systemd/system", root / "usr/lib/systemd/system", symlinks=True)
    command = root / "opt/staccato/.venv/bin/staccato"
    command.parent.mkdir(parents=True)
    command.touch(mode=0o755)
    return root


def analyze(verb: str, root: Path, unit: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [program("systemd-analyze"), verb, *options, f"--root={root}", unit]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", NAMES)
def test_systemd_takes_the_unit(root: Path, name: str) -> None:
    ran = analyze("verify", root, f"staccato-{name}.service", "--man=no")
    assert ran.returncode == 0 and not ran.stderr, ran.stderr


def test_the_gateways_share_a_socket(root: Path) -> None:
    ran = analyze("verify", root, "staccato-gateway.socket", "--man=no")
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    assert "Sockets=staccato-gateway.socket\n" in (UNITS / "staccato-gateway@.service").read_text()


def test_the_verification_can_fail(root: Path) -> None:
    (root / "etc/systemd/system/staccato-wrong.service").write_text("[Service]\nExecStart=/nowhere\nRestarts=yes\n")
    assert analyze("verify", root, "staccato-wrong.service", "--man=no").stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_unit_is_confined(root: Path, name: str) -> None:
    options = ("--offline=yes", f"--threshold={EXPOSURE_MOST}", "--no-pager")
    ran = analyze("security", root, f"staccato-{name}.service", *options)
    assert ran.returncode == 0, ran.stdout[-300:] + ran.stderr


def test_every_unit_is_for_a_role_and_gets_its_own_seed() -> None:
    units = {path.stem.removeprefix("staccato-").rstrip("@"): path.read_text() for path in UNITS.glob("*.service")}
    assert set(units) == {"gateway", "join-service", "ledger", "migrate", "node", "runtime", "scheduler"}
    for role, text in units.items():
        assert f"ExecStart=/opt/staccato/.venv/bin/staccato {role}\n" in text
        seeds = re.findall(r"^LoadCredential=nats\.nk:/etc/staccato/nats/(.+)$", text, re.MULTILINE)
        special = {"migrate": [], "node": [], "runtime": ["runtime-%i.nk"], "join-service": ["join.nk"]}
        assert seeds == special.get(role, [f"{role}.nk"])
        assert ("Type=notify" in text) == ("WatchdogSec=" in text) == (role != "migrate")


def test_sigterm_is_for_the_main_process_alone() -> None:
    """With systemd's default, the fork server got SIGTERM beside the runtime, and ended the device process before the
    drain."""
    assert "\nKillMode=mixed\n" in (UNITS / "staccato-.service.d/confined.conf").read_text()
    assert not [path for path in UNITS.glob("*.service") if "KillMode" in path.read_text()]


def test_the_example_of_a_node_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (UNITS / "node.env.example").read_text()
    for name, value in re.findall(r"^#?(STACCATO_\w+)=(.*)$", text, re.MULTILINE):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STACCATO_TRANSPORT_PLAINTEXT", "true")
    own, settings = NodeSettings(), load(runtimes=8)
    own.check(settings.runtimes)
    assert own.variables(8)["STACCATO_NATS_CREDENTIALS"] == "/var/lib/staccato-node/r8.nk"
    assert own.variables(8)["STACCATO_TRANSPORT_PORT"] == "7007"
    RuntimeSettings().check()
