"""Requests of a model on a device, by their place: waiting, running or leaving. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.core.device.idle import IdleThreshold
from runtime.core.device.request import Request, RequestId


@dataclass(slots=True, eq=False)
class Queues:
    """Requests of a model, with sums over the running requests.

    `waiting` requests have not reached the engine. `running` requests have, and may be parked in the engine."""

    waiting: dict[RequestId, Request] = field(default_factory=dict)
    running: dict[RequestId, Request] = field(default_factory=dict)
    leaving: dict[RequestId, Request] = field(default_factory=dict)  # in the engine, but in none of its steps
    context: int = 0  # tokens of running requests, prompt and output
    prompts: int = 0  # running requests that have made no token on this device yet
    high: int = 0  # running requests of high priority
    ttft_s: float = 10.0  # objective of the last request
    idle: IdleThreshold = field(default_factory=IdleThreshold)  # learnt from the gaps between requests

    @property
    def tbt_s(self) -> float:
        """Shortest TBT objective of the running and waiting requests, in seconds; 0 without requests."""
        requests = [*self.running.values(), *self.waiting.values()]
        return min([request.objective.tbt_s for request in requests], default=0.0)

    def run(self, request: Request) -> None:
        """Add the request to the running requests."""
        self.running[request.id] = request
        self.context += request.context
        self.prompts += not request.computed
        self.high += request.objective.high

    def take(self, id: RequestId) -> Request:
        """Remove the request from its place and return the request."""
        request = self.running.pop(id, None)
        if request is not None:
            self.context -= request.context
            self.prompts -= not request.computed
            self.high -= request.objective.high
        else:
            request = self.waiting.pop(id) if id in self.waiting else self.leaving.pop(id)
        return request

    def check(self, model: str) -> None:
        """Assert that the sums are those of the running requests. `model` names the model in the error."""
        context = prompts = high = 0
        for request in self.running.values():
            context += request.context
            prompts += not request.computed
            high += request.objective.high
        counted = self.context, self.prompts, self.high
        assert counted == (context, prompts, high), f"{model} lost count: {counted}"
