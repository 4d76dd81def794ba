"""Shells complete commands, options, choices and the names of deployments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from gateway.config import Settings
from tests.conftest import ROOT, free_port
from tests.gateway.cli.test_cli import Staccato
from tests.gateway.cli.test_cli import deployed as deployed
from tests.gateway.cli.test_cli import hub as hub
from tests.gateway.cli.test_cli import settings as settings
from tests.gateway.cli.test_cli import staccato as staccato
from tests.gateway.cli.test_cli import tenant as tenant

BASH = """
eval "$(staccato completion bash)"
COMP_WORDS=(staccato {words}) COMP_CWORD={place}
_staccato_completion staccato
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(*words: str, **settings: str) -> list[str]:
    """Completions that bash offers for the last of `words`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("STACCATO_")}
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    script = BASH.format(words=" ".join(word or "''" for word in words), place=len(words))
    environment = inherited | {"PATH": path, "PYTHONPATH": str(ROOT)} | settings
    ran = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    return ran.stdout.split()


def test_commands_and_options_are_completed() -> None:
    assert completed("de") == ["deploy"]
    assert completed("tenant", "cr") == ["create"]
    assert completed("deploy", "mine", "--prio") == ["--priority"]
    assert completed("completion", "") == ["bash", "zsh", "fish"]


def test_the_names_of_deployments_are_completed(settings: Settings, deployed: str) -> None:
    told = {"STACCATO_DATA": str(settings.data), "STACCATO_PORT": str(settings.port)}
    assert completed("chat", deployed[:-2], **told) == [deployed]


def test_without_a_gateway_nothing_is_offered_and_nothing_is_said(tmp_path: Path) -> None:
    assert completed("chat", "m", STACCATO_DATA=str(tmp_path), STACCATO_PORT=str(free_port())) == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_their_own(staccato: Staccato, shell: str, tmp_path: Path) -> None:
    script = staccato("completion", shell)
    assert script.code == 0 and f"complete_{shell}" in script.out and "_STACCATO_COMPLETE" in script.out
    if shutil.which(shell):
        (tmp_path / "script").write_text(script.out)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")]).returncode == 0


def test_an_unknown_shell_is_refused(staccato: Staccato) -> None:
    ran = staccato("completion", "tcsh")
    assert ran.code == 2 and "bash" in ran.err
