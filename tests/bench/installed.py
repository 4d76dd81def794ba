"""Programs and libraries that benches compare the product with, installed into folders of their own below `build`.

No dependency of the project is touched. An installation stays for the next run."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "compared"
DONE = "installed"  # file that says which requirements a folder has


def libraries(name: str, *requirements: str) -> Path:
    """Install pinned packages without their dependencies. Returns a folder for `sys.path`.

    Raises CalledProcessError if pip fails."""
    folder = FOLDER / name
    arguments = ["--no-deps", "--target", str(folder), "--upgrade"]
    _install(Path(sys.executable), folder, arguments, requirements)
    return folder


def environment(name: str, *requirements: str) -> Path:
    """Install pinned packages with their dependencies into a virtual environment. Returns the folder of programs.

    Raises CalledProcessError if pip fails."""
    folder = FOLDER / name
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    _install(folder / "bin" / "python", folder, [], requirements)
    return folder / "bin"


def _install(python: Path, folder: Path, arguments: list[str], requirements: tuple[str, ...]) -> None:
    done, wanted = folder / DONE, "\n".join(requirements)
    if done.exists() and done.read_text() == wanted:
        return
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments, *requirements], check=True, stderr=subprocess.DEVNULL)
    done.write_text(wanted)
