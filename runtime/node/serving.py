"""Models that a node serves: from their placement here to their withdrawal, and the requests for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import structlog

from runtime import ipc
from runtime.core.compile_orders import NotCompiled
from runtime.core.fleet.crash_backoff import Quarantine
from runtime.core.fleet.hosting import Hosting
from runtime.core.ledgers.costs import Law, LawCosts
from runtime.core.ledgers.fair_share import may_take
from runtime.core.warm_models import WarmModels
from runtime.migration.host import OpenStream
from runtime.migration.peers import Peers
from runtime.node.gateways import Gateways
from runtime.node.grammars import Grammars
from runtime.node.own import OwnState
from runtime.node.streams import Streams
from store.contract import wire
from store.contract.wire import Delta, Finish, Refusal, Residency

log = structlog.get_logger()

STREAMS_MOST = 4096  # streams open at once; further requests are refused as BUSY


class ModelServing:
    """Models hosted on this runtime, and requests for these models.

    `spawn` starts a task of the node. `move_off` moves some streams of a model to other runtimes."""

    def __init__(
        self,
        own: OwnState,
        gateways: Gateways,
        streams: Streams,
        peers: Peers,
        quarantine: Quarantine,
        grammars: Grammars,
        spawn: Callable[[Coroutine[None, None, Any]], asyncio.Task[Any]],
        move_off: Callable[[str], Awaitable[None]],
        law: dict[str, float],
    ) -> None:
        self._own, self._gateways, self._streams, self._peers = own, gateways, streams, peers
        self._quarantine, self._grammars = quarantine, grammars
        self._spawn, self._move_off = spawn, move_off
        self._hosting = Hosting(own.id)
        self.hosted: dict[str, wire.EngineSpec] = {}
        self.costs = LawCosts(msgspec.convert(law, Law) if law else None, self.hosted)
        self._placed: dict[str, wire.EngineSpec] = {}  # hosted models given to the present device process
        self._returning: set[str] = set()  # models hosted when the present device process began
        self._warm = WarmModels(ZoneInfo)
        self.leaving: dict[str, asyncio.Task[None]] = {}  # by model, the task that moves the model's streams away

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, data: bytes) -> wire.Reply:
        """Take a request: the device process hears of the request at once, or when the grammar is compiled."""
        run = wire.decode(wire.Run, data)
        if refusal := self.refusal(run):
            return refusal
        stream, last = self._streams.open(run)
        self._own.prompt_s += self._prompt_s(run)
        if run.grammar:
            stream.compiling = self._spawn(self._compile(stream))
        else:
            self._own.send(ipc.Start(run))
        return wire.Reply(epoch=self._own.epoch, seq=last)

    def _prompt_s(self, run: wire.Run) -> float:
        """Return the time that the prompt takes: by the costs of the model, scaled to what the device has learnt."""
        costs, state = self.costs.of(run.model), self._own.state.models.get(run.model)
        longest_s = costs.prefill(self.hosted[run.model].max_model_len)
        learnt = 1.0 if state is None or not state.prefill_ms else state.prefill_ms / 1e3 / longest_s
        return costs.prefill(run.prompt_tokens) * learnt

    async def _compile(self, stream: OpenStream) -> None:
        """Give the request to the device when the request's grammar is compiled; end the request if compiling fails."""
        run = stream.run
        try:
            grammar = await self.grammar(run)
        except NotCompiled as error:
            last = Delta(run.stream, [], stream.at, error.finish, error=str(error))
            await self._streams.publish(run.gateway, [last])
            return
        stream.compiling = None
        assert self._own.device is not None, "with the device process its streams are lost"
        self._own.send(ipc.Start(run, grammar))

    async def grammar(self, run: wire.Run) -> bytes:
        """Return the compiled grammar of the run, empty without a grammar. Raises NotCompiled."""
        if not run.grammar:
            return b""
        if (spec := self.hosted.get(run.model)) is None:
            raise NotCompiled(f"runtime {self._own.id} does not host model {run.model} any more", Finish.LOST)
        return await self._grammars.compiled(spec, run.tenant, run.grammar)

    def refusal(self, run: wire.Run) -> wire.Reply | None:
        """Return why this runtime would not take the run now; None: the runtime would take the run."""
        own, id = self._own, self._own.id
        state = own.state.models.get(run.model)
        if own.draining:
            return wire.Reply(refusal=Refusal.DRAINING, reason=f"runtime {id} is draining")
        if own.device is None:
            return wire.Reply(refusal=Refusal.BUSY, reason=f"runtime {id} is starting its device process")
        if run.engine != own.engine:
            reason = f"runtime {id} runs {own.engine}, the request was written by {run.engine}"
            return wire.Reply(refusal=Refusal.ENGINE_VERSION, reason=reason)
        if reason := self._quarantine.reason(run.model, time.monotonic()):
            return wire.Reply(refusal=Refusal.MODEL_FAILED, reason=reason)
        if run.model not in self._placed or run.model in self.leaving:
            return wire.Reply(refusal=Refusal.UNKNOWN_MODEL, reason=f"runtime {id} does not host model {run.model}")
        if state and state.residency is Residency.FAILED:
            return wire.Reply(refusal=Refusal.MODEL_FAILED, reason=state.error)
        free = STREAMS_MOST - self._gateways.open_streams
        if not may_take(STREAMS_MOST - free, free) and not may_take(self._gateways.streams_of(run.tenant), free):
            reason = f"runtime {id} has {STREAMS_MOST - free} streams open, and {free} are left for other tenants"
            return wire.Reply(refusal=Refusal.BUSY, reason=reason)
        return None

    async def control(self, data: bytes) -> wire.Reply:
        """Let the device process load a model, give a model's pages back, or forget prefixes, by order from outside."""
        control = wire.decode(wire.Control, data)
        if control.op == "forget" and control.salt is not msgspec.UNSET:
            if self._own.device is not None:  # a device process that is gone has left no prefix
                self._own.send(ipc.Forget(control.model, control.salt))
            return wire.Reply()
        if control.op not in ("sleep", "wake"):
            return wire.Reply(
                refusal=Refusal.BAD_MESSAGE, reason=f"no operation {control.op!r}: sleep, wake, or forget with a salt"
            )
        if reason := self._quarantine.reason(control.model, time.monotonic()):
            return wire.Reply(refusal=Refusal.MODEL_FAILED, reason=reason) if control.op == "wake" else wire.Reply()
        if self._own.device is None:
            return wire.Reply(refusal=Refusal.BUSY, reason=f"runtime {self._own.id} is starting its device process")
        if control.model not in self._placed:
            reason = f"runtime {self._own.id} has no model {control.model}"
            return wire.Reply(refusal=Refusal.UNKNOWN_MODEL, reason=reason)
        self._own.send(ipc.Order(control.model, control.op == "wake"))
        return wire.Reply()

    # ── hosted models ─────────────────────────────────────────────────────────────────────────────────────────────────

    def spec_changed(self, key: str, spec: wire.EngineSpec | None) -> None:
        """Take the spec of a model that runtimes are to serve; None: no runtime is to serve the model any more."""
        self._hosting.spec_changed(key, spec)
        if spec is None and key in self.hosted:  # a deleted model: streams end everywhere
            self._withdraw(key)
        self.host()

    def places_changed(self, key: str, value: bytes | None) -> None:
        self._hosting.places_changed(key, None if value is None else wire.decode(wire.Places, value))
        self.host()

    def host(self) -> None:
        """Host the models that this runtime must host now, and begin to leave the models no longer hosted here."""
        now = time.monotonic()
        for model, warm in self._warm.changes(time.time()):
            self._own.send(ipc.Warm(model, warm))
        wanted = self._hosting.hosted(self._peers.there(now), now)
        for key, spec in wanted.items():
            self.leaving.pop(key, None)  # the model stays after all
            if spec != self.hosted.get(key):
                self.hosted[key] = spec
        self.place(now)
        for key in self.hosted.keys() - wanted.keys() - self.leaving.keys():
            self.leaving[key] = self._spawn(self._leave(key))
            self._own.lease_due.set()

    def place(self, now: float) -> None:
        """Send the device `Place` for every hosted model not placed yet, or placed with another spec, except models in
        quarantine, and models that another runtime must load first (a trial)."""
        if self._own.device is None:
            return
        for key, spec in self.hosted.items():
            if self._placed.get(key) is spec or self._quarantine.reason(key, now):
                continue
            if key in self._placed or not self._hosting.waits(key, self._peers.states(key, now), now):
                self._placed[key] = spec
                self._own.send(ipc.Place(spec, returns=key in self._returning))
                self._follow_schedule(spec)

    def _follow_schedule(self, spec: wire.EngineSpec) -> None:
        try:
            self._warm.placed(spec)
        except ValueError as error:
            log.warning("node.no_schedule", model=spec.key, detail=str(error))

    async def _leave(self, model: str) -> None:
        """Withdraw the model once no stream is left: streams move, or end here. Stops if the model is to stay."""
        leaves = asyncio.current_task()
        while self.leaving.get(model) is leaves:
            if not any(stream.run.model == model for stream in self._gateways.streams):
                log.info("node.left_model", model=model)
                self._withdraw(model)
                return
            await self._move_off(model)

    def _withdraw(self, model: str) -> None:
        self.leaving.pop(model, None)
        del self.hosted[model]
        self._warm.withdrawn(model)
        self._returning.discard(model)
        if self._placed.pop(model, None):
            self._own.send(ipc.Withdraw(model))

    # ── the device process ────────────────────────────────────────────────────────────────────────────────────────────

    def device_ready(self) -> None:
        """Place every hosted model on the new device process."""
        self._returning = set(self.hosted)
        self.place(time.monotonic())

    def heard(self, state: ipc.State) -> None:
        """Note which models the device process has loaded."""
        self._quarantine.heard(state.models)
        self._hosting.trials.heard(state.models)

    def device_lost(self) -> None:
        """Note that the next device process hosts no model yet."""
        self._placed, self._warm = {}, WarmModels(ZoneInfo)
