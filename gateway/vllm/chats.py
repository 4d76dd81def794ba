"""Chats of the fast way, rendered by processes of a front while the event loop goes on: no thread waits for a text.

A thread would need the interpreter three times for a chat, and would get the interpreter late while the loop is busy.
A tenant has at most one chat with a process at a time, and waiting tenants take turns. A chat that takes long gives the
other tenants a second process. Without chats for IDLE_S, the processes end: a process takes 12 MiB, and a gateway has
many fronts.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from jinja2 import TemplateError

from gateway.inference.context import TENANT
from gateway.vllm.rendering import DEADLINE_S
from gateway.vllm.templates import (
    ANSWER_MOST,
    GRACE_S,
    LENGTH,
    PATIENCE_S,
    NotedTemplate,
    RenderingProcess,
    text_of,
)
from gateway.vllm.threads import TooManyWaiting
from runtime.core.fair_queue import FairQueue

PROCESSES = 2  # of a front
LATE_S = 0.05  # after this time of a chat, other tenants get the second process
IDLE_S = 60.0  # a front's processes end after this time without a chat; starting a process takes some 0.1 s
WAITING_MOST, WAITING_BYTES_MOST = 4096, 64 << 20  # chats of one tenant that wait, and the bytes of the chats


class ProcessLink(asyncio.Protocol):
    """The event loop's end of the socket to a rendering process. Carries one job at a time."""

    def __init__(self) -> None:
        self._heard: Callable[[bytes | None], None] | None = None  # hears of the job under way
        self._read = bytearray()
        self._transport: asyncio.Transport | None = None  # None: the process is gone

    @property
    def there(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._answered(None)

    def ask(self, job: bytes, heard: Callable[[bytes | None], None]) -> None:
        """Send a job. `heard` gets the answer, or None if the process ends before the answer."""
        assert self._heard is None and self._transport is not None
        self._heard = heard
        self._transport.write(LENGTH.pack(len(job)) + job)

    def data_received(self, data: bytes) -> None:
        self._read += data
        if len(self._read) < LENGTH.size:
            return
        end = LENGTH.size + LENGTH.unpack_from(self._read)[0]
        if not LENGTH.size < end <= LENGTH.size + ANSWER_MOST:
            assert self._transport is not None
            self._transport.abort()
        elif len(self._read) >= end:
            answer = bytes(self._read[LENGTH.size : end])
            del self._read[:end]
            self._answered(answer)

    def _answered(self, answer: bytes | None) -> None:
        heard, self._heard = self._heard, None
        if heard is not None:
            heard(answer)


@dataclass(eq=False)
class ChatJob:
    """A chat that waits for its text."""

    tenant: str
    job: bytes
    answer: asyncio.Future[bytes]


@dataclass(eq=False)
class LinkedProcess:
    """A rendering process and the link to the process."""

    process: RenderingProcess
    link: ProcessLink
    late: bool = False  # the chat under way takes long
    overdue: bool = False  # the kernel should have ended the process by now
    timer: asyncio.TimerHandle | None = field(default=None)  # of the chat under way


class ChatRenderer:
    """Renders the chats of a front, with the front's template. Processes end with this object."""

    def __init__(self, noted: NotedTemplate, process: RenderingProcess | None) -> None:
        """`noted`: the template, and its variables besides the messages. `process`: a running process to begin with;
        without, the first chat starts a process.

        To be called in a thread: `process` is told the template. Raises TemplateError for a faulty template."""
        if process is not None:
            process.keep(noted)
        self._noted = noted
        self._spare: RenderingProcess | None = process  # not linked yet
        self._queue: FairQueue[ChatJob] = FairQueue(WAITING_MOST)
        self._waiting_bytes = Counter[str]()  # by tenant, of chats without a text yet
        self._processes: set[LinkedProcess] = set()
        self._idle: list[LinkedProcess] = []
        self._starting: asyncio.Task[None] | None = None
        self._closed = False
        self._asked_at = 0.0  # time of the event loop
        self._watching: asyncio.TimerHandle | None = None

    async def text(self, job: bytes) -> str:
        """Return the text of a chat: see `templates.chat_job`. Raises TooManyWaiting, TemplateError."""
        chat = ChatJob(TENANT.get(), job, asyncio.get_running_loop().create_future())
        if self._waiting_bytes[chat.tenant] + len(job) > WAITING_BYTES_MOST:
            raise TooManyWaiting(f"{WAITING_BYTES_MOST >> 20} MiB of this tenant's chats wait to be rendered, the most")
        if not self._queue.put(chat.tenant, chat):
            raise TooManyWaiting(f"{WAITING_MOST} chats of this tenant wait to be rendered, the most")
        self._waiting_bytes[chat.tenant] += len(job)
        self._begin()
        try:
            return text_of(await chat.answer)
        finally:
            self._queue.remove(chat.tenant, chat)  # the client may have left before the chat's turn
            self._waiting_bytes[chat.tenant] -= len(job)
            if not self._waiting_bytes[chat.tenant]:
                del self._waiting_bytes[chat.tenant]

    def close(self) -> None:
        """End the processes, each at the end of its chat. A later chat starts a process anew."""
        self._closed = True
        self._end_idle()

    def watch(self) -> None:
        """From now on, end the processes after IDLE_S without a chat. To be called on the event loop."""
        if self._watching is None:
            self._watch_again(IDLE_S)

    def _watch_again(self, after_s: float) -> None:
        # A weak reference: processes end with this object, whether a timer runs or not.
        self._watching = asyncio.get_running_loop().call_later(after_s, _look, weakref.ref(self))

    def look(self) -> None:
        """End idle processes if no chat came for IDLE_S, and look again later if there are processes then."""
        self._watching = None
        left_s = self._asked_at + IDLE_S - asyncio.get_running_loop().time()
        if left_s <= 0:
            self._end_idle()
        if self._processes or self._spare is not None:
            self._watch_again(left_s if left_s > 0 else IDLE_S)

    def _end_idle(self) -> None:
        for linked in self._idle:
            self._processes.discard(linked)
            linked.process.end()
        self._idle.clear()
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def _begin(self) -> None:
        """Give idle processes to waiting tenants in turn, and start a process if the processes there are too few."""
        while self._idle:
            if not self._idle[-1].link.there:
                self._processes.discard(self._idle.pop())
            elif taken := self._queue.take():
                self._ask(self._idle.pop(), taken[1])
            else:
                break
        lacks = len(self._processes) < PROCESSES and all(linked.late for linked in self._processes)
        if lacks and len(self._queue) and self._starting is None:
            self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        """Add a process. If no process starts, a waiting chat hears the reason."""
        try:
            process, self._spare = self._spare, None
            if process is None or not process.alive:
                process = await asyncio.to_thread(_started, self._noted)
            link = ProcessLink()
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=process.loop_end())
            linked = LinkedProcess(process, link)
            self._processes.add(linked)
            self._idle.append(linked)
            self.watch()
        except (TemplateError, OSError) as error:
            if taken := self._queue.take():
                self._over(taken[1], TemplateError(f"the chat template was not rendered: {error}"))
        finally:
            self._starting = None
            self._begin()

    def _ask(self, linked: LinkedProcess, chat: ChatJob) -> None:
        loop = asyncio.get_running_loop()
        self._asked_at = loop.time()
        linked.timer = loop.call_later(LATE_S, self._late, linked)
        linked.link.ask(chat.job, partial(self._heard, linked, chat))

    def _late(self, linked: LinkedProcess) -> None:
        linked.late = True
        linked.timer = asyncio.get_running_loop().call_later(PATIENCE_S - LATE_S, self._slow, linked)
        self._begin()

    def _slow(self, linked: LinkedProcess) -> None:
        linked.process.slow_down()
        linked.timer = asyncio.get_running_loop().call_later(DEADLINE_S + GRACE_S, self._overdue, linked)

    def _overdue(self, linked: LinkedProcess) -> None:
        linked.overdue = True
        linked.process.end()

    def _heard(self, linked: LinkedProcess, chat: ChatJob, answer: bytes | None) -> None:
        assert linked.timer is not None
        linked.timer.cancel()
        linked.late = False
        if answer is None or linked.process.slowed or self._closed:
            self._processes.discard(linked)
            harm = linked.process.harm(linked.overdue)
            self._over(chat, harm if answer is None else answer)
        else:
            self._idle.append(linked)
            self._over(chat, answer)
        self._begin()

    def _over(self, chat: ChatJob, answer: bytes | TemplateError) -> None:
        self._queue.done(chat.tenant)
        if chat.answer.done():
            return  # the client has left
        if isinstance(answer, TemplateError):
            chat.answer.set_exception(answer)
        else:
            chat.answer.set_result(answer)


def _look(renderer: weakref.ref[ChatRenderer]) -> None:
    if (there := renderer()) is not None:
        there.look()


def _started(noted: NotedTemplate) -> RenderingProcess:
    process = RenderingProcess()
    process.keep(noted)
    return process
