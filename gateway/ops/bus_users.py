"""Users of the platform's own NATS. Each user has an nkey; only a file of the user's process has the seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from store.contract.grants import JOIN, User, authorization, joining
from store.kept import kept
from store.keypairs import SigningKey, new_seed

ISSUER_FILE = "issuer.nk"  # seed of the account that signs joined runtimes in: for the join service alone


def seed_file(folder: Path, user: User) -> Path:
    return folder / f"{user.name}.nk"


def make(folder: Path, users: Sequence[User]) -> str:
    """Return the `authorization` block of nats-server's configuration. Seeds missing in `folder` are made."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return authorization(users, {user.name: _public_key(seed_file(folder, user)) for user in users})


def make_joining(folder: Path, users: Sequence[User]) -> str:
    """Return blocks of nats-server's configuration in which runtimes join by proof. Seeds of users,
    join service and issuer are made if missing in `folder`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    keys = {user.name: _public_key(seed_file(folder, user)) for user in (*users, JOIN)}
    issuer = SigningKey(kept(folder / ISSUER_FILE, new_seed("account")))
    return joining(users, keys, issuer.public_key)


def _public_key(file: Path) -> str:
    return SigningKey(kept(file, new_seed("user"))).public_key
