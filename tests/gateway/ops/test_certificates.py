"""An installation's authority: TLS believes the certificates, valid certificates stay, only the user reads files."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.ops import certificates

NOW = datetime.now(UTC)


def shaken(folder: Path, name: str, host: str, authority: Path) -> None:
    """Shake hands, as a client of `host`, with a server with the certificate `name`. Raises ssl.SSLError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    here, there = socket.socketpair()

    def serve() -> None:
        with there:
            try:
                server.wrap_socket(there, server_side=True).close()
            except OSError:
                there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with here:
            here.settimeout(10)
            ssl.create_default_context(cafile=authority).wrap_socket(here, server_hostname=host).close()
    finally:
        thread.join(10)


@pytest.mark.parametrize("host", ["nats.example.com", "localhost", "127.0.0.1", "10.0.0.7"])
def test_the_servers_certificate_is_believed_by_each_of_its_names(tmp_path: Path, host: str) -> None:
    certificates.make(tmp_path, [], ["nats.example.com", "10.0.0.7"])
    shaken(tmp_path, "nats", host, tmp_path / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shaken(tmp_path, "nats", "elsewhere.example.com", tmp_path / "ca.crt")


def test_another_authority_believes_nothing_of_it(tmp_path: Path) -> None:
    for folder in ("ours", "strange"):
        certificates.make(tmp_path / folder, [], [])
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(tmp_path / "ours", "nats", "localhost", tmp_path / "strange/ca.crt")


def test_what_is_there_and_holds_stays(tmp_path: Path) -> None:
    first = certificates.make(tmp_path, ["runtime-r1"], ["nats"])
    assert first == ["ca.crt", "nats.crt", "nats.key", "runtime-r1.crt", "runtime-r1.key"]
    assert certificates.make(tmp_path, ["runtime-r1"], ["nats"]) == []
    assert certificates.make(tmp_path, ["runtime-r1", "runtime-r2"], ["nats"]) == ["runtime-r2.crt", "runtime-r2.key"]
    assert certificates.make(tmp_path, [], ["nats", "other"]) == ["nats.crt", "nats.key"]


def test_a_certificate_that_ends_soon_is_made_again_by_the_same_authority(tmp_path: Path) -> None:
    certificates.make(tmp_path, ["runtime-r1"], [], NOW - timedelta(days=certificates.DAYS - 30))
    authority = (tmp_path / "ca.crt").read_bytes()
    assert certificates.make(tmp_path, ["runtime-r1"], [], NOW) == [
        *("nats.crt", "nats.key", "runtime-r1.crt", "runtime-r1.key")
    ]
    assert (tmp_path / "ca.crt").read_bytes() == authority
    shaken(tmp_path, "runtime-r1", "runtime-r1", tmp_path / "ca.crt")


def test_an_authority_without_its_key_is_one_sentence(tmp_path: Path) -> None:
    certificates.make(tmp_path, [], [])
    (tmp_path / "authority/ca.key").unlink()
    with pytest.raises(ValueError, match="ca.key is not: put the key back"):
        certificates.make(tmp_path, ["runtime-r1"], [])


def test_keys_are_for_their_user_alone(tmp_path: Path) -> None:
    certificates.make(tmp_path / "made", ["runtime-r1"], [])
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "made").rglob("*")}
    assert len(modes) >= 7 and not [path for path, mode in modes.items() if mode & 0o077]
