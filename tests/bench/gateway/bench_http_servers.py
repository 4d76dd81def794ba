"""HTTP servers for the gateway: CPU time of an event, slow clients, clients that leave.

An ASGI application (`http_servers/app.py`) streams an event to each of 200 clients every 20 ms, under each server in
turn: uvicorn, uvicorn with the gateway's limits of connections, hypercorn and granian, the latter two also over HTTP/2
without TLS. Measured are the CPU time of an event in all processes of a server and the gaps between events. A client
that reads nothing shows how much of an answer a server takes for the client within 12 s, and whether the server ends
the connection; a client that leaves shows when the application hears of the leaving.

`python tests/bench/gateway/bench_http_servers.py`
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.bench.gateway.servers import ComparedServer  # noqa: E402
from tests.bench.gateway.streams import Client, Job  # noqa: E402
from tests.bench.installed import libraries  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402
from tests.conftest import free_port  # noqa: E402

INSTALLED = ["granian==2.8.9", "hypercorn==0.18.0", "h2==4.4.1", "hpack==4.2.0", "hyperframe==6.1.0"]
INSTALLED += ["priority==2.0.0", "wsproto==1.3.2"]
FOLDER = "tests.bench.gateway.http_servers"
APP = f"{FOLDER}.app:app"
STREAMS, CONNECTIONS, TOKENS = 200, 4, 256  # connections of HTTP/2
ROUNDS = 5
UNREAD_S = 12.0  # the gateway's limits end an unread connection after 8 s


class Served(ComparedServer):
    """An HTTP server with the application."""

    def __init__(self, name: str, port: int, folder: Path, command: list[str], libraries: Path) -> None:
        path = os.pathsep.join([str(libraries), str(ROOT)])
        super().__init__(port, folder / f"{port}.log", command, os.environ | {"PYTHONPATH": path})
        self.name = name

    def _ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 2):
            return True  # a server for HTTP/2 alone answers no other health check
        return False

    def _processes(self) -> list[psutil.Process]:
        return [self.front, *self.front.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU time of the server's processes."""
        times = [process.cpu_times() for process in self._processes()]
        return sum((each.user + each.system for each in times), 0.0)

    def resident_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._processes())

    def noted(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/noted", timeout=5) as answer:
            return json.load(answer)


def commands(port: int) -> dict[str, list[str]]:
    uvicorn = ["-m", "uvicorn", APP, "--loop", "uvloop", "--http", "httptools", "--ws", "none", "--no-access-log"]
    hypercorn = ["-m", "hypercorn", APP, "--worker-class", "uvloop", "--bind", f"127.0.0.1:{port}"]
    granian = ["-m", "granian", APP, "--interface", "asgi", "--loop", "uvloop", "--no-ws", "--port", str(port)]
    return {
        "uvicorn": [*uvicorn, "--port", str(port), "--log-level", "warning"],
        "uvicorn, the gateway's": ["-m", f"{FOLDER}.bounded", str(port)],
        "hypercorn": hypercorn,
        "hypercorn, HTTP/2": hypercorn,
        "granian": [*granian, "--http", "1"],
        "granian, HTTP/2": [*granian, "--http", "2"],
    }


@contextlib.contextmanager
def served(name: str, folder: Path, libraries: Path) -> Iterator[Served]:
    port = free_port()
    server = Served(name, port, folder, [sys.executable, *commands(port)[name]], libraries)
    server.start()
    try:
        yield server
    finally:
        server.stop()


# ── the cost of an event ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Measured:
    us_per_event: list[float] = field(default_factory=list)
    gap_ms_p50: list[float] = field(default_factory=list)
    gap_ms_p99: list[float] = field(default_factory=list)

    def add(self, cpu_s: float, events: int, p50: float, p99: float) -> None:
        self.us_per_event.append(cpu_s / events * 1e6)
        self.gap_ms_p50.append(p50)
        self.gap_ms_p99.append(p99)


def measure_streams(server: Served, client: Client, into: Measured) -> None:
    before_s = server.cpu_s()
    made = client.run(Job(server.port, "none", ["tiny"], STREAMS, 1, 0, tokens=TOKENS))
    into.add(server.cpu_s() - before_s, made.tokens, made.gap_ms.p50, made.gap_ms.p99)


def measure_http2(server: Served, libraries: Path, into: Measured) -> None:
    command = [sys.executable, str(Path(__file__).parent / "http_servers" / "http2.py"), str(server.port)]
    command += [str(number) for number in (CONNECTIONS, STREAMS // CONNECTIONS, TOKENS)]
    before_s = server.cpu_s()
    printed = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(libraries)}, check=True, capture_output=True)
    said = json.loads(printed.stdout)
    assert said["events"] == STREAMS * (TOKENS + 1), said  # an event for the usage
    into.add(server.cpu_s() - before_s, STREAMS * TOKENS, *said["gap_ms"])


# ── clients that do not read, clients that leave ──────────────────────────────────────────────────────────────────────


def unread(server: Served) -> dict[str, object]:
    """Bytes taken by a server for a client that reads nothing."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        began_at = time.time()
        before = server.resident_bytes()
        while (over_at := server.noted()["flood_over_at"]) < began_at and time.time() < began_at + UNREAD_S:
            time.sleep(0.1)
        taken = server.noted()["flooded_bytes"]
        grown = server.resident_bytes() - before
    return {
        "unread_kib_taken": round(taken / 1024),
        "grown_kib": round(grown / 1024),
        "ended_after_s": round(over_at - began_at, 1) if over_at > began_at else None,
    }


def left(server: Served) -> float | None:
    """Seconds until the application hears that a client has left; None: not within 5 s."""
    body = json.dumps({"max_tokens": 10_000}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + body)
        connection.recv(1 << 16)
        time.sleep(0.5)
    closed_at = time.time()
    while time.time() < closed_at + 5:
        left_at = float(server.noted()["left_at"])
        if left_at >= closed_at - 0.1:
            return round(max(left_at - closed_at, 0.0), 3)
        time.sleep(0.05)
    return None


def main() -> None:
    installed = libraries("http-servers", *INSTALLED)
    names = list(commands(0))
    measured = {name: Measured() for name in names}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = stack.enter_context(contextlib.closing(Client()))
        for number in range(ROUNDS):
            for name in names if number % 2 else reversed(names):
                with served(name, folder, installed) as server:
                    if "HTTP/2" in name:
                        measure_http2(server, installed, measured[name])
                    else:
                        measure_streams(server, client, measured[name])
        for name in names:
            said: dict[str, object] = {"server": name, "streams": STREAMS, "load": load()}
            said |= {key: spread(values, 1) for key, values in vars(measured[name]).items()}
            if "HTTP/2" not in name:
                with served(name, folder, installed) as server:
                    said |= unread(server) | {"leaving_heard_s": left(server)}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
