"""A front, asked both ways: a scripted runtime gives equal tokens to the fast way and to vLLM's handlers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Message

from gateway.core.way import FAST, fast_ask
from gateway.http.vllm_errors import Reworded, Wording
from gateway.inference.computed import Computed
from gateway.inference.context import TENANT, RequestContext
from gateway.inference.exchange import Exchange
from gateway.inference.meter import MeteredCall
from gateway.inference.response import ResponseWriter
from gateway.streams.relay import RuntimeRefused, Sink
from gateway.vllm.bus_core import Deps
from gateway.vllm.front import Front, Fronts
from runtime.core.device.request import Objective
from store.contract import wire
from store.contract.wire import Delta, EngineSpec, Finish
from tests.gateway.inference.test_response import TALLY, Counted
from tests.store.test_bus import usage

TURNS = 40  # turns of the loop until every task has come to rest
ID = "019"  # of every request
_TIMES = re.compile(rb'"created":\d+')


@dataclass(frozen=True)
class Step:
    """A step of an engine: tokens for answers, by index. `then`: the step after comes when the stream is still."""

    tokens: dict[int, list[int]]
    then: bool = True


@dataclass(frozen=True)
class Script:
    """The deeds of a runtime for a request."""

    steps: tuple[Step, ...]
    finish: Finish = Finish.LENGTH
    stop_reason: int | str | None = None
    cached: int = 0
    refusal: str = ""  # reason for which the runtime does not take the request; empty: the runtime does
    error: str = ""  # with which answer 0 ends, after the steps
    refused: bool = False  # the error is the client's fault


@dataclass
class ScriptedRelay:
    """Plays relay and runtimes: takes runs and, when `answers` runs are here, plays the script."""

    script: Script = field(default_factory=lambda: Script(()))
    answers: int = 1
    runs: list[wire.Run] = field(default_factory=list)
    left: set[int] = field(default_factory=set)  # answers that need no further token
    sink: Sink | None = None
    _ids: int = 0
    _playing: asyncio.Task[None] | None = None

    def begin(self, script: Script, answers: int) -> None:
        self.script, self.answers, self.runs, self.left, self.sink = script, answers, [], set(), None
        self._playing = None

    async def played(self) -> None:
        """Return when the script is over: engines go on for some steps after a stop string."""
        if self._playing is not None:
            await self._playing

    def number(self) -> int:
        self._ids += 1
        return self._ids

    async def run(self, runtime: str, run: wire.Run, sink: Sink) -> None:
        if self.script.refusal:
            raise RuntimeRefused(wire.Refusal.BAD_MESSAGE, self.script.refusal)
        self.runs.append(run)
        self.sink = sink
        if len(self.runs) == self.answers:
            self._playing = asyncio.create_task(self._play())

    async def cancel(self, streams: Iterable[int]) -> None:
        self._leave(streams)

    async def leave(self, streams: Iterable[int], keep: bool = False) -> None:
        self._leave(streams)

    def _leave(self, streams: Iterable[int]) -> None:
        known = {run.stream: index for index, run in enumerate(self.runs)}
        self.left |= {known[stream] for stream in streams if stream in known}

    async def _play(self) -> None:
        at = dict.fromkeys(range(self.answers), 0)
        last = {index: number for number, step in enumerate(self.script.steps) for index in step.tokens}
        await still()
        for number, step in enumerate(self.script.steps):
            deltas = []
            for index, tokens in step.tokens.items():
                ends = number == last[index] and not (self.script.error and index == 0)
                deltas.append(self._delta(index, tokens, at[index], ends))
                at[index] += len(tokens)
            self._deliver(deltas)
            if step.then:
                await still()
        if self.script.error:
            finish = Finish.REFUSED if self.script.refused else Finish.ERROR
            self._deliver([Delta(self.runs[0].stream, [], at[0], finish, error=self.script.error)])

    def _delta(self, index: int, tokens: list[int], at: int, ends: bool) -> Delta:
        finish, reason = (self.script.finish, self.script.stop_reason) if ends else (None, None)
        found = self.script.cached if at == 0 else 0
        stream = self.runs[index].stream
        return Delta(stream, list(tokens), at, finish, reason, cached_tokens=found, written_tokens=found // 2)

    def _deliver(self, deltas: list[Delta]) -> None:
        assert self.sink is not None
        self.sink.deliver(deltas)


class OneRuntime:
    """A fleet with a runtime that can take every model."""

    def failure(self, key: str) -> None: ...

    def choose(self, *_: object) -> str:
        return "r1"

    def took(self, *_: object) -> None: ...

    def gave_back(self, *_: object) -> None: ...


async def still() -> None:
    """Return when the tasks of the loop have come to rest."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class Said:
    """The answer to a request, and the traces that the request left."""

    way: str
    status: int
    kind: bytes  # content type
    body: bytes  # without times
    counts: tuple[int, int, int]  # tokens of prompt, found cached, made
    counted: int  # output tokens in the journal
    finish: str
    complete: bool
    left: frozenset[int]  # answers that the engine was told to end
    asked: tuple[Any, ...]  # requests at the runtime, without ids and times


class BothWays:
    """A front over the scripted runtime."""

    def __init__(self, front: Front, relay: ScriptedRelay, spec: EngineSpec) -> None:
        self.front, self.relay, self.spec = front, relay, spec

    @classmethod
    async def over(cls, folder: Path, **settings: Any) -> BothWays:
        relay = ScriptedRelay()
        sizes: dict[str, int] = {"max_model_len": 256, "weight_bytes": 1, "kv_bytes_per_token": 1}
        facts = {"key": "k" * 16, "digest": "d", "architecture": "LlamaForCausalLM", "dtype": "float32"}
        spec = EngineSpec(path=str(folder), **facts, **sizes, **settings)
        fronts = Fronts(Deps(relay, OneRuntime(), "g1", 60.0))  # type: ignore[arg-type]
        return cls(await fronts.get(spec, None), relay, spec)

    async def ask(self, path: str, body: bytes, script: Script, answers: int, fast: bool) -> Said:
        """Ask the front. `fast`: the fast way, if the request can go so; else vLLM's way."""
        TENANT.set("acme")
        self.relay.begin(script, answers)
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        head = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": head, "query_string": b""}
        request = Request(scope, receive)
        context, meter = self._context(), Counted()
        context.ask = fast_ask(path, request.headers, body) if fast else None
        wording = Wording(path, context.name, (self.spec.path, self.spec.key))
        answer = ResponseWriter(send, context, meter, {"x-staccato-cold": "none"}, False, wording)  # type: ignore[arg-type]
        context.writer = answer
        exchange = Exchange(request, send, ID, path, body)
        async with asyncio.timeout(60):
            complete = await exchange.pass_on(
                self.front, context, Reworded(answer.send, wording), asyncio.Event().wait()
            )
        await self.relay.played()
        await still()
        await self.front.leave(context.computed)
        headers = dict(sent[0]["headers"])
        call = context.call
        return Said(
            context.way,
            sent[0]["status"],
            headers[b"content-type"],
            _TIMES.sub(b'"created":0', b"".join(message.get("body", b"") for message in sent[1:])),
            (call.prompt_tokens, call.cached_tokens, context.made_tokens),
            meter.counts[-1] if meter.counts else 0,
            call.finish,
            complete,
            frozenset(self.relay.left),
            tuple(_asked(run) for run in self.relay.runs),
        )

    def _context(self) -> RequestContext:
        call = MeteredCall(usage(ID), 0)
        context = RequestContext(ID, TALLY)
        target = type("Target", (), {"tenant_weight": 1.0, "spec": self.spec})()
        context.understood(None, "faq", target, TALLY, 30.0, None, False)  # type: ignore[arg-type]
        context.opened(call, Objective(), "salt", None)
        context.computed = Computed()
        return context


def _asked(run: wire.Run) -> Any:
    """The engine's request in a run, without the ids and times that differ from request to request."""
    said = msgspec.msgpack.decode(run.payload)
    said[0], said[5] = re.sub("-[0-9a-f]{8}$", "", said[0]), 0.0
    fields = {name: getattr(run, name) for name in ("model", "request", "prompt_tokens", "max_tokens", "grammar")}
    return said, fields


def took_fast(said: Said) -> bool:
    return said.way == FAST
