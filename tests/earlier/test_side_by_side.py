"""Processes of this version join a running 71e32b0, on its database and bus, while clients stream from both versions.

The order is the runbook's: migration, ledger, gateway, runtime. The tree of 71e32b0 comes from git's history.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from store.db.database import head
from tests.conftest import NatsServer, free_port
from tests.e2e.conftest import AWAKE, MODELS, READY_S, Platform
from tests.earlier.installation import TENANT, Sent, asked
from tests.earlier.tree import unpacked

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # two platforms start, one after the other

MODEL = "faq"
QUESTIONS = ("What is a turn?", "What is a page?")
TOKENS = 900
LONG = {"ignore_eos": True, "max_tokens": TOKENS}
SETTINGS = {"STACCATO_HOST_CACHE": "256MiB", "STACCATO_HANG_S": "600"}  # a device may sleep during the migration


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("earlier"))


@dataclass
class Newcomers:
    """Processes of this version beside a platform of 71e32b0."""

    old: Platform
    nats_url: str
    port: int = field(default_factory=free_port)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, role: str) -> subprocess.Popen[bytes]:
        """Start `staccato ROLE` on the bus and the database of the old platform."""
        data = self.old.data.parent / "data-of-this-version"
        if not data.exists():
            data.mkdir()
            for secret in ("pepper", "admin.key"):
                shutil.copy(self.old.data / secret, data / secret)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STACCATO_")}
        environment |= SETTINGS | {
            "STACCATO_DATA": str(data),
            "STACCATO_DATABASE_URL": f"sqlite:///{self.old.data / 'staccato.db'}",
            "STACCATO_NATS_URL": self.nats_url,
            "STACCATO_PORT": str(self.port),
            "STACCATO_RUNTIME_ID": "newcomer",
        }
        with (data / f"{role}.log").open("w") as log:
            command = [str(Path(sys.executable).with_name("staccato")), role]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        if role != "migrate":
            self.running.append(process)
        return process

    def is_ready(self) -> bool:
        return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200

    def can_serve(self) -> bool:
        """Whether the runtime of this version has the model."""
        gpus = {gpu["id"]: gpu["models"] for gpu in self.old.get("/api/v1/gpus").json()["data"]}
        states = [model["residency"] for model in gpus.get("newcomer", {}).values()]
        return len(states) == 1 and states[0] in ("resident", "staged")

    def stop(self) -> list[int]:
        """End the processes, the last started process first. Returns the exit codes."""
        codes = []
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
            codes.append(process.wait(60))
        return codes


@dataclass(frozen=True)
class Upgrade:
    """Answers by the part of the upgrade in which clients asked, and the booked usage.

    `calm`: 71e32b0 alone. `migrated`: in mid-stream during the migration. `joined`: gateway of this version, runtime of
    71e32b0. `old_gateway` and `new_gateway`: from both gateways, in mid-stream at the death of the old runtime and of
    the old ledger."""

    calm: list[Sent]
    migrated: list[Sent]
    joined: list[Sent]
    old_gateway: list[Sent]
    new_gateway: list[Sent]
    booked: list[tuple[str, int, int]]  # request, tokens of the prompt, tokens of the answer


def questions() -> list[Sent]:
    return [Sent(MODEL, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def upgrade(earlier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgrade]:
    folder = tmp_path_factory.mktemp("upgrade")
    nats = NatsServer(folder / "nats")
    nats.start()
    here = {"PYTHONPATH": str(earlier), "STACCATO_NATS_URL": nats.url}
    old = Platform(folder / "data", free_port(), SETTINGS | here)
    new = Newcomers(old, nats.url)
    try:
        old.start()
        old.tenant(TENANT)
        old.model(MODEL, MODELS / MODEL)
        assert old.deploy(TENANT, MODEL, **AWAKE)["status"]["phase"] == "awake"
        yield upgraded(old, new)
    finally:
        codes = new.stop()
        assert old.process is not None
        old.process.send_signal(signal.SIGCONT)
        codes.append(old.stop())
        nats.kill()
    assert codes == [0] * len(codes)


def upgraded(old: Platform, new: Newcomers) -> Upgrade:
    key = old.keys[TENANT]
    calm, migrated, joined, old_gateway, new_gateway = (questions() for _ in range(5))
    with asked(old.url, key, calm, **LONG):
        pass
    with asked(old.url, key, migrated, **LONG):
        old.until(lambda: all(len(sent.tokens) > 20 for sent in migrated), READY_S)
        device = old.child("runtime.device")
        device.suspend()
        assert new.start("migrate").wait(READY_S) == 0
        new.start("ledger")
        assert not any(sent.ended for sent in migrated)
        device.resume()
    new.start("gateway")
    old.until(new.is_ready, READY_S)
    with asked(new.url, key, joined, **LONG):
        pass
    new.start("runtime")
    old.until(new.can_serve, READY_S)
    both = old_gateway + new_gateway
    with asked(old.url, key, old_gateway, **LONG), asked(new.url, key, new_gateway, **LONG):
        old.until(lambda: all(len(sent.tokens) > 20 for sent in both), READY_S)
        kill(old, "runtime.node", "store.ledger")
        assert not any(sent.ended for sent in both)
    old.until(lambda: len(booked(old.data)) == 10, READY_S)
    return Upgrade(calm, migrated, joined, old_gateway, new_gateway, booked(old.data))


def kill(old: Platform, *modules: str) -> None:
    """SIGKILL for the modules' processes and their children. The supervisor sleeps, and so starts no process again."""
    assert old.process is not None
    found = [old.child(module) for module in modules]
    old.process.send_signal(signal.SIGSTOP)
    for process in found:
        for child in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def booked(data: Path) -> list[tuple[str, int, int]]:
    """Requests with a booked end, with tokens of prompt and answer, in order."""
    query = "SELECT request, prompt_tokens, output_tokens FROM usage WHERE final ORDER BY 1"
    with contextlib.closing(sqlite3.connect(f"file:{data / 'staccato.db'}?mode=ro", uri=True)) as database:
        return database.execute(query).fetchall()


def version(**environment: str) -> dict[str, str | int]:
    """Answer of `staccato version`."""
    command = [str(Path(sys.executable).with_name("staccato")), "version", "--json"]
    found: dict[str, str | int] = json.loads(subprocess.check_output(command, env=os.environ | environment))
    return found


def test_versions_with_unlike_databases_and_the_same_wire_may_work_together(earlier: Path) -> None:
    then, now = version(PYTHONPATH=str(earlier)), version()
    assert (then["database"], now["database"]) == ("0007", head())
    assert then["wire"] == now["wire"]


@pytest.mark.parametrize("part", ["migrated", "joined", "old_gateway", "new_gateway"])
def test_streams_of_every_part_of_an_upgrade_say_what_71e32b0_alone_said(upgrade: Upgrade, part: str) -> None:
    calm = [sent.tokens for sent in upgrade.calm]
    assert [len(tokens) for tokens in calm] == [TOKENS] * len(QUESTIONS)
    answers: list[Sent] = getattr(upgrade, part)
    assert all(sent.ended for sent in answers)
    assert [sent.tokens for sent in answers] == calm


def test_every_stream_is_booked_once_whichever_ledger_read_the_usage(upgrade: Upgrade) -> None:
    answers = upgrade.calm + upgrade.migrated + upgrade.joined + upgrade.old_gateway + upgrade.new_gateway
    assert upgrade.booked == sorted((sent.request, sent.prompt_tokens, len(sent.tokens)) for sent in answers)
