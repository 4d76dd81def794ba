"""A platform with a part that can't start: operators read the part's name and the cause at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT, free_port
from tests.e2e.conftest import READY_S, Platform

STACCATO = str(Path(sys.executable).with_name("staccato"))


@pytest.fixture
def source_without_library(tmp_path: Path) -> Path:
    """A folder with the program, but without the memory library built by `make -C csrc`."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("gateway", "runtime", "store", "migrations", "deploy"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def broken(tmp_path: Path, source_without_library: Path) -> Iterator[Platform]:
    platform = Platform(tmp_path / "data", free_port(), {"PYTHONPATH": str(source_without_library)})
    command = [STACCATO, "up", "--data", str(platform.data), "--port", str(platform.port)]
    with (tmp_path / "up.log").open("w") as log:
        platform.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | platform.settings)
    yield platform
    platform.process.send_signal(signal.SIGTERM)
    platform.process.wait(60)


def until(said: object, timeout_s: float = READY_S) -> None:
    assert callable(said)
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if said():
                return
        assert time.monotonic() < deadline_s, f"not reached within {timeout_s} s"
        time.sleep(0.1)


def test_a_missing_memory_library_is_named_by_up_by_readyz_and_by_doctor(broken: Platform, tmp_path: Path) -> None:
    """Formerly the device process restarted silently for ever, and the only message was `no runtime is up`."""
    up_log = tmp_path / "up.log"
    until(lambda: "r1: its device process ended before it was ready" in up_log.read_text())
    assert "libstaccato_memory.so can't be loaded" in up_log.read_text()
    assert "build it with `make -C csrc`" in up_log.read_text()

    until(lambda: httpx.get(f"{broken.url}/readyz", timeout=5).json()["dying"])
    ready = httpx.get(f"{broken.url}/readyz", timeout=5)
    (dying,) = ready.json()["dying"]
    assert ready.status_code == 503 and "no runtime is up" in ready.json()["missing"]
    assert (dying["role"], dying["error"]) == ("r1 device", "LibraryMissing") and "line" not in dying
    (dying,) = broken.get("/readyz").json()["dying"]
    assert "libstaccato_memory.so can't be loaded" in dying["line"]

    environment = os.environ | {"STACCATO_DATA": str(broken.data), "STACCATO_PORT": str(broken.port)}
    doctor = subprocess.run([STACCATO, "doctor"], env=environment, capture_output=True, text=True)
    (line,) = [line for line in doctor.stdout.splitlines() if " platform " in line]
    assert line.startswith("FAIL") and "r1 device" in line and "libstaccato_memory.so can't be loaded" in line


def test_a_platform_without_a_runtime_says_so_in_seconds(tmp_path: Path) -> None:
    """`staccato up --runtimes 0`, as for a fleet: ready, and no request waits for a runtime never started."""
    platform = Platform(tmp_path / "data", free_port())
    try:
        platform.start("--runtimes", "0")
        platform.until(lambda: "no runtime is started here" in (tmp_path / "data.up.log").read_text())
        assert platform.get("/readyz").json() == {
            "ready": True,
            "missing": [],
            "runtimes": 0,
            "dying": [],
            "degraded": [],
        }
        platform.tenant("acme")
        platform.model("faq", ROOT / "deploy" / "demo" / "models" / "faq")
        command = [
            STACCATO,
            "deploy",
            "faq",
            "--model",
            "faq",
            "--tenant",
            "acme",
            "--timeout",
            "4",
            "--dtype",
            "float32",
        ]
        environment = os.environ | {"STACCATO_DATA": str(platform.data), "STACCATO_URL": platform.url}
        deploy = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert deploy.returncode != 0
        assert "no runtime is up: start one with `staccato runtime`" in deploy.stderr
        began_s = time.monotonic()
        body = {"model": "faq", "messages": [{"role": "user", "content": "How do I pay?"}]}
        refused = platform.request("POST", "/v1/chat/completions", body, key=platform.keys["acme"])
        assert time.monotonic() - began_s < 20
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_runtime"
        assert "no runtime is up: the operator starts one" in refused.json()["error"]["message"]
    finally:
        assert platform.stop() == 0
