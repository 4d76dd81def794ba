"""House rules that a machine can check: directions of imports, purity, file headers, promises of documents."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import settings

from tests.conftest import ROOT

PACKAGES = ("gateway", "runtime", "store", "migrations")
LINES_MOST = 600
DEADLINES = ("tests/conftest.py",)  # files that may set hypothesis' deadline
DOCUMENTS = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(f"{folder}/README.md" for folder in ("gateway", "runtime", "store", "csrc", "tests")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/bench").glob("*.md")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "deploy/docs").rglob("*.md")),
)

# No clock, no chance, no I/O: the same file runs in production and in a simulator.
PURE = re.compile(r"(runtime/core|store/contract|gateway/core)/.*")
IMPURE_MODULES = (
    "time",
    "random",
    "asyncio",
    "logging",
    "structlog",
    "os",
    "socket",
    "threading",
    "subprocess",
    "pathlib",
)
IMPURE_CALLS = ("open", "print", "input")

# Folders of ours that the files of a folder may import, besides the folder itself. `x/*`: x and every folder below x.
MAY_IMPORT = {
    "gateway": "gateway/* store/* runtime/core/*",
    "gateway/core": "runtime/core/* store/contract",
    "gateway/core/declared": "gateway/core store/contract",
    "gateway/http": "gateway/core store/*",
    "gateway/streams": "runtime/core/* store store/contract store/telemetry",
    "gateway/inference": "gateway/core gateway/http gateway/streams runtime/core/* store/*",
    "gateway/fast": "gateway/core gateway/inference store/contract store/telemetry",
    "gateway/vllm": "gateway/core gateway/fast gateway/http gateway/inference gateway/streams"
    " runtime/core/* runtime/engine store/*",
    "gateway/billing": "gateway/http store/*",
    "gateway/imports": "gateway/config.py store/*",
    "gateway/joining": "gateway/config.py store/*",
    "gateway/declared": "gateway/core/declared gateway/cli/api.py gateway/cli/terminal"
    " gateway/config.py store store/telemetry",
    "gateway/control": "gateway/core gateway/http gateway/inference gateway/streams gateway/billing gateway/imports"
    " gateway/ops runtime/core/* store/*",
    "gateway/machine": "gateway/config.py gateway/ops store/*",
    "gateway/ops": "gateway/config.py gateway/http gateway/machine gateway/streams store/*",
    "gateway/cli": "gateway/cli/* gateway/config.py gateway/core/declared gateway/declared gateway/machine gateway/ops"
    " runtime/core/* store/*",
    "gateway/cli/terminal": "gateway/cli gateway/config.py",
    "gateway/dashboard": "",
    "runtime": "runtime/* store/*",
    "runtime/core": "runtime/core/* store/contract store/contract/warm",
    "runtime/core/device": "runtime/core runtime/core/ledgers runtime/core/turns store/contract",
    "runtime/core/turns": "runtime/core/device",
    "runtime/core/fleet": "runtime/core/* store/contract",
    "runtime/core/ledgers": "runtime/core/device store/contract",
    "runtime/memory": "runtime/core",
    "runtime/engine": "runtime/core/* runtime/memory runtime/slices.py store/*",
    "runtime/group": "runtime/core/* runtime/engine runtime/ipc.py store/*",
    "runtime/migration": "runtime/core/* runtime/memory runtime/ipc.py store/*",
    "runtime/device": "runtime/core/* runtime/engine runtime/group runtime/memory runtime/migration runtime/ipc.py"
    " runtime/slices.py store/*",
    "runtime/node": "runtime/core runtime/core/fleet runtime/core/ledgers runtime/device runtime/migration"
    " runtime/config.py runtime/imaging.py runtime/ipc.py store/*",
    "runtime/scheduler": "runtime/core/* runtime/config.py store/*",
    "runtime/sim": "runtime/core/* runtime/device runtime/sim/dispatch store/contract store/files",
    "runtime/sim/dispatch": "runtime/core/* runtime/sim store/contract",
    "store": "store/contract store/contract/joining",
    "store/contract": "",
    "store/contract/joining": "store/contract",
    "store/contract/warm": "",
    "store/db": "store/*",
    "store/db/fleet": "store/*",
    "store/files": "store/contract",
    "store/fork": "",
    "store/telemetry": "",
    "migrations": "store/db",
    "migrations/versions": "store/db",
}

# A dependency has a single home.
HOMES = {
    "nats": r"store/(bus|streams|system)\.py",
    "nkeys": r"store/keypairs\.py",
    "nacl": r"store/keypairs\.py",
    "cryptography": r"gateway/ops/certificates\.py",
    "sqlalchemy": r"(store|migrations)/.*",
    "alembic": r"(store|migrations)/.*",
    "vllm": r"runtime/engine/\w+\.py|gateway/vllm/\w+\.py",
    "torch": r"runtime/engine/\w+\.py|gateway/vllm/\w+\.py",
    "xgrammar": r"runtime/engine/\w+\.py",
    "greenlet": r"runtime/slices\.py",
    "opentelemetry": r"store/telemetry/tracing\.py",
    "fastapi": r"gateway/vllm/\w+\.py",
    "jinja2": r"gateway/vllm/\w+\.py",
    "yaml": r"gateway/declared/folder\.py|gateway/cli/declared\.py",
    "huggingface_hub": r"gateway/imports/sources\.py",
    "botocore": r"gateway/imports/sources\.py",
    "httpx2": r"gateway/imports/download\.py|gateway/declared/kubernetes\.py",
    "lightkube": r"gateway/declared/kubernetes\.py",
    "pyarrow": r"runtime/sim/trace\.py|gateway/billing/formats\.py",
}
# The handle of a transaction goes through the gateway's hands, from `store.db.database` to the rest of `store`.
HANDED_ON = ("sqlalchemy.ext.asyncio.AsyncConnection",)

# Loopback and the names that RFCs keep for examples.
HARMLESS_HOST = re.compile(r"(127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1\]|([\w-]+\.)*example(\.(com|org|net))?)(:\S*)?$")
PUBLIC_HOST = re.compile(
    r"([\w-]+\.)*(github\.com|apache\.org|pytorch\.org|vllm\.ai|nats\.io|python\.org|openai\.com|w3\.org|huggingface\.co|hf\.co)$"
)
WRITTEN = (".py", ".md", ".toml", ".txt", ".lock", "Makefile", ".ci/run")
MACHINE_PATH = re.compile(r"(?<![\w./-])/(work|home|root|Users|mnt|workspace)/\w+")


def sources(*folders: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def imports(source: str) -> tuple[str, ...]:
    """Dotted names, also of imports inside functions and for type checkers alone; `from a import b` is `a.b`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found += (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
    return tuple(found)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@cache
def module_path(name: str) -> str:
    """The file that an import within the repository reads: `runtime.core.turns.turn.Turn` →
    `runtime/core/turns/turn.py`."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        if (ROOT / f"{path}.py").exists():
            return f"{path}.py"
    return "/".join(parts) + "/"


# ── the rules: each returns what is wrong with a file ─────────────────────────────────────────────────────────────────


def wrong_directions(path: str, source: str) -> list[str]:
    """Imports of ours that MAY_IMPORT does not allow to the file's folder."""
    return [name for name in imports(source) if not _may_import(path, name)]


def _may_import(path: str, name: str) -> bool:
    if name.startswith(".") or within(name, "tests", "deploy"):
        return False
    if not within(name, *PACKAGES):
        return True
    folder, target = path.rpartition("/")[0], module_path(name)
    home = target.rstrip("/") if target.endswith("/") else target.rpartition("/")[0]
    if home == folder:
        return True
    for allowed in MAY_IMPORT.get(folder, "").split():
        parent = allowed.removesuffix("/*")
        if target == allowed or home == parent or (allowed.endswith("/*") and home.startswith(allowed[:-1])):
            return True
    return False


def homeless(path: str, source: str) -> list[str]:
    """Imports of a dependency outside its home."""
    return [
        name
        for name in imports(source)
        for package, home in HOMES.items()
        if within(name, package) and not re.fullmatch(home, path) and name not in HANDED_ON
    ]


def impurities(path: str, source: str) -> list[str]:
    """Constructs and imports that a pure file may not have."""
    if not PURE.fullmatch(path):
        return []
    found = [name for name in imports(source) if within(name, *IMPURE_MODULES)]
    ours = [name for name in imports(source) if within(name, *PACKAGES)]
    found += [name for name in ours if not PURE.fullmatch(module_path(name))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith):
            found.append(f"async in line {node.lineno}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"{node.func.id}() in line {node.lineno}")
    return found


def bad_shape(path: str, source: str) -> list[str]:
    """Faults of a file that is too long to be read at once, or has no docstring on its purpose."""
    lines = source.count("\n")
    too_long = [f"{lines} lines, at most {LINES_MOST}: split it"] if lines > LINES_MOST else []
    silent = bool(source.strip()) and not ast.get_docstring(ast.parse(source))
    return too_long + (["no docstring says what it is for"] if silent else [])


def machine_names(path: str, source: str) -> list[str]:
    """Hosts and folders of a particular machine, useless on any other machine. Tests may name hosts."""
    hosts = [] if path.startswith("tests/") else re.findall(r"\b\w+://(?:[^\s/@\"'`<>{}]*@)?([\w.-]*\w)", source)
    strange = [host for host in hosts if "." in host and not (HARMLESS_HOST.match(host) or PUBLIC_HOST.match(host))]
    return strange + [found.group() for found in MACHINE_PATH.finditer(source)]


Rule = Callable[[str, str], list[str]]
RULES: tuple[Rule, ...] = (wrong_directions, homeless, impurities, bad_shape)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    wrong = {path: found for path in sources(*PACKAGES) if (found := rule(path, (ROOT / path).read_text()))}
    assert not wrong


def test_the_demo_keeps_the_shape_and_no_test_is_too_long() -> None:
    wrong = {path: found for path in sources("deploy") if (found := bad_shape(path, (ROOT / path).read_text()))}
    long = [path for path in sources("tests") if (ROOT / path).read_text().count("\n") > LINES_MOST]
    assert not wrong and not long


def test_no_file_names_a_machine() -> None:
    wrong = {path: found for path in texts() if (found := machine_names(path, (ROOT / path).read_text()))}
    assert not wrong


def texts() -> list[str]:
    """Paths of written files that git keeps or would keep; without git, documents and sources."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = [*DOCUMENTS, *sources(*PACKAGES, "tests", "deploy")]
    return [path for path in listed if path.endswith(WRITTEN) and (ROOT / path).is_file()]


# ── the rules can fail ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (wrong_directions, "store/x.py", "import gateway.app"),
        (wrong_directions, "store/x.py", "def f():\n    from runtime.core.device.request import Request"),
        (wrong_directions, "runtime/x.py", "from gateway import relay"),
        (wrong_directions, "gateway/x.py", "from runtime import node"),
        (wrong_directions, "gateway/x.py", "from runtime.engine.settings import engine_args"),
        (wrong_directions, "gateway/vllm/front.py", "from runtime.device.loop import Device"),
        (wrong_directions, "gateway/inference/x.py", "from gateway.vllm.front import Fronts"),
        (wrong_directions, "gateway/http/x.py", "from gateway.streams.relay import Relay"),
        (wrong_directions, "gateway/streams/x.py", "from gateway.inference.timing import Timing"),
        (wrong_directions, "gateway/streams/x.py", "from store.db.database import Database"),
        (wrong_directions, "runtime/node/x.py", "from runtime.engine.vllm import VllmEngine"),
        (wrong_directions, "runtime/memory/x.py", "from runtime.engine.worker import Home"),
        (wrong_directions, "runtime/core/turns/x.py", "from runtime.core.fleet.cluster import Cluster"),
        (wrong_directions, "store/contract/x.py", "from store.bus import Bus"),
        (wrong_directions, "runtime/newroom/x.py", "from store.bus import Bus"),
        (wrong_directions, "store/x.py", "from . import wire"),
        (wrong_directions, "runtime/x.py", "from tests.conftest import ROOT"),
        (homeless, "gateway/streams/relay.py", "import nats.errors"),
        (homeless, "store/db/ledger.py", "from nats.aio.client import Client"),
        (homeless, "gateway/control/tenants.py", "from sqlalchemy import select"),
        (homeless, "runtime/node/runtime.py", "import alembic"),
        (homeless, "gateway/inference/endpoint.py", "from vllm import ModelRegistry"),
        (homeless, "runtime/device/loop.py", "if True:\n    import torch"),
        (impurities, "runtime/core/device/instance.py", "import time"),
        (impurities, "runtime/core/turns/turn.py", "from random import Random"),
        (impurities, "runtime/core/engine.py", "from os import environ"),
        (impurities, "store/contract/wire.py", "import asyncio.events"),
        (impurities, "runtime/core/ledgers/replay_buffer.py", "async def f(): ..."),
        (impurities, "runtime/core/device/model.py", "print(1)"),
        (impurities, "runtime/core/device/events.py", "from runtime.ipc import Start"),
        (impurities, "runtime/core/device/request.py", "from store.bus import Bus"),
        (impurities, "gateway/core/allowance.py", "from store.db.tenants import Tenant"),
        (bad_shape, "store/x.py", "x = 1\n"),
        (bad_shape, "store/x.py", '"""Long."""\n' + "x = 1\n" * LINES_MOST),
        (machine_names, "README.md", "clone it from https://git.internal.corp.net/staccato"),
        (machine_names, "Makefile", "cp /" + "home/somebody/models ."),
    ],
)
def test_the_rule_finds_what_breaks_it(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (wrong_directions, "gateway/config.py", "from runtime.core.turns.registry import POLICIES"),
        (wrong_directions, "gateway/vllm/front.py", "from runtime.engine.settings import engine_args"),
        (homeless, "gateway/control/models.py", "from sqlalchemy.ext.asyncio import AsyncConnection"),
        (impurities, "runtime/node/runtime.py", "import time"),
        (bad_shape, "store/__init__.py", ""),
        (machine_names, "README.md", "http://127.0.0.1:8080/v1 nats://user:secret@nats.example.com:4222"),
    ],
)
def test_the_rule_lets_pass_what_is_right(rule: Rule, path: str, source: str) -> None:
    assert not rule(path, source)


# ── documents ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_named_in_a_document_exist(document: str) -> None:
    """From the root, or from the document's own folder."""
    places = (ROOT, (ROOT / document).parent)
    named = named_paths((ROOT / document).read_text())
    assert not [path for path in named if not any((place / path).exists() for place in places)]


def named_paths(text: str) -> list[str]:
    """Names in backticks, or behind a link, of files of the root and of files below a folder of the root."""
    words = re.findall(r"`([\w./-]+)`", text) + re.findall(r"\]\(([\w./-]+)\)", text)
    folders = tuple(f"{folder}/" for folder in (*PACKAGES, "csrc", "tests", "deploy", ".ci"))
    return [word for word in words if word.startswith(folders) or re.fullmatch(r"[A-Z]+\.md|LICENSE|Makefile", word)]


def test_a_path_that_is_not_there_is_found() -> None:
    assert named_paths("see `gateway/nowhere.py`, `make test` and [it](MISSING.md)") == [
        "gateway/nowhere.py",
        "MISSING.md",
    ]


def test_every_target_of_the_makefile_is_in_its_help_and_every_named_one_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    helped = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert targets == helped
    named = {name for document in DOCUMENTS for name in re.findall(r"`make ([a-z-]+)`", (ROOT / document).read_text())}
    assert named <= targets


def test_no_property_has_a_deadline() -> None:
    """A slow example on a busy machine is no counterexample: the profile of tests/conftest.py has no deadline."""
    own = re.compile(r"\bdeadline=(None|\d|timedelta)")
    assert settings().deadline is None
    assert [path for path in sources("tests") if path not in DEADLINES and own.search((ROOT / path).read_text())] == []
