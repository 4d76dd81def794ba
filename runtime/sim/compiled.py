"""The machines compiled: the same files through mypyc, for simulations. `python -m runtime.sim.compiled` makes them.

They lie in a folder of their own, named by the digest of all sources: what was made of a file is never run after the
file was edited, and nothing that serves requests ever sees it.
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
VALUES = tuple(f"runtime/{name}.py" for name in ("engine/base", "events", "policy/eviction", "request"))
COMPILED = (  # what runs for every event; of VALUES the structs, too: a simulation neither writes nor reads them
    *(f"runtime/{name}.py" for name in ("account", "attainment", "cluster", "engine/base", "estimate")),
    *(f"runtime/{name}.py" for name in ("events", "instance", "model", "pages", "request", "requests", "rooms")),
    "runtime/shares.py",
    *(
        f"runtime/policy/{name}.py"
        for name in ("dispatch", "eviction", "idle", "migration", "prefetch", "scaling", "slack", "turns")
    ),
    *(f"runtime/sim/{name}.py" for name in ("device", "engine", "moves", "world")),
)
DONE = "compiled"  # a file that says that the folder is whole
BUILD_S_MOST = 900.0


def folder(root: Path = ROOT) -> Path:
    """Where the compiled machines of these sources are, or would be."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag} {platform.platform()}".encode())
    for path in _sources(root):
        digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return root / "build" / "fast" / digest.hexdigest()[:16]


def _sources(root: Path) -> list[Path]:
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def build(root: Path = ROOT) -> Path:
    """The folder, made if it is not there; takes minutes. Raises ValueError without mypyc, compiler or headers."""
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
        first = next((line for line in said if ": error:" in line), said[-1])  # warnings come after it
        raise ValueError(f"mypyc failed: {first}; it needs the package mypy, a C compiler and Python's headers")
    shutil.rmtree(fresh / "build")


def environment(made: Path) -> dict[str, str]:
    """Of a process, and of those that it starts, that imports from the folder `made`."""
    return {**os.environ, "PYTHONPATH": str(made), "PYTHONSAFEPATH": "1"}


def start_again() -> None:
    """`python -m runtime.sim` becomes the same with the compiled machines; says so on stderr if there are none."""
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
