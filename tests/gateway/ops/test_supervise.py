import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.ops import supervise
from gateway.ops.supervise import DEATHS_MOST, HEALTHY_S, Child, GaveUp, Log, Restarts, Tree
from gateway.ops.troubles import Troubles, known
from store.fork import client as fork
from tests.conftest import ROOT, soon

PYTHON = sys.executable
SLEEPS = "import time; print('here', flush=True); time.sleep(60)"


def child(name: str, code: str, stop_s: float = 5.0) -> Child:
    return Child(name, (PYTHON, "-S", "-c", code), os.environ, stop_s)


def appends(path: Path, then: str = "time.sleep(60)") -> str:
    """A Python program: each start appends the pid to `path` as a line, then runs `then`."""
    return f"import os, time; print(os.getpid(), file=open({str(path)!r}, 'a'), flush=True); {then}"


async def pids(path: Path, count: int) -> list[int]:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(FileNotFoundError):
                found = [int(line) for line in path.read_text().split()]
                if len(found) >= count:
                    return found
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while alive(pid):
            await asyncio.sleep(0.01)


async def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    tree = Tree(tmp_path / "logs", said.append)
    tree.start(child("ledger", appends(tmp_path / "pids")))
    (first,) = await pids(tmp_path / "pids", 1)
    os.kill(first, signal.SIGKILL)
    _, second = await pids(tmp_path / "pids", 2)
    assert second != first and alive(second)
    assert len(said) == 1 and said[0].startswith("ledger was killed by SIGKILL, starting it again in 0.1 s")
    await tree.stop()
    assert not alive(second)


class Forking:
    """A tree with a fork server, and the module `forked` that its children run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.ours, self.theirs = fork.sockets()
        self.tree = Tree(folder / "logs", self.said.append, forks=fork.ForkServer(self.ours))
        self.environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"} | fork.VARIABLES

    def serve(self, *modules: str) -> None:
        command = fork.server_command(self.theirs.fileno(), modules)
        server = Child("fork-server", command, self.environment, fds=(self.theirs.fileno(),), needed=False)
        self.tree.start().start(server, lambda name, error: None)

    def start(self, code: str) -> None:
        (self.folder / "forked.py").write_text(code)
        command = (PYTHON, "-P", "-m", "forked")
        self.tree.start(Child("gateway", command, self.environment, 5.0, forked=True))

    def parent(self, pid: int) -> str:
        """Return the command line of the parent of the process `pid`."""
        status = Path(f"/proc/{pid}/status").read_text()
        return Path(f"/proc/{status.partition('PPid:')[2].split()[0]}/cmdline").read_text()


@pytest.fixture
async def forking(tmp_path: Path) -> AsyncIterator[Forking]:
    forking = Forking(tmp_path)
    yield forking
    await forking.tree.stop()
    forking.ours.close()
    forking.theirs.close()


async def test_a_forked_child_is_kept_alive_and_stopped_as_an_executed_child_is(forking: Forking) -> None:
    forking.serve()
    ending = "import sys; print('last words', flush=True); sys.exit(3)"
    forking.start(appends(forking.folder / "pids", "time.sleep(60)"))
    (first,) = await pids(forking.folder / "pids", 1)
    assert "store.fork.server" in forking.parent(first) and os.getpgid(first) == first
    os.kill(first, signal.SIGKILL)
    _, second = await pids(forking.folder / "pids", 2)
    assert forking.said[0].startswith("gateway was killed by SIGKILL, starting it again in 0.1 s")
    (forking.folder / "forked.py").write_text(ending)
    os.kill(second, signal.SIGTERM)
    await soon(lambda: any(said.startswith("gateway exited with code 3") for said in forking.said))
    assert "last words" in (forking.folder / "logs" / "gateway.log").read_text()
    began_s = time.monotonic()
    await forking.tree.stop()
    assert time.monotonic() - began_s < 4


async def test_without_a_server_fit_to_fork_the_child_is_executed(forking: Forking) -> None:
    (forking.folder / "threaded.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    )
    forking.serve("threaded")
    forking.start(appends(forking.folder / "pids"))
    (pid,) = await pids(forking.folder / "pids", 1)
    assert "store.fork.server" not in forking.parent(pid)
    (said,) = forking.said
    assert said.startswith("gateway is started without the fork server: the imported modules have started 1 threads (")


async def test_a_tree_that_stops_does_not_wait_for_a_server_that_still_imports(forking: Forking) -> None:
    (forking.folder / "slow.py").write_text("import time; time.sleep(60)")
    forking.serve("slow")
    forking.start(appends(forking.folder / "pids"))
    await asyncio.sleep(0.3)
    began_s = time.monotonic()
    await forking.tree.stop()
    assert time.monotonic() - began_s < 4 and not (forking.folder / "pids").exists()


async def test_what_is_started_first_is_stopped_last_and_a_tier_together(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    tree = Tree(tmp_path / "logs", print)
    for tier in (["nats"], ["r1", "r2"], ["gateway"]):
        tree.start(
            *(
                child(
                    name,
                    "import signal, sys, time\n"
                    "def end(*_):\n"
                    f"    time.sleep(0.1); print({name!r}, file=open({str(ended)!r}, 'a'), flush=True); sys.exit(0)\n"
                    "signal.signal(signal.SIGTERM, end)\n" + appends(tmp_path / name),
                )
                for name in tier
            )
        )
    for name in ("nats", "r1", "r2", "gateway"):
        await pids(tmp_path / name, 1)
    await tree.stop()
    order = ended.read_text().split()
    assert (order[0], set(order[1:3]), order[3]) == ("gateway", {"r1", "r2"}, "nats")


async def test_a_child_that_ignores_the_stop_is_killed_after_its_deadline(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "logs", print)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + appends(tmp_path / "pids")
    tree.start(child("deaf", deaf, stop_s=0.2))
    (pid,) = await pids(tmp_path / "pids", 1)
    began_s = time.monotonic()
    await tree.stop()
    assert 0.2 <= time.monotonic() - began_s < 2 and not alive(pid) and not tree.killed


async def test_a_second_signal_ends_the_wait_at_once(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "logs", print)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + appends(tmp_path / "pids")
    tree.start(child("deaf", deaf, stop_s=60))
    (pid,) = await pids(tmp_path / "pids", 1)
    stopping = asyncio.create_task(tree.stop())
    await asyncio.sleep(0.05)
    tree.kill()
    async with asyncio.timeout(20):
        await stopping
    assert not alive(pid) and tree.killed


async def test_what_a_child_leaves_behind_dies_with_it(tmp_path: Path) -> None:
    orphan = appends(tmp_path / "orphan")
    parent = f"import subprocess; subprocess.Popen([{PYTHON!r}, '-S', '-c', {orphan!r}]); " + appends(tmp_path / "pids")
    tree = Tree(tmp_path / "logs", lambda _: None)
    tree.start(child("runtime", parent))
    (left,) = await pids(tmp_path / "orphan", 1)
    (pid,) = await pids(tmp_path / "pids", 1)
    os.kill(pid, signal.SIGKILL)
    await gone(left)
    await tree.stop()


async def test_a_child_that_never_gets_well_ends_the_watch_with_its_last_words(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "logs", lambda _: None)
    tree.start(child("gateway", "raise SystemExit('STACCATO_PORT is wrong')"))
    with pytest.raises(GaveUp) as gave_up:
        await tree.watch(asyncio.Event())
    await tree.stop()
    assert str(gave_up.value).startswith(f"gateway exited with code 1 {DEATHS_MOST} times in a row")
    assert "STACCATO_PORT is wrong" in str(gave_up.value)


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "logs", print)
    tree.start(Child("nats", (str(tmp_path / "nats-server"),), os.environ))
    with pytest.raises(GaveUp, match="nats does not start: .*nats-server: No such file"):
        await tree.watch(asyncio.Event())
    await tree.stop()


def test_pauses_double_up_to_five_seconds_and_start_anew_after_a_good_life() -> None:
    restarts, pauses = Restarts(was_well=True), []
    for _ in range(8):
        restarts = restarts.died(lived_s=1)
        pauses.append(restarts.pause_s)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    assert not restarts.hopeless
    assert restarts.died(lived_s=HEALTHY_S).pause_s == 0.1


def test_a_child_is_hopeless_only_when_it_was_never_well() -> None:
    never, once = Restarts(), Restarts().died(lived_s=HEALTHY_S)
    for _ in range(DEATHS_MOST):
        assert not never.hopeless
        never, once = never.died(lived_s=1), once.died(lived_s=1)
    assert never.hopeless and not once.hopeless


def test_a_child_that_is_not_needed_is_hopeless_also_when_it_was_well() -> None:
    restarts = Restarts(needed=False).died(lived_s=HEALTHY_S)
    for _ in range(DEATHS_MOST - 1):
        assert not restarts.hopeless
        restarts = restarts.died(lived_s=1)
    assert restarts.hopeless
    assert not restarts.died(lived_s=HEALTHY_S).hopeless


ENDS = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "


async def test_children_of_a_tier_come_and_go_while_the_tree_is_watched(tmp_path: Path) -> None:
    said: list[str] = []
    lost: list[str] = []
    tree, stop = Tree(tmp_path / "logs", said.append), asyncio.Event()
    tier = tree.start(child("r1", ENDS + appends(tmp_path / "r1")))
    watching = asyncio.create_task(tree.watch(stop))
    tier.start(child("r2", ENDS + appends(tmp_path / "r2")), lambda name, error: lost.append(name))
    (first,), _ = await pids(tmp_path / "r1", 1), await pids(tmp_path / "r2", 1)
    tier.end("r1")
    assert tier.ending == {"r1"}
    tier.end("r1")
    await soon(lambda: tier.names == {"r2"} and not tier.ending)
    assert not alive(first) and not watching.done() and (said, lost) == ([], [])
    tier.start(child("r1", appends(tmp_path / "r1")), lambda name, error: lost.append(name))
    _, again = await pids(tmp_path / "r1", 2)
    stop.set()
    await watching
    await tree.stop()
    assert not alive(again) and tier.names == frozenset()


async def test_a_child_that_comes_later_and_is_hopeless_does_not_end_the_watch(tmp_path: Path) -> None:
    lost: dict[str, BaseException] = {}
    tree, stop = Tree(tmp_path / "logs", lambda _: None), asyncio.Event()
    tier = tree.start(child("r1", appends(tmp_path / "r1")))
    watching = asyncio.create_task(tree.watch(stop))
    tier.start(child("r2", "raise SystemExit('no device')"), lost.__setitem__)
    tier.start(Child("r3", (str(tmp_path / "nothing"),), os.environ), lost.__setitem__)
    await soon(lambda: lost.keys() == {"r2", "r3"})
    assert "no device" in str(lost["r2"]) and "r3 does not start" in str(lost["r3"])
    assert tier.names == {"r1"} and not watching.done()
    stop.set()
    await watching
    await tree.stop()


async def test_a_child_that_was_told_to_end_is_killed_by_a_second_signal_to_the_supervisor(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "logs", print)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + appends(tmp_path / "pids")
    tier = tree.start(child("deaf", deaf, stop_s=600))
    (pid,) = await pids(tmp_path / "pids", 1)
    tier.end("deaf")
    stopping = asyncio.create_task(tree.stop())
    tree.kill()
    async with asyncio.timeout(60):
        await stopping
    assert not alive(pid)


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    supervisor = f"""
import asyncio, os, sys
from pathlib import Path
from gateway.ops import supervise
from gateway.ops.supervise import DEATHS_MOST, HEALTHY_S, Child, GaveUp, Log, Restarts, Tree
from gateway.ops.troubles import Troubles, known
from tests.conftest import soon
async def main():
    tree = Tree(Path({str(tmp_path)!r}), print)
    tree.start(Child("a", (sys.executable, "-S", "-c", {appends(tmp_path / "pids")!r}), os.environ))
    await tree.watch(asyncio.Event())
asyncio.run(main())
"""
    process = subprocess.Popen([PYTHON, "-c", supervisor])
    (pid,) = asyncio.run(pids(tmp_path / "pids", 1))
    assert alive(pid)
    process.kill()
    process.wait()
    asyncio.run(gone(pid))


async def test_every_line_a_child_writes_is_kept_and_told_on_request(tmp_path: Path) -> None:
    told: list[str] = []
    tree = Tree(tmp_path, lambda _: None, lambda name, line: told.append(f"{name} {line}"))
    tree.start(child("r1", "import sys; print('one'); print('two', file=sys.stderr); " + appends(tmp_path / "pids")))
    await pids(tmp_path / "pids", 1)
    await tree.stop()
    assert set((tmp_path / "r1.log").read_text().split()) >= {"two"}
    assert "r1 two" in told


def test_the_log_of_the_start_before_is_kept(tmp_path: Path) -> None:
    (tmp_path / "nats.log").write_text("before")
    assert Log(tmp_path, "nats", None).tail() == []
    assert (tmp_path / "nats.log.1").read_text() == "before"


async def test_a_child_that_keeps_ending_is_named_with_its_last_line_and_forgotten_when_it_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "HEALTHY_S", 0.5)
    said: list[str] = []
    tree = Tree(tmp_path / "logs", said.append, troubles=Troubles(tmp_path, said.append))
    mended = tmp_path / "mended"
    code = f"import os, time; os.path.exists({str(mended)!r}) or exec('raise OSError(5)'); time.sleep(60)"
    tree.start(child("r1", code))
    await soon(lambda: any(trouble.deaths >= 2 for trouble in known(tmp_path)))
    (trouble,) = known(tmp_path)
    assert (trouble.role, trouble.ended, trouble.line, trouble.kind) == (
        "r1",
        "exited with code 1",
        "OSError: 5",
        "OSError",
    )
    assert any(
        sentence.startswith("r1 exited with code 1 2 times in a row") and "OSError: 5" in sentence for sentence in said
    )
    assert (tmp_path / "troubles.json").stat().st_mode & 0o077 == 0
    mended.touch()
    await soon(lambda: known(tmp_path) == [])
    await tree.stop()


async def test_a_child_that_is_to_be_started_again_is_even_if_it_ignores_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "RESTART_S", 0.1)
    said: list[str] = []
    tree = Tree(tmp_path / "logs", said.append)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + appends(tmp_path / "pids")
    tree.start(child("nats", deaf))
    (first,) = await pids(tmp_path / "pids", 1)
    tree.restart("nats")
    await pids(tmp_path / "pids", 2)
    assert not alive(first) and said == []
    await tree.stop()


DEVICE_LOST = '{"restart_in_s": 0.4, "tries": 2, "event": "node.device_lost", "process": "runtime", "level": "error"}'


def test_a_device_process_that_never_gets_ready_is_named_with_its_error(tmp_path: Path) -> None:
    """The error is read from the log of the node, the parent of the device process."""
    said: list[str] = []
    troubles = Troubles(tmp_path, said.append)
    for line in ("Traceback (most recent call last):", "a.b.LibraryMissing: no library: build it", DEVICE_LOST):
        troubles.heard("r1", line)
    assert said == [
        "r1: its device process ended before it was ready, 2 times in a row: a.b.LibraryMissing: no library: build it"
    ]
    (trouble,) = known(tmp_path)
    assert (trouble.role, trouble.deaths, trouble.kind) == ("r1 device", 2, "LibraryMissing")
    troubles.heard("r1", '{"engine": "vllm", "event": "node.ready", "process": "runtime"}')
    assert known(tmp_path) == []
    troubles.heard("r1", DEVICE_LOST.replace('"tries": 2', '"tries": 0'))  # the device process had been at work
    assert known(tmp_path) == [] and len(said) == 1
