"""The askers' side of the fork server (store/fork/server.py): starts processes that are forked instead of executed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

import msgspec

from store.fork.server import ENCODER, Ended, Forked, ForkOrder, Unfit

REPLY_BYTES_MOST = 4096
FORK_S_MOST = 150.0  # longest wait for the server: on a machine with far too much to do, imports take over a minute
REPLIES = msgspec.json.Decoder(Forked | Unfit | Ended)


# What a server imports: nearly everything that a gateway or a device process imports from torch and vLLM.
IMPORTED = (
    "runtime.engine.settings",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.gpu_worker",
)
# Variables of a server: a second thread of numpy would forbid to fork, and the output of forks must not be buffered.
VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class NotForked(Exception):
    """The fork server did not fork the process. The text says why."""


class ForkedProcess:
    """A process forked by the fork server: has what asyncio's `Process` has to wait for a process and to end one."""

    def __init__(self, pid: int, pidfd: int, reply: socket.socket) -> None:
        """`pidfd` and `reply` belong to this object from now on."""
        self.pid = pid
        self.returncode: int | None = None  # negative: the signal that ended the process
        self._pidfd, self._reply = pidfd, reply
        self._ending = asyncio.create_task(self._end())

    async def wait(self) -> int:
        """Wait for the end of the process, and return the exit code."""
        await asyncio.shield(self._ending)
        assert self.returncode is not None
        return self.returncode

    async def _end(self) -> None:
        # Without a word of the server, the process was killed: the server is gone, and took its processes along. If
        # this task is cancelled, the server hears that nobody asks for the process any more, and kills the process.
        code = -signal.SIGKILL
        try:
            with contextlib.suppress(OSError):
                message, _ = await _heard(self._reply)
                if isinstance(message, Ended):
                    code = message.code
        finally:
            self.returncode = code
            os.close(self._pidfd)
            self._reply.close()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process. Raises ProcessLookupError if the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        with contextlib.suppress(ProcessLookupError):  # the process has ended, and word of the end is on the way
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The way to a fork server that another process started, or that is to be started with `fd` as its socket."""

    def __init__(self, orders: socket.socket) -> None:
        """`orders` is the askers' end of the server's socket."""
        self._orders = orders

    @staticmethod
    def at(fd: int) -> ForkServer | None:
        """Return the way through the inherited file `fd`; None if `fd` is negative."""
        return ForkServer(socket.socket(fileno=os.dup(fd))) if fd >= 0 else None

    @property
    def fd(self) -> int:
        """Number of the askers' end, for a child process that asks as well."""
        return self._orders.fileno()

    async def fork(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        fds: Mapping[int, int],
        group: bool = False,
    ) -> ForkedProcess:
        """Fork a process that runs a module as `python -m` would. Waits while the server imports its modules.

        Args:
            fds: the files of the process: by the number in the process, the number here.
            group: the process leads a process group of its own.

        Raises NotForked.
        """
        order = ForkOrder(module, tuple(arguments), dict(environment), tuple(fds), group, os.getpid())
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reply.setblocking(False)
        with contextlib.ExitStack() as opened:
            opened.enter_context(reply)
            with theirs:
                try:
                    socket.send_fds(self._orders, [ENCODER.encode(order)], [theirs.fileno(), *fds.values()])
                except OSError as error:
                    raise NotForked(f"the fork server takes no orders: {error.strerror}") from error
            try:
                async with asyncio.timeout(FORK_S_MOST):
                    message, pidfd = await _heard(reply)
            except TimeoutError as error:
                raise NotForked(f"the fork server has not answered within {FORK_S_MOST:g} s") from error
            except OSError as error:
                raise NotForked(f"the fork server is gone: {error.strerror}") from error
            if not isinstance(message, Forked) or pidfd is None:
                raise NotForked(message.why if isinstance(message, Unfit) else "the fork server is gone")
            opened.pop_all()
        return ForkedProcess(message.pid, pidfd, reply)


async def _heard(reply: socket.socket) -> tuple[Forked | Unfit | Ended | None, int | None]:
    """Wait for a message of the server and the file beside the message; None: the server has hung up.

    Raises OSError."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(reply, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(reply)
    data, files, _, _ = socket.recv_fds(reply, REPLY_BYTES_MOST, 1)
    return (REPLIES.decode(data) if data else None), (files[0] if files else None)


def server_command(orders: int, modules: Sequence[str] = IMPORTED) -> tuple[str, ...]:
    """Return the command of a server that takes orders from the inherited file `orders`. See also VARIABLES."""
    return (sys.executable, "-P", "-m", "store.fork.server", str(orders), *modules)


def sockets() -> tuple[socket.socket, socket.socket]:
    """Return the askers' end and the server's end of a socket for orders, both of which outlive a server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs
