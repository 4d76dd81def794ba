"""Progress of long work, for a person at a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from gateway.cli.api import Row


@contextlib.contextmanager
def expected(message: str, lasts_s: float | None) -> Iterator[Callable[[str, object], None]]:
    """Show a bar that is full after `lasts_s`, with the time left.

    The caller reports the state and the bytes read to the yielded function. Without `lasts_s` the bar is a spinner. If
    standard error is no terminal, nothing is shown.
    """
    if not sys.stderr.isatty():
        yield lambda how, progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()]
    if lasts_s:
        columns[2:] = [BarColumn(), TextColumn("{task.fields[left]}", markup=False)]
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task, began_s = shown.add_task(message, total=lasts_s, left=""), time.monotonic()

        def tell(how: str, progress: object) -> None:
            passed_s = time.monotonic() - began_s
            left = _left(lasts_s - passed_s) if lasts_s else ""
            how = f"{how}, {_read(progress)}" if isinstance(progress, dict) else how
            shown.update(task, completed=passed_s, description=f"{message}: {how}", left=left)

        yield tell


def _read(progress: Row) -> str:
    from rich.filesize import decimal

    done, total = (decimal(_number(progress.get(name))) for name in ("done_bytes", "total_bytes"))
    eta_s, waits_for = progress.get("eta_s"), progress.get("waits_for")
    how = str(waits_for) if waits_for else f"{done} of {total} read"
    return how + ("" if eta_s is None else f", about {eta_s} s left")


def _left(rest_s: float) -> str:
    return f"about {rest_s:.1f} s left" if rest_s > 0 else "longer than the last time"


Told = Callable[[Row], None]  # called with `progress` of the control plane


@contextlib.contextmanager
def bytes_coming(message: str) -> Iterator[Told]:
    """Show a bar of bytes on standard error, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

    left = TextColumn("{task.fields[left]}", markup=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), left)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(message, total=None, left="")

        def tell(progress: Row) -> None:
            done, total, eta_s = (_number(progress.get(name)) for name in ("done_bytes", "total_bytes", "eta_s"))
            known = "" if progress.get("eta_s") is None else f"{eta_s // 60}:{eta_s % 60:02} left"
            bar.update(task, completed=done, total=total or None, left=str(progress.get("waits_for") or known))

        yield tell


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
