"""A separate process migrates the database, and the previous version can go on with the migrated database."""

import ast
from pathlib import Path

from store.db import database
from tests.conftest import ROOT
from tests.deploy.tools import staccato

FIRST_RELEASE = "0006"  # no release was installed up to this migration
TAKES_AWAY = ("drop_column", "drop_table", "alter_column", "rename_table")


def taken_away(migration: Path) -> list[str]:
    """Acts of the migration's upgrade that the previous version could not go on with."""
    functions = [node for node in ast.parse(migration.read_text()).body if isinstance(node, ast.FunctionDef)]
    (upgrade,) = (function for function in functions if function.name == "upgrade")
    called = [node.func.attr for node in ast.walk(upgrade) if isinstance(node, ast.Call) and hasattr(node.func, "attr")]
    return [name for name in called if name in TAKES_AWAY]


def test_since_the_first_release_migrations_only_add() -> None:
    """A migration may drop a column or table once no released version needs it: name the migration here then."""
    later = [path for path in (ROOT / "migrations/versions").glob("*.py") if path.name[:4] > FIRST_RELEASE]
    assert {path.name: found for path in later if (found := taken_away(path))} == {}


def test_what_a_migration_takes_away_is_found() -> None:
    assert taken_away(ROOT / "migrations/versions/0005_audit.py") == ["drop_table"]


def test_a_database_is_migrated_by_the_url_in_a_file_of_the_folder_of_secrets(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/staccato.db"
    (tmp_path / "STACCATO_DATABASE_URL").write_text(f"{url}\n")
    ran = staccato("migrate", STACCATO_SECRETS=str(tmp_path))
    assert ran.returncode == 0 and database.head() in ran.stderr, ran.stderr
    assert database.revision(url) == database.head()


def test_a_database_that_is_not_reachable_is_named_without_its_password() -> None:
    ran = staccato("migrate", STACCATO_DATABASE_URL="postgresql://staccato:secret@127.0.0.1:1/staccato")
    assert ran.returncode == 1 and "not reachable" in ran.stderr and "secret" not in ran.stderr, ran.stderr
