"""Which request is where on one device, from its arrival to its one end. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.attainment import Attainment
from runtime.events import Abort, Effect, Lose
from runtime.model import Model
from runtime.request import Request, RequestId
from runtime.rooms import Rooms
from runtime.shares import Shares
from store.wire import Finish


class Requests:
    """Each is in its model's `waiting`, `running` or `leaving`, and in no other."""

    def __init__(self, rooms: Rooms) -> None:
        self.attainment = Attainment()  # of those that ended
        self.shares = Shares()
        self._rooms = rooms
        self._owners: dict[RequestId, Model] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, id: RequestId) -> Model | None:
        """The model that has the request; None when it is not here, or no longer."""
        return self._owners.get(id)

    # ── moving ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Request, model: Model, now: float) -> None:
        self._owners[request.id] = model
        self.shares.arrive(request.tenant, request.weight)
        model.waiting[request.id] = request
        model.ttft_s = max(request.objective.ttft_s, request.objective.tbt_s)  # it may have waited elsewhere
        model.idle.arrived(now)
        model.dues_changed()
        self._rooms.file(model)

    def join(self, model: Model, request: Request) -> None:
        """A waiting one is given to the engine."""
        del model.waiting[request.id]
        self._run(model, request)

    def leave(self, id: RequestId, now: float) -> None:
        """It is in the engine still, and in none of its steps."""
        model = self._owners[id]
        request = model.leaving[id] = self._take(id, now)
        self._owners[id] = model
        self.shares.arrive(request.tenant, request.weight)
        model.stuck = False

    def settle(self, had_us: dict[str, int]) -> None:
        """What tenants had of the device since the last call: who is over their share now."""
        if self.shares.settle(had_us):
            for model in self._rooms.working.values():
                model.dues_changed()

    def stay(self, id: RequestId) -> None:
        model = self._owners[id]
        self._run(model, model.leaving.pop(id))
        model.dues_changed()
        self._rooms.file(model)

    def _run(self, model: Model, request: Request) -> None:
        model.running[request.id] = request
        model.context += request.context
        model.prompts += not request.computed

    def _take(self, id: RequestId, now: float) -> Request:
        """Remove it from wherever it is."""
        model = self._owners.pop(id)
        request = model.running.pop(id, None)
        if request is not None:
            model.context -= request.context
            model.prompts -= not request.computed
        else:
            request = model.waiting.pop(id) if id in model.waiting else model.leaving.pop(id)
        self.shares.leave(request.tenant)
        model.dues_changed()
        if not model.has_requests:
            model.idle.left(now)
            self._rooms.file(model)
        return request

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, request: Request, now: float) -> None:
        """It has all of its tokens."""
        self._take(request.id, now)
        self.attainment.end(request.label, request.progress, now)

    def cancel(self, ids: list[RequestId], now: float, ended: bool = True) -> list[Effect]:
        """Nobody wants them, here; with `ended` false they go on elsewhere. Those that are not here are ignored."""
        effects: list[Effect] = []
        for model in {self._owners[id].key: self._owners[id] for id in ids if id in self._owners}.values():
            inside = [id for id in ids if id in model.running or id in model.leaving]
            for id in ids:
                if self._owners.get(id) is model:
                    request = self._take(id, now)
                    self.attainment.end(request.label, request.progress, now, ended=ended)
            if inside:
                effects.append(Abort(model.key, inside))
            model.stuck = False  # what they leave behind may suffice for the others
            model.used_at = now
        return effects

    def drop(self, model: Model, error: str, now: float, finish: Finish = Finish.LOST) -> list[Effect]:
        """All of a model's."""
        inside = [*model.running, *model.leaving]
        aborts: list[Effect] = [Abort(model.key, inside)] if inside else []
        return aborts + self.lose([*inside, *model.waiting], error, now, finish)

    def lose(
        self, ids: Iterable[RequestId], error: str, now: float, finish: Finish = Finish.LOST, suspect: bool = False
    ) -> list[Effect]:
        lost = [self._take(id, now) for id in list(ids)]
        for request in lost:
            self.attainment.end(request.label, request.progress, now, owed=1)
        return [Lose(request, error, finish, suspect) for request in lost]

    def check(self, models: Iterable[Model]) -> None:
        """The invariants."""
        held = [id for model in models for id in (*model.waiting, *model.running, *model.leaving)]
        assert len(held) == len(set(held)), "a request is held twice"
        assert set(held) == set(self._owners), "a request is owned and not held, or held and not owned"
        assert sum(share.requests for share in self.shares.there.values()) == len(held), "shares lost count"
