"""The platform over the REST API, as the reconciler looks at the platform and changes the platform."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, Self

import msgspec

from gateway.cli.api import CliError, Row
from gateway.cli.terminal.client import GatewayClient
from gateway.core.declared.observed import Observed, SeenKey, SeenModel, deployment_of, tenant_of
from gateway.core.declared.reconciler import RestCall

PREFIX = "/api/v1"
BUSY = (409, 429)  # statuses of refusals that may end by themselves, as of a tenant that still has deployments


class CallFailed(Exception):
    """A call that failed. `reason`: a word for programs; `unreachable`: no gateway answered."""

    def __init__(self, message: str, reason: str, unreachable: bool = False) -> None:
        super().__init__(message)
        self.reason, self.unreachable = reason, unreachable

    @classmethod
    def by(cls, error: CliError) -> Self:
        if error.status is None:
            return cls(str(error), "Unreachable", unreachable=True)
        return cls(str(error), "Failed" if error.status >= 500 else "Busy" if error.status in BUSY else "Refused")


class Platform(Protocol):
    """The platform for the reconciler. Both methods raise CallFailed."""

    def observe(self, tenants: Collection[str]) -> Observed:
        """Return the platform's rows, without the Secrets. `tenants`: names of the tenants whose keys are wanted."""

    def carry_out(self, call: RestCall) -> Row:
        """Make a call, and return the answer."""


class RestPlatform:
    """The platform behind a gateway."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway

    def observe(self, tenants: Collection[str]) -> Observed:
        try:
            return self._observe(tenants)
        except CliError as error:
            raise CallFailed.by(error) from error

    def _observe(self, with_keys: Collection[str]) -> Observed:
        tenants = {row.name: row for row in map(tenant_of, self._rows("/tenants"))}
        deployments = [deployment_of(row) for row in self._rows("/deployments")]
        models = msgspec.convert(list(self._rows("/models")), list[SeenModel])
        return Observed(
            tenants=tenants,
            deployments={(row.tenant, row.name): row for row in deployments},
            models={(row.tenant, row.name): row for row in models},
            keys={name: self._keys(name) for name in with_keys if name in tenants},
        )

    def _rows(self, path: str) -> Iterable[Row]:
        return self._gateway.every(PREFIX + path)

    def _keys(self, tenant: str) -> tuple[SeenKey, ...]:
        return msgspec.convert(list(self._rows(f"/tenants/{tenant}/keys")), tuple[SeenKey, ...])

    def carry_out(self, call: RestCall) -> Row:
        path, body = PREFIX + call.path, dict(call.body)
        try:
            match call.method:
                case "POST":
                    return self._gateway.post(path, body)
                case "PATCH":
                    return self._gateway.patch(path, body)
                case "DELETE":
                    return self._gateway.delete(path)
        except CliError as error:
            raise CallFailed.by(error) from error
        raise AssertionError(f"the reconciler makes no {call.method}")
