"""`staccato apply`, `staccato crds`, `staccato controller`: declared objects, in a folder or in Kubernetes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.api import CONFLICT, ERROR, RETRYABLE, CliError
from gateway.cli.terminal.options import Json, Key, Url, connect
from gateway.cli.terminal.output import note, print_json, print_rows

if TYPE_CHECKING:
    from gateway.core.declared.objects import Ref
    from gateway.core.declared.reconciler import RestCall
    from gateway.core.declared.status import ObjectStatus
    from gateway.declared.folder import Folder
    from gateway.declared.platform import CallFailed
    from gateway.declared.reconciling import Pass, Reconciler

APPLIED = {
    "KIND": "kind",
    "NAMESPACE": "namespace",
    "NAME": "name",
    "PHASE": "status.phase",
    "SYNCED": "synced",
    "READY": "ready",
    "MESSAGE": "message",
}
LOOK_S = 1.0  # between two looks at the files
HOPELESS = ("Refused", "Conflict", "InvalidSpec", "TenantMissing")  # reasons that end by an edit alone


def apply(
    place: Annotated[
        Path, typer.Option("--file", "-f", metavar="FOLDER", help="A folder with YAML files of objects, or a file.")
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Go on: follow every change, until Ctrl-C.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete what an earlier apply made and no file declares any more.")
    ] = False,
    keys: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where API keys of tenants are written, a file for each.")
    ] = None,
    manager: Annotated[
        str, typer.Option(help="Name for what is made: two folders with two names leave each other's objects alone.")
    ] = "staccato",
    wait: Annotated[bool, typer.Option(help="Wait until deployments serve.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait at most.")] = 300,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Bring tenants and deployments to what files declare."""
    from gateway.declared.folder import Folder
    from gateway.declared.platform import RestPlatform
    from gateway.declared.reconciling import Reconciler

    folder = Folder(place, keys, manager)
    folder.load()
    with connect(url, key) as gateway:
        reconciler = Reconciler(folder, RestPlatform(gateway), manager, gateway.url, time.monotonic, _Notes(), prune)
        if watch:
            _follow(folder, reconciler)
            return
        done = _until_applied(reconciler, wait, timeout)
    _print(done.statuses, json)
    _check(done, wait, timeout)


class _Notes:
    """Tells a person at the terminal of calls."""

    def called(self, ref: Ref, call: RestCall, trouble: CallFailed | None) -> None:
        note(f"{ref}: {call}" + (f": {trouble}" if trouble else ""))

    def away(self, error: CallFailed) -> None:
        note(str(error))


def _until_applied(reconciler: Reconciler, wait: bool, timeout_s: float) -> Pass:
    """Make passes until all is applied (and, with `wait`, serves), nothing can be applied, or time is up."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        done = reconciler.once()
        finished = done.synced and (done.settled or not wait) and not done.calls
        if finished or _hopeless(done) or time.monotonic() > deadline_s:
            return done
        time.sleep(min(done.next_s, 1.0))


def _hopeless(done: Pass) -> bool:
    """Return whether every object that is not applied waits for an edit of the object."""
    reasons = [reason for status in done.statuses.values() if (reason := _reason(status))]
    return not done.calls and bool(reasons) and all(reason in HOPELESS for reason in reasons)


def _reason(status: ObjectStatus) -> str:
    """Return why an object is not applied; empty: the object is applied."""
    from gateway.core.declared.status import SYNCED, found

    synced = found(status, SYNCED)
    return synced.reason if synced and synced.status != "True" else ""


def _check(done: Pass, wait: bool, timeout_s: float) -> None:
    """Raise CliError unless everything is applied and, with `wait`, serves."""
    left = sorted(str(ref) for ref, status in done.statuses.items() if _reason(status))
    if not done.statuses and not done.synced:
        raise CliError("nothing was applied: no gateway answered in time", RETRYABLE)
    if left:
        conflicts = any(_reason(status) == "Conflict" for status in done.statuses.values())
        hopeless = CONFLICT if conflicts else ERROR
        raise CliError(f"not applied: {', '.join(left)}", hopeless if _hopeless(done) else RETRYABLE)
    if wait and not done.settled:
        raise CliError(f"applied, and not everything serves after {timeout_s:g} s", RETRYABLE)


def _print(statuses: Mapping[Ref, ObjectStatus], json: bool) -> None:
    import msgspec

    from gateway.core.declared.objects import camel, renamed
    from gateway.core.declared.status import READY, SYNCED, found

    rows: list[dict[str, object]] = []
    for ref, status in statuses.items():
        synced, ready = found(status, SYNCED), found(status, READY)
        why = ready if synced and synced.status == "True" else synced
        shown = renamed(msgspec.to_builtins(status), camel)
        rows.append({"kind": ref.kind, "namespace": ref.namespace, "name": ref.name, "status": shown})
        rows[-1] |= {} if json else {"synced": synced and synced.status, "ready": ready and ready.status}
        rows[-1] |= {} if json else {"message": why and why.message}
    if json:
        print_json(rows)
    else:
        print_rows(rows, APPLIED, False)


def _follow(folder: Folder, reconciler: Reconciler) -> None:
    """Apply each change of the files. Files with a fault change nothing: the objects read before stay declared."""
    seen, due_s = _stamps(folder), 0.0
    try:
        while True:
            if (stamps := _stamps(folder)) != seen:
                seen, due_s = stamps, 0.0
                _reload(folder)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + reconciler.once().next_s
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return


def _reload(folder: Folder) -> None:
    try:
        folder.load()
    except CliError as error:
        note(f"{error}; the objects read before stay")


def _stamps(folder: Folder) -> list[tuple[str, int, int]]:
    """Return name, time and size of each file."""
    try:
        return [(str(path), os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in folder.files()]
    except (CliError, OSError):
        return []


def crds(json: Json = False) -> None:
    """Print the custom resource definitions for Kubernetes."""
    import yaml

    from gateway.core.declared.schema import definitions

    if json:
        print_json(definitions())
    else:
        yaml.safe_dump_all(definitions(), sys.stdout, sort_keys=False, width=120)


def controller() -> None:
    """Run the controller alone, with settings from the environment: custom resources of Kubernetes come true."""
    from gateway.declared.controller import main

    raise typer.Exit(main())
