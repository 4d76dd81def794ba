"""The bill in FOCUS 1.2 (FinOps Open Cost and Usage Specification): a row for each line of the bill.

The rows have all mandatory columns, and the conditional columns of a platform with unit prices. BilledCost is the
amount to pay. ListCost and ContractedCost are exact, since the specification requires unit price x quantity.
"""

from __future__ import annotations

import msgspec

from store.db.bill import CORRECTION, Line

SERVICE = "Staccato"
NO_CURRENCY = "XXX"  # ISO 4217's code for no currency: no price was set, and costs are zero


class Charge(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """A row of FOCUS. None is FOCUS's null, an empty field."""

    billed_cost: str
    billing_account_id: str
    billing_account_name: str
    billing_currency: str
    billing_period_end: str
    billing_period_start: str
    charge_category: str  # Usage | Credit | Adjustment
    charge_class: str | None  # Correction: the row corrects an earlier bill
    charge_description: str
    charge_frequency: str
    charge_period_end: str
    charge_period_start: str
    consumed_quantity: str | None = None
    consumed_unit: str | None = None
    contracted_cost: str
    contracted_unit_price: str | None = None
    effective_cost: str
    invoice_id: str
    invoice_issuer_name: str = SERVICE
    list_cost: str
    list_unit_price: str | None = None
    pricing_category: str | None = None
    pricing_quantity: str | None = None
    pricing_unit: str | None = None
    provider_name: str = SERVICE
    publisher_name: str = SERVICE
    resource_id: str | None = None
    resource_name: str | None = None
    resource_type: str | None = None
    service_category: str = "AI and Machine Learning"
    service_name: str = SERVICE
    service_subcategory: str = "Generative AI"
    sku_id: str | None = None
    sku_meter: str | None = None
    sku_price_id: str | None = None


def charge(line: Line) -> Charge:
    return _corrected(line) if line.sku == CORRECTION else _used(line)


def _used(line: Line) -> Charge:
    sku = f"{line.model}/{line.sku}"
    shared = _shared(line)
    return Charge(
        **shared,
        charge_category="Usage",
        charge_class=None,
        charge_description=f"{line.sku} of {line.deployment} ({line.model})",
        charge_frequency="Usage-Based",
        consumed_quantity=line.quantity,
        consumed_unit=line.unit,
        contracted_cost=line.unrounded,
        contracted_unit_price=line.unit_price,
        list_cost=line.unrounded,
        list_unit_price=line.unit_price,
        pricing_category="Standard",
        pricing_quantity=line.quantity,
        pricing_unit=line.unit,
        resource_id=line.deployment_id,
        resource_name=line.deployment,
        resource_type="Deployment",
        sku_id=sku,
        sku_meter=line.sku,
        sku_price_id=f"{line.price_id or 'none'}/{sku}",
    )


def _corrected(line: Line) -> Charge:
    """Return a correction's row. Without a unit price, FOCUS requires BilledCost as ListCost and ContractedCost."""
    return Charge(
        **_shared(line),
        charge_category="Credit" if line.amount.startswith("-") else "Adjustment",
        charge_class="Correction" if line.month < line.period else None,
        charge_description=line.reason,
        charge_frequency="One-Time",
        contracted_cost=line.amount,
        list_cost=line.amount,
    )


def _shared(line: Line) -> dict[str, str]:
    currency = line.currency or NO_CURRENCY
    return {
        "billed_cost": line.amount,
        "billing_account_id": line.tenant_id,
        "billing_account_name": line.tenant,
        "billing_currency": currency,
        "billing_period_start": _month_begin(line.period),
        "billing_period_end": _month_begin(month_after(line.period)),
        "charge_period_start": _month_begin(line.month),
        "charge_period_end": _month_begin(month_after(line.month)),
        "effective_cost": line.amount,
        "invoice_id": f"{line.period}-{line.tenant_id}-{currency}",
    }


def month_after(month: str) -> str:
    year, number = int(month[:4]), int(month[5:])
    return f"{year + number // 12}-{number % 12 + 1:02d}"


def _month_begin(month: str) -> str:
    return f"{month}-01T00:00:00Z"
