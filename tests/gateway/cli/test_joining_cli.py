"""`staccato join-token`, `staccato joined` and `staccato nats-users --join`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from typer.testing import CliRunner

from gateway.cli import app
from gateway.cli.api import NOT_FOUND, USAGE
from gateway.config import Settings, pepper
from gateway.ops import bus_users
from store.contract.joining.proofs import TOKEN, JoinProof
from store.db.database import Database
from store.db.fleet import joining
from store.db.tenants import key_mac
from store.keypairs import SigningKey
from tests.gateway.cli.test_cli import Staccato
from tests.gateway.cli.test_cli import hub as hub
from tests.gateway.cli.test_cli import settings as settings
from tests.gateway.cli.test_cli import staccato as staccato


def join(settings: Settings, id: str, secret: str) -> None:
    async def work() -> None:
        async with Database.open(settings.database_url) as database:
            await joining.admit(database, JoinProof(id, f"U-{id}", True), key_mac(pepper(settings), secret))

    asyncio.run(work())


def test_a_token_is_made_used_and_revoked_and_the_runtime_too(staccato: Staccato, settings: Settings) -> None:
    made = staccato("join-token", "create", "--runtime", "gpu-7", "--expires", "2h")
    assert made.code == 0, made.err
    (secret,) = made.out.split()
    assert TOKEN.fullmatch(secret)
    other = json.loads(staccato("join-token", "create", "--json").out)
    join(settings, "gpu-7", secret)
    listed = staccato("join-token", "ls").out
    assert " used " in listed and " valid " in listed and "gpu-7" in listed and secret not in listed
    assert staccato("join-token", "revoke", other["id"]).code == 0
    assert " revoked " in staccato("join-token", "ls").out
    assert " joined " in staccato("joined", "ls").out
    revoked = staccato("joined", "revoke", "gpu-7")
    assert revoked.code == 0 and "within 5 seconds its connection ends" in revoked.err
    assert json.loads(staccato("joined", "ls", "--json").out)[0]["state"] == "revoked"
    assert staccato("joined", "revoke", "none").code == NOT_FOUND


def test_a_wrong_id_or_lifetime_is_the_callers_mistake(staccato: Staccato) -> None:
    assert staccato("join-token", "create", "--runtime", "a.b").code == USAGE
    assert staccato("join-token", "create", "--expires", "soon").code == USAGE
    assert staccato("join-token", "create", "--expires", "99d").code == USAGE


def test_users_with_join_name_the_issuer_and_keep_its_seed_for_the_join_service(tmp_path: Path) -> None:
    folder = tmp_path / "users"
    made = CliRunner().invoke(app, ["nats-users", str(folder), "--join"])
    assert made.exit_code == 0, made.output
    assert {file.name for file in folder.glob("*.nk")} == {
        *("gateway.nk", "scheduler.nk", "ledger.nk", "join.nk", "issuer.nk")
    }
    block = (folder / "users.conf").read_text()
    issuer = (folder / bus_users.ISSUER_FILE).read_text()
    assert f"issuer: {SigningKey(issuer).public_key}" in block
    assert not any(file.read_text().strip() in block for file in folder.glob("*.nk"))
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.glob("*.nk"))
    assert CliRunner().invoke(app, ["nats-users", str(folder), "--join"]).exit_code == 0
    assert (folder / "users.conf").read_text() == block and (folder / bus_users.ISSUER_FILE).read_text() == issuer


def test_users_without_join_are_as_ever(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["nats-users", str(tmp_path)]).exit_code == 0
    block = (tmp_path / "users.conf").read_text()
    assert block.startswith("authorization {\n  users: [\n") and block.endswith("\n  ]\n}\n")
    assert "callout" not in block and not (tmp_path / bus_users.ISSUER_FILE).exists()
    assert 'allow_responses: { max: 1, expires: "2m" }' in block and (tmp_path / "runtime-r1.nk").exists()
