"""Requests on their way to or from another runtime, as the device process handles them.

What is on its way is looked at between two steps, and nothing here waits. Going: blocks that are full are copied to the
host cache while the request goes on; when little is new it leaves the batch, and its last blocks follow. Coming: blocks
are copied in as they are told of, if the model is here and has room; then the request arrives like any other, and what
is missing is copied when its engine gets it. If all fails it is computed again. Who wrote the blocks is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import structlog
from msgspec import structs

from runtime.engine.base import BadRequest, Engine, EngineError, Hold
from runtime.events import Arrived, Departed, Event, Expected, Leaving, Ordered, Refused, Stayed, Told
from runtime.instance import Instance
from runtime.model import Phase
from runtime.pipe import (
    Adopt,
    Answered,
    Coming,
    Gone,
    LandedHere,
    Left,
    MoveOut,
    Next,
    NotComing,
    NotMoving,
    Staged,
    Stay,
    Take,
    ToNode,
)
from runtime.request import ModelKey, Request, RequestId, request_id
from store import wire

log = structlog.get_logger()

STAGES_MOST = 4  # then it leaves, however much is new
NEW_MOST = 1  # blocks made since the last stage with which it leaves

Command = MoveOut | Next | Gone | Stay | Coming | Take | Adopt | NotComing
Act = Callable[[Engine], Event | None]


@dataclass(slots=True)
class Going:
    """A request that is handed over."""

    id: RequestId
    model: ModelKey
    told: int = 0  # blocks that the target was told of
    staged: list[int] | None = None  # being copied: to be told when they are there
    stages: int = 0
    left: bool = False
    departed: bool = False  # the target was told all


@dataclass(slots=True)
class Guest:
    """A request that may come."""

    id: RequestId
    model: ModelKey
    run: wire.Run
    tokens: int
    form: wire.KvForm  # of its blocks
    owner: int  # whose they are in the host cache; 0: this runtime's own
    holds: list[Hold] = field(default_factory=list)  # on them: they do not go with their owner
    expects: Engine | None = None  # that takes its blocks
    taken: int = 0  # blocks
    taking: bool = False  # being copied: to be answered when they are there
    departure: wire.Departure | None = None  # it is ours, and waits for its engine
    adopted: bool = False


class Handover:
    """`engines` are the device's, `hold` is its builder's; `ask` lets a model's engine do something and hears what
    comes of it; `flush` sends the tokens made so far."""

    def __init__(
        self,
        instance: Instance,
        engines: Mapping[ModelKey, Engine],
        hold: Callable[[list[int], int, int], Hold | None],
        ask: Callable[[ModelKey, Act], None],
        hear: Callable[[Event], None],
        send: Callable[[ToNode], None],
        flush: Callable[[], None],
        arrive: Callable[[wire.Run, wire.Departure], Request],
    ) -> None:
        self._instance, self._engines, self._hold_blocks = instance, engines, hold
        self._ask, self._hear = ask, hear
        self._send, self._flush, self._arrive = send, flush, arrive
        self._going: dict[str, Going] = {}
        self._coming: dict[str, Guest] = {}
        self._adopting: dict[RequestId, str] = {}  # those that are ours and wait for their engine, or for their blocks

    @property
    def copying(self) -> bool:
        """Whether something is to be looked at even if nothing else happens."""
        going = any(going.staged is not None or (going.left and not going.departed) for going in self._going.values())
        return going or bool(self._adopting) or any(guest.taking for guest in self._coming.values())

    def command(self, command: Command) -> None:
        match command:
            case MoveOut(move, gateway, stream):
                self._begin(move, request_id(gateway, stream))
            case Next(move):
                if going := self._going.get(move):
                    self._ask(going.model, partial(self._stage, move, going))
            case Gone(move):
                if going := self._going.pop(move, None):
                    self._hear(Departed([going.id]))
            case Stay(move):
                if going := self._going.pop(move, None):
                    self._stay(going)
            case Coming():
                self._expect(command)
            case Take(move, first, host):
                if coming := self._coming.get(move):
                    self._take(move, coming, first, host)
                else:
                    self._send(Answered(move, "it is not expected here"))
            case Adopt(move, departure):
                if coming := self._coming.get(move):
                    self._adopt(move, coming, departure)
                else:
                    self._send(Answered(move, "it is not expected here"))
            case NotComing(move):
                self._not_coming(move)

    def look(self) -> None:
        """At what is on its way."""
        for move, going in list(self._going.items()):
            if self._instance.requests.owner(going.id) is None:
                self._give_up(move, "it ended")
            elif going.staged is not None or (going.left and not going.departed):
                self._ask(going.model, partial(self._look_at_going, move, going))
        for move, coming in list(self._coming.items()):
            if coming.departure is not None and self._instance.requests.owner(coming.id) is None:
                self._forget(coming)
                self._landed(move)
                continue
            self._check_engine(move, coming)
            if coming.taking or coming.adopted:
                self._ask(coming.model, partial(self._look_at_coming, move, coming))

    # ── going ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, move: str, id: RequestId) -> None:
        model = self._instance.requests.owner(id)
        if model is None or id not in model.running:
            waits = model is not None and id in model.waiting
            self._send(NotMoving(move, "it has not begun" if waits else "it does not run here", waits))
            return
        going = self._going[move] = Going(id, model.key)
        self._ask(model.key, partial(self._stage, move, going))

    def _stage(self, move: str, going: Going, engine: Engine) -> Event | None:
        """What is new since the last time; the rest, when that is little, or when it is not in its batch anyway."""
        if self._instance.requests.owner(going.id) is None:
            self._give_up(move, "it ended")
            return None
        staged = engine.stage(going.id, going.told)
        going.stages += 1
        if staged is None or going.stages > STAGES_MOST or (going.stages > 1 and len(staged) <= NEW_MOST):
            return self._leave(move, going, engine)
        going.staged = staged
        return None

    def _leave(self, move: str, going: Going, engine: Engine) -> Event | None:
        try:
            engine.leave(going.id)
        except EngineError as error:
            engine.stay(going.id)
            self._give_up(move, str(error))
            return None
        going.left = True
        self._hear(Leaving(going.id))
        return Told(going.model, engine.held())

    def _look_at_going(self, move: str, going: Going, engine: Engine) -> Event | None:
        try:
            if not engine.staged(going.id):
                return None
            if going.staged is not None:
                first, going.told = going.told, going.told + len(going.staged)
                self._send(Staged(move, first, going.staged))
                going.staged = None
            else:
                departure = engine.departure(going.id)
                going.departed = True
                self._flush()
                self._send(Left(move, departure))
        except EngineError as error:
            self._give_up(move, str(error))
            self._stay(going)
        return None

    def _give_up(self, move: str, reason: str) -> None:
        self._going.pop(move, None)
        self._send(NotMoving(move, reason))

    def _stay(self, going: Going) -> None:
        if self._instance.requests.owner(going.id) is None:
            return
        if going.left:
            self._hear(Stayed(going.id))
        self._ask(going.model, partial(_stay, going))

    # ── coming ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _expect(self, command: Coming) -> None:
        move, run = command.move, command.run
        key = ModelKey(run.model)
        model = self._instance.models.get(key)
        if model is None or model.withdrawn or model.error:
            self._send(Answered(move, model.error if model else "the model is not placed here"))
            return
        engine = self._engines.get(key)
        if engine is not None and engine.kv_form != command.form:
            self._send(Answered(move, f"its blocks are {command.form}, here they are {engine.kv_form}"))
            return
        coming = Guest(request_id(run.gateway, run.stream), key, run, command.tokens, command.form, command.owner)
        self._coming[move] = coming
        if model.phase is Phase.RESIDENT:
            self._hear(Expected(key, command.tokens))
            self._ask(key, partial(self._expect_in, move, coming))
        else:
            self._hear(Ordered(key, awake=True))
            self._send(Answered(move))

    def _expect_in(self, move: str, coming: Guest, engine: Engine) -> Event:
        try:
            if engine.expect(coming.id, coming.run.payload, coming.tokens):
                coming.expects = engine
            self._send(Answered(move))
        except BadRequest as error:
            del self._coming[move]
            self._send(Answered(move, str(error)))
        return Told(coming.model, engine.held())

    def _check_engine(self, move: str, coming: Guest) -> None:
        """An engine that was closed meanwhile has nothing of what it took."""
        if coming.expects is None or coming.expects is self._engines.get(coming.model):
            return
        coming.expects, coming.taken, coming.adopted = None, 0, False
        if coming.taking:
            coming.taking = False
            self._send(Answered(move))

    def _take(self, move: str, coming: Guest, first: int, host: list[int]) -> None:
        self._check_engine(move, coming)
        if not self._hold(coming, host):
            self._send(Answered(move, "who wrote its blocks is gone, and they with it"))
        elif coming.expects is not None and first == coming.taken:
            self._ask(coming.model, partial(self._take_in, move, coming, host))
        else:
            self._send(Answered(move))  # they will be read when it has an engine that has room

    def _hold(self, coming: Guest, host: list[int]) -> bool:
        """False if its blocks may be anybody's."""
        if not coming.owner or not host:
            return True
        hold = self._hold_blocks(host, coming.form.bytes, coming.owner)
        if hold is not None:
            coming.holds.append(hold)
        return hold is not None

    def _take_in(self, move: str, coming: Guest, host: list[int], engine: Engine) -> Event:
        if engine.receive(coming.id, coming.taken, host):
            coming.taken += len(host)
            coming.taking = True
        else:
            self._send(Answered(move))
        return Told(coming.model, engine.held())

    def _look_at_coming(self, move: str, coming: Guest, engine: Engine) -> Event | None:
        try:
            if not engine.received(coming.id):
                return None
        except EngineError as error:
            log.warning("handover.not_received", model=coming.model, error=str(error))
            engine.abort([coming.id])
            coming.expects, coming.taken = None, 0
        if coming.taking:
            coming.taking = False
            self._send(Answered(move))
        if coming.adopted:
            self._landed(move)
        return Told(coming.model, engine.held())

    def _adopt(self, move: str, coming: Guest, departure: wire.Departure) -> None:
        # What can't be held is not read: then all of it was before, or it is computed again.
        coming.departure = departure if self._hold(coming, departure.host) else structs.replace(departure, host=[])
        self._adopting[coming.id] = move
        self._hear(Arrived(self._arrive(coming.run, departure)))
        self._send(Answered(move))

    def adopts(self, id: RequestId) -> bool:
        """Whether the engine is to get this one by `add`."""
        return id in self._adopting

    def add(self, request: Request, engine: Engine) -> Event:
        """A request that came is given to its engine, with its keys and values if that is possible."""
        id = request.id
        coming = self._coming[self._adopting[id]]
        run, departure = coming.run, coming.departure
        assert departure is not None
        try:
            if coming.expects is not engine:
                tokens = run.prompt_tokens + len(departure.made)
                fits = engine.kv_form == coming.form and engine.expect(id, run.payload, tokens, admitted=True)
                coming.expects, coming.taken = engine if fits else None, 0
            rest = departure.host[coming.taken :]
            if coming.expects and engine.receive(id, coming.taken, rest, admitted=True):
                engine.adopt(id, departure)
                coming.adopted = True
                return Told(coming.model, engine.held())
        except EngineError as error:
            log.warning("handover.not_adopted", model=coming.model, error=str(error))
        engine.abort([id])
        self._landed(self._adopting[id])
        try:
            engine.add(id, run.payload, departure.made)
        except BadRequest as error:
            return Refused(id, coming.model, str(error))
        return Told(coming.model, engine.held())

    def _not_coming(self, move: str) -> None:
        coming = self._coming.get(move)
        if coming is not None and coming.departure is not None:
            return  # it is ours already, and will land
        if coming is not None:
            del self._coming[move]
            self._forget(coming)
        self._send(LandedHere(move))

    def _forget(self, coming: Guest) -> None:
        if coming.expects is not None and coming.expects is self._engines.get(coming.model) and not coming.adopted:
            self._ask(coming.model, partial(_abort, coming))
        self._release(coming)

    def _release(self, coming: Guest) -> None:
        """Nothing of it is read any more."""
        for hold in coming.holds:
            hold.release()
        coming.holds.clear()

    def _landed(self, move: str) -> None:
        coming = self._coming.pop(move)
        self._adopting.pop(coming.id, None)
        self._release(coming)
        self._send(LandedHere(move))


def _stay(going: Going, engine: Engine) -> Event:
    engine.stay(going.id)
    return Told(going.model, engine.held())


def _abort(coming: Guest, engine: Engine) -> Event:
    engine.abort([coming.id])
    return Told(coming.model, engine.held())
