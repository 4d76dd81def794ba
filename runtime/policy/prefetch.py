"""Who gets pages next, while another steps: decided from the order of turns, answered with what is to be done. Pure.

Nobody is overtaken: until the one whose turn comes first of those that can't go on has its pages, nobody behind it gets
any by harming others. So each comes in: those before it have their turns and go to the end of the order, and then all
that the others hold can be taken for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from runtime.engine.base import Held
from runtime.events import Evict, Fetch, Grow, MemoryEffect, Shrink
from runtime.model import Model, Phase
from runtime.pages import Pages
from runtime.policy.eviction import Action, Holding, make_room, spare_room

HEADROOM = 24  # who comes in leaves this part of the pool to those who are there, for their next tokens

_STILL, _LEAVING = (Phase.STAGED, Phase.RESIDENT), (Phase.PARKING, Phase.CLOSING)

Yields = Callable[[Model], bool]  # whether a model with work may be harmed


def in_turn(order: Sequence[Model], relieves: bool) -> Iterator[Model]:
    """Who gets pages at the expense of others: the first that can't go on without. If the policy `relieves`, before it
    those in front of it that go on, but not with all that they have."""
    for model in order:
        if model.needy:
            yield model
            return
        if relieves and model.cramped:
            yield model


def bring_in(
    needy: Model,
    order: Sequence[Model],
    idle: Iterable[Model],
    pages: Pages,
    stepper: Model | None,
    yields: Yields,
    now: float,
) -> list[MemoryEffect] | None:
    """Pages for `needy`, one of `order` (soonest turn first), or what makes room for it; None if there is no way, or no
    need.

    `idle` are models without work, `stepper` is who steps meanwhile."""
    held = pages.of(needy.key)
    short = needy.short(held, pages.total)
    if not (short or needy.needy):
        return None
    leave = pages.total // HEADROOM if needy.phase is Phase.STAGED else 0
    missing = min(short + leave, pages.total - held.weights - held.kv) - pages.free
    actions: list[Action] = []
    if missing > 0:
        holders = _holders(idle, order, needy, yields, pages)
        missing -= _coming(holders)
        if missing > _most(holders):  # more often than not: ask no further
            return None
        made = make_room(missing, _holdings(holders, now), stepper.key if stepper else None)
        if made is None:
            return None
        actions = made
        if pages.free + _freed(actions) < short:  # the rest is on its way
            return [*actions]
    if needy.phase is Phase.RESIDENT:
        return [*actions, Grow(needy.key, short)]
    return [*actions, Fetch(needy.key, needy.kv_needed(held, pages.total))]


def grow(
    model: Model, short: int, order: Sequence[Model], idle: Iterable[Model], pages: Pages, yields: Yields, now: float
) -> list[MemoryEffect]:
    """As many of the `short` pages that a resident model lacks as can be had without parking who has requests.

    Clean weights of those that are parked already and yield are not left to lie beside requests that wait for pages."""
    missing = short - pages.free
    actions: list[Action] = []
    if missing > 0:
        holders = _holders(idle, order, model, yields, pages)
        actions = spare_room(missing - _coming(holders), _holdings(holders, now))
    had = min(short, pages.free + _freed(actions))
    return [*actions, Grow(model.key, had)] if had > 0 else [*actions]


Holder = tuple[Model, Held, bool]  # what it has, and whether it is kept while it works


def _holders(idle: Iterable[Model], order: Sequence[Model], asks: Model, yields: Yields, pages: Pages) -> list[Holder]:
    """Who else has pages. Only those behind `asks` may yield."""
    holders: list[Holder] = []
    all_held, behind = pages.held, False
    for model in idle:
        held = all_held[model.key]
        if model is not asks and (held.weights or held.kv):
            holders.append((model, held, True))
    for model in order:
        if model is asks:
            behind = True
        elif model.key in all_held:
            held = all_held[model.key]
            if held.weights or held.kv:
                holders.append((model, held, not (behind and yields(model))))
    return holders


def _coming(holders: Sequence[Holder]) -> int:
    """On their way back: what a park leaves behind can be taken at once."""
    return sum([held.weights + held.kv for model, held, _ in holders if model.phase in _LEAVING])


def _most(holders: Sequence[Holder]) -> int:
    """That they could give."""
    return sum([held.kv_spare if kept and model.works else held.weights + held.kv for model, held, kept in holders])


def _holdings(holders: Sequence[Holder], now: float) -> list[Holding]:
    """Of what moves nothing can be taken."""
    return [_holding(model, held, kept, now) for model, held, kept in holders if model.phase in _STILL]


def _freed(actions: Sequence[Action]) -> int:
    return sum([action.pages for action in actions if isinstance(action, Evict | Shrink)])


def _spare(model: Model, held: Held) -> int:
    """Pages of its KV cache that neither those who run in it nor those who wait for it are about to use."""
    if model.fresh or held.kv_wanted > held.kv:
        return 0
    return max(0, min(held.kv_spare, held.kv - model.kv_wanted(held))) if model.waiting else held.kv_spare


def _holding(model: Model, held: Held, kept: bool, now: float) -> Holding:
    spare, resident = _spare(model, held), model.phase is Phase.RESIDENT
    if model.works:
        return Holding(model.key, held.weights, held.kv, spare, resident, True, kept, model.used_at)
    patience_s = model.spec.idle_s
    if patience_s is None:
        patience_s = model.idle.value(now, model.load_s)
    return Holding(
        model.key,
        held.weights,
        held.kv,
        spare,
        resident,
        works=False,
        kept=kept,
        used_at=model.used_at,
        pinned=model.spec.pinned,
        idle=(now - model.used_at) / max(patience_s, 1e-9),
        unused_s=now - model.came_at,
        ttft_s=model.ttft_s,
        reload_s=model.load_s,
    )
