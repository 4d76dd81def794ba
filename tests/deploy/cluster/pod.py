"""A pod as a kubelet starts it: the volumes, settings, user, probes and grace period of the template, and of the image
nothing but its programs, which are this machine's."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.deploy.cluster.network import PodNetwork

READY_FAILURES = LIVE_FAILURES = 3  # Kubernetes' default
Described = Mapping[str, Any]


@dataclass(frozen=True)
class Image:
    """Programs of an image: the command before the container's arguments, and its settings.

    `tree` is the folder of the project, in the image at /opt/staccato."""

    command: list[str]
    settings: dict[str, str]
    tree: Path


@dataclass(frozen=True)
class Supplies:
    """What pods get: images by a part of the name, secrets, config maps, and the folders of claims."""

    images: dict[str, Image]
    secrets: Path  # a folder for each secret
    configs: dict[str, dict[str, str]]
    claims: Path


class Pod:
    """A pod with one container, which is started again whenever the container ends."""

    def __init__(self, name: str, template: Described, folder: Path, network: PodNetwork, supplies: Supplies) -> None:
        self.name, self.template, self.folder, self._network = name, template, folder, network
        self.labels: dict[str, str] = template["metadata"]["labels"]
        (self.container,) = template["spec"]["containers"]
        self._supplies = supplies
        self.ready, self.restarts, self.ended = False, 0, False
        self._stack = contextlib.ExitStack()
        self._sandbox = self._stack.enter_context(network.sandbox())
        self.address = network.attach(self._sandbox.pid)
        (folder / "upper").mkdir(parents=True)
        self._environment = self._settings()
        self._mounts = self._prepared()
        self._start()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def port(self, named: str | int) -> int:
        """The number of a port of the container."""
        if isinstance(named, int):
            return named
        return next(int(port["containerPort"]) for port in self.container["ports"] if port["name"] == named)

    def log(self) -> str:
        """The end of what the container has written."""
        return f"{self.name}: {(self.folder / 'log').read_text(errors='replace')[-3000:]}"

    def processes(self) -> list[psutil.Process]:
        """Processes of the container, the container's first process in front."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """End every process of the container at once."""
        if processes := self.processes():
            with contextlib.suppress(psutil.Error):
                processes[0].kill()

    def delete(self) -> int:
        """End the pod as a kubelet does: no new connections, the hook, SIGTERM, and after the grace period SIGKILL.

        Returns the container's exit status."""
        self.ended = True
        self._watching.join(30)
        self.ready = False
        deadline = time.monotonic() + self.template["spec"].get("terminationGracePeriodSeconds", 30)
        time.sleep(self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
        for process in self.processes()[:1]:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait(30)
        self._stack.close()
        return status

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of a job's container. Returns the exit status."""
        self.ended = True
        self._watching.join(30)
        return self._process.wait(timeout_s)

    # ── start ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _settings(self) -> dict[str, str]:
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        said = dict(self._image.settings)
        for entry in self.container.get("env", []):
            said[entry["name"]] = entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        return said

    @property
    def _image(self) -> Image:
        name = self.container["image"]
        return next(image for part, image in self._supplies.images.items() if part in name)

    def _prepared(self) -> list[tuple[str, Path, bool]]:
        """Fill the volumes. Returns the path inside, the path outside, and whether the pod may write there."""
        volumes = {volume["name"]: self._volume(volume) for volume in self.template["spec"].get("volumes", [])}
        found = []
        for mount in self.container.get("volumeMounts", []):
            outside = volumes.get(mount["name"]) or self._claim(mount["name"])
            below = re.sub(r"\$\((\w+)\)", lambda m: self._environment[m[1]], mount.get("subPathExpr", ""))
            below = below or mount.get("subPath", "")
            outside = outside / below
            if not outside.exists():
                outside.mkdir(parents=True)
                self._give(outside, 0o777)
            inside = Path(mount["mountPath"])
            real = inside.parent.resolve() / inside.name  # a link to /run would lead out of the root
            found.append((str(real), outside, not mount.get("readOnly", False)))
        return found

    def _volume(self, volume: Described) -> Path:
        folder = self.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True)
        self._give(folder, 0o777)
        match volume:
            case {"secret": secret}:
                names = {path.name: path.name for path in (self._supplies.secrets / secret["secretName"]).glob("*.*")}
                names = {item["key"]: item["path"] for item in secret["items"]} if "items" in secret else names
                for key, name in names.items():
                    shutil.copy(self._supplies.secrets / secret["secretName"] / key, folder / name)
                    self._give(folder / name, secret.get("defaultMode", 0o644))
            case {"configMap": config}:
                for name, text in self._supplies.configs[config["name"]].items():
                    (folder / name).write_text(text)
            case {"persistentVolumeClaim": claim}:
                return self._supplies.claims / str(claim["claimName"])
            case {"emptyDir": _}:
                pass
            case _:
                raise NotImplementedError(volume)
        return folder

    def _claim(self, name: str) -> Path:
        """A volume of a StatefulSet's template: the pod's own, which outlives the pod."""
        folder = self._supplies.claims / f"{name}-{self.name}"
        if not folder.exists():
            folder.mkdir(parents=True)
            self._give(folder, 0o777)
        return folder

    def _give(self, path: Path, mode: int) -> None:
        os.chown(path, 0, self.template["spec"]["securityContext"]["fsGroup"])
        path.chmod(mode)

    def _start(self) -> None:
        root, image, security = self.folder / "root", self._image, self.template["spec"]["securityContext"]
        root.mkdir(exist_ok=True)
        script = [
            f"mount -t tmpfs tmpfs {self.folder}/upper && mkdir {self.folder}/upper/upper {self.folder}/upper/work",
            "mount -t overlay overlay -o "
            f"lowerdir=/,upperdir={self.folder}/upper/upper,workdir={self.folder}/upper/work {root}",
        ]
        script += [f"mount -t proc proc {root}/proc"] + [f"mount --rbind {at} {root}{at}" for at in ("/sys", "/dev")]
        mounts = [("/opt/staccato", image.tree, False), ("/opt/staccato/.venv", Path(sys.prefix), False)]
        mounts += [("/etc/hosts", self._network.hosts, False)]
        # A home above Python's own files may be closed to other users.
        opened = {str(folder) for folder in Path(sys.executable).resolve().parents} - {"/"}
        script += [f"chmod a+rx {' '.join(f'{root}{folder}' for folder in sorted(opened))}"]
        script += [f"echo user:x:{security['runAsUser']}:{security['runAsGroup']}::/:/bin/sh >> {root}/etc/passwd"]
        for inside, outside, writable in [*mounts, *self._mounts]:
            kind = "mkdir -p" if outside.is_dir() else "touch"
            if not inside.startswith("/opt/staccato/"):
                script += [f"mkdir -p {root}{Path(inside).parent} && {kind} {root}{inside}"]
            script += [f"mount --rbind {outside} {root}{inside}"]
            script += [] if writable else [f"mount -o remount,bind,ro {root}{inside}"]
        script += [f"mount -o remount,bind,ro {root}"]
        user, group = str(security["runAsUser"]), str(security["runAsGroup"])
        confined = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"]
        confined += ["--bounding-set=-all", "--inh-caps=-all", "env", "-i"]
        confined += [f"{key}={value}" for key, value in self._environment.items()]
        run = " && ".join([*script, f'exec chroot {root} env -C /opt/staccato "$@"'])
        words = ["nsenter", f"--net=/proc/{self._sandbox.pid}/ns/net"]
        words += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", run, "sh", *confined]
        with (self.folder / "log").open("ab") as log:
            command = [*words, *image.command, *self.container.get("args", [])]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    # ── probes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Start an ended container again, and follow the probes, until the pod's end."""
        self._network.inside()
        at_once = "startupProbe" not in self.container
        started, failed, due = at_once, {"readinessProbe": 0, "livenessProbe": 0}, dict[str, float]()
        while not self.ended:
            time.sleep(0.2)
            if self._process.poll() is not None and not self.ended and "restartPolicy" not in self.template["spec"]:
                self.ready, started, self.restarts = False, at_once, self.restarts + 1
                time.sleep(1)
                self._start()
            if "readinessProbe" not in self.container:
                self.ready = started
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = self.container.get(kind)
                if probe is None or started == (kind == "startupProbe") or time.monotonic() < due.get(kind, 0.0):
                    continue
                due[kind] = time.monotonic() + probe.get("periodSeconds", 10)
                well = self._succeeds(probe)
                if kind == "startupProbe":
                    started = well
                    continue
                failed[kind] = 0 if well else failed[kind] + 1
                if kind == "readinessProbe":
                    self.ready = (well or self.ready and failed[kind] < READY_FAILURES) and not self.ended
                elif failed[kind] >= probe.get("failureThreshold", LIVE_FAILURES):
                    self.kill()

    def _succeeds(self, probe: Described) -> bool:
        timeout_s = probe.get("timeoutSeconds", 1) + 1  # two busy cores
        match probe:
            case {"exec": {"command": command}}:
                if not (processes := self.processes()):
                    return False
                pid = processes[0].pid
                inside = ["nsenter", f"--mount=/proc/{pid}/ns/mnt", f"--root=/proc/{pid}/root"]
                inside += [f"--net=/proc/{pid}/ns/net", *command]
                path = f"/opt/staccato/deploy/docker:{self._environment['PATH']}"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    settings = self._environment | {"PATH": path}
                    return subprocess.run(inside, env=settings, capture_output=True, timeout=30).returncode == 0
            case {"httpGet": get}:
                with contextlib.suppress(OSError):
                    url = f"http://{self.address}:{self.port(get['port'])}{get['path']}"
                    return bool(urllib.request.urlopen(url, timeout=timeout_s).status < 400)
            case _:
                with contextlib.suppress(OSError):
                    socket.create_connection((self.address, self.port(probe["tcpSocket"]["port"])), timeout_s).close()
                    return True
        return False
