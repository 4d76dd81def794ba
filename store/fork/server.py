"""The fork server: `python -P -m store.fork.server FD MODULE...` imports the modules once, and then forks processes.

Importing vLLM takes many seconds of processor time and hundreds of MB. A process that is forked from a process with
vLLM in memory starts at once, and shares the memory of the libraries. store/fork/client.py is the other side.

The server has a single thread, and answers orders that come as packets over the socket FD. A forked process ends with
the server: the kernel sees to the end. The server ends a process when the asker of the process is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import setproctitle

ORDER_BYTES_MOST = 1 << 20
FDS_MOST = 64
PR_SET_PDEATHSIG = 1
# jemalloc ends its own thread before a fork and begins the thread anew after the fork, in both processes.
FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})


class ForkOrder(msgspec.Struct, frozen=True):
    """A process to fork. The reply's socket and the files `fds` travel beside the order, in this sequence."""

    module: str  # run as `python -m` would
    arguments: tuple[str, ...]
    environment: dict[str, str]
    fds: tuple[int, ...]  # numbers under which the process has the files
    group: bool  # the process leads a process group of its own
    asker: int  # id of the asking process


class Forked(msgspec.Struct, frozen=True, tag="Forked"):
    """The process runs. A pidfd of the process travels beside the message."""

    pid: int


class Unfit(msgspec.Struct, frozen=True, tag="Unfit"):
    """The server can't fork; the asker starts the process in another way."""

    why: str


class Ended(msgspec.Struct, frozen=True, tag="Ended"):
    """The process has ended. `code` is negative for a signal."""

    code: int


ENCODER = msgspec.json.Encoder()


class EnvironmentChanges:
    """Changes of the environment by imported modules, which a forked process finds imported.

    Every change counts, also a variable set to the value that the server's variable had: the variable of a forked
    process may have another value."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}
        self._removed: set[str] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what the context does to `os.environ`."""
        putenv, unsetenv = os.putenv, os.unsetenv

        def put(name: bytes, value: bytes) -> None:
            self._made[os.fsdecode(name)] = os.fsdecode(value)
            self._removed.discard(os.fsdecode(name))
            putenv(name, value)

        def unset(name: bytes) -> None:
            self._made.pop(os.fsdecode(name), None)
            self._removed.add(os.fsdecode(name))
            unsetenv(name)

        vars(os).update(putenv=put, unsetenv=unset)  # called by os.environ
        try:
            yield
        finally:
            vars(os).update(putenv=putenv, unsetenv=unsetenv)

    def applied(self, environment: dict[str, str]) -> dict[str, str]:
        """Return `environment` with the changes."""
        return {name: value for name, value in environment.items() if name not in self._removed} | self._made


@dataclass(frozen=True, eq=False)
class Fork:
    """A living process, as the server knows the process."""

    pid: int
    pidfd: int
    reply: socket.socket
    group: bool

    def end(self) -> None:
        """Kill the process, and the process's group if the process has a group of its own."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if self.group else os.kill)(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.pidfd)
        self.reply.close()


class Server:
    """Forks processes to order, and tells each asker how the process ended."""

    def __init__(self, orders: socket.socket, unfit: str | None, imported: EnvironmentChanges) -> None:
        """`unfit`: why this process must not be forked; None: this process can be forked.

        `imported`: what the imported modules did to the environment."""
        self._orders, self._unfit, self._imported = orders, unfit, imported
        self._forks: dict[int, Fork] = {}  # by the number of the pidfd, and by the number of the reply's socket
        self._poll = select.poll()
        self._poll.register(orders, select.POLLIN)

    def run(self) -> ForkOrder:
        """Serve orders. Returns in a forked process alone, with the order for the process. Raises SystemExit at the
        end of the last asker."""
        while True:
            number, _ = self._poll.poll()[0]  # a single event: the event's work may give a number to another file
            if number == self._orders.fileno():
                if order := self._take():
                    return order
                continue
            fork = self._forks[number]
            if number == fork.pidfd:
                self._ended(fork)
            else:  # the asker is gone
                self._poll.unregister(number)
                fork.end()

    def _take(self) -> ForkOrder | None:
        """Fork to order. Returns None in the server, and the order in the new process."""
        data, received, _, _ = socket.recv_fds(self._orders, ORDER_BYTES_MOST, FDS_MOST)
        if not data:
            raise SystemExit(0)
        if not received:
            return None  # without a file the server can't answer: the asker hears that the reply's socket is closed
        order = msgspec.json.decode(data, type=ForkOrder)
        reply, files = socket.socket(fileno=received[0]), received[1:]
        unfit = self._unfit
        if unfit is None and len(files) < len(order.fds):
            unfit = "the fork server has too many open files"
        server = os.getpid()
        try:
            if unfit is not None or _hangs_up(reply):
                _say(reply, Unfit(unfit or "nobody waits for the process"))
                reply.close()
            elif (pid := os.fork()) == 0:
                self._leave(order, reply, files, server)
                return order
            else:
                self._keep(pid, order.group, reply)
        except OSError as error:  # the processes forked before must not end with an order that fails
            if os.getpid() != server:
                raise
            _say(reply, Unfit(f"the fork server cannot fork: {error.strerror}"))
            reply.close()
        for file in files:
            os.close(file)
        return None

    def _keep(self, pid: int, group: bool, reply: socket.socket) -> None:
        """Watch over a new process, and tell the asker. Raises OSError if the process can't be watched, and ends it."""
        try:
            if group:
                with contextlib.suppress(OSError):  # the new process does the same: whoever comes first
                    os.setpgid(pid, pid)
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        fork = Fork(pid, pidfd, reply, group)
        self._forks[pidfd] = self._forks[reply.fileno()] = fork
        self._poll.register(pidfd, select.POLLIN)
        self._poll.register(reply, select.POLLIN)
        with contextlib.suppress(OSError):  # the asker is gone, and the poll will say so
            socket.send_fds(reply, [ENCODER.encode(Forked(pid))], [pidfd])

    def _ended(self, fork: Fork) -> None:
        _, status = os.waitpid(fork.pid, 0)
        _say(fork.reply, Ended(os.waitstatus_to_exitcode(status)))
        with contextlib.suppress(KeyError):  # the asker went first
            self._poll.unregister(fork.reply)
        self._poll.unregister(fork.pidfd)
        del self._forks[fork.pidfd], self._forks[fork.reply.fileno()]
        fork.close()

    def _leave(self, order: ForkOrder, reply: socket.socket, files: list[int], server: int) -> None:
        """Make the forked process one of the asker: with the files and the environment of the order alone."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # the server died before prctl
            os._exit(1)
        if order.group:
            os.setpgid(0, 0)
        above = max(order.fds, default=2) + 1
        kept = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(above, 3)) for file in files]
        reply.close()
        for file in files:
            os.close(file)
        for fork in set(self._forks.values()):
            fork.close()
        self._orders.close()
        for file, number in zip(kept, order.fds, strict=True):
            os.dup2(file, number, inheritable=number < 3)
            os.close(file)
        os.environ.clear()
        os.environ.update(self._imported.applied(order.environment))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = [order.module, *order.arguments]
        title = (sys.executable, "-P", "-m", order.module, *order.arguments, f"(forked for {order.asker})")
        setproctitle.setproctitle(" ".join(title))


def _say(reply: socket.socket, message: Unfit | Ended) -> None:
    with contextlib.suppress(OSError):  # the asker is gone
        reply.send(ENCODER.encode(message))


def _hangs_up(reply: socket.socket) -> bool:
    """Whether the asker has closed the other end. Askers write nothing, so a readable end is a closed end."""
    return bool(select.select([reply], [], [], 0)[0])


def unfit() -> str | None:
    """Return why this process must not be forked, or None.

    A fork has the forking thread alone, so a second thread's locks would stay locked; and a fork has no GPU, if the
    process has begun with the GPU.
    """
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    others = [name for task in tasks if (name := (task / "comm").read_text().strip()) not in FORK_SAFE_THREADS]
    if others:
        return f"the imported modules have started {len(others)} threads ({', '.join(sorted(set(others)))})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imported modules have begun with the GPU"
    return None


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the server ends the server
    setproctitle.getproctitle()  # finds the title's place, which is found while the environment is as it was
    changes = EnvironmentChanges()
    with changes.noted():
        for module in sys.argv[2:]:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections of forked processes pass over what was imported, and write into no shared page
    order = Server(orders, unfit(), changes).run()
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
