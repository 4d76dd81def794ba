"""Turn policy for models sharing a device: a shared queue gives up the fewest first tokens (Prism, §6.2). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.core.device.request import Request
from runtime.core.device.view import ModelView
from runtime.core.turns.fixed import Resident
from runtime.core.turns.moore_hodgson import PendingPrefill, on_time

PROMOTED_EVERY = 4  # prompts; promoting at each prompt would under overload serve late requests only


class Prism(Resident):
    """Prompts in the order of Moore and Hodgson; late prompts when no timely prompt waits, or once promoted."""

    def first(self, models: Sequence[ModelView], now: float) -> Request | None:
        waiting = {request.id: request for model in models for request in model.queues.waiting.values()}
        jobs = [_job(model, request) for model in models for request in model.queues.waiting.values()]
        order, late = on_time(jobs, now, promote=int(self.prompts % PROMOTED_EVERY == 0))
        return waiting[(order or late)[0].request] if jobs else None


def _job(model: ModelView, request: Request) -> PendingPrefill:
    objective = request.objective
    return PendingPrefill(request.id, request.arrived_at, objective.ttft_s, model.costs.prefill(request.to_compute))
