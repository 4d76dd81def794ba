"""Whose pages are taken back when others need them: asked with values, answered with what is to be done. Pure.

From what costs least to what costs most: clean weights nobody waits for, KV cache that holds only prefixes, models
without requests, clean weights that somebody waits for, models with requests. Of those without requests the one used
least recently goes first; of those with requests, the one whose next turn comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from runtime.events import Evict, Park, Shrink
from runtime.request import ModelKey

Action = Evict | Shrink | Park


class Holding(msgspec.Struct, frozen=True):
    """What one model has of the pool, in pages, and what speaks against taking it."""

    model: ModelKey
    weights: int  # clean cache, unless `resident`
    kv: int
    kv_spare: int
    resident: bool  # only a park makes its weights clean
    works: bool  # somebody waits for it, or for its tokens
    kept: bool  # while it works it must not be parked, nor lose its clean weights
    used_at: float


class _Offer(NamedTuple):
    action: Action
    pages: int


def spare_room(short: int, holdings: Sequence[Holding]) -> list[Action]:
    """At most `short` pages, without harm to anybody's work. What a park brings comes later.

    `holdings` are in the order of turns, soonest first, here and below."""
    return _exactly(short, _take(short, _harmless(holdings)))


def make_room(short: int, holdings: Sequence[Holding], stepping: ModelKey | None) -> list[Action] | None:
    """How `short` pages come free; None if they can't. Either parks alone, to decide again when they are done, or
    exactly the pages that are short. `stepping` would keep the device at work meanwhile: it is parked last."""
    taken = _take(short, (*_harmless(holdings), *_harmful(holdings, stepping)))
    if _pages(taken) < short:
        return None
    parks = [offer for offer in taken if isinstance(offer.action, Park)]
    if not parks:
        return _exactly(short, taken)
    # What is too much of a last offer that can be had in parts is not taken, so it makes no park needless.
    return _fewest(parks, _pages(taken) - short if taken[-1] is parks[-1] else 0)


def _take(short: int, offers: Iterable[_Offer]) -> list[_Offer]:
    """The first that bring `short` pages together, or all."""
    taken: list[_Offer] = []
    for offer in offers:
        if short <= 0:
            break
        taken.append(offer)
        short -= offer.pages
    return taken


def _exactly(short: int, taken: list[_Offer]) -> list[Action]:
    """Without the pages of the last that are too many; a park can't be had in parts."""
    actions = [offer.action for offer in taken]
    excess = _pages(taken) - short
    if excess > 0 and actions and not isinstance(last := actions[-1], Park):
        actions[-1] = msgspec.structs.replace(last, pages=last.pages - excess)
    return actions


def _fewest(parks: list[_Offer], excess: int) -> list[Action]:
    """Without those that a later, larger one made needless; of these the nearest turn is spared first."""
    needed: list[Action] = []
    for offer in reversed(parks):
        if offer.pages <= excess:
            excess -= offer.pages
        else:
            needed.append(offer.action)
    return needed[::-1]


def _pages(offers: Iterable[_Offer]) -> int:
    return sum(offer.pages for offer in offers)


# ── what there is, cheapest first ─────────────────────────────────────────────────────────────────────────────────────


def _harmless(holdings: Sequence[Holding]) -> Iterator[_Offer]:
    idle = sorted((holding for holding in holdings if not holding.works), key=lambda h: (h.used_at, h.model))
    working = [holding for holding in reversed(holdings) if holding.works]
    yield from _clean(idle)
    yield from _spare((*idle, *working))
    yield from _parks(idle)


def _harmful(holdings: Sequence[Holding], stepping: ModelKey | None) -> Iterator[_Offer]:
    victims = [holding for holding in reversed(holdings) if holding.works and not holding.kept]
    yield from _clean(victims)
    yield from _parks(sorted(victims, key=lambda holding: holding.model == stepping))


def _clean(holdings: Iterable[Holding]) -> Iterator[_Offer]:
    for holding in holdings:
        if not holding.resident and holding.weights:
            yield _Offer(Evict(holding.model, holding.weights), holding.weights)


def _spare(holdings: Iterable[Holding]) -> Iterator[_Offer]:
    for holding in holdings:
        if holding.resident and holding.kv_spare:
            yield _Offer(Shrink(holding.model, holding.kv_spare), holding.kv_spare)


def _parks(holdings: Iterable[Holding]) -> Iterator[_Offer]:
    """Each brings what it has besides its spare pages, which were offered before."""
    for holding in holdings:
        if holding.resident:
            yield _Offer(Park(holding.model), holding.weights + holding.kv - holding.kv_spare)
