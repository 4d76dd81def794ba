"""Common ground of the tests: a real NATS server, tiny models with random weights."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

# A property holds on a slow, busy machine as well: no example has a deadline. The profile builds on the current
# profile, because hypothesis chooses a reproducible profile where the variable CI is set.
settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")

# Waiting threads of torch give the core away: beside a second load, a test of engines took 38 s with spinning threads,
# and 4.5 s with these settings. The variables reach every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")
# A device process has a thread for every two processors. Two threads spend twice the processor time of one thread on
# models as small as those of tests. Benches, which import this file as well, choose for themselves.
if "PYTEST_VERSION" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # No test asks a server with a public certificate. A client of HTTP would read the file of public authorities, for
    # 40 ms of a processor: tests make thousands of clients, and platforms are asked ten times a second.
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)  # without certificates; a folder is searched when needed

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Freeze vLLM's modules, as the product's processes do: else each end of an engine visits every object, for half a
    second. With the modules frozen, tests/runtime/engine/test_golden.py took 31 s of a processor instead of 67 s."""
    if "vllm" in sys.modules:
        gc.collect()
        gc.freeze()


def pytest_runtest_call(item: pytest.Item) -> None:
    """Let Python tell where a process of tests crashes. A library of xgrammar takes the signals when imported, and
    writes to the standard error that pytest captures: a worker of pytest-xdist then ends without a word."""
    if "tvm_ffi" in sys.modules and (fd := item.config.stash.get(fault_handler_stderr_fd_key, None)) is not None:
        faulthandler.disable()  # a handler that counts as enabled is not set again
        faulthandler.enable(fd)


def with_hook(folder: Path) -> str:
    """Return a PYTHONPATH by which a process loads the sitecustomize.py of a folder, and the project."""
    return os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(count: int) -> list[int]:
    """Return different free ports: of `free_port` called again and again, two may be the same."""
    with contextlib.ExitStack() as opened:
        probes = [opened.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


async def soon(true: Callable[[], bool]) -> None:
    """Return when `true()` is true; fail after 180 s."""
    async with asyncio.timeout(180):
        while not true():
            await asyncio.sleep(0.01)


class NatsServer:
    """A nats-server child with JetStream on a free port. `kill` and a new `start` keep the port and the data."""

    def __init__(self, folder: Path, authorization: str = "") -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "nats.conf"
        self.configure(authorization)
        self._process: subprocess.Popen[bytes] | None = None

    def configure(self, authorization: str) -> None:
        """Write the configuration, which the server reads at its next start."""
        store = self._config.parent / "js"
        own = f'listen: "127.0.0.1:{self.port}"\nmax_payload: 8MB\njetstream {{ store_dir: "{store}" }}\n'
        self._config.write_text(own + authorization)

    def start(self) -> None:
        binary = Path(sysconfig.get_path("scripts")) / "nats-server"
        self._process = subprocess.Popen([binary, "-c", self._config], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
                return
            time.sleep(0.02)
        raise RuntimeError("nats-server did not start")

    def reload(self) -> None:
        """Have the server read its configuration again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of three architectures with random float32 weights, whose greedy output does not repeat itself."""
    from deploy.demo.random_weights import write_random

    folder = tmp_path_factory.mktemp("random-models")
    return {name: write_random(folder / name, name, seed=seed) for seed, name in enumerate(("llama", "qwen3", "opt"))}
