"""A bench's programs in processes of their own: a job per line in, a result per line out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LAST = ("nice", "-n", "19")  # for a program that yields to every other process


class ChildProgram:
    """A Python program, as held by a bench."""

    def __init__(self, file: str, *before: str) -> None:
        """Start the program `file`. `before`: the command that starts Python, if any."""
        self._file = file
        self._process = subprocess.Popen(
            [*before, sys.executable, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.process = psutil.Process(self._process.pid)

    def ask(self, job: DataclassInstance) -> str:
        """Send a job and return the result, in JSON. Raises RuntimeError if the program ends before the result."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._file} ended: its error is above")
        return line

    def close(self) -> None:
        """Let the program end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
