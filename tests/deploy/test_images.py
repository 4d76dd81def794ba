"""A single place names foreign images, and a release refuses a tag without a digest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.deploy.test_compose import FILE
from tests.deploy.tools import DEPLOY

LOCK = DEPLOY / "helm/staccato/images.lock"
LINES = dict(re.findall(r"^([A-Z]+_IMAGE)=([^@\n]+)", LOCK.read_text(), re.MULTILINE))


def images(lock: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`path`: the only folder with programs."""
    command = [sys.executable, str(DEPLOY / "images.py"), "--lock", str(lock), *arguments]
    environment = os.environ | ({"PATH": str(path)} if path else {})
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.fixture
def loose(tmp_path: Path) -> Path:
    """A lock without digests."""
    lock = tmp_path / "images.lock"
    lock.write_text("# images\n" + "".join(f"{name}={image}\n" for name, image in LINES.items()))
    return lock


def registry(folder: Path, tool: str, answer: str) -> Path:
    """Make a folder with a program named `tool`, in place of the real tool that asks registries; returns the folder."""
    folder.mkdir()
    program = folder / tool
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    return folder


def test_a_release_refuses_tags_without_a_digest(loose: Path) -> None:
    ran = images(loose, "check")
    assert ran.returncode == 1 and ran.stderr.startswith(
        f"error: {len(LINES)} images have a tag and no digest (python:"
    )
    assert images(loose, "get", "PYTHON_IMAGE").returncode == 1, "the Dockerfile's base has to have one, too"


@pytest.mark.parametrize("tool", ["crane", "skopeo", "docker"])
def test_digests_are_asked_for_and_written_beside_their_tags(loose: Path, tmp_path: Path, tool: str) -> None:
    digest = "sha256:" + "5" * 64
    path = registry(tmp_path / "bin", tool, f'for last; do :; done; echo "$last" >> {tmp_path}/asked; echo {digest}')
    for _ in range(2):  # again, when the lock has digests already
        assert images(loose, "resolve", path=path).returncode == 0
    asked = (tmp_path / "asked").read_text().replace("docker://", "").split()
    assert asked == [*LINES.values()] * 2
    assert images(loose, "check").returncode == 0
    assert images(loose, "get", "PYTHON_IMAGE").stdout == f"{LINES['PYTHON_IMAGE']}@{digest}\n"
    assert loose.read_text().startswith("# images\n")


@pytest.mark.parametrize("answer", ["echo unauthorized >&2; exit 1", "echo latest", "true"])
def test_what_is_no_digest_is_not_written(loose: Path, tmp_path: Path, answer: str) -> None:
    before = loose.read_text()
    ran = images(loose, "resolve", path=registry(tmp_path / "bin", "crane", answer))
    assert ran.returncode == 1 and f"crane gives no digest for {LINES['PYTHON_IMAGE']}" in ran.stderr
    assert loose.read_text() == before


def test_without_a_tool_that_asks_registries_it_is_one_sentence(loose: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran = images(loose, "resolve", path=tmp_path / "empty")
    assert ran.returncode == 1 and ran.stderr == (
        "error: none of crane, skopeo, docker is installed: install one, which asks the registries for digests\n"
    )


def test_a_release_checks_before_it_builds_and_makes_the_bill_of_materials() -> None:
    ran = subprocess.run(["make", "--dry-run", "release"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout
    places = [said.index(step) for step in ("build/sbom.json", "deploy/images.py check", "docker build")]
    assert places == sorted(places)
    assert "deploy/images.py get PYTHON_IMAGE" in said


def test_compose_the_chart_and_the_dockerfile_name_the_images_of_the_lock() -> None:
    services = yaml.safe_load(FILE.read_text())["services"]
    named = dict(re.findall(r"\$\{([A-Z]+_IMAGE):-(\S+)\}", " ".join(one["image"] for one in services.values())))
    values = yaml.safe_load((DEPLOY / "helm/staccato/values.yaml").read_text())
    named |= {f"{name.upper()}_IMAGE": values[name]["image"] for name in ("nats", "postgres")}
    named |= {"PYTHON_IMAGE": re.findall(r"^ARG PYTHON=(.+)$", (DEPLOY / "docker/Dockerfile").read_text(), re.M)[0]}
    assert named == LINES
