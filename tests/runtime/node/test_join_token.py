"""Settings by which a runtime joins: the token, the file of the token, and the key made at the first start."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config import RuntimeSettings
from store.keypairs import SigningKey
from store.settings import SettingsError, read

TOKEN = f"st-join-{'1' * 32}-{'2' * 48}"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STACCATO_NATS_CREDENTIALS", str(tmp_path / "data" / "own.nk"))
    return tmp_path / "data" / "own.nk"


def test_without_a_token_no_key_is_made(key: Path) -> None:
    assert read(RuntimeSettings).join_with() is None and not key.exists()


def test_with_a_token_the_key_is_made_once(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_JOIN_TOKEN", TOKEN)
    settings = read(RuntimeSettings)
    assert settings.join_with() == TOKEN and TOKEN not in repr(settings)
    seed = key.read_text()
    assert SigningKey(seed).public_key.startswith("U") and key.stat().st_mode & 0o777 == 0o600
    assert settings.join_with() == TOKEN and key.read_text() == seed


def test_the_file_of_a_token_may_go_once_the_runtime_has_a_key(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("STACCATO_JOIN_TOKEN_FILE", str(file))
    with pytest.raises(ValueError, match="token: No such file"):
        read(RuntimeSettings).join_with()
    assert not key.exists()
    file.write_text(TOKEN + "\n")
    assert read(RuntimeSettings).join_with() == TOKEN and key.exists()
    file.unlink()
    assert read(RuntimeSettings).join_with() is None


def test_a_token_needs_a_file_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_JOIN_TOKEN", TOKEN)
    with pytest.raises(ValueError, match="needs STACCATO_NATS_CREDENTIALS"):
        read(RuntimeSettings).join_with()


def test_a_malformed_token_is_refused_without_being_shown(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_JOIN_TOKEN", "st-join-mine")
    with pytest.raises(ValueError, match="malformed") as raised:
        read(RuntimeSettings).join_with()
    assert "mine" not in str(raised.value) and not key.exists()


def test_a_secret_token_is_not_shown_by_an_error_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_TENSOR_PARALLEL", "none")
    monkeypatch.setenv("STACCATO_JOIN_TOKEN", TOKEN)
    with pytest.raises(SettingsError, match="STACCATO_TENSOR_PARALLEL") as raised:
        read(RuntimeSettings, ("join_token",))
    assert TOKEN not in str(raised.value)
