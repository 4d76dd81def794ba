"""The keeper of the number of runtimes, with answers about a fleet that the tests make, and with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import load
from gateway.ops import fleet_keeper
from gateway.ops.fleet_keeper import FleetAnswer, FleetKeeper, FleetStep, ask, step_to
from gateway.ops.supervise import DEATHS_MOST, Child, Tier, Tree
from gateway.ops.troubles import Troubles, known
from store.tasks import ended
from tests.conftest import free_port, soon

NAMES = ("r1", "r2", "r3")
PROGRAMS = {
    "fails": "raise SystemExit('no memory for the pool')",
    "ends": "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(600)",
}


def answer(
    wanted: int | None, serving: str = "", drained: str = "", surplus: str = "", removable: str = ""
) -> FleetAnswer:
    """The answer about a fleet with runtimes drained by an operator, surplus runtimes, and removable ones of these."""
    names = [frozenset(names.split()) for names in (serving, f"{drained} {surplus} {removable}")]
    names += [frozenset(f"{surplus} {removable}".split()), frozenset(removable.split())]
    return FleetAnswer(wanted, *names)


# ── what is to be done ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("seen", "present", "ending", "step"),
    [
        pytest.param(answer(None, "r1", "", "", "r2"), "r1 r2", "", FleetStep(), id="no scheduler: nothing is done"),
        pytest.param(answer(1, "r1"), "r1", "", FleetStep(), id="as many as wanted"),
        pytest.param(answer(3, "r1"), "r1", "", FleetStep(("r2", "r3"), missing=2), id="missing: next free names"),
        pytest.param(answer(2, "r2"), "r2", "", FleetStep(("r1",), missing=1), id="the first name may be free"),
        pytest.param(answer(2, "r1"), "r1 r2", "", FleetStep(), id="a process without a lease is on its way"),
        pytest.param(answer(2, "r1 far"), "r1", "", FleetStep(), id="runtimes of other hosts count"),
        pytest.param(answer(2, "r1 r2"), "r1", "", FleetStep(), id="also under a name of this host"),
        pytest.param(answer(1, "r1", "r2"), "r1 r2", "", FleetStep(), id="an operator's drain"),
        pytest.param(answer(1, "r1", "", "r2"), "r1 r2", "", FleetStep(), id="surplus with requests"),
        pytest.param(answer(2, "r1", "", "r2"), "r1 r2", "", FleetStep(), id="surplus, and to be asked back"),
        pytest.param(answer(1, "r1", "", "", "r2"), "r1 r2", "", FleetStep(end=("r2",)), id="surplus without requests"),
        pytest.param(answer(1, "r2", "", "", "r1"), "r1 r2", "", FleetStep(end=("r1",)), id="the first may be surplus"),
        pytest.param(answer(1, "r1", "", "", "r2"), "r1 r2", "r2", FleetStep(), id="told to end already"),
        pytest.param(answer(1, "r1", "", "", "far"), "r1", "", FleetStep(), id="other hosts end their own"),
        pytest.param(
            answer(2, "r1", "r2"), "r1 r2", "", FleetStep(("r3",), missing=1), id="an operator's drain is replaced"
        ),
        pytest.param(
            answer(3, "r3", "r1 r2"), "r1 r2 r3", "", FleetStep(missing=2), id="never more processes than names"
        ),
        pytest.param(
            answer(2, "r1 r2"), "r1 r2", "r2", FleetStep(("r3",), missing=1), id="asked back, and ended already"
        ),
    ],
)
def test_the_step_towards_the_wanted_number(seen: FleetAnswer, present: str, ending: str, step: FleetStep) -> None:
    assert step_to(seen, frozenset(present.split()), frozenset(ending.split()), NAMES) == step


# ── how it is done ────────────────────────────────────────────────────────────────────────────────────────────────────


class Kept:
    """A keeper of processes that stand in for runtimes, and the fleet's next answer: a value or an error."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.folder = folder
        self.tree = Tree(folder / "logs", self.said.append, troubles=Troubles(folder, self.said.append))
        self.programs = dict.fromkeys(NAMES, "ends")
        self.tier: Tier = self.tree.start(self.runtime("r1"))
        self.answer: FleetAnswer | Exception = answer(1, "r1")
        self.asked = 0
        self.keeper = FleetKeeper(self.tier, self.runtime, NAMES, self._ask, self.said.append)

    def runtime(self, name: str) -> Child:
        return Child(name, (sys.executable, "-S", "-c", PROGRAMS[self.programs[name]]), os.environ, stop_s=60)

    async def _ask(self) -> FleetAnswer:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def looks(self, count: int) -> None:
        """Return when the keeper has looked at the present answer `count` times."""
        before = self.asked
        await soon(lambda: self.asked > before + count)

    def told(self, *words: str) -> int:
        """Number of sentences with all of `words`."""
        return sum(all(word in sentence for word in words) for sentence in self.said)


@pytest.fixture
async def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    monkeypatch.setattr(fleet_keeper, "PERIOD_S", 0.02)
    kept = Kept(tmp_path)
    stop = asyncio.Event()
    watching = asyncio.create_task(kept.tree.watch(stop))
    keeping = asyncio.create_task(kept.keeper.keep())
    yield kept
    assert not keeping.done() and not watching.done(), "neither the keeper nor the platform ends by itself"
    stop.set()
    await watching
    await ended(keeping)
    await kept.tree.stop()
    assert kept.tier.names == frozenset()


async def test_missing_runtimes_start_and_surplus_runtimes_end_without_being_failures(kept: Kept) -> None:
    kept.answer = answer(3, "r1")
    await soon(lambda: kept.tier.names == {"r1", "r2", "r3"})
    kept.answer = answer(3, "r1 r2 r3")
    await kept.looks(3)
    kept.answer = answer(1, "r2", removable="r1 r3")
    await soon(lambda: kept.tier.names == {"r2"})
    await kept.looks(3)
    assert kept.said == [
        "r2 starts: the load needs 3 runtimes",
        "r3 starts: the load needs 3 runtimes",
        "r1 ends: the load needs fewer runtimes",
        "r3 ends: the load needs fewer runtimes",
    ]
    kept.answer = answer(2, "r2")
    await soon(lambda: kept.tier.names == {"r1", "r2"})


async def test_a_runtime_that_an_operator_drains_stays_a_process_and_is_replaced(kept: Kept) -> None:
    kept.answer = answer(2, "r1")
    await soon(lambda: kept.tier.names == {"r1", "r2"})
    kept.answer = answer(1, "r1", "r2")
    await kept.looks(5)
    assert kept.tier.names == {"r1", "r2"} and not kept.tier.ending
    kept.answer = answer(2, "r1", "r2")
    await soon(lambda: kept.tier.names == {"r1", "r2", "r3"})


async def test_a_joined_runtime_that_fails_is_named_once_and_tried_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_keeper, "RETRY_S", 0.2)
    starts: list[str] = []
    made = kept.runtime
    monkeypatch.setattr(kept.keeper, "_runtime", lambda name: (starts.append(name), made(name))[1])
    kept.programs["r2"] = "fails"
    kept.answer = answer(2, "r1")
    await soon(lambda: len(starts) >= 3)
    assert set(starts) == {"r2"} and kept.told("r2 does not get well", "no memory for the pool") == 1
    deaths = [sentence for sentence in kept.said if sentence.startswith("r2 exited")]
    assert len(deaths) == DEATHS_MOST - 1, "deaths of the first try alone"
    assert [trouble.role for trouble in known(kept.folder)] == ["r2"]
    kept.programs["r2"] = "ends"
    await soon(lambda: len(starts) > 3 or kept.tier.names == {"r1", "r2"})
    kept.answer = answer(2, "r1 r2")
    await kept.looks(3)
    assert kept.told("does not get well") == 1


async def test_a_failed_runtime_is_not_tried_again_before_its_time_and_forgotten_when_it_is_not_wanted(
    kept: Kept,
) -> None:
    kept.programs["r2"] = "fails"
    kept.answer = answer(2, "r1")
    await soon(lambda: kept.told("r2 does not get well") == 1)
    await kept.looks(5)
    assert kept.tier.names == {"r1"}
    kept.answer = answer(1, "r1")
    await soon(lambda: known(kept.folder) == [])


@pytest.mark.parametrize(
    "error",
    [OSError("the gateway answers 503"), ConnectionRefusedError("refused"), ValueError("no JSON"), TimeoutError()],
)
async def test_an_error_is_said_once_and_looked_at_again(kept: Kept, error: Exception) -> None:
    kept.answer = error
    await kept.looks(5)
    assert kept.told("the number of runtimes stays as it is", str(error) or "TimeoutError") == 1 == len(kept.said)
    kept.answer = answer(2, "r1")
    await soon(lambda: kept.tier.names == {"r1", "r2"})
    kept.answer = error
    await kept.looks(5)
    assert kept.told("the number of runtimes stays as it is") == 2


async def test_a_full_disk_on_which_no_log_can_be_opened_is_said_once(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, mode: int = 0o666, exist_ok: bool = True) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "touch", full)
        kept.answer = answer(2, "r1")
        await kept.looks(5)
        assert kept.told("No space left on device", "r2.log") == 1 == len(kept.said)
        assert kept.tier.names == {"r1"}
    await soon(lambda: kept.tier.names == {"r1", "r2"})


# ── how it asks ───────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def gateway(port: int, said: bytes) -> AsyncIterator[list[bytes]]:
    """A server that answers every request with `said`. Yields the requests."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", port):
        yield heard


def http(status: str, body: Any) -> bytes:
    encoded = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(encoded)}\r\nconnection: close\r\n\r\n".encode() + encoded


FLEET = {"scheduler": "s", "runtimes": 2, "wanted": 1, "serving": ["r1"]}
FLEET |= {"draining": ["r2"], "surplus": ["r2"], "removable": ["r2"]}


async def test_the_fleet_is_asked_for_with_the_operator_key(tmp_path: Path) -> None:
    settings = load(data=tmp_path, port=free_port())
    async with gateway(settings.port, http("200 OK", FLEET)) as heard:
        assert await ask(settings, "sk-operator") == answer(1, "r1", removable="r2")
    assert (
        heard[0].startswith(b"GET /api/v1/fleet HTTP/1.1\r\n") and b"Authorization: Bearer sk-operator\r\n" in heard[0]
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (http("401 Unauthorized", {}), "answers 401"),
        (http("503 Service Unavailable", {}), "answers 503"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP"),
        (b"", "no HTTP"),
        (http("200 OK", "x" * (2 << 20)), "longer than"),
    ],
)
async def test_an_answer_that_tells_no_fleet_is_an_error_that_says_why(tmp_path: Path, said: bytes, why: str) -> None:
    settings = load(data=tmp_path, port=free_port())
    async with gateway(settings.port, said):
        with pytest.raises(OSError, match=why):
            await ask(settings, "sk-operator")
    with pytest.raises(OSError):
        await ask(settings, "sk-operator")
