"""Users of the platform's own NATS. Each user has an nkey; only a file of the user's process has the seed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import nkeys

from gateway.config import kept
from store.contract.grants import User, authorization


def seed_file(folder: Path, user: User) -> Path:
    return folder / f"{user.name}.nk"


def make(folder: Path, users: Sequence[User]) -> str:
    """Return the `authorization` block of nats-server's configuration. Seeds missing in `folder` are made."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return authorization(users, {user.name: _public_key(seed_file(folder, user)) for user in users})


def _public_key(file: Path) -> str:
    fresh: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    pair = nkeys.from_seed(bytearray(kept(file, fresh.decode()).encode()))
    public: bytes = pair.public_key
    return public.decode()
