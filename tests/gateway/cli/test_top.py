"""`staccato top`, and the progress of slow commands as seen at a terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gateway.cli.top import Sample, view
from gateway.config import Settings
from tests.conftest import ROOT, free_port
from tests.gateway.cli.terminal import on_a_terminal
from tests.gateway.cli.test_cli import Staccato
from tests.gateway.cli.test_cli import deployed as deployed
from tests.gateway.cli.test_cli import hub as hub
from tests.gateway.cli.test_cli import settings as settings
from tests.gateway.cli.test_cli import staccato as staccato
from tests.gateway.cli.test_cli import tenant as tenant

LEAVES_SCREEN = "\x1b[?1049l"


def model(*deployments: str, tokens: int = 0, running: int = 0, waiting: int = 0) -> dict[str, Any]:
    return {"deployments": list(deployments), "tokens": tokens, "running": running, "waiting": waiting}


def gpu(id: str, holder: str | None, switches: int = 0, **models: dict[str, Any]) -> dict[str, Any]:
    sizes = {"memory_bytes": 512 << 20, "used_bytes": 384 << 20}
    return {"id": id, "holder": holder, "draining": False, "switches": switches, "models": models, **sizes}


def deployment(tenant: str, name: str, **attainment: float) -> dict[str, Any]:
    return {"tenant": tenant, "name": name, "status": {"phase": "awake", "attainment": attainment or None}}


def environment(settings: Settings) -> dict[str, str]:
    return {"STACCATO_DATA": str(settings.data), "STACCATO_PORT": str(settings.port)}


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_speeds_are_what_was_counted_between_two_looks() -> None:
    before = Sample(10.0, [gpu("r1", "a", 5, a=model("acme/poet@1", tokens=100))], [])
    now = Sample(12.0, [gpu("r1", "a", 11, a=model("acme/poet@1", tokens=150))], [deployment("acme", "poet")])
    shown = view(before, now)
    assert shown.gpus and (shown.gpus[0]["tokens_per_s"], shown.gpus[0]["switches_per_s"]) == (25.0, 3.0)
    assert shown.deployments[0]["tokens_per_s"] == 25.0
    first = view(None, now)
    assert first.gpus and first.gpus[0]["tokens_per_s"] is None is first.deployments[0]["tokens_per_s"]


def test_a_process_that_began_anew_has_no_negative_speed() -> None:
    before, now = (Sample(at, [gpu("r1", "a", a=model("acme/poet@1", tokens=n))], []) for at, n in ((1, 900), (2, 3)))
    shown = view(before, now)
    assert shown.gpus and shown.gpus[0]["tokens_per_s"] == 0


def test_a_gpu_says_who_holds_it_and_what_waits() -> None:
    models = {"a": model("acme/poet@1", "acme/bard@2", running=3, waiting=1), "b": model("globex/faq@1", waiting=4)}
    shown = view(None, Sample(1.0, [gpu("r2", None), gpu("r1", "a", **models)], []))
    assert shown.gpus is not None
    busy, idle = shown.gpus
    assert (busy["gpu"], busy["held_by"], busy["running"], busy["waiting"]) == ("r1", "acme/poet@1 +1", 3, 5)
    assert (busy["memory_mib"], busy["used"]) == (512, 0.75)
    assert (idle["gpu"], idle["held_by"]) == ("r2", "idle")


def test_a_gpu_drained_for_want_of_load_is_told_from_a_gpu_drained_by_an_operator() -> None:
    gpus = [gpu("r1", "a") | {"draining": True}, gpu("r2", None) | {"draining": True, "surplus": True}]
    shown = view(None, Sample(1.0, gpus, []))
    assert shown.gpus and [row["held_by"] for row in shown.gpus] == ["draining", "surplus"]


def test_deployments_are_shown_over_all_gpus_the_busiest_first() -> None:
    gpus = [gpu(id, "a", a=model("acme/poet@1", running=2, waiting=1)) for id in ("r1", "r2")]
    rows = [deployment("acme", "idle"), deployment("acme", "poet", first_token=0.99999, token=0.5)]
    first, second = view(None, Sample(1.0, gpus, rows)).deployments
    assert (first["name"], first["running"], first["waiting"]) == ("poet", 4, 2)
    assert (first["first_on_time"], first["on_time"]) == (0.999, 0.5), "only 1 is all"
    assert (second["name"], second["running"], second["on_time"]) == ("idle", 0, None)


def test_what_a_tenant_may_not_see_is_not_shown_as_nothing() -> None:
    shown = view(None, Sample(1.0, None, [deployment("acme", "poet")]))
    assert shown.gpus is None and shown.deployments[0]["waiting"] is None


# ── against a gateway ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_look_is_for_scripts(staccato: Staccato, deployed: str, tenant: str) -> None:
    plain = staccato("top", "--once")
    assert plain.code == 0 and "\x1b" not in plain.out
    lines = plain.out.splitlines()
    assert lines[0].split()[:3] == ["GPU", "HELD", "BY"] and lines[1].split()[:2] == ["r1", "idle"]
    (mine,) = [line.split() for line in lines if line.startswith(deployed)]
    assert mine[1:3] == [tenant, "awake"]
    told = staccato("top", "--once", "--json").json
    assert told["gpus"][0]["gpu"] == "r1" and deployed in [row["name"] for row in told["deployments"]]


def test_a_tenants_key_shows_its_deployments_alone(staccato: Staccato, deployed: str, tenant: str) -> None:
    key = staccato("key", "create", tenant, "--json").json["key"]
    told = staccato("top", "--once", "--json", "--key", key).json
    assert told["gpus"] is None and [row["name"] for row in told["deployments"]] == [deployed]
    assert "GPU" not in staccato("top", "--once", "--key", key).out


def test_without_a_gateway_one_look_is_one_sentence(staccato: Staccato) -> None:
    ran = staccato("top", "--once", "--url", f"http://127.0.0.1:{free_port()}")
    assert ran.code == 75 and "no gateway answers" in ran.err and ran.err.count("\n") == 1


def test_in_a_pipe_a_line_comes_each_second(settings: Settings, deployed: str) -> None:
    command = [sys.executable, "-c", "from gateway.cli import main; main()", "top", "--json"]
    inherited = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=inherited | environment(settings), stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        looks = [json.loads(running.stdout.readline()) for _ in range(2)]
        running.terminate()
    assert all(look["gpus"][0]["gpu"] == "r1" for look in looks)


@pytest.mark.parametrize("keys", ["q", "\x03"], ids=["q", "ctrl-c"])
def test_the_live_view_leaves_the_terminal_as_it_was(settings: Settings, deployed: str, keys: str) -> None:
    with on_a_terminal("top", settings=environment(settings)) as terminal:
        terminal.until(deployed)
        terminal.until("HELD BY")
        shown = terminal.seen.count("staccato top")
        terminal.until("staccato top" if not shown else "\x1b[H")  # the screen is drawn again
        assert not terminal.is_as_before, "keys would be echoed"
        terminal.type("x" + keys)
        assert terminal.ended() == 0
        assert terminal.seen.rstrip().endswith(LEAVES_SCREEN + "\x1b[?25h") or LEAVES_SCREEN in terminal.seen
        assert terminal.is_as_before and "Traceback" not in terminal.seen


def test_the_live_view_waits_for_a_gateway_that_is_away(settings: Settings) -> None:
    away = environment(settings) | {"STACCATO_URL": f"http://127.0.0.1:{free_port()}"}
    with on_a_terminal("top", settings=away) as terminal:
        terminal.until("no gateway answers")
        assert terminal.process.poll() is None
        terminal.type("q")
        assert terminal.ended() == 0


def test_a_wake_tells_a_person_how_long_it_will_take(settings: Settings, staccato: Staccato, deployed: str) -> None:
    assert staccato("sleep", deployed).code == 0
    with on_a_terminal("wake", deployed, settings=environment(settings)) as terminal:
        assert terminal.ended() == 0
        assert "waking" in terminal.seen and "awake" in terminal.seen
    assert staccato("wake", deployed, "--json").json["status"]["phase"] == "awake"
