"""ARCHITECTURE's walks of a request and of a model name each file on the real way, and the ways are short.

A file is crossed if a function of the file is on the stack when the request, or the model, is handed on: to another
task, to another process, to vLLM, to the memory library, or to the database. A function that has returned by then was
help on the way, not a station."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, free_port
from tests.e2e.conftest import AWAKE, MODELS, Platform

MOST_FILES = 40
HOOK = Path(__file__).parent / "hook"


@dataclass(frozen=True)
class HandOver:
    """An expected call of `function`, with an argument like `given`, and with the project's function `above` on the
    stack."""

    function: str
    given: str = ""  # a regular expression
    above: str = ""

    def fits(self, function: str, given: str, stack: list[str]) -> bool:
        called = {name.split(":")[1] for name in stack}
        return (
            function == self.function and bool(re.match(self.given, given)) and (not self.above or self.above in called)
        )


REQUEST_THERE = [
    HandOver("create_task", above="Exchange.pass_on"),
    HandOver("Client.publish", r"rt\..*\.run"),
    HandOver("NodeEnd.send", "Start"),
    HandOver("GPUModelRunner.execute_model"),
]
REQUEST_BACK = [
    HandOver("DeviceEnd.send", "Made"),
    HandOver("Client.publish", r"gw\..*\.frames"),
    HandOver("Event.set", above="Relay._receive"),
    HandOver("RequestResponseCycle.send", above="FastFront.answered"),
    HandOver("Queue.put_nowait", above="Meter._close"),
    HandOver("Client.publish", "usage"),
    HandOver("Connection.commit", above="consume"),
]
MODEL_THERE = [
    HandOver("Event.set", above="Rollout.nudge"),
    HandOver("Client.publish", r"\$KV\.models"),
    HandOver("NodeEnd.send", "Place"),
]
MODEL_BACK = [  # the device orders an image; the node has the image made by another process
    HandOver("DeviceEnd.send", "MakeImage"),
    HandOver("create_task", above="ImageMaker.make"),
    HandOver("BaseModelLoader.load_model"),
    HandOver("GPUModelRunner.execute_model"),
    HandOver("CacheMemory.commit"),
    HandOver("NodeEnd.send", "ImageMade"),
    HandOver("Reservation.map"),
    HandOver("DeviceEnd.send", "State"),
    HandOver("Client.publish", r"\$KV\.leases"),
]


class Recorded:
    """Hand-overs of all processes, and files of the project with a function called meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.hand_overs: list[tuple[float, str, str, list[str]]] = []
        self.ran: set[str] = set()
        for file in folder.glob("*.json"):
            hand_overs, files = json.loads(file.read_text())
            self.hand_overs += hand_overs
            self.ran |= set(files)
        self.hand_overs.sort()

    def crossed(self, expected: list[HandOver]) -> list[str]:
        """The files crossed at the expected hand-overs, in the order of the first crossing.

        Fails if an expected hand-over is missing."""
        missing = [one for one in expected if not any(one.fits(*seen[1:]) for seen in self.hand_overs)]
        assert not missing
        stacks = [seen[3] for seen in self.hand_overs if any(one.fits(*seen[1:]) for one in expected)]
        return list(dict.fromkeys(name.split(":")[0] for stack in stacks for name in stack))


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with the demo's model `faq` and processes able to record hand-overs."""
    folder = tmp_path_factory.mktemp("walk")
    hook = [f"PYTHONPATH={HOOK}{os.pathsep}{ROOT}", f"WALK_ROOT={ROOT}", f"WALK_FOLDER={folder}"]
    started = Platform(folder / "data", free_port(), limited=("env", *hook))
    try:
        started.start()
        started.tenant("acme")
        started.model("faq", MODELS / "faq")
        started.model("weather", MODELS / "weather")
        started.deploy("acme", "faq", **AWAKE)
        yield started
    finally:
        code = started.stop()
    assert code == 0


def recorded(platform: Platform, work: Callable[[], object], then: Callable[[], bool]) -> Recorded:
    """Hand-overs of the platform's processes from the beginning of `work` until `then` is true."""
    folder = platform.data.parent
    for old in folder.glob("*.json"):
        old.unlink()
    able = [process for process in platform.everyone() if _hears(process, signal.SIGUSR2)]
    assert len(able) >= 5, "gateway, scheduler, ledger, node and device"
    for process in able:
        process.send_signal(signal.SIGUSR2)
    work()
    platform.until(then)
    for process in filter(_alive, able):  # processes for templates may have ended
        process.send_signal(signal.SIGUSR2)
    platform.until(lambda: all((folder / f"{one.pid}.json").exists() or not _alive(one) for one in able))
    return Recorded(folder)


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _hears(process: psutil.Process, wanted: signal.Signals) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (wanted - 1) & 1)


def listed(heading: str) -> set[str]:
    """Files named in the numbered list below a heading of ARCHITECTURE."""
    chapter = (
        (ROOT / "ARCHITECTURE.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0].split('\n\n"Asleep"')[0]
    )
    return set(re.findall(r"`((?:gateway|runtime|store)/[\w/]+\.py)`", chapter))


def folders(files: list[str]) -> list[str]:
    return [folder for folder, _ in groupby(str(Path(file).parent) for file in files)]


def test_a_request_takes_the_way_of_the_first_walk(platform: Platform) -> None:
    client = platform.client("acme", max_retries=0)
    question = [{"role": "user", "content": "What are you?"}]

    def ask() -> None:
        client.chat.completions.create(model="faq", messages=question, max_tokens=8)  # type: ignore[arg-type]

    ask()
    platform.until(lambda: platform.usage("acme")["requests"] == 1)
    seen = recorded(platform, ask, lambda: platform.usage("acme")["requests"] == 2)
    there, crossed = seen.crossed(REQUEST_THERE), seen.crossed(REQUEST_THERE + REQUEST_BACK)
    print(len(crossed), crossed, len(seen.ran), folders(there))
    assert len(crossed) <= MOST_FILES and len(listed("A request, from HTTP to the bill")) <= MOST_FILES
    assert not set(crossed) - listed("A request, from HTTP to the bill")
    assert len(folders(there)) == len(set(folders(there))), "the request returns to a folder that it has left"


def test_a_model_takes_the_way_of_the_second_walk(platform: Platform) -> None:
    def awake() -> bool:
        deployments = platform.get("/api/v1/deployments?tenant=acme").json()["data"]
        return [one["status"]["phase"] for one in deployments if one["name"] == "weather"] == ["awake"]

    body = {"name": "weather", "model": "weather", "tenant": "acme", "dtype": "float32", **AWAKE}
    seen = recorded(platform, lambda: platform.post("/api/v1/deployments", body), awake)
    there, crossed = seen.crossed(MODEL_THERE), seen.crossed(MODEL_THERE + MODEL_BACK)
    print(len(crossed), crossed, len(seen.ran), folders(there))
    assert len(crossed) <= MOST_FILES and len(listed("A model, from deploy to asleep and awake")) <= MOST_FILES
    assert not set(crossed) - listed("A model, from deploy to asleep and awake")
    assert len(folders(there)) == len(set(folders(there))), "the model returns to a folder that it has left"
