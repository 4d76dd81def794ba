"""Whose pages are taken back when others need them: asked with values, answered with what is to be done. Pure.

From what costs least to what costs most: clean weights nobody waits for, KV cache that holds only prefixes, models
without requests, clean weights that somebody waits for, models with requests. Of those without requests, the ones that
were idle for longer than their threshold go first, and of these the one whose first token may come latest; then the
others, least recently used first; last who came moments ago and was not used yet, or two models would take turns at
pushing each other out. Pinned models without requests give no more than spare KV cache as long as what all others hold
would do. Of those with requests, the one whose next turn comes last goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import msgspec

from runtime.events import Evict, Park, Shrink
from runtime.request import ModelKey

Action = Evict | Shrink | Park

COOL_DOWN_S = 5.0


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
    pinned: bool = False  # keeps what it has while nobody waits for it
    idle: float = 0.0  # time without requests, in thresholds: above 1 it is longer than the model's own
    unused_s: float = float("inf")  # since it became resident without a step; endless once it made one
    ttft_s: float = 10.0  # its objective
    reload_s: float = 0.0  # to bring it back


class _Offer(msgspec.Struct, frozen=True):
    action: Action
    pages: int
    weights: int = 0  # of them, if it is a park


def spare_room(short: int, holdings: Sequence[Holding]) -> list[Action]:
    """At most `short` pages, from work no more than clean weights of who may be harmed. What a park brings comes later.

    `holdings` are in the order of turns, soonest first, here and below."""
    if short <= 0:
        return []
    return _exactly(short, _take(short, chain(_harmless(holdings), _clean(_victims(holdings)))))


def make_room(short: int, holdings: Sequence[Holding], stepping: ModelKey | None) -> list[Action] | None:
    """How `short` pages come free; None if they can't. Either exactly these, at once, or parks alone, whose requests
    must be out first, to decide again then. `stepping` would keep the device at work meanwhile: it is parked last."""
    if short <= 0:
        return []
    taken = _take(short, chain(_harmless(holdings), _harmful(holdings, stepping), _pinned(short, holdings)))
    if _pages(taken) < short:
        return None
    # What is too much of a last offer that can be had in parts is not taken, so it makes no park needless.
    needed = _fewest(taken, _pages(taken) - short if isinstance(taken[-1].action, Park) else 0)
    parks: list[Action] = [offer.action for offer in needed if isinstance(offer.action, Park)]
    at_once = [_at_once(offer) for offer in needed]
    if _pages(at_once) < short:
        return parks
    return parks + _exactly(short, _take(short, at_once))


def _at_once(offer: _Offer) -> _Offer:
    """Of a park its weights: they are clean before the requests are out."""
    if not isinstance(offer.action, Park):
        return offer
    return _Offer(Evict(offer.action.model, offer.weights), offer.weights)


def _take(short: int, offers: Iterable[_Offer]) -> list[_Offer]:
    """The first that bring `short` pages together, or all."""
    taken: list[_Offer] = []
    for offer in offers:
        taken.append(offer)
        short -= offer.pages
        if short <= 0:
            break
    return taken


def _exactly(short: int, taken: list[_Offer]) -> list[Action]:
    """Without the pages of the last that are too many; a park can't be had in parts."""
    actions = [offer.action for offer in taken]
    excess = _pages(taken) - short
    if excess > 0 and actions and not isinstance(last := actions[-1], Park):
        actions[-1] = type(last)(last.model, last.pages - excess)
    return actions


def _fewest(taken: list[_Offer], excess: int) -> list[_Offer]:
    """Without the parks that a later, larger one made needless; of these the nearest turn is spared first."""
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


def _harmless(holdings: Sequence[Holding]) -> Iterator[_Offer]:
    idle = sorted((holding for holding in holdings if not holding.works), key=_reluctance)
    given_up = [holding for holding in idle if not holding.pinned]
    yield from _clean(given_up)
    yield from _spare(idle)
    yield from _spare(holding for holding in reversed(holdings) if holding.works)
    yield from _parks(given_up)


def _reluctance(idle: Holding) -> tuple[bool, bool, float, float, float, int, ModelKey]:
    """What speaks against taking one without requests, least first."""
    cooling = idle.unused_s < COOL_DOWN_S
    if idle.idle > 1:
        return cooling, False, -idle.ttft_s, -idle.idle, idle.reload_s, -(idle.weights + idle.kv), idle.model
    return cooling, True, idle.used_at, 0.0, 0.0, 0, idle.model


def _harmful(holdings: Sequence[Holding], stepping: ModelKey | None) -> Iterator[_Offer]:
    victims = _victims(holdings)
    yield from _clean(victims)
    yield from _parks(sorted(victims, key=lambda holding: holding.model == stepping))


def _pinned(short: int, holdings: Sequence[Holding]) -> Iterator[_Offer]:
    """If all that the others hold would not do, ever, who is pinned gives way before somebody waits for good."""
    idle = [holding for holding in holdings if holding.pinned and not holding.works]
    others = sum(holding.weights + holding.kv for holding in holdings) - sum(each.weights + each.kv for each in idle)
    if short > others:
        yield from _clean(idle)
        yield from _parks(idle)


def _victims(holdings: Sequence[Holding]) -> list[Holding]:
    return [holding for holding in reversed(holdings) if holding.works and not holding.kept]


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
            pages = holding.weights + holding.kv - holding.kv_spare
            yield _Offer(Park(holding.model), pages, holding.weights)
