"""Pairs of keys of NATS (nkeys, Ed25519): made, read from a seed, used to sign and to check."""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Literal

import nacl.exceptions
import nacl.signing
import nkeys

KINDS = {"user": nkeys.PREFIX_BYTE_USER, "account": nkeys.PREFIX_BYTE_ACCOUNT, "server": nkeys.PREFIX_BYTE_SERVER}
KEY_BYTES, CHECKSUM_BYTES = 32, 2
Kind = Literal["user", "account", "server"]


def new_seed(kind: Kind) -> str:
    """Return a fresh seed, which is a secret."""
    seed: bytes = nkeys.encode_seed(secrets.token_bytes(KEY_BYTES), KINDS[kind])
    return seed.decode()


class SigningKey:
    """A pair of keys. Raises ValueError for a text that is no seed; the message does not show the text."""

    def __init__(self, seed: str) -> None:
        try:
            self._pair = nkeys.from_seed(bytearray(seed.strip().encode()))
            self.public_key: str = self._pair.public_key.decode()
        except (nkeys.NkeysError, ValueError, TypeError, IndexError) as error:
            raise ValueError("no seed of an nkey: a seed begins with S and has 58 characters") from error

    def sign(self, data: bytes) -> bytes:
        signature: bytes = self._pair.sign(data)
        return signature


def verified(public_key: str, data: bytes, signature: bytes) -> bool:
    """Whether `signature` is of `data` and of the public key's owner; False for a malformed key, too."""
    try:
        raw = base64.b32decode(public_key + "=" * (-len(public_key) % 8))
        body, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
        if len(body) != 1 + KEY_BYTES or nkeys.crc16(bytearray(body)).to_bytes(CHECKSUM_BYTES, "little") != checksum:
            return False
        nacl.signing.VerifyKey(body[1:]).verify(data, signature)
        return True
    except (binascii.Error, ValueError, nacl.exceptions.CryptoError):
        return False


def is_of_user(public_key: str) -> bool:
    """Whether the text has the form of a user's public key."""
    return public_key.startswith("U") and len(public_key) == 56 and public_key.isascii()
