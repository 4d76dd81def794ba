"""Listening sockets that outlive a gateway."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from gateway.ops import listening
from tests.conftest import free_port

# Takes no connection until told by a line, then greets each connection.
GREETER = """
import socket, sys
port = socket.socket(fileno=int(sys.argv[1]))
port.setblocking(True)
print("there", flush=True)
sys.stdin.readline()
while True:
    connection, _ = port.accept()
    connection.sendall(b"hello")
    connection.close()
"""


def greeter(number: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", GREETER, str(number)]
    process = subprocess.Popen(command, pass_fds=(number,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def test_connections_that_a_killed_gateway_had_not_taken_are_taken_by_its_neighbour() -> None:
    port = free_port()
    (shared,) = listening.opened("127.0.0.1", port)
    killed, neighbour = greeter(shared.fileno()), greeter(shared.fileno())
    clients = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(20)]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert neighbour.stdin is not None
    neighbour.stdin.write("go\n")
    neighbour.stdin.flush()
    try:
        assert [client.recv(5) for client in clients] == [b"hello"] * 20
    finally:
        neighbour.kill()
        for process in (killed, neighbour):
            process.communicate()
        for client in (*clients, shared):
            client.close()


def test_every_address_of_a_host_gets_a_socket() -> None:
    port = free_port()
    sockets = listening.opened("localhost", port)
    families = {found[0] for found in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)}
    assert {each.family for each in sockets} == families
    for each in sockets:
        each.close()


def test_a_taken_port_raises_and_leaves_no_socket_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        listening.opened("127.0.0.1", taken.getsockname()[1])


def test_sockets_come_from_the_supervisor_or_from_systemd() -> None:
    assert listening.inherited((), {}) == []
    assert listening.inherited((), {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1"}) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = listening.inherited([str(os.dup(server.fileno()))], {})
        with found:
            assert found.getsockname() == server.getsockname()
