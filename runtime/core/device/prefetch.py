"""Choice of the model that gets pages next while another model steps, by the order of turns. Pure.

No model overtakes a blocked model. A model is blocked if it has work and cannot go on without more pages. Until the
first blocked model of the order has its pages, models behind it get no pages by harming models. Therefore every model
gets its pages in the end: models ahead of the blocked model have their turns and go to the end of the order, and then
every page in the pool can be taken for the blocked model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from runtime.core.device.events import Evict, Fetch, Grow, MemoryEffect, Shrink
from runtime.core.device.eviction import Action, ModelHolding, make_room, spare_room
from runtime.core.device.model import Model, Phase
from runtime.core.device.pages import Pages
from runtime.core.device.request import Request
from runtime.core.device.view import ModelView
from runtime.core.engine import AHEAD, Held

EXPECTED_AHEAD = 4 * AHEAD  # tokens: an expected request goes on making tokens at its source while blocks are copied
HEADROOM = 24  # a model that is fetched leaves 1/24 of the pool to resident models, for their next tokens

_STILL, _LEAVING = (Phase.STAGED, Phase.RESIDENT), (Phase.PARKING, Phase.CLOSING)


class PoolSnapshot(NamedTuple):
    """The pool and the models, from which is chosen where pages come from."""

    order: Sequence[ModelView]  # models with work, soonest turn first
    idle: Sequence[ModelView]  # models without work that hold or want pages
    pages: Pages
    room_pages: float  # pages left to requests of tenants over their share, by the order of turns
    stepper: ModelView | None  # the model that steps meanwhile; parked last
    yields: Callable[[ModelView, ModelView], bool]  # whether a model with work may be harmed for a model that asks
    now: float


def in_turn(order: Sequence[ModelView], relieves: bool) -> Iterator[ModelView]:
    """Models that may take pages from other models, in turn order.

    Yields the first blocked model. If the policy sets `relieves`, yields running models first: models ahead of the
    blocked model with too few pages for their batch."""
    for model in order:
        if model.needy:
            yield model
            return
        if relieves and model.demand.cramped:
            yield model


def bring_in(needy: ModelView, pool: PoolSnapshot) -> list[MemoryEffect] | None:
    """Effects that give `needy`, a model of `pool.order`, its missing pages, or that make room first; None if no way
    exists, or no need.

    If the effects make room only, the caller must ask again once the parks have ended."""
    pages, room_pages = pool.pages, pool.room_pages
    held = pages.of(needy.key)
    short = needy.short(held, pages.total, room_pages)
    if not (short or needy.needy):
        return None
    leave = pages.total // HEADROOM if needy.phase is Phase.STAGED else 0
    missing = min(short + leave, pages.total - held.weights - held.kv) - pages.free
    actions: list[Action] = []
    if missing > 0:
        holders = _holders(needy, pool)
        missing -= _coming(holders)
        if missing > _most(holders):  # the most frequent case: no need to look for single pages
            return None
        made = _make_room(missing, holders, pool)
        if made is None:
            return None
        actions = made
        if pages.free + _freed(actions) < short:  # the remaining pages come free later
            return [*actions]
    if needy.phase is Phase.RESIDENT:
        return [*actions, Grow(needy.key, short)]
    return [*actions, Fetch(needy.key, needy.kv_needed(held, pages.total, room_pages))]


def room_to_build(model: ModelView, wanted: int, pool: PoolSnapshot) -> list[Action]:
    """Actions that free pages until `wanted` pages are free, for the build of a model without an engine.

    The list is empty if the pages are free or on their way, or if no way exists now. If the actions are parks alone,
    the caller must ask again once the parks have ended."""
    missing = wanted - pool.pages.free
    if missing <= 0:
        return []
    holders = _holders(model, pool)
    missing -= _coming(holders)
    if missing <= 0 or missing > _most(holders):
        return []
    return _make_room(missing, holders, pool) or []


def expected(model: Model, tokens: int, pages: Pages) -> list[MemoryEffect]:
    """Effects that give free pages to the model of an expected request of `tokens` tokens, so that the request need not
    wait when the request comes."""
    held = pages.of(model.key)
    missing = held.kv_wanted + model.kv_pages(model.kv.bytes(tokens)) - held.kv
    given = min(missing + model.kv_pages(EXPECTED_AHEAD * model.kv.growth(0)), pages.free)
    if model.phase is not Phase.RESIDENT or given <= 0 or given < missing:
        return []
    return [Grow(model.key, given)]


def grow(model: ModelView, short: int, pool: PoolSnapshot) -> list[MemoryEffect]:
    """Effects that give a resident model as many of its `short` missing pages as possible without parking a model that
    has requests.

    Clean weights of parked models are taken if the models yield: weights do not lie idle beside requests that wait for
    pages."""
    missing = short - pool.pages.free
    actions: list[Action] = []
    if missing > 0:
        holders = _holders(model, pool)
        actions = spare_room(missing - _coming(holders), _holdings(holders, pool.room_pages, pool.now))
    had = min(short, pool.pages.free + _freed(actions))
    return [*actions, Grow(model.key, had)] if had > 0 else [*actions]


Holder = tuple[ModelView, Held, bool]  # a model, its pages, and whether the model is kept while it works


def _holders(asks: ModelView, pool: PoolSnapshot) -> list[Holder]:
    """Models, except `asks`, that hold pages. Only models behind `asks` in the order may yield."""
    holders: list[Holder] = []
    all_held, behind = pool.pages.held, False
    for model in pool.idle:
        held = all_held[model.key]
        if model is not asks and (held.weights or held.kv):
            holders.append((model, held, True))
    for model in pool.order:
        if model is asks:
            behind = True
        elif model.key in all_held:
            held = all_held[model.key]
            if held.weights or held.kv:
                holders.append((model, held, not (behind and pool.yields(model, asks))))
    return holders


def _make_room(missing: int, holders: Sequence[Holder], pool: PoolSnapshot) -> list[Action] | None:
    stepper = pool.stepper.key if pool.stepper else None
    return make_room(missing, _holdings(holders, pool.room_pages, pool.now), stepper)


def _coming(holders: Sequence[Holder]) -> int:
    """Pages on their way back, of models being parked or closed. Clean weights left by a park can be taken at once."""
    return sum([held.weights + held.kv for model, held, _ in holders if model.phase in _LEAVING])


def _most(holders: Sequence[Holder]) -> int:
    """Upper bound on the pages that the holders could give."""
    return sum([held.kv_spare if kept and model.works else held.weights + held.kv for model, held, kept in holders])


def _holdings(holders: Sequence[Holder], room_pages: float, now: float) -> list[ModelHolding]:
    """Holdings for the eviction policy. Models that move are left out: no page can be taken from them."""
    return [_holding(model, held, kept, room_pages, now) for model, held, kept in holders if model.phase in _STILL]


def _freed(actions: Sequence[Action]) -> int:
    return sum([action.pages for action in actions if isinstance(action, Evict | Shrink)])


def _spare(model: ModelView, held: Held, room_pages: float) -> int:
    """Spare KV pages that neither running nor waiting requests of the model are about to use."""
    if model.demand.fresh or held.kv_wanted > held.kv:
        return 0
    return (
        max(0, min(held.kv_spare, held.kv - model.kv_wanted(held, room_pages)))
        if model.queues.waiting
        else held.kv_spare
    )


def _holding(model: ModelView, held: Held, kept: bool, room_pages: float, now: float) -> ModelHolding:
    spare, resident = _spare(model, held, room_pages), model.phase is Phase.RESIDENT
    if model.works:
        return ModelHolding(model.key, held.weights, held.kv, spare, resident, True, kept, model.used_at)
    patience_s = model.spec.idle_s
    if patience_s is None:
        patience_s = model.queues.idle.value(now, model.loads.load_s)
    return ModelHolding(
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
        unused_s=now - model.loads.came_at,
        ttft_s=model.queues.ttft_s,
        reload_s=model.loads.load_s,
    )


def fitting(model: Model, admitted: Sequence[Request], held: Held, room: int, most: int) -> list[Request]:
    """The first requests of `admitted` that find room in the model's batch.

    Args:
        held: pages as the engine told last.
        room: KV pages that the model has now.
        most: KV pages that the model could ever have. A request alone may join once the model has every possible page:
            waiting would bring no more pages."""
    joining: list[Request] = []
    kv_bytes = 0
    for request in admitted:
        kv_bytes += model.kv.bytes(request.context + 1)
        if model.kv_joined(held, kv_bytes) > room and (model.queues.running or joining or room < most):
            break
        joining.append(request)
    return joining
