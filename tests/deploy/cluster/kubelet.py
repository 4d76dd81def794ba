"""A cluster of one machine for rendered objects of the chart: workloads, their pods, and services.

The cluster does the work of Kubernetes' controllers for the objects, in the controllers' order: a Deployment's new pod
is ready before an old pod ends; a StatefulSet changes the pod with the highest number first, one pod at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.deploy.cluster.network import PodNetwork
from tests.deploy.cluster.pod import Pod, Supplies

Object = Mapping[str, Any]
RESTARTS_MAX = 5  # of a pod that becomes no more ready
READY_S = 300.0  # four processes may import vLLM at once, on two cores


class Cluster:
    def __init__(self, folder: Path, supplies: Supplies, network: PodNetwork) -> None:
        self.folder, self._supplies, self._network = folder, supplies, network
        self._objects: dict[tuple[str, str], Object] = {}
        self.pods: dict[str, list[Pod]] = {}  # by workload
        self.ports: dict[str, int] = {}  # ports of this host, by service
        self._count = 0

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, supplies: Supplies) -> Iterator[Cluster]:
        with PodNetwork(folder).up() as network:
            cluster = cls(folder, supplies, network)
            try:
                yield cluster
            finally:
                pods = [pod for pods in cluster.pods.values() for pod in pods]
                with ThreadPoolExecutor(max(1, len(pods))) as pool:
                    list(pool.map(Pod.delete, pods))

    def apply(self, objects: list[Object], only: str = "") -> None:
        """Bring the objects about, jobs first: the chart's jobs are hooks before an upgrade.

        `only`: part of the names of workloads to be brought about. Returns when all pods are ready."""
        mine = [one for one in objects if only in one["metadata"]["name"]]
        for one in objects:
            if one["kind"] == "ConfigMap":
                self._supplies.configs[one["metadata"]["name"]] = one["data"]
            if one["kind"] == "Service" and one["metadata"]["name"] not in self.ports:
                self._serve(one)
        for kind in ("Job", "StatefulSet", "Deployment"):
            for one in (one for one in mine if one["kind"] == kind):
                self._bring_about(one)
        self.await_ready()

    def scale(self, workload: str, replicas: int) -> None:
        """Change the number of pods. A StatefulSet's pods with the highest numbers go, each after the pod above."""
        kind, one = self._workload(workload)
        self._objects[kind, workload] = {**one, "spec": {**one["spec"], "replicas": replicas}}
        while len(self.pods[workload]) > replicas:
            self._end(workload, self.pods[workload][-1])
        while len(self.pods[workload]) < replicas:
            self._begin(workload)
        self.await_ready()

    def delete(self, workload: str, pod: Pod) -> Pod:
        """Delete a pod, as a drained node does. Returns the next pod in the place, which may not be ready yet."""
        name = pod.name if self._workload(workload)[0] == "StatefulSet" else ""
        self._end(workload, pod)
        return self._begin(workload, name)

    def remove(self, workload: str) -> None:
        """Delete a workload that a release no longer has, the pod with the highest number first."""
        for pod in reversed([*self.pods[workload]]):
            self._end(workload, pod)
        del self._objects[self._workload(workload)[0], workload], self.pods[workload]

    def await_ready(self, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while waiting := [pod.name for pods in self.pods.values() for pod in pods if not pod.ready]:
            assert time.monotonic() < deadline, f"not ready within {timeout_s} s: {waiting}"
            lost = [pod.log() for pods in self.pods.values() for pod in pods if pod.restarts > RESTARTS_MAX]
            assert not lost, lost
            time.sleep(0.2)

    # ── workloads ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _bring_about(self, one: Object) -> None:
        kind, name = one["kind"], one["metadata"]["name"]
        before = self._objects.get((kind, name))
        self._objects[kind, name] = one
        if kind == "Job":
            if before is None or before != one:
                job = self._pod(name, name)
                assert job.wait(one["spec"]["activeDeadlineSeconds"]) == 0, job.log()
                job.delete()
            return
        self.pods.setdefault(name, [])
        if before is not None and before["spec"]["template"] != one["spec"]["template"]:
            self._roll(kind, name)
        self._scale_up(name, one["spec"]["replicas"], in_order=one["spec"].get("podManagementPolicy") != "Parallel")

    def _scale_up(self, workload: str, replicas: int, in_order: bool) -> None:
        while len(self.pods[workload]) < replicas:
            pod = self._begin(workload)
            if in_order and self._workload(workload)[0] == "StatefulSet":
                self._await(pod)

    def _roll(self, kind: str, workload: str) -> None:
        for old in reversed([*self.pods[workload]]):
            if kind == "Deployment":
                self._await(self._begin(workload))
                self._end(workload, old)
            else:
                self._await(self.delete(workload, old))

    def _await(self, pod: Pod) -> None:
        deadline = time.monotonic() + READY_S
        while not pod.ready:
            assert time.monotonic() < deadline, f"{pod.name} is not ready within {READY_S} s"
            time.sleep(0.2)

    def _workload(self, name: str) -> tuple[str, Object]:
        return next((kind, one) for (kind, at), one in self._objects.items() if at == name)

    def _begin(self, workload: str, name: str = "") -> Pod:
        kind, one = self._workload(workload)
        taken = {pod.name for pod in self.pods[workload]}
        if kind == "StatefulSet":
            name = name or next(f"{workload}-{n}" for n in range(len(taken) + 1) if f"{workload}-{n}" not in taken)
        pod = self._pod(workload, name or f"{workload}-{self._count:05x}")
        self.pods[workload].append(pod)
        self.pods[workload].sort(key=lambda pod: pod.name)
        if "serviceName" in one["spec"]:
            self._network.name(f"{pod.name}.{one['spec']['serviceName']}", pod.address)
        return pod

    def _pod(self, workload: str, name: str) -> Pod:
        self._count += 1
        template = self._workload(workload)[1]["spec"]["template"]
        return Pod(name, template, self.folder / f"pod-{self._count}-{name}", self._network, self._supplies)

    def _end(self, workload: str, pod: Pod) -> None:
        pod.delete()
        self.pods[workload].remove(pod)

    # ── services ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, service: Object) -> None:
        name, spec = service["metadata"]["name"], service["spec"]
        if spec.get("clusterIP") == "None":  # pods are found by their own names
            self.ports[name] = 0
            return
        (port,) = spec["ports"]

        def endpoints() -> list[tuple[str, int]]:
            chosen = spec["selector"].items()
            pods = [pod for pods in list(self.pods.values()) for pod in list(pods) if chosen <= pod.labels.items()]
            return [(pod.address, pod.port(port["targetPort"])) for pod in pods if pod.ready]

        self.ports[name] = self._network.serve(name, port["port"], endpoints)
