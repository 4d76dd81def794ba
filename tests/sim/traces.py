"""Traces for tests: recorded traces if present, and files written from rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import ROOT

TRACES = Path(os.environ.get("STACCATO_TRACES", ROOT.parent / "shared" / "traces"))


def real(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not there: STACCATO_TRACES names the folder of traces")
    return path


def written(path: Path, rows: list[list[str]], header: str = "t,model,inp,out") -> Path:
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n")
    return path
