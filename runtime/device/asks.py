"""What the device process asks of an engine: each call returns the event for the machine, or None."""

from __future__ import annotations

from runtime.core.device.events import Event, Evict, Grow, Refused, Shrink, Told
from runtime.core.device.request import ModelKey, Request, RequestId
from runtime.core.engine import BadRequest, Engine


def wait(timeout_s: float, engine: Engine) -> None:
    engine.wait(timeout_s)


def forget(salt: str, engine: Engine) -> None:
    engine.forget_prefixes(salt)


def add(request: Request, engine: Engine) -> Event:
    try:
        engine.add(request.id, request.payload, request.made, request.grammar)
    except BadRequest as error:
        return Refused(request.id, request.model, str(error))
    return Told(request.model, engine.held())


def abort(model: ModelKey, requests: list[RequestId], engine: Engine) -> Event:
    engine.abort(requests)
    return Told(model, engine.held())


def resize(effect: Evict | Grow | Shrink, engine: Engine) -> Event | None:
    match effect:
        case Evict(_, pages):
            engine.evict(pages)
        case Shrink(_, pages):
            engine.shrink(pages)
        case Grow(model, pages):
            engine.grow(pages)
            return Told(model, engine.held())
    return None
