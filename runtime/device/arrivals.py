"""Requests as the machine knows them, made of messages from the bus."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from runtime.core.device.request import ModelKey, Objective, Request, RequestId, request_id
from store.contract.wire import Departure, Run, replace


def departed(clock: Callable[[], float], run: Run, departure: Departure) -> Request:
    """The request that another runtime hands over with `departure`."""
    id = request_id(run.gateway, run.stream)
    request = request_of(replace(run, made=departure.made), id, ModelKey(run.model), clock())
    return dataclasses.replace(request, handed=True)


def request_of(run: Run, id: RequestId, model: ModelKey, now: float) -> Request:
    objective = Objective(run.ttft_s, run.tbt_s, run.patience_s, run.priority)
    return Request(
        id,
        run.gateway,
        run.stream,
        model,
        run.payload,
        now,
        run.prompt_tokens,
        run.max_tokens,
        objective,
        run.label,
        run.tenant,
        run.weight,
        run.made,
        run.first_late,
    )
