"""Images built from the Dockerfile without a daemon, and their containers run as the compose file says.

`Storage` has buildah's images below a folder of its own. The base is made from Debian's packages by debootstrap: tests
ask no registry. `Network` is a network namespace with loopback alone, in which the names of services are found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from tests.deploy.tools import DEPLOY

BASE = "localhost/base"
PACKAGES = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates"
TOOLS = ("buildah", "debootstrap", "unshare", "nsenter", "ip")


def needed() -> None:
    """Skip the test where images can't be built."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"images are built by root with {', '.join(missing or TOOLS)}")


@dataclass
class Storage:
    """Images of buildah."""

    folder: Path

    def buildah(self, *words: str | Path) -> str:
        places = ["--root", self.folder / "store", "--runroot", self.folder / "run"]
        ran = subprocess.run(["buildah", *places, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return ran.stdout.strip()

    def make_base(self) -> None:
        """Make the image BASE: Debian with Python, from the packages that this machine installs from."""
        root = self.folder / "base"
        sources = list(Path("/etc/apt/sources.list.d").glob("*.sources"))
        text = "\n".join(source.read_text() for source in sources) or Path("/etc/apt/sources.list").read_text()
        mirror, suite = re.findall(r"https?://\S+", re.sub(r"^#.*$", "", text, flags=re.MULTILINE))[0], "bookworm"
        make = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, root, mirror]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        for file in (*sources, *Path("/etc/apt/apt.conf.d").glob("99*")):
            shutil.copy(file, root / file.relative_to("/"))
        if sources:
            (root / "etc/apt/sources.list").unlink(missing_ok=True)
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, root, "/")
        self.buildah("commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(root)

    def build(self, target: str) -> str:
        """Build the Dockerfile's image `target`. Returns the image's name."""
        image = f"localhost/staccato-{target}"
        isolation = ["--isolation", "chroot", "--network", "host", "--layers", "--format", "docker"]
        ignored = ["--ignorefile", DEPLOY / "docker/Dockerfile.dockerignore"]
        index = os.environ.get("TORCH_INDEX")
        given = ["--build-arg", f"PYTHON={BASE}", *(["--build-arg", f"TORCH_INDEX={index}"] if index else [])]
        volumes = [word for mount in pip_of_this_machine(self.folder) for word in ("--volume", mount)]
        file = ["--file", DEPLOY / "docker/Dockerfile", "--target", target, "--tag", image]
        self.buildah("build", *isolation, *ignored, *given, *volumes, *file, str(ROOT))
        return image

    def settings(self, image: str) -> dict[str, Any]:
        """Environment, user, command and health check of an image."""
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", image))["Docker"]["config"]
        return found

    def layers(self, image: str) -> list[int]:
        """Bytes of each layer of an image, from the base upwards."""
        known = {
            each["id"]: each for each in json.loads(next(self.folder.glob("store/*-layers/layers.json")).read_text())
        }
        (images,) = self.folder.glob("store/*-images/images.json")
        (at,) = (each["layer"] for each in json.loads(images.read_text()) if f"{image}:latest" in each.get("names", ()))
        found: list[int] = []
        while at:
            found.append(known[at].get("diff-size", 0))
            at = known[at].get("parent")
        return found[::-1]

    @contextlib.contextmanager
    def mounted(self, image: str, points: list[str]) -> Iterator[Path]:
        """The image's files, with a folder at each of `points` to mount volumes at."""
        container = self.buildah("from", "--pull-never", image)
        root = Path(self.buildah("mount", container))
        for point in points:
            (root / point.lstrip("/")).mkdir(parents=True, exist_ok=True)
        try:
            yield root
        finally:
            self.buildah("umount", container)
            self.buildah("rm", container)


def pip_of_this_machine(folder: Path) -> list[str]:
    """Volumes by which pip in a build asks the indexes that pip asks here."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    options = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", said.stdout, re.MULTILINE))
    options.pop("disable-pip-version-check", None)
    (folder / "pip.conf").write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in options.items()))
    indexes = {Path(path).parent for text in options.values() for path in re.findall(r"file://[^/\s]*(/\S+)", text)}
    paths = indexes | {Path(text) for text in options.values() if text.startswith("/")}
    known = [f"{path}:{path}:ro" for path in sorted(paths) if path.exists()]
    return [f"{folder / 'pip.conf'}:/etc/pip.conf:ro", *known]


@dataclass
class Network:
    """A network namespace with loopback alone. Each name in `names` is this network's 127.0.0.1."""

    folder: Path
    names: tuple[str, ...]
    hosts: Path = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = self.folder / "hosts"
        self.hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *self.names)))

    @contextlib.contextmanager
    def up(self) -> Iterator[Network]:
        with subprocess.Popen(["unshare", "--net", "sleep", "3600"]) as held:
            while Path(f"/proc/{held.pid}/comm").read_text() != "sleep\n":
                assert held.poll() is None
            self._inside = ["nsenter", f"--net=/proc/{held.pid}/ns/net"]
            subprocess.run([*self._inside, "ip", "link", "set", "lo", "up"], check=True)
            try:
                yield self
            finally:
                held.kill()

    def command(self, *words: str | Path) -> list[str]:
        return [*self._inside, *map(str, words)]

    def ask(self, method: str, url: str, key: str, body: object = None) -> tuple[int, Any]:
        """Send a request from within the network. Returns the status and the answer's JSON."""
        words = ["curl", "--silent", "--request", method, "--header", f"authorization: Bearer {key}"]
        words += ["--header", "content-type: application/json", "--write-out", "\n%{http_code}", url]
        words += [] if body is None else ["--data", json.dumps(body)]
        ran = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=120)
        text, _, status = ran.stdout.rpartition("\n")
        return int(status), json.loads(text) if text else None


@dataclass
class Container:
    """A container that runs: confined as in the compose file, with a read-only root and without capabilities."""

    process: subprocess.Popen[bytes]
    health: list[str]

    @classmethod
    def start(
        cls,
        root: Path,
        image: Mapping[str, Any],
        network: Network,
        arguments: list[str],
        environment: dict[str, str],
        volumes: Mapping[str, tuple[Path, bool]],
    ) -> Container:
        """`volumes`: by the path inside, the path outside and whether the container may write."""
        mounts = [f"mount --bind {root} {root}"]
        for inside, (outside, writable) in {"/etc/hosts": (network.hosts, False), **volumes}.items():
            mounts += [f"mount --bind {outside} {root}{inside}"]
            mounts += [] if writable else [f"mount -o remount,bind,ro {root}{inside}"]
        mounts += [f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp", f"mount -t proc proc {root}/proc"]
        mounts += [
            f"mount --rbind /sys {root}/sys",
            f"mount --rbind /dev {root}/dev",
            f"mount -o remount,bind,ro {root}",
        ]
        user, _, group = image["User"].partition(":")
        confined = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"]
        confined += ["--bounding-set=-all", "--inh-caps=-all"]
        settings = dict(pair.split("=", 1) for pair in image["Env"]) | environment
        command = [*image["Entrypoint"], *(arguments or image["Cmd"])]
        script = " && ".join([*mounts, f'exec chroot {root} env -C {image["WorkingDir"]} "$@"'])
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", script, "sh", *confined]
        said = [f"{key}={value}" for key, value in settings.items()]
        process = subprocess.Popen(network.command(*words, "env", "-i", *said, *command))
        return cls(process, image["Healthcheck"]["Test"][1:])

    def _pid(self) -> int:
        """The first process of the container."""
        (only,) = psutil.Process(self.process.pid).children()
        return int(only.pid)

    def healthy(self) -> bool:
        """Whether the image's health check succeeds in the container."""
        assert self.process.poll() is None, "the container ended"
        with contextlib.suppress(ValueError, psutil.Error):
            pid = self._pid()
            environment = dict(os.environ) | psutil.Process(pid).environ()
            inside = ["nsenter", f"--mount=/proc/{pid}/ns/mnt", f"--root=/proc/{pid}/root", *self.health]
            return subprocess.run(inside, env=environment, capture_output=True).returncode == 0
        return False

    def kill(self) -> None:
        """End every process of the container at once: the namespace of processes ends with the first process."""
        with contextlib.suppress(ValueError, psutil.Error):
            psutil.Process(self._pid()).kill()
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        """End the container as an engine does, with SIGTERM to the first process. Returns the exit status."""
        if self.process.poll() is None:
            with contextlib.suppress(ValueError, psutil.Error):
                psutil.Process(self._pid()).terminate()
        return self.process.wait(90)
