"""A GPU for each runtime, on a host whose `nvidia-smi` is a script of the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.config import load
from gateway.machine.runtimes import MachineRuntimes
from gateway.ops import doctor, gpus, up
from runtime.memory import numa

SAID = """\
0, GPU-aa, NVIDIA H200, 143771, 00000000:3B:00.0
1, GPU-bb, NVIDIA H200, 143771, 00000001:5E:00.0
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with two GPUs beside the nodes 0 and 1, with vLLM's build for CUDA. Returns the kernel's folder."""
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{SAID}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    devices = tmp_path / "devices"
    for address, node in (("0000:3b:00.0", "0"), ("0001:5e:00.0", "1")):
        (devices / address).mkdir(parents=True)
        (devices / address / "numa_node").write_text(f"{node}\n")
    find = gpus.found
    monkeypatch.setattr(gpus, "found", lambda: find(devices))
    monkeypatch.setattr(gpus, "engine_for_gpus", lambda: True)
    return devices


def environments(tmp_path: Path, **given: object) -> list[dict[str, str]]:
    settings, devices = gpus.with_gpus(load(data=tmp_path, **given))
    names = up.runtime_ids(settings)
    machine = MachineRuntimes(settings, names, 0, -1, devices, lambda name: {})
    return [dict(machine.child(name).environment) for name in names[: settings.runtimes]]


def test_each_gpu_has_a_runtime_that_sees_no_other(host: Path, tmp_path: Path) -> None:
    first, second = environments(tmp_path, cache_pinned=8 << 30)
    assert (first["STACCATO_RUNTIME_ID"], first["CUDA_VISIBLE_DEVICES"]) == ("r1", "GPU-aa")
    assert (second["STACCATO_RUNTIME_ID"], second["CUDA_VISIBLE_DEVICES"]) == ("r2", "GPU-bb")
    assert [told["STACCATO_NUMA_NODE"] for told in (first, second)] == ["0", "1"]
    assert [told["STACCATO_CACHE_PINNED"] for told in (first, second)] == [str(4 << 30)] * 2


def test_named_gpus_alone_are_taken_in_their_order(host: Path, tmp_path: Path) -> None:
    assert [told["CUDA_VISIBLE_DEVICES"] for told in environments(tmp_path, gpus="1")] == ["GPU-bb"]
    assert [told["CUDA_VISIBLE_DEVICES"] for told in environments(tmp_path, gpus="GPU-bb,0")] == ["GPU-bb", "GPU-aa"]
    assert [told["CUDA_VISIBLE_DEVICES"] for told in environments(tmp_path, runtimes=1)] == ["GPU-aa"]


def test_a_runtime_of_two_gpus_sees_both_and_is_bound_to_a_node_only_if_both_have_the_node(
    host: Path, tmp_path: Path
) -> None:
    (told,) = environments(tmp_path, tensor_parallel=2)
    assert (told["CUDA_VISIBLE_DEVICES"], told["STACCATO_TENSOR_PARALLEL"]) == ("GPU-aa,GPU-bb", "2")
    assert "STACCATO_NUMA_NODE" not in told
    (host / "0001:5e:00.0/numa_node").write_text("0\n")
    (told,) = environments(tmp_path, tensor_parallel=2)
    assert told["STACCATO_NUMA_NODE"] == "0"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"gpus": "0,7"}, "there is no GPU 7, this host has 0, 1"),
        ({"gpus": "1,1"}, "name each GPU once"),
        ({"runtimes": 3}, "3 runtimes need a GPU each, and there are 2"),
        ({"runtimes": 2, "tensor_parallel": 2}, "2 runtimes need 2 GPUs each, and there are 2"),
        ({"tensor_parallel": 4}, "TENSOR_PARALLEL=4 is more than the 2 GPUs of this host"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    host: Path, tmp_path: Path, given: dict[str, object], sentence: str
) -> None:
    with pytest.raises(gpus.NoSuchGpu, match=sentence):
        environments(tmp_path, **given)


def test_doctor_shows_each_gpu_and_its_node(host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = doctor.devices(load(data=tmp_path))
    assert shown.ok and shown.found == "0 NVIDIA H200 143771 MiB, node 0; 1 NVIDIA H200 143771 MiB, node 1"
    wrong = doctor.devices(load(data=tmp_path, gpus="5"))
    assert not wrong.ok and "no GPU 5" in wrong.found + wrong.fix
    monkeypatch.setattr(gpus, "engine_for_gpus", lambda: False)
    assert "2 of this host are not used" in doctor.devices(load(data=tmp_path)).found


def test_without_gpus_the_runtimes_are_as_many_as_the_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.found() == []
    (told,) = environments(tmp_path)
    assert "STACCATO_NUMA_NODE" not in told
    with pytest.raises(gpus.NoSuchGpu, match="none that `nvidia-smi` shows"):
        environments(tmp_path, gpus="0")


def test_a_thread_is_bound_to_processors_that_the_node_has_and_the_process_may_use(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    (tmp_path / "node3").mkdir()
    (tmp_path / "node3/cpulist").write_text(f"{min(mine)},900-902\n")
    assert numa.processors(3, tmp_path) == {min(mine), 900, 901, 902}
    try:
        assert numa.bind(-1, tmp_path) == numa.bind(4, tmp_path) == set() and os.sched_getaffinity(0) == mine
        assert numa.bind(3, tmp_path) == os.sched_getaffinity(0) == {min(mine)}
    finally:
        os.sched_setaffinity(0, mine)
