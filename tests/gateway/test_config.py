import multiprocessing
import stat
from pathlib import Path

import pytest

from gateway import config
from runtime.config import RuntimeSettings
from store.settings import PREFIX, MemoryShare, SettingsError


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in config.Settings.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
    monkeypatch.setenv("STACCATO_DATA", str(tmp_path))
    return tmp_path


def test_the_database_is_a_file_in_the_data_folder_unless_said_otherwise(data: Path) -> None:
    assert config.load().database_url == f"sqlite:///{data}/staccato.db"
    assert config.load(database_url="postgresql://db/staccato").database_url == "postgresql://db/staccato"


def test_an_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_PORT", "9000")
    assert (config.load().port, config.load(port=9001).port) == (9000, 9001)


def test_a_relative_data_folder_is_the_same_for_every_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.load(data="here").data == tmp_path / "here"


def test_sizes_and_folder_lists_are_read_as_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_DEVICE_MEMORY", "1GiB")
    monkeypatch.setenv("STACCATO_MODEL_ROOTS", "/models:/more")
    settings = config.load()
    assert settings.device_memory == 1 << 30
    assert settings.model_roots == [Path("/models"), Path("/more")]


def test_a_devices_memory_may_be_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_DEVICE_MEMORY", "90%")
    assert config.load().device_memory == MemoryShare(90)
    assert config.shown(config.load())["STACCATO_DEVICE_MEMORY"] == "90%"
    assert RuntimeSettings().pool == (0, 90)
    monkeypatch.setenv("STACCATO_DEVICE_MEMORY", "1GiB")
    assert RuntimeSettings().pool == (1 << 30, 0)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("STACCATO_DEVICE_MEMORY", "99%", ": write a part as 1% to 95%"),
        ("STACCATO_PORT", "eighty", ": write a whole number"),
        ("STACCATO_PORT", "70000", ": write at most 65535"),
        ("STACCATO_HEADER_DEADLINE_S", "soon", ": write a number, as 2.5"),
        ("STACCATO_HEADER_DEADLINE_S", "0", ": write more than 0"),
        ("STACCATO_DEVICE_MEMORY", "lots", ": write a size in bytes, as 512MiB or 8GB"),
        ("STACCATO_DEVICE_MEMORY", "1MiB", "4194304"),
        ("STACCATO_HOST_CACHE", "1MiB", "16777216"),
        ("STACCATO_POLICY", "fair", "round-robin"),
        ("STACCATO_RUNTIMES", "x", ": write a whole number"),
        ("STACCATO_RUNTIMES_MOST", "x", ": write a whole number"),
        ("STACCATO_LOG_LEVEL", "loud", "warning"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_expected(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as refused:
        config.load()
    sentence = str(refused.value)
    assert sentence.startswith(f"{variable} is '{value}'") and expected in sentence and "\n" not in sentence


def test_the_number_of_runtimes_stays_as_it_is_unless_the_most_is_above_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = config.load()
    assert (settings.runtimes, settings.runtimes_most, settings.elastic) == (1, 1, False)
    monkeypatch.setenv("STACCATO_RUNTIMES", "3")
    settings = config.load()
    assert (settings.runtimes, settings.runtimes_most, settings.elastic) == (3, 3, False)
    monkeypatch.setenv("STACCATO_RUNTIMES_MOST", "5")
    settings = config.load()
    assert (settings.runtimes, settings.runtimes_most, settings.elastic) == (3, 5, True)
    settings.check_runtimes()
    config.load(runtimes=0, runtimes_most=0).check_runtimes()


@pytest.mark.parametrize(
    ("least", "most", "sentence"),
    [
        ("4", "1", "STACCATO_RUNTIMES=4 is more than STACCATO_RUNTIMES_MOST=1: lower the least number"),
        ("0", "2", "STACCATO_RUNTIMES=0 with STACCATO_RUNTIMES_MOST=2: no runtime would tell of a load"),
    ],
)
def test_bounds_of_runtimes_that_can_not_be_kept_are_refused_by_up_alone(
    monkeypatch: pytest.MonkeyPatch, least: str, most: str, sentence: str
) -> None:
    """A gateway without `staccato up` may share its environment with a scheduler, and starts no runtime."""
    monkeypatch.setenv("STACCATO_RUNTIMES", least)
    monkeypatch.setenv("STACCATO_RUNTIMES_MOST", most)
    settings = config.load()
    with pytest.raises(SettingsError, match=f"^{sentence}"):
        settings.check_runtimes()


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_ADMIN_KEY", "hush-key")
    monkeypatch.setenv("STACCATO_DATABASE_URL", "postgresql://staccato:hush-db@db/staccato")
    monkeypatch.setenv("STACCATO_NATS_URL", "nats://staccato:hush-nats@bus:4222")
    shown = config.shown(config.load())
    assert "hush" not in str(shown)
    assert shown["STACCATO_DATABASE_URL"] == "postgresql://staccato:***@db/staccato"
    assert set(shown) == {PREFIX + name.upper() for name in config.Settings.model_fields}


def test_the_admin_key_is_made_once_and_for_its_owner_alone(data: Path) -> None:
    first = config.admin_key(config.load())
    assert len(first) > 40 and config.admin_key(config.load()) == first
    assert stat.S_IMODE((data / "admin.key").stat().st_mode) == 0o600
    assert list(data.iterdir()) == [data / "admin.key"]


def test_the_admin_key_of_the_environment_leaves_no_file(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    monkeypatch.setenv("STACCATO_ADMIN_KEY", "given")
    assert config.admin_key(config.load()) == "given"
    assert list(data.iterdir()) == []


def _pepper(data: str) -> bytes:
    return config.pepper(config.load(data=data))


def test_processes_that_start_at_once_agree_on_one_pepper(data: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        found = set(pool.map(_pepper, [str(data)] * 16, chunksize=1))
    assert len(found) == 1 and len(found.pop()) == 32


def test_a_secret_may_stand_in_a_file_that_only_this_process_can_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "STACCATO_DATABASE_URL").write_text("postgresql://u:secret@db/staccato\n")
    (tmp_path / "STACCATO_ADMIN_KEY").write_text("sk-st-admin-x\n")
    monkeypatch.setenv("STACCATO_SECRETS", str(tmp_path))
    settings = config.load()
    assert settings.database_url == "postgresql://u:secret@db/staccato"
    assert config.admin_key(settings) == "sk-st-admin-x"
