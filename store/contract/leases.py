"""Leases in two parts, so that the lease of a runtime with thousands of models stays small. Pure.

A lease is renewed each second, and the states of most models do not change from one second to the next. A lease with
many entries therefore amends a base: the runtime publishes the base seldom, in a bucket of its own, and the lease holds
the entries that differ from the base. An entry is the state of a model, the attainment of a label, or the account of a
label. A lease with few entries has no base.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from store.contract.wire import Lease, LeaseBase

WHOLE_MOST = 64  # entries of a lease without a base
AMENDED_SHARE = 0.125  # share of the entries; a lease that amends more gets a new base, after BASE_S_LEAST
BASE_S_LEAST = 30.0  # seconds; models that are always busy change in every lease, and a new base would not help
BASE_S = 200.0  # seconds between two bases, a quarter more or less: bases leave the bucket after three times as long
T = TypeVar("T")


class LeaseParts:
    """The leases of one runtime, for the publishing runtime."""

    def __init__(self) -> None:
        self._base: LeaseBase | None = None
        self._version = 0
        self._settled = self._ends = 0.0  # times from which the base may be, and is, replaced

    def split(self, lease: Lease, now: float) -> tuple[LeaseBase | None, Lease]:
        """Return the base to publish first, if there has to be a new base, and the lease to publish.

        `now`: seconds."""
        entries = _entries(lease)
        if entries <= WHOLE_MOST:
            self._base = None
            return None, lease
        if self._base is not None and self._base.epoch == lease.epoch and now < self._ends:
            amending = _amending(lease, self._base)
            if amending is not None and (now < self._settled or _entries(amending) <= AMENDED_SHARE * entries):
                return None, amending
        self._version += 1
        self._base = LeaseBase(
            runtime=lease.runtime,
            epoch=lease.epoch,
            version=self._version,
            models=dict(lease.models),
            attainment=dict(lease.attainment),
            labels=dict(lease.accounts.labels),
        )
        self._settled = now + BASE_S_LEAST
        # Runtimes that started together do not all publish their bases at the same moment.
        self._ends = now + BASE_S * (0.75 + zlib.crc32(f"{lease.runtime} {self._version}".encode()) / (2 << 32))
        none = replace(lease.accounts, labels={})
        return self._base, replace(lease, base=self._version, models={}, attainment={}, accounts=none)

    def forget(self) -> None:
        """Note that the last base may not be in the bucket: the next lease gets a new base."""
        self._base = None


def _entries(lease: Lease) -> int:
    return len(lease.models) + len(lease.gone) + len(lease.attainment) + len(lease.accounts.labels)


def _amending(lease: Lease, base: LeaseBase) -> Lease | None:
    """Return the lease as amendments of the base; None if an attainment or account of the base is gone."""
    models = _changed(lease.models, base.models)
    attainment = _changed(lease.attainment, base.attainment)
    labels = _changed(lease.accounts.labels, base.labels)
    gone = [key for key in base.models if key not in lease.models]
    if not (base.attainment.keys() <= lease.attainment.keys() and base.labels.keys() <= lease.accounts.labels.keys()):
        return None  # the device process started anew
    accounts = replace(lease.accounts, labels=labels)
    return replace(lease, base=base.version, models=models, gone=gone, attainment=attainment, accounts=accounts)


def _changed(entries: Mapping[str, T], base: Mapping[str, T]) -> dict[str, T]:
    return {key: entry for key, entry in entries.items() if base.get(key) != entry}


class WholeLeases:
    """The leases of all runtimes, for a reader: leases and bases in, whole leases out.

    `changed` takes a runtime's id and the whole lease, or None if the runtime gave the lease back. A lease whose base
    has not come waits for the base, until the next lease."""

    def __init__(self, changed: Callable[[str, Lease | None], None]) -> None:
        self._changed = changed
        self._bases: dict[str, LeaseBase] = {}
        self._waiting: dict[str, Lease] = {}

    def lease_changed(self, id: str, lease: Lease | None) -> None:
        """Take a lease as published; None: the lease was given back."""
        self._waiting.pop(id, None)
        if lease is None or not lease.base:
            return self._changed(id, lease)
        base = self._bases.get(id)
        if base is None or (base.epoch, base.version) != (lease.epoch, lease.base):
            self._waiting[id] = lease
        else:
            self._changed(id, _whole(lease, base))

    def base_changed(self, id: str, base: LeaseBase | None) -> None:
        """Take a base; None: the base was deleted."""
        if base is None:
            self._bases.pop(id, None)
            return
        self._bases[id] = base
        if id in self._waiting:
            self.lease_changed(id, self._waiting[id])


def _whole(lease: Lease, base: LeaseBase) -> Lease:
    models = base.models | lease.models
    for key in lease.gone:
        models.pop(key, None)
    accounts = replace(lease.accounts, labels=base.labels | lease.accounts.labels)
    attainment = base.attainment | lease.attainment
    return replace(lease, base=0, gone=[], models=models, attainment=attainment, accounts=accounts)
