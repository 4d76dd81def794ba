"""Clients that leave pay for computed tokens: for the prompts, and for tokens made until runtimes heard of the cancel.

The test plays the clients, and two runtimes that may die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message

from gateway.inference import serving
from gateway.streams import dispatch, relay
from store.contract import wire
from store.contract.limits import Account
from store.contract.wire import Delta, Finish, ModelState, Residency, Spent
from store.db import usage as bill
from store.db import verify
from store.db.database import now_us
from store.tasks import ended
from tests.conftest import soon
from tests.gateway.plane import Plane, made, until
from tests.gateway.vllm.test_front import FAQ, asked

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front

STEP_S = 0.002
PATIENT_S = 10.0
PRICE = 1_000_000_000  # price of a token in pico: a thousand tokens cost 1
RESIDENT = ModelState(residency=Residency.RESIDENT, load_ms=1.0)


@dataclass(frozen=True)
class Plan:
    """A request to be played.

    `leaves_at`: the client leaves once runtimes have made so many tokens, however few the client has; None: never."""

    stream: bool = False
    choices: int = 1
    prompts: int = 1
    tokens: int = 20  # tokens of a choice
    leaves_at: int | None = None


@dataclass
class Ask:
    """A request under way or ended, as seen by the client and by the runtimes."""

    plan: Plan
    prompt_tokens: int  # length of a prompt: names the request to the runtimes
    left: asyncio.Event = field(default_factory=asyncio.Event)
    made: dict[bytes, int] = field(default_factory=dict)  # tokens by choice: the engine's request names the choice
    body: bytes = b""
    id: str = ""
    ended: bool = False

    @property
    def delivered(self) -> int:
        """Number of tokens that the client got."""
        events = [line.removeprefix(b"data: ") for line in self.body.split(b"\n") if line.startswith(b"data: {")]
        answers = [json.loads(event) for event in events] if self.plan.stream else []
        if not self.plan.stream and self.ended and self.body:
            answers = [json.loads(self.body)]
        return sum(len(choice.get("token_ids") or ()) for answer in answers for choice in answer.get("choices", ()))

    def note(self, run: wire.Run, at: int) -> None:
        self.id = run.request  # noted by a runtime: a client that leaves before the answer never learns the id
        self.made[run.payload] = max(self.made.get(run.payload, 0), at)
        if self.plan.leaves_at is None or sum(self.made.values()) < self.plan.leaves_at:
            return
        begun = sum(made > 0 for made in self.made.values())
        if not self.plan.leaves_at or begun == self.plan.choices * self.plan.prompts:
            self.left.set()  # with `leaves_at` 0 the gateway may not know yet of the run


class Runtime:
    """Makes a token every few milliseconds for every stream that the gateway knows to be taken, as `is_known` says.

    An engine's first token as well comes later than the answer to the gateway that the request was taken."""

    def __init__(self, plane: Plane, id: str, asks: dict[int, Ask], is_known: Callable[[int], bool]) -> None:
        self.plane, self.id, self.asks, self.is_known = plane, id, asks, is_known
        self.streams: dict[int, tuple[wire.Run, int]] = {}  # stream: the run, and the index of the next token
        self.seq = self.total = 0
        self.answers = True  # answers cancels
        self.dies_at: int | None = None  # dies after so many tokens of the streams together
        self.died = False
        self.waits = False  # takes requests, and makes no tokens
        self.prefill_us = 0  # device time of a prefill, told with the answer to a cancel

    async def start(self) -> None:
        await self.plane.bus.respond(wire.run_subject(self.id), self._take)
        await self.plane.bus.subscribe(wire.cancel_subject(self.id), self._cancel)

    async def _take(self, data: bytes) -> wire.Reply:
        run = wire.decode(wire.Run, data)
        self.streams[run.stream] = run, len(run.made)
        self.asks[run.prompt_tokens].note(run, len(run.made))
        return wire.Reply(epoch=1, seq=self.seq)

    async def _cancel(self, data: bytes) -> None:
        for stream in wire.decode(wire.Cancel, data).streams:
            if held := self.streams.pop(stream, None):
                run, at = held
                if self.answers:
                    spent = Spent(gpu_us=10 * (at - len(run.made)) + self.prefill_us)
                    await self._say(Delta(stream, [], at, Finish.ABORT, spent=spent))

    async def run(self) -> None:
        """Make steps, and die where the test says, until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            for stream, (run, at) in [] if self.waits else list(self.streams.items()):
                if stream not in self.streams or not self.is_known(stream):
                    continue
                last = at + 1 == run.max_tokens
                self.streams[stream] = run, at + 1
                if last:
                    del self.streams[stream]
                spent = Spent(gpu_us=10 * (at + 1 - len(run.made)))
                self.total += 1
                self.asks[run.prompt_tokens].note(run, at + 1)
                await self._say(Delta(stream, [5], at, Finish.LENGTH if last else None, spent=spent))
            if self.dies_at is not None and self.total >= self.dies_at:
                self.dies_at, self.died = None, True
                lost, self.streams = self.streams, {}
                for stream, (_, at) in lost.items():
                    await self._say(Delta(stream, [], at, Finish.LOST, error="it died"))
            await self._say()

    async def _say(self, *deltas: Delta) -> None:
        self.seq += bool(deltas)
        frame = wire.Frame(runtime=self.id, epoch=1, seq=self.seq, deltas=list(deltas))
        await self.plane.bus.publish(wire.frame_subject("g1"), wire.encode(frame))


@dataclass
class Stage:
    """A gateway with the tenant `acme`, runtimes, and the usage booked by request."""

    plane: Plane
    app: ASGIApp
    key: str
    runtimes: list[Runtime]
    asks: dict[int, Ask]
    batches: AsyncIterator[Any]
    booked: dict[str, wire.Usage] = field(default_factory=dict)

    async def play(self, plans: list[Plan], path: str = "/v1/completions") -> list[Ask]:
        """Play the plans at once. Returns the requests once every request is booked."""
        asks = [Ask(plan, 11 + number) for number, plan in enumerate(plans)]
        self.asks.clear()
        self.asks.update({ask.prompt_tokens: ask for ask in asks})
        await asyncio.gather(*(self._ask(ask, path) for ask in asks))
        async with asyncio.timeout(20):
            while not all(ask.id in self.booked for ask in asks if ask.id):
                batch = await anext(self.batches)
                await batch.ack()
                self.booked |= {said.request: said for said in batch.usages if said.final}
        return asks

    async def _ask(self, ask: Ask, path: str) -> None:
        plan = ask.plan
        prompts = [[5 + number, *range(6, 5 + ask.prompt_tokens)] for number in range(plan.prompts)]
        body = {"model": "chat", "prompt": prompts, "max_tokens": plan.tokens, "ignore_eos": True}
        body |= {"n": plan.choices, "stream": plan.stream, "return_token_ids": True, "temperature": 0.5}
        sent = json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        bodies = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> Message:
            if bodies:
                return bodies.pop()
            await ask.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                ask.body += message.get("body", b"")
                ask.ended = not message.get("more_body", False)

        await self.app(scope, receive, send)

    def row(self, ask: Ask) -> wire.Usage:
        return self.booked[ask.id]


def is_known(of: relay.Relay, stream: int) -> bool:
    """Whether the relay knows that a runtime has taken the stream."""
    return stream in of._streams and of._streams[stream].epoch != 0


@pytest.fixture
async def stage(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    for module in (dispatch, serving):
        monkeypatch.setattr(module, "PARTING_S", PATIENT_S, raising=False)
    monkeypatch.setattr(relay, "SILENCE_S", 60.0)  # the runtimes run on the test's loop, and the loop may stand still
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    key = made(await plane.admin.post("/tenants/acme/keys"))["key"]
    await plane.model("faq", folder=Path(FAQ))
    chat = made(await plane.admin.post("/deployments", json={"tenant": "acme", "name": "chat", "model": "faq"}))
    made(await plane.admin.post("/prices", json={"prompt_pico": PRICE, "output_pico": PRICE}))
    asks: dict[int, Ask] = {}
    relays: list[relay.Relay] = []
    runtimes = [Runtime(plane, id, asks, lambda stream: is_known(relays[0], stream)) for id in ("r1", "r2")]
    batches = plane.bus.usage_batches("test", 100)

    async def report() -> None:
        while True:
            for runtime in runtimes:
                await plane.report({chat["engine"]: RESIDENT}, runtime.id)
            await asyncio.sleep(1)

    async with asked(plane, key) as client, asyncio.TaskGroup() as group:
        app = client._transport.app  # type: ignore[attr-defined]
        relays.append(app.serving.fronts._deps.relay)
        for runtime in runtimes:
            await runtime.start()
            await plane.report({chat["engine"]: RESIDENT}, runtime.id)
        tasks = [group.create_task(job) for job in (report(), *(runtime.run() for runtime in runtimes))]
        yield Stage(plane, app, key, runtimes, asks, batches)
        await ended(*tasks)  # a single cancel may be swallowed by nats-py, and the group would wait for ever


def plans() -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        stream=st.booleans(),
        choices=st.integers(1, 2),
        prompts=st.integers(1, 2),
        tokens=st.integers(2, 25),
        leaves_at=st.none() | st.integers(0, 60),
    )


def wait_for_runtimes(seconds: float) -> None:
    """Set the longest wait of the gateway for the answer to a cancel; a fixture resets the wait after the test."""
    dispatch.PARTING_S = serving.PARTING_S = seconds  # type: ignore[misc]


deaths = st.lists(st.none() | st.integers(0, 80), min_size=2, max_size=2)


@given(st.lists(plans(), min_size=1, max_size=4), deaths, st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whenever_clients_leave_and_runtimes_die_a_bill_is_between_what_was_delivered_and_what_was_made(
    stage: Stage, plans: list[Plan], deaths: list[int | None], answers: bool
) -> None:
    for runtime, dies_at in zip(stage.runtimes, deaths, strict=True):
        runtime.total, runtime.dies_at, runtime.answers, runtime.died = 0, dies_at, answers, False
    wait_for_runtimes(PATIENT_S if answers else 0.3)
    for ask in await stage.play(plans):
        if not ask.id:
            continue  # no runtime was asked
        row, computed = stage.row(ask), sum(ask.made.values())
        assert ask.delivered <= row.output_tokens <= computed
        assert row.prompt_tokens in (0, ask.prompt_tokens, 2 * ask.prompt_tokens)
        assert row.prompt_tokens <= ask.plan.prompts * ask.prompt_tokens
        assert row.prompt_tokens or not row.output_tokens
        if row.finish != "cancelled":
            assert row.output_tokens == ask.delivered
        elif ask.plan.leaves_at and answers and not any(runtime.died for runtime in stage.runtimes):
            assert row.output_tokens == computed
        assert row.elapsed is not None, "the ledger keeps where its time went"
        assert abs(sum(row.elapsed.parts_us.values()) - row.elapsed.total_us) <= len(row.elapsed.parts_us)
    period = bill.period_of(now_us())
    async with stage.plane.database.write() as connection:
        await bill.book(connection, list(stage.booked.values()), now_us())
    async with stage.plane.database.snapshot() as connection:
        assert (await verify.verify(connection, period, now_us())).flaws == []
    await soon(lambda: not any(runtime.streams for runtime in stage.runtimes))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choices", "prompts"), [(1, 1), (2, 1), (1, 2), (2, 2)])
async def test_ten_requests_that_are_left_at_three_quarters_are_charged_for_what_runtimes_made(
    stage: Stage, stream: bool, choices: int, prompts: int
) -> None:
    plan = Plan(stream=stream, choices=choices, prompts=prompts, tokens=40, leaves_at=30 * choices * prompts)
    for ask in await stage.play([plan] * 10):
        row, computed = stage.row(ask), sum(ask.made.values())
        assert row.finish == "cancelled" and row.prompt_tokens == prompts * ask.prompt_tokens
        assert plan.leaves_at <= row.output_tokens == computed
        assert row.gpu_us == 10 * computed, "the time of the device until then is in the row as well"


async def test_of_a_runtime_that_does_not_answer_what_the_gateway_had_received_counts(stage: Stage) -> None:
    wait_for_runtimes(0.5)
    for runtime in stage.runtimes:
        runtime.answers = False
    (ask,) = await stage.play([Plan(leaves_at=15, tokens=400)])
    assert 14 <= stage.row(ask).output_tokens <= sum(ask.made.values()) < 100


async def left_while_it_waits(stage: Stage) -> Ask:
    """Play a request; the client leaves once a runtime has taken the request and the gateway knows of the run."""
    playing = asyncio.create_task(stage.play([Plan()]))
    await soon(lambda: any(runtime.streams for runtime in stage.runtimes))
    await asyncio.sleep(0.1)
    (ask,) = stage.asks.values()
    ask.left.set()
    await playing
    return ask


async def test_a_request_that_no_device_began_with_is_charged_for_nothing(stage: Stage) -> None:
    for runtime in stage.runtimes:
        runtime.waits = True
    row = stage.row(await left_while_it_waits(stage))
    assert (row.finish, row.prompt_tokens, row.output_tokens, row.gpu_us) == ("cancelled", 0, 0, 0)


async def test_a_request_that_is_left_amid_its_prompt_is_charged_for_the_prompt(stage: Stage) -> None:
    for runtime in stage.runtimes:
        runtime.waits, runtime.prefill_us = True, 700
    ask = await left_while_it_waits(stage)
    row = stage.row(ask)
    assert (row.prompt_tokens, row.output_tokens, row.gpu_us) == (ask.prompt_tokens, 0, 700)


async def test_a_budget_and_a_rate_are_settled_with_what_is_charged(stage: Stage) -> None:
    """No token stays reserved, and the account has spent the cost of the row."""
    budget = {"amount": "1000.00", "currency": "USD"}
    limits = {"limits": {"tokens_per_minute": 100_000, "monthly_budget": budget, "concurrent_streams": 4}}
    tenant = made(await stage.plane.admin.patch("/tenants/acme", json=limits), 200)["id"]
    (ask,) = await stage.play([Plan(leaves_at=30, tokens=40)])
    row = stage.row(ask)
    tokens = row.prompt_tokens + row.output_tokens
    assert row.output_tokens >= 30

    async def settled() -> bool:
        account, _ = await stage.plane.bus.read(wire.QUOTAS, tenant, Account)
        return account is not None and int(account.spent) == tokens * PRICE

    await until(settled)


async def test_a_gateway_that_dies_while_it_asks_runtimes_leaves_what_was_computed_behind(
    stage: Stage,
) -> None:
    wait_for_runtimes(3.0)
    for runtime in stage.runtimes:
        runtime.answers = False
    playing = asyncio.create_task(stage.play([Plan(leaves_at=15, tokens=400)]))
    journal = stage.app.serving.meter._journal  # type: ignore[attr-defined]
    await soon(lambda: any(call.output_tokens >= 14 for call in journal.left_behind()))
    assert not playing.done(), "it still waits for the runtime"
    (call,) = journal.left_behind()
    (ask,) = await playing
    assert call.prompt_tokens == ask.prompt_tokens and call.output_tokens <= stage.row(ask).output_tokens
