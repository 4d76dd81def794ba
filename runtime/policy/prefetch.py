"""Who gets pages next, while another steps: decided from the order of turns, answered with what is to be done. Pure.

Nobody is overtaken: until the one whose turn comes first of those that can't go on has its pages, nobody behind it gets
any by harming others. So each comes in: those before it have their turns and go to the end of the order, and then all
that the others hold can be taken for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.events import Evict, Fetch, Grow, MemoryEffect, Shrink
from runtime.model import Model, Phase
from runtime.pages import Pages
from runtime.policy.eviction import Action, Holding, make_room, spare_room
from runtime.request import ModelKey


def bring_in(order: Sequence[Model], pages: Pages, stepper: Model | None, in_turn: bool) -> list[MemoryEffect]:
    """Pages for the first of `order` (soonest turn first) that can't go on without, or what makes room for it.

    `stepper` is who steps meanwhile; `in_turn`: it must not be parked for this."""
    place = next((place for place, model in enumerate(order) if model.needy), None)
    if place is None:
        return []
    needy = order[place]
    if needy.phase is Phase.STAGED and any(model.phase is Phase.FETCHING for model in order):
        return []
    kept = {model.key for model in order if model.fresh or (in_turn and model is stepper)}
    kept.update(model.key for model in order[:place])
    short = needy.short(pages.of(needy.key), pages.total)
    missing = short - pages.free - _coming(order, pages)
    actions = make_room(missing, _holdings(needy, order, pages, kept), stepper.key if stepper else None)
    if actions is None:
        return []
    if pages.free + _freed(actions) < short:  # the rest is on its way
        return [*actions]
    if needy.phase is Phase.RESIDENT:
        return [*actions, Grow(needy.key, short)]
    return [*actions, Fetch(needy.key, needy.kv_needed(pages.of(needy.key), pages.total))]


def grow(model: Model, order: Sequence[Model], pages: Pages) -> list[MemoryEffect]:
    """As many of the pages that a resident model lacks as can be had without parking anybody who has requests."""
    short = model.short(pages.of(model.key), pages.total)
    if short <= 0:
        return []
    missing = short - pages.free - _coming(order, pages)
    actions = spare_room(missing, _holdings(model, order, pages, set()))
    had = min(short, pages.free + _freed(actions))
    return [*actions, Grow(model.key, had)] if had > 0 else [*actions]


def _coming(models: Sequence[Model], pages: Pages) -> int:
    """On their way back: what a park leaves behind can be taken at once."""
    leaving = [model.key for model in models if model.phase in (Phase.PARKING, Phase.CLOSING)]
    return sum(pages.of(key).weights + pages.of(key).kv for key in leaving)


def _freed(actions: Sequence[Action]) -> int:
    return sum(action.pages for action in actions if isinstance(action, Evict | Shrink))


def _holdings(needy: Model, order: Sequence[Model], pages: Pages, kept: set[ModelKey]) -> list[Holding]:
    """Of the others that can be asked for theirs, in their order."""
    others = [model for model in order if model is not needy and model.phase in (Phase.STAGED, Phase.RESIDENT)]
    return [_holding(model, pages, model.key in kept) for model in others]


def _holding(model: Model, pages: Pages, kept: bool) -> Holding:
    held = pages.of(model.key)
    uses_spare = model.fresh or held.kv_wanted > held.kv
    return Holding(
        model.key,
        weights=held.weights,
        kv=held.kv,
        kv_spare=0 if uses_spare else held.kv_spare,
        resident=model.phase is Phase.RESIDENT,
        works=model.works,
        kept=kept,
        used_at=model.used_at,
    )
