import asyncio
import socket
from pathlib import Path

import pytest

from store.telemetry import signs
from tests.conftest import soon


async def test_who_is_not_ready_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "PERIOD_S", 0.01)
    monkeypatch.setenv("STACCATO_SIGNS", str(tmp_path))
    able = False
    giving = asyncio.create_task(signs.give(lambda: able))
    await soon((tmp_path / "alive").exists)
    assert not (tmp_path / "ready").exists()
    able = True
    await soon((tmp_path / "ready").exists)
    giving.cancel()


async def test_systemd_is_told_when_it_is_ready_and_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        for able, said in ((False, b"WATCHDOG=1"), (True, b"WATCHDOG=1\nREADY=1")):
            giving = asyncio.create_task(signs.give(lambda able=able: able))
            assert await asyncio.to_thread(systemd.recv, 64) == said
            giving.cancel()
