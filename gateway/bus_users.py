"""The users of the platform's own NATS: an nkey for each, whose seed only a file of its process has."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import nkeys

from gateway.config import kept
from store.grants import User, authorization


def seed_file(folder: Path, user: User) -> Path:
    return folder / f"{user.name}.nk"


def make(folder: Path, users: Sequence[User]) -> str:
    """The `authorization` block of nats-server's configuration. Seeds that are not in `folder` yet are made."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return authorization(users, {user.name: _public_key(seed_file(folder, user)) for user in users})


def _public_key(file: Path) -> str:
    fresh: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    pair = nkeys.from_seed(bytearray(kept(file, fresh.decode()).encode()))
    public: bytes = pair.public_key
    return public.decode()
