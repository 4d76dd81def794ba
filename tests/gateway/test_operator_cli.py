"""`staccato audit`, canaries and plans by the command line, against a real control plane."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy import text

from gateway.cli.api import CONFLICT, ERROR, USAGE
from gateway.config import Settings
from store.db import Database
from tests.gateway.test_cli import MODELS, Ran, Staccato
from tests.gateway.test_cli import hub as hub
from tests.gateway.test_cli import settings as settings
from tests.gateway.test_cli import staccato as staccato
from tests.gateway.test_cli import tenant as tenant


def told(ran: Ran) -> Any:
    assert ran.code == 0, ran.err
    return ran.json


def test_what_was_done_is_listed_and_verified(staccato: Staccato, tenant: str) -> None:
    listed = staccato("audit", "--tenant", tenant)
    assert "tenant.created" in listed.out and "admin" in listed.out
    head = staccato("audit", "verify").out.strip()
    assert staccato("tenant", "create", f"{tenant}-2").code == 0
    assert staccato("audit", "verify", "--head", head).code == 0
    wrong = staccato("audit", "verify", "--head", f"{head[:-4]}beef")
    assert wrong.code == ERROR and "is another one than when it was noted" in wrong.err
    assert staccato("audit", "verify", "--head", "beef").code == USAGE


def test_a_canary_is_deployed_promoted_and_rolled_back(staccato: Staccato, tenant: str) -> None:
    assert staccato("deploy", "poet", "--model", str(MODELS / "poet"), "--tenant", tenant, "--ttft", "5s").code == 0
    changed = told(staccato("deploy", "poet", "--tenant", tenant, "--canary", "10", "--priority", "high", "--json"))
    assert (changed["priority"], changed["slo"]["ttft_ms"], changed["canary"]["weight"]) == ("high", 5000, 10)
    assert changed["status"]["target_revision"] == 2
    promoted = told(staccato("promote", "poet", "--tenant", tenant, "--json"))
    assert promoted["status"]["active_revision"] == 2
    assert staccato("promote", "poet", "--tenant", tenant).code == CONFLICT
    assert told(staccato("rollback", "poet", "--tenant", tenant, "--json"))["status"]["active_revision"] == 1
    assert staccato("rollback", "poet", "--tenant", tenant, "--revision", "2", "--json").code == 0
    assert staccato("deploy", "other", "--tenant", tenant).code == USAGE


def test_a_plan_makes_nothing_and_fails_where_it_fits_nowhere(staccato: Staccato, tenant: str) -> None:
    ran = staccato("deploy", "poet", "--model", str(MODELS / "poet"), "--tenant", tenant, "--plan", "--json")
    assert ran.code == ERROR and "it fits nowhere: no runtime is there" in ran.err  # the stand-in has no memory
    assert not ran.json["fits"] and ran.json["weight_bytes"] > 0
    assert told(staccato("ls", "--tenant", tenant, "--json")) == []


def test_a_log_that_was_tampered_with_fails(staccato: Staccato, settings: Settings, tenant: str) -> None:
    """Last: the log of this module is broken for good."""

    async def forge() -> None:
        async with Database.open(settings.database_url) as database, database.write() as connection:
            await connection.execute(text("DROP TRIGGER audit_no_update"))
            await connection.execute(text("UPDATE audit SET kind = 'x' WHERE seq = 1"))

    asyncio.run(forge())
    ran = staccato("audit", "verify")
    assert ran.code == ERROR and "is not right from row 1 on" in ran.err
