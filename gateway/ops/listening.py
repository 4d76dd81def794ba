"""Listening sockets of gateways: opened once by the supervisor, or by systemd, and shared by the gateways of a host.

Gateways that share a socket share the queue of connections not taken yet. The queue outlives a killed gateway, and the
next free gateway takes the waiting connections. With a socket for each gateway (SO_REUSEPORT), the kernel would close
the connections in the queue of the killed gateway.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Mapping, Sequence

BACKLOG = 2048  # connections that wait for a gateway
SYSTEMD_FIRST = 3  # number of the first file that systemd hands to a service


def opened(host: str, port: int) -> list[socket.socket]:
    """Open a listening socket for each address of `host`. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as closing:
        sockets = [closing.enter_context(_listening(each[0], each[4])) for each in dict.fromkeys(found)]
        closing.pop_all()
    return sockets


def port_refusal(host: str, port: int) -> str | None:
    """Return why no process can listen on the port, or None."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        return f"host {host!r} has no address ({error.strerror}): correct --host"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} on {host} is taken: stop the program that has it or choose another with --port"
        return f"cannot listen on {host} port {port} ({error.strerror}): choose others with --host and --port"
    return None


def _listening(family: int, address: object) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # `::` must not take the port of 0.0.0.0, which has a socket of its own
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)  # type: ignore[arg-type]
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def inherited(numbers: Sequence[str], environment: Mapping[str, str]) -> list[socket.socket]:
    """Return the sockets that another process opened for this gateway; [] if the gateway must open the port itself.

    `numbers`: the files named by the supervisor. Without such files, the protocol of systemd's sockets decides."""
    if numbers:
        return [socket.socket(fileno=int(number)) for number in numbers]
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = int(environment.get("LISTEN_FDS", "0"))
    return [socket.socket(fileno=number) for number in range(SYSTEMD_FIRST, SYSTEMD_FIRST + count)]
