"""Models share a device, and a shared queue gives up as few first tokens as can be (Prism, §6.2). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.model import Model
from runtime.policy.fixed import Resident
from runtime.policy.moore_hodgson import Job, on_time
from runtime.request import Request

PROMOTED_EVERY = 4  # prompts; if it were each of them, under overload none but late ones would be served


class Prism(Resident):
    """Prompts in the order of Moore and Hodgson; late ones when no other waits, or when they are promoted at last."""

    def first(self, models: Sequence[Model], now: float) -> Request | None:
        waiting = {request.id: request for model in models for request in model.waiting.values()}
        jobs = [_job(model, request) for model in models for request in model.waiting.values()]
        order, late = on_time(jobs, now, promote=int(self.prompts % PROMOTED_EVERY == 0))
        return waiting[(order or late)[0].request] if jobs else None


def _job(model: Model, request: Request) -> Job:
    objective = request.objective
    return Job(request.id, request.arrived_at, objective.ttft_s, model.costs.prefill(request.to_compute))
