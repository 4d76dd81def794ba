"""Processes that a real fork server forks: what the processes find, how the processes end, and who hears of the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import psutil
import pytest

from store.fork import client
from store.fork.client import ForkedProcess, ForkServer, NotForked
from tests.conftest import ROOT, soon


class ForkServerOfTest:
    """A fork server with modules of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours, self.theirs = client.sockets()
        self.forks = ForkServer(self.ours)
        self.process: subprocess.Popen[bytes] | None = None

    def module(self, name: str, source: str) -> None:
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))

    def start(self, *modules: str) -> None:
        environment = {"PYTHONPATH": f"{ROOT}:{self.folder}", "GONE": "1", "KEPT": "1", "OTHER": "1"} | client.VARIABLES
        command = client.server_command(self.theirs.fileno(), modules)
        self.process = subprocess.Popen(command, env=environment, pass_fds=[self.theirs.fileno()])

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def fork(self, module: str, *arguments: str, fds: Mapping[int, int] = {}, group: bool = False) -> ForkedRun:
        reading, writing = os.pipe()
        files = {0: 0, 1: writing, 2: 2} | dict(fds)
        process = await self.forks.fork(module, arguments, {"NAME": "value", "GONE": "2", "KEPT": "2"}, files, group)
        os.close(writing)
        return ForkedRun(process, reading)


class ForkedRun:
    """A forked process and what the process writes."""

    def __init__(self, process: ForkedProcess, reading: int) -> None:
        self.process, self._reading = process, reading

    async def output(self) -> str:
        """Return all that the process writes until its end."""
        with open(self._reading) as pipe:
            return await asyncio.to_thread(pipe.read)

    async def line(self) -> str:
        said = b""
        while not said.endswith(b"\n"):
            said += await asyncio.to_thread(os.read, self._reading, 1)
        return said.decode()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ForkServerOfTest]:
    server = ForkServerOfTest(tmp_path)
    server.module("waiting", "import sys, time; print('here', flush=True); time.sleep(60)")
    yield server
    server.end()
    server.ours.close()
    server.theirs.close()


async def test_a_fork_runs_a_module_with_its_arguments_environment_and_files_alone(server: ForkServerOfTest) -> None:
    server.module("imported", "import os; os.environ['KEPT'] = '1'; os.environ.pop('GONE'); COUNT = [0]")
    server.module(
        "said",
        """
        import atexit, imported, json, os, sys
        imported.COUNT[0] += 1
        atexit.register(print, "at exit")
        names = ("NAME", "GONE", "KEPT", "OTHER")
        files = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
        print(json.dumps([sys.argv, [os.environ.get(name) for name in names], imported.COUNT, files]))
        os.write(9, b"nine")
        sys.exit(7)
        """,
    )
    server.start("imported")
    for _ in range(2):
        ours, theirs = socket.socketpair()
        run = await server.fork("said", "one", "two words", fds={9: theirs.fileno()})
        theirs.close()
        argv = f'["{server.folder}/said.py", "one", "two words"]'
        said = await run.output()
        assert said == f'[{argv}, ["value", null, "1", null], [1], [0, 1, 2, 9]]\nat exit\n'
        assert ours.recv(10) == b"nine"
        assert await run.process.wait() == run.process.returncode == 7
        ours.close()
        with pytest.raises(ProcessLookupError):
            run.process.kill()


async def test_a_fork_is_named_as_if_executed_and_names_its_asker(server: ForkServerOfTest) -> None:
    server.start()
    run = await server.fork("waiting", "argument")
    await run.line()
    command = psutil.Process(run.process.pid).cmdline()
    assert command[:5] == [sys.executable, "-P", "-m", "waiting", "argument"]
    assert " ".join(command).endswith(f"(forked for {os.getpid()})")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_signal_that_ends_a_fork_is_told(server: ForkServerOfTest, number: int) -> None:
    server.start()
    run = await server.fork("waiting")
    await run.line()
    run.process.send_signal(number)
    assert await run.process.wait() == -number


async def test_a_fork_ends_with_the_server_and_the_next_server_takes_the_order_that_waits(
    server: ForkServerOfTest,
) -> None:
    server.start()
    run = await server.fork("waiting")
    await run.line()
    server.end()
    assert await run.process.wait() == -signal.SIGKILL
    waiting = asyncio.create_task(server.fork("waiting"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    server.start()
    again = await waiting
    assert await again.line() == "here\n"


async def test_a_fork_and_its_group_end_with_the_asker(server: ForkServerOfTest) -> None:
    server.module(
        "family",
        """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        time.sleep(60)
        """,
    )
    server.start()
    run = await server.fork("family", group=True)
    born = [run.process.pid, int(await run.line())]
    assert os.getpgid(born[1]) == born[0]
    run.process._reply.shutdown(socket.SHUT_RDWR)  # as the kernel does when the asker ends
    await soon(lambda: not any(_runs(pid) for pid in born))


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def test_an_order_that_its_asker_gave_up_is_not_carried_out(server: ForkServerOfTest) -> None:
    server.module("marks", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()")
    waiting = asyncio.create_task(server.fork("marks", str(server.folder / "first")))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    server.start()
    run = await server.fork("marks", str(server.folder / "second"))
    assert await run.process.wait() == 0
    assert not (server.folder / "first").exists() and (server.folder / "second").exists()


async def test_a_process_with_two_threads_is_not_forked(server: ForkServerOfTest) -> None:
    server.module("threaded", "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()")
    server.start("threaded")
    with pytest.raises(NotForked, match="have started 1 threads"):
        await server.fork("waiting")


async def test_a_thread_of_jemalloc_forbids_no_fork(server: ForkServerOfTest) -> None:
    named = "open('/proc/thread-self/comm', 'w').write('jemalloc_bg_thd')"
    server.module(
        "threaded",
        f"import threading, time\nbegun = threading.Event()\n"
        f"def work():\n    {named}\n    begun.set()\n    time.sleep(60)\n"
        "threading.Thread(target=work, daemon=True).start()\nbegun.wait()",
    )
    server.module("says", "print('forked')")
    server.start("threaded")
    run = await server.fork("says")
    assert (await run.output(), await run.process.wait()) == ("forked\n", 0)


async def test_a_fork_that_fails_costs_no_other_process(server: ForkServerOfTest) -> None:
    server.module(
        "scarce",
        """
        import os
        fork, calls = os.fork, []
        def scarce():
            calls.append(None)
            if len(calls) == 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()
        os.fork = scarce
        """,
    )
    server.start("scarce")
    first = await server.fork("waiting")
    await first.line()
    with pytest.raises(NotForked, match="cannot fork: Resource temporarily unavailable"):
        await server.fork("waiting")
    third = await server.fork("waiting")
    assert await third.line() == "here\n" and first.process.returncode is None


async def test_a_server_that_ends_over_an_order_did_not_fork(server: ForkServerOfTest) -> None:
    server.module("deadly", "import os; os.fork = lambda: os._exit(3)")
    server.start("deadly")
    with pytest.raises(NotForked, match="the fork server is gone"):
        await server.fork("waiting")


async def test_a_server_that_does_not_answer_is_done_without(
    server: ForkServerOfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FORK_S_MOST", 0.2)
    with pytest.raises(NotForked, match=r"not answered within 0\.2 s"):
        await server.fork("waiting")


async def test_many_forks_at_once_each_hear_of_their_own_end(server: ForkServerOfTest) -> None:
    server.module("ends", "import sys, time; time.sleep(0.05); sys.exit(int(sys.argv[1]))")
    server.start()
    runs = await asyncio.gather(*(server.fork("ends", str(code)) for code in range(40)))
    assert [await run.process.wait() for run in runs] == list(range(40))
    assert server.process is not None
    files = f"/proc/{server.process.pid}/fd"
    await soon(lambda: len(os.listdir(files)) == 4)  # standard files and the orders
