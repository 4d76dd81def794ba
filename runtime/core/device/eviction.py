"""Which models give pages back when another model needs pages: decides on values, returns actions. Pure.

Pages are taken in the order of their cost, the cheapest first:

1. clean weights of models without work,
2. KV cache that holds only prefixes of ended requests,
3. parks of models without requests,
4. clean weights of models with work,
5. parks of models with requests, the model with the latest next turn first.

Models without requests go in this order: models idle for longer than their threshold, the longest TTFT objective first;
then other models, least recently used first; last, models that became resident moments ago and have not stepped yet, or
two models would push each other out in turns. Pinned models without requests give only spare KV cache while the pages
of the remaining models suffice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import msgspec

from runtime.core.device.events import Evict, Park, Shrink
from runtime.core.device.request import ModelKey

Action = Evict | Shrink | Park

COOL_DOWN_S = 5.0


class ModelHolding(msgspec.Struct, frozen=True):
    """Pages that a model holds, and reasons against taking the pages."""

    model: ModelKey
    weights: int  # clean cache, unless `resident`
    kv: int
    kv_spare: int
    resident: bool  # the weights become clean only by a park
    works: bool  # requests or an operator wait for the model
    kept: bool  # while the model works, it must not be parked, nor lose clean weights
    used_at: float
    pinned: bool = False  # the model keeps its pages while it has no work
    idle: float = 0.0  # time without requests in multiples of the model's idle threshold
    unused_s: float = float("inf")  # seconds since the model became resident; endless once the model has stepped
    ttft_s: float = 10.0  # objective of the model's last request
    reload_s: float = 0.0  # time to load the model again


class _Offer(msgspec.Struct, frozen=True):
    action: Action
    pages: int  # that the action frees
    weights: int = 0  # share of `pages` that is weights, if the action is a park


def spare_room(short: int, holdings: Sequence[ModelHolding]) -> list[Action]:
    """Actions that free at most `short` pages without parking a model that works.

    Models that work give spare KV cache, and clean weights unless the model is kept. Pages of a park come free later.
    Here and below, `holdings` are in the order of turns, soonest first."""
    if short <= 0:
        return []
    return _exactly(short, _take(short, chain(_harmless(holdings), _clean(_victims(holdings)))))


def make_room(short: int, holdings: Sequence[ModelHolding], stepping: ModelKey | None) -> list[Action] | None:
    """Actions that free `short` pages; None if the holdings do not suffice.

    Returns either actions that free exactly `short` pages at once, or parks alone. With parks alone, the requests must
    leave the device first; the caller decides again then. `stepping` is parked last, since the model keeps the device
    at work meanwhile."""
    if short <= 0:
        return []
    taken = _take(short, chain(_harmless(holdings), _harmful(holdings, stepping), _pinned(short, holdings)))
    if _pages(taken) < short:
        return None
    # A last offer that is no park is taken in part, without its excess pages: the excess makes no park needless.
    needed = _fewest(taken, _pages(taken) - short if isinstance(taken[-1].action, Park) else 0)
    parks: list[Action] = [offer.action for offer in needed if isinstance(offer.action, Park)]
    at_once = [_at_once(offer) for offer in needed]
    if _pages(at_once) < short:
        return parks
    return parks + _exactly(short, _take(short, at_once))


def let_images_go(short_bytes: int, images: Sequence[ModelHolding]) -> list[ModelKey] | None:
    """Models without work whose images leave the host cache, for `short_bytes` bytes together; None: never enough.

    `images` hold the bytes of images as `weights`. Pinned models keep their images if the others suffice."""
    idle = sorted((image for image in images if not image.works), key=lambda image: (image.pinned, _reluctance(image)))
    taken: list[ModelKey] = []
    for image in idle:
        if short_bytes <= 0:
            break
        taken.append(image.model)
        short_bytes -= image.weights
    return taken if short_bytes <= 0 else None


def _at_once(offer: _Offer) -> _Offer:
    """Part of the offer that comes free at once. A park frees its weights at once: the weights are clean before the
    requests have left."""
    if not isinstance(offer.action, Park):
        return offer
    return _Offer(Evict(offer.action.model, offer.weights), offer.weights)


def _take(short: int, offers: Iterable[_Offer]) -> list[_Offer]:
    """First offers that free `short` pages together; every offer if the pages do not suffice."""
    taken: list[_Offer] = []
    for offer in offers:
        taken.append(offer)
        short -= offer.pages
        if short <= 0:
            break
    return taken


def _exactly(short: int, taken: list[_Offer]) -> list[Action]:
    """Actions of the offers, without the excess pages of the last action. A park cannot be taken in part."""
    actions = [offer.action for offer in taken]
    excess = _pages(taken) - short
    if excess > 0 and actions and not isinstance(last := actions[-1], Park):
        actions[-1] = type(last)(last.model, last.pages - excess)
    return actions


def _fewest(taken: list[_Offer], excess: int) -> list[_Offer]:
    """Offers without the parks made needless by a later, larger park; a model with a nearer turn is spared first.

    `excess` is the number of pages above the need."""
    needed: list[_Offer] = []
    for offer in reversed(taken):
        if isinstance(offer.action, Park) and offer.pages <= excess:
            excess -= offer.pages
        else:
            needed.append(offer)
    return needed[::-1]


def _pages(offers: Iterable[_Offer]) -> int:
    return sum(offer.pages for offer in offers)


# ── what there is, cheapest first ─────────────────────────────────────────────────────────────────────────────────────


def _harmless(holdings: Sequence[ModelHolding]) -> Iterator[_Offer]:
    idle = sorted((holding for holding in holdings if not holding.works), key=_reluctance)
    given_up = [holding for holding in idle if not holding.pinned]
    yield from _clean(given_up)
    yield from _spare(idle)
    yield from _spare(holding for holding in reversed(holdings) if holding.works)
    yield from _parks(given_up)


def _reluctance(idle: ModelHolding) -> tuple[bool, bool, float, float, float, int, ModelKey]:
    """Sort key of models without requests: models that should give pages first sort first."""
    cooling = idle.unused_s < COOL_DOWN_S
    if idle.idle > 1:
        return cooling, False, -idle.ttft_s, -idle.idle, idle.reload_s, -(idle.weights + idle.kv), idle.model
    return cooling, True, idle.used_at, 0.0, 0.0, 0, idle.model


def _harmful(holdings: Sequence[ModelHolding], stepping: ModelKey | None) -> Iterator[_Offer]:
    victims = _victims(holdings)
    yield from _clean(victims)
    yield from _parks(sorted(victims, key=lambda holding: holding.model == stepping))


def _pinned(short: int, holdings: Sequence[ModelHolding]) -> Iterator[_Offer]:
    """Offers of pinned models without work, only if the pages of every other model could never suffice.

    Without these offers, a model would wait for pages forever."""
    idle = [holding for holding in holdings if holding.pinned and not holding.works]
    others = sum(holding.weights + holding.kv for holding in holdings) - sum(each.weights + each.kv for each in idle)
    if short > others:
        yield from _clean(idle)
        yield from _parks(idle)


def _victims(holdings: Sequence[ModelHolding]) -> list[ModelHolding]:
    return [holding for holding in reversed(holdings) if holding.works and not holding.kept]


def _clean(holdings: Iterable[ModelHolding]) -> Iterator[_Offer]:
    for holding in holdings:
        if not holding.resident and holding.weights:
            yield _Offer(Evict(holding.model, holding.weights), holding.weights)


def _spare(holdings: Iterable[ModelHolding]) -> Iterator[_Offer]:
    for holding in holdings:
        if holding.resident and holding.kv_spare:
            yield _Offer(Shrink(holding.model, holding.kv_spare), holding.kv_spare)


def _parks(holdings: Iterable[ModelHolding]) -> Iterator[_Offer]:
    """Parks of resident models, without the spare KV pages, which were offered before."""
    for holding in holdings:
        if holding.resident:
            pages = holding.weights + holding.kv - holding.kv_spare
            yield _Offer(Park(holding.model), pages, holding.weights)
