"""Limits of a tenant, as an operator sets them. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class Budget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budget for the requests that begin in a calendar month, UTC."""

    amount: Annotated[
        str, Meta(pattern=r"^\d{1,12}(\.\d{1,12})?$", description="an amount of money as a text, as 25.50")
    ]  # whole units of the currency
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}$", description="a currency in three capital letters, as USD")] = (
        "USD"
    )

    @property
    def pico(self) -> int:
        whole, _, rest = self.amount.partition(".")
        return int(whole) * 10**12 + int(rest.ljust(12, "0"))


_Count = Annotated[int, Meta(ge=1, le=10**9)]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits over all requests of a tenant together; `max_output_tokens` limits each request. None: no limit."""

    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None  # prompt and output
    concurrent_streams: _Count | None = None  # requests being answered, streamed or not
    max_output_tokens: _Count | None = None
    monthly_budget: Budget | None = None
    storage_bytes: Annotated[int, Meta(ge=0, le=2**53)] | None = None  # size of the models that the tenant imports

    @property
    def shared(self) -> bool:
        """Whether a limit holds over all gateways together."""
        ours = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_streams, self.monthly_budget)
        return any(limit is not None for limit in ours)


NO_LIMITS = Limits()
