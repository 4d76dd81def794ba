"""A small certificate authority for an installation: TLS of the NATS server and between runtimes.

Files are PEM. `authority/ca.key` signs certificates and stays on the signing machine; every process has `ca.crt`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
DAYS = 730  # validity of a certificate; a run of the command within the last RENEWED_DAYS makes the certificate again
RENEWED_DAYS = 60
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def make(folder: Path, runtimes: Sequence[str], hosts: Sequence[str], now: datetime | None = None) -> list[str]:
    """Make ca.crt, nats.crt for a server with the names `hosts`, and NAME.crt for each of `runtimes`, with keys.

    A valid certificate stays. Returns the names of the files written. Raises ValueError if ca.crt is in the folder and
    the authority's key is missing."""
    now = now or datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, key, written = _authority(folder, now)
    names = tuple(dict.fromkeys((*LOOPBACK, *hosts)))
    wanted: dict[str, tuple[str, ...]] = {"nats": names, **{runtime: (runtime,) for runtime in runtimes}}
    for name, alternatives in wanted.items():
        if not _holds(folder / f"{name}.crt", authority, alternatives, now):
            _issue(folder, name, alternatives, authority, key, now)
            written += [f"{name}.crt", f"{name}.key"]
    return written


def routes_block(folder: Path) -> str:
    """Return the line of nats-server's configuration by which a server lets in servers with the key of nats.crt alone.

    Runtimes have certificates of the same authority, and a server of the cluster hears every message."""
    key = x509.load_pem_x509_certificate((folder / "nats.crt").read_bytes()).public_key()
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    return f'pinned_certs: ["{digest.finalize().hex()}"]\n'


def _authority(folder: Path, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, list[str]]:
    certificate, secret = folder / "ca.crt", folder / "authority" / "ca.key"
    if certificate.exists():
        if not secret.exists():
            raise ValueError(
                f"{certificate} is there and its key {secret} is not: put the key back, or remove every .crt for a new "
                "authority, and give all processes the new files"
            )
        key = load_pem_private_key(secret.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return x509.load_pem_x509_certificate(certificate.read_bytes()), key, []
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Staccato installation of {now:%Y-%m-%d %H:%M:%S}")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates and lists
    made = (
        _builder(name, name, key, now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret.parent.mkdir(exist_ok=True, mode=0o700)
    _write(secret, _pem(key))
    _write(certificate, made.public_bytes(Encoding.PEM))
    return made, key, ["ca.crt"]


def _issue(
    folder: Path,
    name: str,
    alternatives: Sequence[str],
    authority: x509.Certificate,
    signing: ec.EllipticCurvePrivateKey,
    now: datetime,
) -> None:
    """Write a certificate and the key. The certificate serves both sides of a move: server and client."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    made = (
        _builder(subject, authority.subject, key, now, DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(one) for one in alternatives]), critical=False)
        .add_extension(both, critical=False)
        .add_extension(issuer, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    _write(folder / f"{name}.key", _pem(key))
    _write(folder / f"{name}.crt", made.public_bytes(Encoding.PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of hosts differ
        .not_valid_after(now + timedelta(days=days))
    )


def _holds(file: Path, authority: x509.Certificate, alternatives: Sequence[str], now: datetime) -> bool:
    """Whether certificate and key exist, signed by `authority` for the names `alternatives`, with RENEWED_DAYS left."""
    if not file.exists() or not file.with_suffix(".key").exists():
        return False
    found = x509.load_pem_x509_certificate(file.read_bytes())
    said = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    try:
        found.verify_directly_issued_by(authority)
    except Exception:  # signed by an earlier authority: cryptography raises errors of several classes
        return False
    long_enough = found.not_valid_after_utc > now + timedelta(days=RENEWED_DAYS)
    return long_enough and list(said) == [_alternative(one) for one in alternatives]


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(file: Path, data: bytes) -> None:
    """Write the whole file, or leave the old file. Only this user can read the file."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(data)
    draft.rename(file)
