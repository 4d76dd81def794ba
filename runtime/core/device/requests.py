"""Books of a device's requests, from the arrival of a request to its single end. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.core.device.events import Abort, Effect, Lose, Stepped, Tell
from runtime.core.device.model import Model, Wish
from runtime.core.device.request import Request, RequestId
from runtime.core.device.rooms import Rooms
from runtime.core.ledgers.attainment import Attainment
from runtime.core.ledgers.fair_share import FairShares
from store.contract.wire import Course, Delta, Finish


class Requests:
    """Requests of a device. A request is either waiting, running or leaving, in the books of its model."""

    def __init__(self, rooms: Rooms, pool_pages: int) -> None:
        self.attainment = Attainment()  # totals of ended requests
        self.shares = FairShares(pool_pages)
        self._rooms = rooms
        self._owners: dict[RequestId, Model] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, id: RequestId) -> Model | None:
        """Model of the request; None if the request is unknown or has ended."""
        return self._owners.get(id)

    def last_words(self, ids: Iterable[RequestId], course: Callable[[RequestId], Course | None]) -> list[Delta]:
        """Last deltas of cancelled requests: the tokens made, and the time and memory of the device used.

        Unknown ids are passed over. `course` returns where the time of a request went. Cancelled requests are charged
        by their last delta, so call this before `cancel`."""
        found = []
        for id in ids:
            if model := self._owners.get(id):
                request = model.queues.running.get(id) or model.queues.waiting.get(id) or model.queues.leaving[id]
                spent = request.spent.shown()
                found.append(Delta(request.stream, [], request.sent, Finish.ABORT, spent=spent, course=course(id)))
        return found

    # ── moving ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Request, model: Model, now: float) -> None:
        self._owners[request.id] = model
        self.shares.arrive(request.tenant, request.weight)
        model.queues.waiting[request.id] = request
        model.queues.ttft_s = max(
            request.objective.ttft_s, request.objective.tbt_s
        )  # the request may have waited elsewhere
        model.queues.idle.arrived(now)
        model.deadlines.changed()
        self._rooms.file(model)

    def join(self, model: Model, request: Request) -> None:
        """Move a waiting request to the running requests: the engine gets the request."""
        del model.queues.waiting[request.id]
        model.queues.run(request)

    def leave(self, id: RequestId, now: float) -> None:
        """Move the request to the leaving requests: still in the engine, but in none of its steps."""
        model = self._owners[id]
        request = model.queues.leaving[id] = self._take(id, now)
        self._owners[id] = model
        self.shares.arrive(request.tenant, request.weight)
        model.demand.stuck = False

    def settle(self, had_us: dict[str, int]) -> None:
        """Book the step time, in µs by tenant, paid since the last call, and find the tenants over their share now."""
        if self.shares.settle(had_us):
            for model in self._rooms.working.values():
                model.deadlines.changed()

    def deliver(self, model: Model, stepped: Stepped, now: float) -> tuple[list[Effect], bool]:
        """Book the outputs of a step. Returns effects that tell the outputs, and whether a request has ended."""
        effects: list[Effect] = []
        queues, ended, steps, step_s = model.queues, False, stepped.steps, stepped.step_s
        began = now - steps * step_s
        for output in stepped.outputs:
            request = queues.running.get(output.request)
            if request is None:  # the request was cancelled while the step ran
                continue
            progress, made = request.progress, len(output.tokens)
            if output.finish is Finish.STOP and not made and not progress.sent:
                made = 1  # a vector is an answer of one piece, due when a first token would be
            effects.append(Tell(request, progress.sent, output))
            if made:
                if not request.computed:
                    request.computed = True
                    queues.prompts -= 1
                progress.deliver(began, made, step_s if made == steps else steps * step_s / made)
                queues.context += made
                model.record.tokens += made
            if output.finish is not None:
                self.finish(request, now)
                ended = True
        model.deadlines.changed()
        return effects, ended

    def stay(self, id: RequestId) -> None:
        """Move a leaving request back to the running requests. A model that was to sleep meanwhile stays awake."""
        model = self._owners[id]
        if model.wish is Wish.ASLEEP:
            model.wish = Wish.NONE
        model.queues.run(model.queues.leaving.pop(id))
        model.deadlines.changed()
        self._rooms.file(model)

    def _take(self, id: RequestId, now: float) -> Request:
        """Remove the request from its place and return the request."""
        model = self._owners.pop(id)
        request = model.queues.take(id)
        self.shares.leave(request.tenant)
        model.deadlines.changed()
        if not model.has_requests:
            model.queues.idle.left(now)
            self._rooms.file(model)
        return request

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, request: Request, now: float) -> None:
        """End a request that has every token of its output."""
        self._take(request.id, now)
        self.attainment.end(request.label, request.progress, now)

    def cancel(self, ids: list[RequestId], now: float, ended: bool = True) -> list[Effect]:
        """End cancelled requests, and return the effects that abort them in their engines. Unknown ids are ignored.

        With `ended` false, the requests go on at another device, where their attainment counts."""
        effects: list[Effect] = []
        for model in {self._owners[id].key: self._owners[id] for id in ids if id in self._owners}.values():
            inside = [id for id in ids if id in model.queues.running or id in model.queues.leaving]
            for id in ids:
                if self._owners.get(id) is model:
                    request = self._take(id, now)
                    self.attainment.end(request.label, request.progress, now, ended=ended)
            if inside:
                effects.append(Abort(model.key, inside))
            model.demand.stuck = False  # the pages left behind may suffice for the remaining requests
            model.used_at = now
        return effects

    def drop(self, model: Model, error: str, now: float, finish: Finish = Finish.LOST) -> list[Effect]:
        """Lose every request of the model: abort the requests in the engine and tell the gateways `error`."""
        inside = [*model.queues.running, *model.queues.leaving]
        aborts: list[Effect] = [Abort(model.key, inside)] if inside else []
        return aborts + self.lose([*inside, *model.queues.waiting], error, now, finish)

    def lose(
        self, ids: Iterable[RequestId], error: str, now: float, finish: Finish = Finish.LOST, suspect: bool = False
    ) -> list[Effect]:
        """End requests without their complete answer, and return the effects that tell the gateways `error`."""
        lost = [self._take(id, now) for id in list(ids)]
        for request in lost:
            self.attainment.end(request.label, request.progress, now, owed=1)
        return [Lose(request, error, finish, suspect) for request in lost]

    def check(self, models: Iterable[Model]) -> None:
        """Assert the invariants of the books."""
        held = [id for model in models for id in (*model.queues.waiting, *model.queues.running, *model.queues.leaving)]
        assert len(held) == len(set(held)), "a request is held twice"
        assert set(held) == set(self._owners), "a request is owned and not held, or held and not owned"
        assert sum(share.requests for share in self.shares.there.values()) == len(held), "shares lost count"
