"""`staccato audit`, canaries and plans by the command line, against a real control plane."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from sqlalchemy import text

from gateway.cli.api import CONFLICT, ERROR, USAGE
from gateway.config import Settings
from store.db.database import Database
from tests.gateway.cli.test_cli import MODELS, Ran, Staccato
from tests.gateway.cli.test_cli import hub as hub
from tests.gateway.cli.test_cli import settings as settings
from tests.gateway.cli.test_cli import staccato as staccato
from tests.gateway.cli.test_cli import tenant as tenant


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
    target = changed["target"]
    assert (target["priority"], target["slo"]["ttft_ms"], target["canary"]["weight"]) == ("high", 5000, 10)
    assert (changed["priority"], changed["status"]["target_revision"], target["revision"]) == ("normal", 2, 2)
    promoted = told(staccato("promote", "poet", "--tenant", tenant, "--json"))
    assert promoted["status"]["active_revision"] == 2
    assert staccato("promote", "poet", "--tenant", tenant).code == CONFLICT
    assert told(staccato("rollback", "poet", "--tenant", tenant, "--json"))["status"]["active_revision"] == 1
    assert staccato("rollback", "poet", "--tenant", tenant, "--revision", "2", "--json").code == 0
    assert staccato("deploy", "other", "--tenant", tenant).code == USAGE


def test_during_a_canary_the_model_shown_is_the_one_that_serves(staccato: Staccato, tenant: str) -> None:
    assert staccato("deploy", "qa", "--model", str(MODELS / "faq"), "--tenant", tenant, "--ttft", "2s").code == 0
    canary = ("--canary", "20", "--model", str(MODELS / "poet"), "--ttft", "1s")
    shown = staccato("deploy", "qa", "--tenant", tenant, *canary)
    assert shown.code == 0, shown.err
    (line,) = staccato("ls", "--tenant", tenant).out.splitlines()[1:]
    assert line.split()[:5] == ["qa", tenant, "faq", "awake", "1"] and "revision 2, 20 %, poet" in line
    for out in (shown.out, staccato("show", "qa", "--tenant", tenant).out):
        said = dict(re.split(r"  +", one, maxsplit=1) for one in out.splitlines())
        assert (said["MODEL"], said["REVISION"], said["OBJECTIVE"]) == ("faq", "1", "ttft_ms=2000, tbt_ms=100")
        assert (said["TARGET"], said["CANARY"]) == ("revision 2, 20 %, poet", "weight=20, errors_most=0.05")
        assert said["TARGET CHANGES"] == "model: faq → poet, slo.ttft_ms: 2000 → 1000"
    back = staccato("rollback", "qa", "--tenant", tenant)
    assert back.code == 0 and "TARGET" not in back.out and re.search(r"^PHASE +awake$", back.out, re.M)


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


def test_an_operators_key_is_made_listed_used_rotated_and_revoked(staccato: Staccato) -> None:
    made = staccato("operator-key", "create", "grafana", "--scope", "metrics:read", "--expires", "90d")
    (secret,) = made.out.split()
    listed = staccato("operator-key", "ls")
    (line,) = [line for line in listed.out.splitlines() if " grafana " in line]
    assert "metrics:read" in line and " valid " in line and secret not in listed.out
    refused = staccato("tenant", "ls", "--key", secret)
    assert refused.code == ERROR and "the scope tenants" in refused.err
    id = line.split()[0]
    successor = told(staccato("operator-key", "rotate", id, "--overlap", "0s", "--json"))
    assert "has expired" in staccato("tenant", "ls", "--key", secret).err
    assert staccato("operator-key", "revoke", successor["id"]).code == 0
    assert "was revoked" in staccato("tenant", "ls", "--key", successor["key"]).err


def test_a_wrong_lifetime_or_scope_of_an_operators_key_is_the_callers_mistake(staccato: Staccato) -> None:
    create = ("operator-key", "create", "bob", "--scope")
    soon = staccato(*create, "fleet", "--expires", "soon")
    assert soon.code == USAGE and "write it as 90d, 12h or 30m" in soon.err
    assert staccato(*create, "root").code == USAGE
    assert staccato("operator-key", "create", "bob").code == USAGE


def test_a_key_is_made_and_listed_with_the_highest_priority_that_its_requests_may_ask_for(
    staccato: Staccato, tenant: str
) -> None:
    usual = told(staccato("key", "create", tenant, "--json"))
    high = told(staccato("key", "create", tenant, "--priority", "high", "--json"))
    assert (usual["priority"], high["priority"]) == ("normal", "high")
    title, *lines = staccato("key", "ls", tenant).out.splitlines()
    place = title.index("PRIORITY")
    assert [line[place:].split()[0] for line in lines] == ["normal", "high"]
    wrong = staccato("key", "create", tenant, "--priority", "urgent")
    assert wrong.code == USAGE and "choose one of batch, high, normal" in wrong.err
    more = staccato("key", "create", tenant, "--priority", "high", "--key", usual["key"])
    assert more.code == USAGE and "at most what its maker has: normal" in more.err
