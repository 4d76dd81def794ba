"""Python loads this file at the start of each process of a watched platform.

Signal SIGUSR2 begins a record of the hand-overs in the process's main thread. The second SIGUSR2 writes the record to
the folder WALK_FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = os.environ["WALK_ROOT"] + "/"
OWN = tuple(f"{ROOT}{folder}/" for folder in ("gateway", "runtime", "store"))  # the project's files
HAND_OVERS = {  # calls of these functions pass work to another task, process or library
    "create_task",
    "Event.set",
    "Queue.put_nowait",
    "Client.publish",
    "NodeEnd.send",
    "DeviceEnd.send",
    "RequestResponseCycle.send",
    "Connection.commit",
    "BaseModelLoader.load_model",
    "GPUModelRunner.execute_model",
    "CacheMemory.commit",
    "Reservation.map",
}
record: list[tuple[float, str, str, list[str]]] = []  # time, function, argument, the project's functions above
files: set[str] = set()  # the project's files with a function called meanwhile


def watch(frame: Any, event: str, _: object) -> None:
    if event != "call":
        return
    if frame.f_code.co_filename.startswith(OWN):
        files.add(frame.f_code.co_filename.removeprefix(ROOT))
    function = frame.f_code.co_qualname
    if function in HAND_OVERS:
        given = frame.f_locals.get("subject") or type(frame.f_locals.get("message")).__name__
        stack = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(OWN) and frame.f_code.co_name not in ("<module>", "main"):
                stack.append(f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        record.append((time.time(), function, given, stack[::-1]))


def signalled(*_: object) -> None:
    if sys.getprofile() is None:
        sys.setprofile(watch)
    else:
        sys.setprofile(None)
        written = Path(os.environ["WALK_FOLDER"]) / f"{os.getpid()}.json"
        written.with_suffix(".new").write_text(json.dumps([record, sorted(files)]))
        written.with_suffix(".new").rename(written)


signal.signal(signal.SIGUSR2, signalled)
