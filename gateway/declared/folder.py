"""Declared objects in YAML files of a folder: the source of `staccato apply`, without Kubernetes.

The files have the form of custom resources in Kubernetes, so a folder serves the command and Kubernetes alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from gateway.cli.api import USAGE, CliError
from gateway.core.declared.objects import Declared, Ref, TenantSpec, Unreadable, is_ours, key_id, read
from gateway.core.declared.observed import Delivered
from gateway.core.declared.reconciler import KeyDelivery
from gateway.core.declared.status import ObjectStatus
from gateway.declared.platform import CallFailed

ENDINGS = (".yaml", ".yml", ".json")
OWNER = ".managed-by"  # ending of the file beside a key, with the mark of the Tenant


class Folder:
    """Objects that files declare, and the folder that gets the keys of tenants.

    Args:
        place: a folder with files of YAML, searched with the folders below, or a file.
        keys: folder of the keys, with files `NAMESPACE/SECRET_NAME`; None: no Tenant may declare a key.
        manager: name that begins every mark.
    """

    def __init__(self, place: Path, keys: Path | None, manager: str) -> None:
        self._place, self._keys, self._manager = place, keys, manager
        self._declared: list[Declared] = []
        self.statuses: dict[Ref, ObjectStatus] = {}

    def files(self) -> list[Path]:
        """Return the files with declared objects, in order. Raises CliError for a missing place."""
        if self._place.is_file():
            return [self._place]
        if not self._place.is_dir():
            raise CliError(f"{self._place} is neither a folder nor a file: say with -f where the YAML files are", USAGE)
        return sorted(path for path in self._place.rglob("*") if path.suffix in ENDINGS and path.is_file())

    def load(self) -> None:
        """Read the files. Raises CliError with file and fault, and keeps the objects read before."""
        found: dict[Ref, Declared] = {}
        for path in self.files():
            for each in _objects(path):
                if each.ref in found:
                    raise CliError(f"{path}: {each.ref} is declared twice: leave one of the two out", USAGE)
                found[each.ref] = each
        self._check_keys(list(found.values()))
        self._declared = list(found.values())

    def _check_keys(self, declared: list[Declared]) -> None:
        """Raise CliError for a key that could not be delivered, or for a file that two tenants name."""
        named: dict[tuple[str, str], Ref] = {}
        for each in declared:
            if not isinstance(each.spec, TenantSpec) or each.spec.key is None:
                continue
            if self._keys is None:
                raise CliError(f"{each.ref} declares a key: say with --keys FOLDER where keys are written", USAGE)
            other = named.setdefault((each.ref.namespace, each.spec.key.secret_name), each.ref)
            if other != each.ref:
                secret = each.spec.key.secret_name
                raise CliError(f"{each.ref} and {other} name one secret, {secret}: name two", USAGE)

    # ── the source of the reconciler ──────────────────────────────────────────────────────────────────────────────────

    def declared(self) -> list[Declared]:
        return list(self._declared)

    def delivered(self, declared: Declared, secret: str) -> Delivered | None:
        path = self._file(declared.ref, secret)
        try:
            key = path.read_text()
        except FileNotFoundError:
            return None
        owner = _owner_file(path)
        ours = owner.is_file() and owner.read_text().strip() == declared.ref.mark(self._manager)
        return Delivered(ours, key_id(key))

    def deliver(self, delivery: KeyDelivery, key_id: str, key: str) -> None:
        path = self._file(delivery.tenant, delivery.secret)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_private(_owner_file(path), delivery.tenant.mark(self._manager))
            _write_private(path, key)
        except OSError as error:
            raise CallFailed(f"the key can't be written: {error}", "Undelivered", unreachable=True) from error

    def _file(self, tenant: Ref, secret: str) -> Path:
        assert self._keys is not None, "load() refuses a key without a folder"
        return self._keys / tenant.namespace / secret

    def tell(self, declared: Declared, status: ObjectStatus) -> None:
        self.statuses[declared.ref] = status

    def release(self, declared: Declared) -> None:
        self.statuses.pop(declared.ref, None)


def _objects(path: Path) -> Iterator[Declared]:
    """Yield the objects of a file; documents of foreign API groups are passed over. Raises CliError."""
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if is_ours(document)]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CliError(f"{path}: {' '.join(str(error).split())}", USAGE) from error
    for document in documents:
        try:
            declared = read(document)
        except Unreadable as error:
            raise CliError(f"{path}: {error}", USAGE) from error
        if declared.spec is None:
            raise CliError(f"{path}: {declared.ref}: {declared.error}", USAGE)
        yield declared


def _owner_file(path: Path) -> Path:
    return path.with_name(path.name + OWNER)


def _write_private(path: Path, text: str) -> None:
    """Write a private file in a single step."""
    made = path.with_name(f".{path.name}.new")
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text + "\n")
    made.replace(path)
