"""Migration of requests as the device process sees it, at the source and at the target.

The device process looks at moving requests between two steps, and never waits. Source: full blocks are copied to the
host cache while the request goes on. When few blocks are new, the request leaves the batch and the last blocks follow.
Target: if the model is resident and has room, blocks are copied in as the source names the blocks. After Commit the
request arrives like any request, and missing blocks are copied when the engine gets the request. If every copy fails,
the engine computes the request again. The device does not know which runtime wrote the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
from msgspec import structs

from runtime.core.device.events import Arrived, Event, MoveStep, Ordered, Refused, Told
from runtime.core.device.instance import Instance
from runtime.core.device.model import Phase
from runtime.core.device.request import ModelKey, Request, RequestId, request_id
from runtime.core.engine import BadRequest, Engine, EngineError, Hold
from runtime.ipc import MoveAnswer, PrepareMove, ToNode
from store.contract.wire import AbortMove, Commit, Copy, Departure, Prepare, Release, Run

log = structlog.get_logger()

COPIES_MOST = 4  # after so many copies a request leaves the batch, however many blocks are new
NEW_MOST = 1  # a request leaves the batch if a copy finds at most so many new blocks

Command = PrepareMove | MoveAnswer | Copy | Commit | AbortMove | Release
Act = Callable[[Engine], Event | None]


@dataclass(slots=True)
class MoveSource:
    """Request on the way to another runtime."""

    id: RequestId
    model: ModelKey
    told: int = 0  # blocks named to the target so far
    copying: list[int] | None = None  # blocks being copied: named to the target once the copies are done
    copies: int = 0
    leaves: bool = False  # the request leaves its batch once the engine is between two steps
    left: bool = False  # the request left its batch
    committed: bool = False  # the target knows every block

    @property
    def waits(self) -> bool:
        """Whether copies to the host are under way, so that the engine must be asked again."""
        return self.copying is not None or self.leaves or (self.left and not self.committed)


@dataclass(slots=True)
class MoveTarget:
    """Request that may come from another runtime."""

    id: RequestId
    model: ModelKey
    prepare: Prepare  # an owner of 0: blocks are received by this runtime's own node
    grammar: bytes  # compiled; empty: the output is free
    holds: list[Hold] = field(default_factory=list)  # keep the blocks if the owner dies
    engine: Engine | None = None  # engine that has taken room for the blocks
    taken: int = 0  # blocks copied in, or being copied
    copying: bool = False  # blocks are being copied: MoveAnswer follows once the copies are done
    departure: Departure | None = None  # set once the request is this runtime's, and waits for the engine
    committed: bool = False  # the engine has the request


class Handover:
    """Migrations that one device process takes part in.

    `engines` are the device's engines, and `hold` is a function of the engines' builder. `ask` runs an action on a
    model's engine and hears the resulting event. `flush` sends the tokens made so far."""

    def __init__(
        self,
        instance: Instance,
        engines: Mapping[ModelKey, Engine],
        hold: Callable[[list[int], int, int], Hold | None],
        ask: Callable[[ModelKey, Act], None],
        hear: Callable[[Event], None],
        send: Callable[[ToNode], None],
        flush: Callable[[], None],
        arrive: Callable[[Run, Departure], Request],
    ) -> None:
        self._instance, self._engines, self._hold_blocks = instance, engines, hold
        self._ask, self._hear = ask, hear
        self._send, self._flush, self._arrive = send, flush, arrive
        self._sources: dict[str, MoveSource] = {}
        self._targets: dict[str, MoveTarget] = {}
        self._arriving: dict[RequestId, str] = {}  # this runtime's requests that wait for the engine, or for blocks

    @property
    def copying(self) -> bool:
        """Whether a moving request waits for copies or for an engine: then call `look` even without an event."""
        sources = any(source.waits for source in self._sources.values())
        return sources or bool(self._arriving) or any(target.copying for target in self._targets.values())

    def command(self, command: Command) -> None:
        source, target = self._sources.get(command.move), self._targets.get(command.move)
        match command:
            case PrepareMove(source=True):
                self._begin(command.move, request_id(command.run.gateway, command.run.stream))
            case PrepareMove(prepare, grammar=grammar):
                self._prepare(prepare, grammar)
            case MoveAnswer(move):
                if source is not None:
                    self._ask(source.model, partial(self._copy_out, move, source))
            case Copy() | Commit() if target is None:
                self._send(MoveAnswer(command.move, "it is not expected here"))
            case Copy(move=move, first=first, host=host):
                assert target is not None
                self._copy(move, target, first, host)
            case Commit(move=move, departure=departure):
                assert target is not None
                self._commit(move, target, departure)
            case AbortMove(move=move):
                if source is not None:
                    del self._sources[move]
                    self._stay(source)
                else:
                    self._abort(move)
            case Release(move=move):
                if source is not None:
                    del self._sources[move]
                    self._hear(MoveStep("release", source.model, source.id))

    def look(self) -> None:
        """Look at each moving request: tell the node of finished copies, and forget requests that have ended."""
        for move, source in list(self._sources.items()):
            if self._instance.requests.owner(source.id) is None:
                self._refuse(move, "it ended")
            elif source.waits:
                self._ask(source.model, partial(self._look_at_source, move, source))
        for move, target in list(self._targets.items()):
            if target.departure is not None and self._instance.requests.owner(target.id) is None:
                self._forget(target)
                self._release(move)
                continue
            self._check_engine(move, target)
            if target.copying or target.committed:
                self._ask(target.model, partial(self._look_at_target, move, target))

    # ── source ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, move: str, id: RequestId) -> None:
        model = self._instance.requests.owner(id)
        if model is None or id not in model.queues.running:
            waits = model is not None and id in model.queues.waiting
            self._send(MoveAnswer(move, "it has not begun" if waits else "it does not run here", waits))
            return
        source = self._sources[move] = MoveSource(id, model.key)
        self._ask(model.key, partial(self._copy_out, move, source))

    def _copy_out(self, move: str, source: MoveSource, engine: Engine) -> Event | None:
        """Begin to copy the blocks that are full since the last copy.

        If few blocks are new, or the request does not run, the request leaves the batch and the rest is copied."""
        if self._instance.requests.owner(source.id) is None:
            self._refuse(move, "it ended")
            return None
        host = engine.copy(source.id, source.told)
        source.copies += 1
        if host is None or source.copies > COPIES_MOST or (source.copies > 1 and len(host) <= NEW_MOST):
            return self._leave(move, source, engine)
        source.copying = host
        return None

    def _leave(self, move: str, source: MoveSource, engine: Engine) -> Event | None:
        source.leaves = engine.ahead
        if source.leaves:
            return Told(source.model, engine.held())  # the machine hears of a change, so the step under way ends next
        try:
            engine.commit(source.id)
        except EngineError as error:
            engine.abort_move(source.id)
            self._refuse(move, str(error))
            return None
        source.left = True
        self._hear(MoveStep("commit", source.model, source.id))
        return Told(source.model, engine.held())

    def _look_at_source(self, move: str, source: MoveSource, engine: Engine) -> Event | None:
        if source.leaves:
            return self._leave(move, source, engine)
        try:
            if source.copying is not None:
                if engine.copied(source.id):
                    first, source.told = source.told, source.told + len(source.copying)
                    self._send(Copy(move=move, first=first, host=source.copying))
                    source.copying = None
            elif (departure := engine.commit(source.id)) is not None:
                source.committed = True
                self._flush()
                self._send(Commit(move=move, departure=departure))
        except EngineError as error:
            self._refuse(move, str(error))
            self._stay(source)
        return None

    def _refuse(self, move: str, reason: str) -> None:
        """Tell the node that the request ended, or stays."""
        self._sources.pop(move, None)
        self._send(MoveAnswer(move, reason))

    def _stay(self, source: MoveSource) -> None:
        if self._instance.requests.owner(source.id) is None:
            return
        if source.left:
            self._hear(MoveStep("abort", source.model, source.id))
        self._ask(source.model, partial(_stay, source))

    # ── target ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self, prepare: Prepare, grammar: bytes) -> None:
        move, run = prepare.move, prepare.run
        key = ModelKey(run.model)
        model = self._instance.models.get(key)
        if model is None or model.withdrawn or model.failures.error:
            self._send(MoveAnswer(move, model.failures.error if model else "the model is not placed here"))
            return
        engine = self._engines.get(key)
        if engine is not None and engine.kv_form != prepare.form:
            self._send(MoveAnswer(move, f"its blocks are {prepare.form}, here they are {engine.kv_form}"))
            return
        id = request_id(run.gateway, run.stream)
        target = self._targets[move] = MoveTarget(id, key, prepare, grammar)
        if model.phase is Phase.RESIDENT:
            self._hear(MoveStep("prepare", key, id, prepare.tokens))
            self._ask(key, partial(self._prepare_in, move, target))
        else:
            self._hear(Ordered(key, awake=True))
            self._send(MoveAnswer(move))

    def _prepare_in(self, move: str, target: MoveTarget, engine: Engine) -> Event:
        prepare = target.prepare
        try:
            if engine.prepare(target.id, prepare.run.payload, prepare.tokens, grammar=target.grammar):
                target.engine = engine
            self._send(MoveAnswer(move))
        except BadRequest as error:
            del self._targets[move]
            self._send(MoveAnswer(move, str(error)))
        return Told(target.model, engine.held())

    def _check_engine(self, move: str, target: MoveTarget) -> None:
        """Forget the copied blocks of a request if the expecting engine was closed meanwhile."""
        if target.engine is None or target.engine is self._engines.get(target.model):
            return
        target.engine, target.taken, target.committed = None, 0, False
        if target.copying:
            target.copying = False
            self._send(MoveAnswer(move))

    def _copy(self, move: str, target: MoveTarget, first: int, host: list[int]) -> None:
        self._check_engine(move, target)
        if not self._hold(target, host):
            self._send(MoveAnswer(move, "who wrote its blocks is gone, and they with it"))
        elif target.engine is not None and first == target.taken:
            self._ask(target.model, partial(self._copy_in, move, target, host))
        else:
            self._send(MoveAnswer(move))  # the blocks will be read once the model has an engine with room

    def _hold(self, target: MoveTarget, host: list[int]) -> bool:
        """Keep the blocks in the host cache. Return False if the owner is gone, and the blocks may be reused."""
        if not target.prepare.owner or not host:
            return True
        hold = self._hold_blocks(host, target.prepare.form.bytes, target.prepare.owner)
        if hold is not None:
            target.holds.append(hold)
        return hold is not None

    def _copy_in(self, move: str, target: MoveTarget, host: list[int], engine: Engine) -> Event:
        if engine.copy(target.id, target.taken, host) is not None:
            target.taken += len(host)
            target.copying = True
        else:
            self._send(MoveAnswer(move))
        return Told(target.model, engine.held())

    def _look_at_target(self, move: str, target: MoveTarget, engine: Engine) -> Event | None:
        try:
            if not engine.copied(target.id):
                return None
        except EngineError as error:
            if target.committed:  # the request moves on already: its source hears of the failed copy
                return None
            log.warning("handover.not_copied", model=target.model, error=str(error))
            engine.abort([target.id])
            target.engine, target.taken = None, 0
        if target.copying:
            target.copying = False
            self._send(MoveAnswer(move))
        if target.committed:
            self._release(move)
        return Told(target.model, engine.held())

    def _commit(self, move: str, target: MoveTarget, departure: Departure) -> None:
        # Blocks that cannot be held are not read: either every block was read before, or the engine computes again.
        target.departure = departure if self._hold(target, departure.host) else structs.replace(departure, host=[])
        self._arriving[target.id] = move
        self._hear(Arrived(replace(self._arrive(target.prepare.run, departure), grammar=target.grammar)))
        self._send(MoveAnswer(move))

    def brings(self, id: RequestId) -> bool:
        """Whether the engine gets this request by `add`, since the request moved here."""
        return id in self._arriving

    def add(self, request: Request, engine: Engine) -> Event:
        """Give an arrived request to the engine, with keys and values if possible; else the engine computes again."""
        id = request.id
        target = self._targets[self._arriving[id]]
        run, departure = target.prepare.run, target.departure
        assert departure is not None
        try:
            if target.engine is not engine:
                tokens, fits = run.prompt_tokens + len(departure.made), engine.kv_form == target.prepare.form
                room = fits and engine.prepare(id, run.payload, tokens, True, target.grammar)
                target.engine, target.taken = engine if room else None, 0
            rest = departure.host[target.taken :]
            if target.engine and engine.copy(id, target.taken, rest, admitted=True) is not None:
                engine.commit(id, departure)
                target.committed = True
                return Told(target.model, engine.held())
        except EngineError as error:
            log.warning("handover.not_committed", model=target.model, error=str(error))
        engine.abort([id])
        self._release(self._arriving[id])
        try:
            engine.add(id, run.payload, departure.made, target.grammar)
        except BadRequest as error:
            return Refused(id, target.model, str(error))
        return Told(target.model, engine.held())

    def _abort(self, move: str) -> None:
        target = self._targets.get(move)
        if target is not None and target.departure is not None:
            return  # the request is this runtime's already, and its blocks are released later
        if target is not None:
            del self._targets[move]
            self._forget(target)
        self._send(Release(move=move))

    def _forget(self, target: MoveTarget) -> None:
        if target.engine is not None and target.engine is self._engines.get(target.model) and not target.committed:
            self._ask(target.model, partial(_abort, target))
        _let_go(target)

    def _release(self, move: str) -> None:
        target = self._targets.pop(move)
        self._arriving.pop(target.id, None)
        _let_go(target)
        self._send(Release(move=move))


def _let_go(target: MoveTarget) -> None:
    """Release the blocks in the host cache: the device reads none of the request's blocks any more."""
    for hold in target.holds:
        hold.release()
    target.holds.clear()


def _stay(source: MoveSource, engine: Engine) -> Event:
    engine.abort_move(source.id)
    return Told(source.model, engine.held())


def _abort(target: MoveTarget, engine: Engine) -> Event:
    engine.abort([target.id])
    return Told(target.model, engine.held())
