"""`staccato node` as a process, with real runtimes and a real nats-server; and the keeper of runtimes with children
that play runtimes, because a hanging or failing runtime must be forced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from gateway.config import load
from gateway.machine import node
from gateway.machine.node import NodeSettings, RuntimeKeeper
from gateway.machine.processes import StartError
from gateway.machine.runtimes import MachineRuntimes
from gateway.ops.supervise import Child, Tree
from store.bus import Bus
from store.contract import grants, wire
from store.settings import SettingsError
from store.tasks import ended
from tests.conftest import ROOT, NatsServer, free_port, soon
from tests.gateway.joining.fleet import JoinFleet
from tests.gateway.joining.fleet import fleet as fleet
from tests.gateway.machine.counted import below, caches

EIGHT = 8
READY_S = 180.0  # eight runtimes start on two busy cores
CHEAP = {"HOST_CACHE": "64MiB", "DISK_CACHE": "0", "DEVICE_MEMORY": "16MiB", "DRAIN_S": "1", "NODE_ID": "n1"}


class Supervisor:
    """A running `staccato node` or `staccato up`, with the settings CHEAP and `settings`."""

    def __init__(self, folder: Path, *arguments: str, **settings: str) -> None:
        self.log = folder / "supervisor.log"
        told = {
            f"STACCATO_{name}": value for name, value in (CHEAP | {"DATA": str(folder / "data")} | settings).items()
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STACCATO_")}
        command = [sys.executable, "-c", "from gateway.cli import main; main()", *arguments]
        with self.log.open("w") as log:
            environment = inherited | {"PYTHONPATH": str(ROOT)} | told
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Return when a state is reached. Fails after READY_S seconds, and if the supervisor ends before."""
        deadline = time.monotonic() + READY_S
        while not reached():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            await asyncio.sleep(0.2)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)


@contextlib.contextmanager
def supervised(folder: Path, *arguments: str, **settings: str) -> Iterator[Supervisor]:
    supervisor = Supervisor(folder, *arguments, **settings)
    try:
        yield supervisor
    finally:
        if supervisor.process.poll() is None:
            supervisor.process.kill()
            supervisor.process.wait()


def ready_file(folder: Path) -> Path:
    (folder / "signs").mkdir()
    return folder / "signs/ready"


@pytest.mark.parametrize("runtimes", [3, pytest.param(EIGHT, marks=pytest.mark.long)])
async def test_runtimes_share_a_host_cache_and_a_killed_runtime_comes_back_and_all_drain(
    nats_server: NatsServer, tmp_path: Path, runtimes: int
) -> None:
    ready = ready_file(tmp_path)
    names = {f"n1-r{number}" for number in range(1, runtimes + 1)}
    told = {"NATS_URL": nats_server.url, "SIGNS": str(ready.parent)}
    with supervised(tmp_path, "node", "--runtimes", str(runtimes), **told) as supervisor:
        await supervisor.until(ready.exists)
        shared = caches(supervisor.process.pid)
        assert len(shared) == runtimes and len(set(shared.values())) == 1
        async with Bus.connect(nats_server.url, "test", grants.GATEWAY) as bus:
            assert set(await bus.keys(wire.LEASES)) == names
            epoch = await lease_epoch(bus, "n1-r3")
            os.kill(process_of(supervisor, "n1-r3"), signal.SIGKILL)
            deadline = time.monotonic() + READY_S
            while await lease_epoch(bus, "n1-r3") <= epoch or len(caches(supervisor.process.pid)) < runtimes:
                assert supervisor.process.poll() is None and time.monotonic() < deadline
                await asyncio.sleep(0.2)
            again = caches(supervisor.process.pid)
            assert set(again.values()) == set(shared.values()) and len(again.keys() & shared.keys()) == runtimes - 1
            assert supervisor.end() == 0
            assert not set(await bus.keys(wire.LEASES))
    said = supervisor.log.read_text()
    assert "n1-r3 was killed by SIGKILL, starting it again" in said and "stopping" in said


@pytest.mark.long
async def test_eight_runtimes_of_the_whole_platform_share_a_host_cache(tmp_path: Path) -> None:
    with supervised(tmp_path, "up", "--runtimes", str(EIGHT), PORT=str(free_port())) as supervisor:
        await supervisor.until(lambda: len(caches(supervisor.process.pid)) == EIGHT)
        assert len(set(caches(supervisor.process.pid).values())) == 1
        assert supervisor.end() == 0


async def lease_epoch(bus: Bus, runtime: str) -> int:
    lease, _ = await bus.read(wire.LEASES, runtime, wire.Lease)
    return lease.epoch if lease else 0


def process_of(supervisor: Supervisor, runtime: str) -> int:
    named = f"STACCATO_RUNTIME_ID={runtime}\0".encode()
    for pid in below(supervisor.process.pid):
        if "runtime.node" in Path(f"/proc/{pid}/cmdline").read_text():
            if named in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
    raise LookupError(runtime)


async def test_the_runtimes_of_a_node_join_by_proof_each_with_a_token_and_a_key(
    fleet: JoinFleet, tmp_path: Path
) -> None:
    for number in (1, 2):
        (tmp_path / f"token-{number}").write_text(await fleet.token(f"n1-r{number}"))
    keys = {"NATS_CREDENTIALS": str(tmp_path / "keys/r{n}.nk"), "JOIN_TOKEN_FILE": str(tmp_path / "token-{n}")}
    told = keys | {"NATS_URL": fleet.server.url, "FORK_SERVER": "false"}
    async with fleet.as_gateway() as bus:
        for number in range(2):  # from the second start on, the keys alone let the runtimes in
            with supervised(tmp_path, "node", "--runtimes", "2", **told) as supervisor:
                deadline = time.monotonic() + READY_S
                while set(await bus.keys(wire.LEASES)) != {"n1-r1", "n1-r2"}:
                    assert supervisor.process.poll() is None and time.monotonic() < deadline
                    await asyncio.sleep(0.2)
                assert supervisor.end() == 0
            for token in tmp_path.glob("token-*"):
                assert number == 0 and token.read_text() not in supervisor.log.read_text()
                token.unlink()
    assert set(await fleet.bindings()) == {"n1-r1", "n1-r2"}
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {"r1.nk", "r2.nk"}


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_number_stands_in_the_files_and_in_the_port_of_each_runtime() -> None:
    own = NodeSettings(node_id="gpu-7", nats_credentials=Path("/k/r{n}.nk"), transport_port=7000)
    own.check(3)
    assert own.runtime_ids(3) == ["gpu-7-r1", "gpu-7-r2", "gpu-7-r3"]
    assert own.variables(3) == {"STACCATO_NATS_CREDENTIALS": "/k/r3.nk", "STACCATO_TRANSPORT_PORT": "7002"}
    assert NodeSettings(node_id="a").variables(1) == {}


@pytest.mark.parametrize(
    ("given", "runtimes", "sentence"),
    [
        ({}, 0, "STACCATO_RUNTIMES=0: a node has at least 1 runtime"),
        ({"node_id": "gpu.7"}, 1, r"STACCATO_NODE_ID is 'gpu\.7'.* write letters, digits and '-'"),
        ({"node_id": "n" * 61}, 1, "63 in all"),
        ({"nats_credentials": Path("/k/r1.nk")}, 2, r"NATS_CREDENTIALS=/k/r1.nk is one file for 2 runtimes: .*r\{n\}"),
        ({"join_token_file": Path("/k/token")}, 2, "STACCATO_JOIN_TOKEN_FILE=/k/token is one file for 2 runtimes"),
        ({"transport_port": 65530}, 8, "leaves no port for 8 runtimes: choose at most 65528"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_remedy(
    given: dict[str, object], runtimes: int, sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        NodeSettings(**({"node_id": "n1"} | given)).check(runtimes)


# ── runtimes that hang or do not get well ─────────────────────────────────────────────────────────────────────────────

PROGRAMS = {
    "lives": "import pathlib, time\n"
    "while True: [pathlib.Path(FOLDER, sign).touch() for sign in ('alive', 'ready')]; time.sleep(0.02)",
    "hangs": "import pathlib, time\npathlib.Path(FOLDER, 'alive').touch(); time.sleep(600)",
    "fails": "raise SystemExit('no memory for the pool')",
}


class Kept:
    """A keeper of children that play runtimes, by a program for each name."""

    def __init__(self, folder: Path, **programs: str) -> None:
        self.said: list[str] = []
        self.folder, self.programs, self.started = folder, programs, list[str]()
        self.tree = Tree(folder / "logs", self.said.append)
        self.keeper = RuntimeKeeper(self.tree.start(), self.child, list(programs), folder, self.said.append)

    def child(self, name: str) -> Child:
        self.started.append(name)
        (self.folder / name).mkdir(exist_ok=True)
        program = f"FOLDER = {str(self.folder / name)!r}\n" + PROGRAMS[self.programs[name]]
        return Child(name, (sys.executable, "-S", "-c", program), os.environ)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        self.keeping = asyncio.create_task(self.keeper.keep(asyncio.Event()))
        try:
            yield
        finally:
            await ended(self.keeping)
            await self.tree.stop()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SILENT_S", 0.5), ("LOOK_PERIOD_S", 0.05), ("RETRY_S", 0.1)):
        monkeypatch.setattr(node, name, value)
    monkeypatch.setattr("gateway.ops.supervise.PAUSE_S_FIRST", 0.01)


@pytest.mark.usefixtures("hurried")
async def test_a_runtime_that_gives_no_sign_of_life_is_started_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path, r1="lives", r2="hangs")
    async with kept.kept():
        await soon(lambda: sum("r2 gave no sign of life" in said for said in kept.said) >= 2)
        assert not any(said.startswith("r1") for said in kept.said)


@pytest.mark.usefixtures("hurried")
async def test_a_runtime_that_does_not_get_well_is_tried_again_and_costs_no_other_runtime(tmp_path: Path) -> None:
    kept = Kept(tmp_path, r1="lives", r2="fails")
    async with kept.kept():
        await soon(lambda: kept.started.count("r2") >= 3 and kept.keeper.ready())
        assert not kept.keeping.done() and kept.started.count("r1") == 1
        assert sum("r2 does not get well, and is tried again" in said for said in kept.said) == 1


@pytest.mark.usefixtures("hurried")
async def test_a_node_of_which_no_runtime_gets_well_ends_with_the_reason(tmp_path: Path) -> None:
    kept = Kept(tmp_path, r1="fails", r2="fails")
    async with kept.kept():
        with pytest.raises(StartError, match=r"no runtime of this node gets well: r\d exited with code 1"):
            async with asyncio.timeout(30):
                await kept.keeping


def test_a_runtime_has_the_time_of_its_drain_before_it_is_killed(tmp_path: Path) -> None:
    settings = load(data=tmp_path, drain_s=300.0)
    child = MachineRuntimes(settings, ["r1"], 0, -1, (), lambda name: {}).child("r1")
    assert child.stop_s > 300 and child.environment["STACCATO_DRAIN_S"] == "300.0"
