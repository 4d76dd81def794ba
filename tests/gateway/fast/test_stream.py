"""A stream to a client that reads at times: every text once and in order, a single write at a time, no task left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from gateway.fast.answer import AnswerFailed, Answers
from gateway.fast.chunks import DONE, EventTemplates, StreamEvents, Template
from gateway.fast.stream import Flusher, StreamSender
from gateway.fast.text import TextDecoder, TextStyle
from gateway.inference.context import RequestContext
from gateway.inference.meter import MeteredCall
from store.contract.wire import Delta, Finish
from tests.gateway.inference.test_response import TALLY
from tests.gateway.vllm.tokenisers import MAKERS
from tests.store.test_bus import usage

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of transformers
TOKENIZER: Any = next(iter(MAKERS.values()))()._tokenizer
PIECE = Template.of_event('{"index": 9000000002, "text": "@content@"}')
LAST = Template.of_event('{"index": 9000000002, "text": "@content@", "finish": "@finish@"}')


class SlowClient:
    """A client that takes a write at once, or after `reads` was called, or never."""

    def __init__(self, slow: Callable[[], bool]) -> None:
        self._slow = slow
        self.body = b""
        self.writes = self.most = 0
        self.waiting: asyncio.Future[None] | None = None
        self.error: Exception | None = None

    async def piece(self, body: bytes) -> None:
        self.writes += 1
        self.most = max(self.most, self.writes)
        try:
            if self.error is not None:
                raise self.error
            if self._slow():
                self.waiting = asyncio.get_running_loop().create_future()
                await self.waiting
                self.waiting = None
            self.body += body
        finally:
            self.writes -= 1

    def reads(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    async def send(self, message: Message) -> None:
        self.body += message.get("body", b"")


class Streamed:
    """A stream of `count` answers to a client."""

    def __init__(self, client: SlowClient, count: int = 1) -> None:
        self.context = RequestContext("019", TALLY)
        self.context.call = MeteredCall(usage("019"), 0)
        self.context.writer = client
        decoders = [TextDecoder(TOKENIZER, {}, [1], TextStyle()) for _ in range(count)]
        self.answers = Answers(decoders, False, lambda index: None)
        templates = EventTemplates(None, PIECE, LAST, LAST, PIECE)
        events = StreamEvents(templates, "019", "faq", 0, 3, count)
        self.sender = StreamSender(self.context, self.answers, events, False, Flusher())
        self.client = client

    def start(self) -> asyncio.Task[None]:
        async def submitted() -> None: ...

        return asyncio.create_task(self.sender.run(self.client.send, submitted()))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def events_of(body: bytes) -> tuple[dict[int, str], bool]:
    """Return the text of each answer, and whether the stream ended well."""
    texts: dict[int, str] = {}
    *said, end = body.split(b"\n\n")[:-1]
    for event in said:
        piece = msgspec.json.decode(event.removeprefix(b"data: "))
        texts[piece["index"]] = texts.get(piece["index"], "") + piece["text"]
    return texts, end + b"\n\n" == DONE


STEPS = st.lists(st.tuples(st.sampled_from(["tokens", "tokens", "reads", "turn"]), st.integers(0, 2)), max_size=30)


@given(steps=STEPS, slow=st.lists(st.booleans(), max_size=20), count=st.integers(1, 3))
@settings(max_examples=200, database=None)
def test_a_client_that_reads_at_times_gets_every_text_once(
    steps: list[tuple[str, int]], slow: list[bool], count: int
) -> None:
    async def run() -> None:
        often = iter(slow)
        client = SlowClient(lambda: next(often, False))
        streamed = Streamed(client, count)
        running, at, made = streamed.start(), [0] * count, [list[int]() for _ in range(count)]

        def take(index: int, finish: Finish | None) -> None:
            token = 100 + (7 * at[index]) % 90
            streamed.answers.made(index, Delta(index, [token], at[index], finish))
            made[index].append(token)
            at[index] += 1

        for step, which in steps:
            if step == "tokens":
                take(which % count, None)
            elif step == "reads":
                client.reads()
            await turns(1 if step == "turn" else 0)
        for index in range(count):
            take(index, Finish.LENGTH)
        while not running.done():
            client.reads()
            await turns(1)
        await running
        alone = [TextDecoder(TOKENIZER, {}, [1], TextStyle()) for _ in range(count)]
        for decoder, tokens in zip(alone, made, strict=True):
            decoder.update(tokens, False)
        assert events_of(client.body) == ({index: alone[index].take(True) for index in range(count)}, True)
        assert client.most <= 1 and streamed.context.made_tokens == sum(at)

    asyncio.run(run())


async def started(client: SlowClient) -> tuple[Streamed, asyncio.Task[None]]:
    streamed = Streamed(client)
    running = streamed.start()
    await turns()
    streamed.answers.made(0, Delta(0, [100], 0))
    await turns()
    return streamed, running


async def test_a_write_that_fails_ends_the_stream_with_its_error() -> None:
    client = SlowClient(lambda: False)
    streamed, running = await started(client)
    client.error = OSError("the socket is gone")
    streamed.answers.made(0, Delta(0, [101], 1))
    with pytest.raises(OSError, match="the socket is gone"):
        await running


async def test_an_error_of_the_runtime_is_told_after_what_is_being_written() -> None:
    client = SlowClient(lambda: True)
    streamed, running = await started(client)
    streamed.answers.failed("the engine failed", False)
    await turns()
    assert not running.done() and not client.body
    client.reads()
    with pytest.raises(AnswerFailed, match="the engine failed"):
        await running
    assert client.body


async def test_a_client_that_never_reads_is_left_without_a_task() -> None:
    client = SlowClient(lambda: True)
    _, running = await started(client)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await turns()
    assert asyncio.all_tasks() == {asyncio.current_task()} and client.writes == 0


async def test_no_task_is_woken_for_a_token() -> None:
    client = SlowClient(lambda: False)
    streamed, running = await started(client)
    loop = asyncio.get_running_loop()
    made: list[Any] = []

    def noted(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        made.append(coro)
        return asyncio.Task(coro, loop=loop, **kwargs)

    loop.set_task_factory(noted)
    waiter: Awaitable[None] | None = streamed.answers._waiter
    for at in range(1, 20):
        streamed.answers.made(0, Delta(0, [100 + at], at))
        await turns(2)
    assert client.body.count(b"data: ") == 20 and not made and streamed.answers._waiter is waiter
    loop.set_task_factory(None)
    streamed.answers.made(0, Delta(0, [99], 20, Finish.LENGTH))
    await running
