"""Decision code compiled by mypyc for simulations; `python -m runtime.sim.compiled` compiles it.

The compiled modules lie in a separate folder named by the digest of the sources. Modules of an edited file are
therefore never run, and no process that serves requests ever imports a compiled module.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from runtime.sim.native import enums, fields, native

ROOT = Path(__file__).parents[2]
PACKAGES = ("runtime", "store")
VALUES = (
    "runtime/core/engine.py",
    *(f"runtime/core/device/{name}.py" for name in ("events", "eviction", "request")),
    "store/contract/reports.py",
)
DEVICE = (
    *("deadlines", "events", "eviction", "idle", "instance", "model", "pages", "prefetch", "queues", "record"),
    *("request", "requests", "rooms", "view"),
)
# Modules replaced in the compiled copy. Look-ups through a Protocol are slow there: the view of a model is the model.
REPLACED = {
    "runtime/core/device/view.py": "from runtime.core.device.model import Model as ModelView\n"
    "from runtime.core.device.record import Turn as TurnView\n"
    "__all__ = ['ModelView', 'TurnView']\n"
}
COMPILED = (  # files run for every event. Structs in VALUES become classes: a simulation never encodes or decodes them
    "runtime/core/engine.py",
    *(f"runtime/core/device/{name}.py" for name in DEVICE),
    *(f"runtime/core/fleet/{name}.py" for name in ("cluster", "dispatch", "rebalance", "scaling")),
    *(f"runtime/core/ledgers/{name}.py" for name in ("attainment", "device_time", "estimate", "fair_share")),
    *(f"runtime/core/turns/{name}.py" for name in ("slack", "turn")),
    *(f"runtime/sim/{name}.py" for name in ("device", "engine", "moves", "simulation", "world")),
    *(f"runtime/sim/dispatch/{name}.py" for name in ("base", "baselines", "gateways", "reports", "roles")),
    "store/contract/reports.py",
)
DONE = "compiled"  # name of a file that marks the folder as complete
BUILD_S_MOST = 900.0


def folder(root: Path = ROOT) -> Path:
    """Folder for the compiled modules of the present sources, whether built or not."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag} {platform.platform()}".encode())
    for path in _sources(root):
        digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return root / "build" / "fast" / digest.hexdigest()[:16]


def _sources(root: Path) -> list[Path]:
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def build(root: Path = ROOT) -> Path:
    """Compiles the sources, unless compiled before, and returns the folder; takes minutes.

    Raises ValueError without mypyc, a C compiler or Python's headers."""
    made = folder(root)
    if (made / DONE).exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as name:
        fresh = Path(name) / "fresh"
        _copy(root, fresh)
        (fresh / "deploy").symlink_to(root / "deploy")
        _compile(fresh)
        (fresh / DONE).touch()
        shutil.rmtree(made, ignore_errors=True)
        fresh.rename(made)
    return made


def _copy(root: Path, fresh: Path) -> None:
    sources = {path.relative_to(root).as_posix(): path.read_text() for path in _sources(root)}
    sources.update({name: source for name, source in REPLACED.items() if name in sources})
    of, members_of = fields([sources[name] for name in COMPILED if name in sources]), enums(sources.values())
    for name, source in sources.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(native(source, of, members_of, name in VALUES) if name in COMPILED else source)


def _compile(fresh: Path) -> None:
    command = [sys.executable, "-m", "mypyc", *COMPILED]
    environment = {**os.environ, "MYPYC_OPT_LEVEL": "2", "MYPYC_DEBUG_LEVEL": "0"}
    done = subprocess.run(
        command,
        cwd=fresh,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_S_MOST,
    )
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines() or ["nothing was said"]
        first = next((line for line in said if ": error:" in line), said[-1])  # warnings come after the error
        raise ValueError(f"mypyc failed: {first}; it needs the package mypy, a C compiler and Python's headers")
    shutil.rmtree(fresh / "build")


def environment(made: Path) -> dict[str, str]:
    """Environment of a process that imports from the folder `made`, as do its child processes."""
    return {**os.environ, "PYTHONPATH": str(made), "PYTHONSAFEPATH": "1"}


def start_again() -> None:
    """Replaces the process `python -m runtime.sim` by a process with the compiled modules.

    Without compiled modules the process goes on interpreted, with a note on stderr."""
    if (ROOT / DONE).exists():
        return
    made = folder()
    if not (made / DONE).exists():
        print(
            "note: interpreted; `make fast` compiles the simulator, and it runs several times as fast", file=sys.stderr
        )
        return
    os.execve(sys.executable, [sys.executable, "-m", "runtime.sim", *sys.argv[1:]], environment(made))


if __name__ == "__main__":
    try:
        print(build())
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"error: {error}")
