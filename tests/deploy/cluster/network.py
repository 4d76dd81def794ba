"""The network of pods: a bridge in a network namespace of its own, and the addresses of services, passed on to pods."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000
BRIDGE = "10.96.0.1"
Endpoints = Callable[[], list[tuple[str, int]]]  # addresses and ports of the pods that are ready


def enter(pid: int) -> None:
    """Move this thread into the network namespace of a process. Raises OSError if the kernel refuses."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


class PodNetwork:
    """A bridge for pods. `hosts` is every pod's /etc/hosts, and changes while the pods run."""

    def __init__(self, folder: Path) -> None:
        self.hosts = folder / "hosts"
        self._names: dict[str, str] = {}
        self._count = self._services = 0
        self._write()

    @contextlib.contextmanager
    def up(self) -> Iterator[PodNetwork]:
        with self.sandbox() as self._holder:
            self._ip("link", "add", "name", "pods", "type", "bridge")
            self._ip("address", "add", f"{BRIDGE}/16", "dev", "pods")
            self._ip("link", "set", "pods", "up")
            self._proxies = Proxies(self._holder.pid)
            try:
                yield self
            finally:
                self._proxies.close()

    @contextlib.contextmanager
    def sandbox(self) -> Iterator[subprocess.Popen[bytes]]:
        """A process with a network namespace of its own, with loopback alone."""
        with subprocess.Popen(["unshare", "--net", "sleep", "7200"]) as held:
            try:
                while Path(f"/proc/{held.pid}/comm").read_text() != "sleep\n":
                    assert held.poll() is None
                ip(held.pid, "link", "set", "lo", "up")
                yield held
            finally:
                held.kill()

    def attach(self, sandbox: int) -> str:
        """Connect the network namespace of a process with the bridge. Returns the namespace's address."""
        self._count += 1
        address, cable = f"10.96.1.{self._count}", f"pod{self._count}"
        self._ip("link", "add", "name", cable, "type", "veth", "peer", "name", "eth0", "netns", f"{sandbox}")
        self._ip("link", "set", cable, "master", "pods", "up")
        ip(sandbox, "address", "add", f"{address}/16", "dev", "eth0")
        ip(sandbox, "link", "set", "eth0", "up")
        return address

    def name(self, name: str, address: str | None) -> None:
        """Let pods find the address by the name; None: no longer."""
        self._names.pop(name, None)
        self._names |= {name: address} if address else {}
        self._write()

    def serve(self, name: str, port: int, endpoints: Endpoints) -> int:
        """Pass connections to a service on to a ready pod, in turns. Returns a port of this host that does the same."""
        self._services += 1
        address = f"10.96.2.{self._services}"
        self._ip("address", "add", f"{address}/32", "dev", "pods")
        self.name(name, address)
        return self._proxies.listen(address, port, endpoints)

    def inside(self) -> None:
        """Move this thread to the bridge."""
        enter(self._holder.pid)

    def _ip(self, *words: str) -> None:
        ip(self._holder.pid, *words)

    def _write(self) -> None:
        known = {"localhost": "127.0.0.1"} | self._names
        with self.hosts.open("w") as file:  # the same file: pods have the file mounted
            file.write("".join(f"{address} {name}\n" for name, address in known.items()))


def ip(pid: int, *words: str) -> None:
    """Run `ip` in the network namespace of a process."""
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *words], check=True, capture_output=True)


class Proxies:
    """A thread on the bridge that listens at addresses of services, and at ports of the host for tests."""

    def __init__(self, pid: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._open: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, args=(pid,), daemon=True)
        self._thread.start()

    def listen(self, address: str, port: int, endpoints: Endpoints) -> int:
        outside = socket.create_server(("127.0.0.1", 0))
        asyncio.run_coroutine_threadsafe(self._listen(address, port, outside, endpoints), self._loop).result(30)
        return int(outside.getsockname()[1])

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _run(self, pid: int) -> None:
        enter(pid)
        self._loop.run_forever()
        for server in self._servers:
            server.close()
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

    async def _listen(self, address: str, port: int, outside: socket.socket, endpoints: Endpoints) -> None:
        turn = 0

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal turn
            turn += 1
            ready = endpoints()
            task = asyncio.current_task()
            assert task is not None
            self._open.add(task)  # the loop alone would forget connections whose reading pauses
            task.add_done_callback(self._open.discard)
            ended = (OSError, ZeroDivisionError, asyncio.CancelledError)  # ZeroDivisionError: no pod is ready
            with contextlib.closing(writer), contextlib.suppress(*ended):
                pod_reader, pod_writer = await asyncio.open_connection(*ready[turn % len(ready)])
                with contextlib.closing(pod_writer):
                    await asyncio.gather(_copy(reader, pod_writer), _copy(pod_reader, writer))

        self._servers += [await asyncio.start_server(connected, address, port)]
        self._servers += [await asyncio.start_server(connected, sock=outside)]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()


def namespaces() -> str:
    """Why pods can't have network namespaces on this machine, or ""."""
    if os.geteuid():
        return "network namespaces need root"
    try:
        check = "ip link add name vtest type bridge && mount -t tmpfs tmpfs /mnt"
        subprocess.run(["unshare", "--net", "--mount", "sh", "-c", check], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"pods need iproute2, bridges and mounts: {error}"
    return ""
