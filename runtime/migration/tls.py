"""TLS of connections between nodes: both sides show a certificate of the authority, and refuse a peer without.

The authority (made by `staccato nats-users`) signs certificates of a single installation, so a signature is the
permission. Addresses of runtimes change, so no certificate is compared with an address. Without `Security` a connection
is plain TCP, for nodes within a host.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HELLO = b"\x16\x03"  # first bytes of a TLS client
WANTED = "STACCATO_TRANSPORT_TLS_CERT, STACCATO_TRANSPORT_TLS_KEY and STACCATO_TRANSPORT_TLS_CA"


@dataclass(frozen=True)
class Security:
    """The node's certificate and authority, for connections accepted by the node and connections made by the node."""

    accepting: ssl.SSLContext
    connecting: ssl.SSLContext

    @classmethod
    def load(cls, certificate: Path, key: Path, authority: Path) -> Security:
        """Read a certificate, the certificate's key and the authority from PEM files.

        Raises ValueError with a sentence for the operator if a file can't be used."""
        made = []
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(side)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(authority)
                context.load_cert_chain(certificate, key)
            except OSError as error:  # or the subclass ssl.SSLError
                raise ValueError(
                    f"the certificate {certificate}, its key {key} and the authority {authority} can't be used "
                    f"({error.strerror or error}): `staccato nats-users FOLDER --runtime ID` makes the three files"
                ) from error
            made.append(context)
        accepting, connecting = made
        accepting.num_tickets = (
            0  # no tickets, so that a readable socket has an answer of the peer: runtime/migration/transport.py polls
        )
        return cls(accepting, connecting)

    def accepted(self, connection: socket.socket) -> ssl.SSLSocket:
        """An accepted connection under TLS. The handshake comes later, with the first bytes. Raises OSError."""
        return self.accepting.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def connected(self, connection: socket.socket) -> ssl.SSLSocket:
        """A connection made by this node, under TLS. The caller shakes hands next (`handshake`). Raises OSError."""
        return self.connecting.wrap_socket(connection, do_handshake_on_connect=False)


# ── on the event loop: sockets that do not block, with TLS or without ─────────────────────────────────────────────────


async def handshake(connection: socket.socket) -> None:
    """Shake hands; without TLS do nothing. The caller sets the deadline. Raises OSError with the reason."""
    if isinstance(connection, ssl.SSLSocket):
        await _until_done(connection, connection.do_handshake)


async def send_all(connection: socket.socket, data: bytes) -> None:
    """Send `data` completely, over TLS or plain TCP. Raises OSError."""
    if not isinstance(connection, ssl.SSLSocket):
        return await asyncio.get_running_loop().sock_sendall(connection, data)
    view = memoryview(data)
    while view:
        view = view[await _until_done(connection, connection.send, view) :]


async def receive(connection: socket.socket, view: memoryview) -> int:
    """Receive bytes into `view`. Returns the number of bytes, 0 at the end of the connection. Raises OSError."""
    if not isinstance(connection, ssl.SSLSocket):
        return await asyncio.get_running_loop().sock_recv_into(connection, view)
    return await _until_done(connection, connection.recv_into, view)


async def _until_done(connection: ssl.SSLSocket, act: object, *arguments: object) -> int:
    loop, number = asyncio.get_running_loop(), connection.fileno()
    while True:
        try:
            return act(*arguments)  # type: ignore[operator, no-any-return]
        except ssl.SSLWantReadError:
            watch, forget = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            watch, forget = loop.add_writer, loop.remove_writer
        ready = loop.create_future()
        watch(number, _tell, ready)
        try:
            await ready
        finally:
            forget(number)


def _tell(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


# ── on a thread ───────────────────────────────────────────────────────────────────────────────────────────────────────


def send_some(connection: socket.socket, view: memoryview, deadline: float) -> int:
    """Send bytes from `view`. Returns the number of bytes sent.

    `deadline`: monotonic seconds. Raises OSError, and TimeoutError after the deadline."""
    return _some(connection, connection.send, view, select.POLLOUT, deadline)


def receive_some(connection: socket.socket, view: memoryview, deadline: float) -> int:
    """Receive bytes into `view`. Returns the number of bytes, 0 at the end of the connection.

    `deadline`: monotonic seconds. Raises OSError, and TimeoutError after the deadline."""
    return _some(connection, connection.recv_into, view, select.POLLIN, deadline)


def _some(
    connection: socket.socket, act: Callable[[memoryview], int], view: memoryview, plain: int, deadline: float
) -> int:
    """The result of `act` on `view`. `plain`: the event that plain TCP waits for; TLS names the event by the error."""
    while True:
        try:
            return act(view)
        except BlockingIOError:
            event = plain
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        wait(connection, event, deadline)


def wait(connection: socket.socket, event: int, deadline: float) -> None:
    """Return when the socket has bytes to read (POLLIN) or room to write (POLLOUT), as `event` says.

    `deadline`: monotonic seconds. Raises TimeoutError after the deadline."""
    poll = select.poll()
    poll.register(connection, event)
    if not poll.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
        raise TimeoutError("the other side neither sends nor takes anything")


def break_off(connection: socket.socket) -> None:
    """End the connection, so that threads and tasks waiting for the connection go on. Raises OSError.

    SSLSocket's own `shutdown` drops TLS, so a thread in the middle of a parcel would go on without TLS."""
    socket.socket.shutdown(connection, socket.SHUT_RDWR)
