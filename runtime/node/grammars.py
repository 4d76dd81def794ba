"""Grammars of requests, compiled beside the device process before the request enters the device process.

A grammar waits in a queue fair to tenants and is compiled by a confined child (runtime/engine/compiling.py). The node
keeps the compiled form for the tenant's next request with equal grammar and vocabulary. Tenants do not share compiled
grammars: the time until a grammar is ready would tell a tenant about the grammars of other tenants.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
import socket
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from runtime.config import RuntimeSettings
from runtime.core.compile_orders import (
    KILLED,
    MADE,
    ORDER_BYTES_MAX,
    REFUSED,
    CompileLimits,
    CompileOrder,
    DropOrder,
    NotCompiled,
    Order,
)
from runtime.core.fair_queue import FairQueue
from store.contract.wire import EngineSpec, Finish
from store.tasks import ended
from store.telemetry.observe import place_of

log = structlog.get_logger()

WAIT_S_MAX = 120.0  # until a grammar is compiled, the queue and the compiler's start included
TENANT_QUEUE_MAX = 256  # different waiting grammars of a tenant
HANG_S = 110.0  # a grammar's time is limited, so after HANG_S the compiler itself hangs, and is ended
READ_BYTES = 1 << 20
# Variables that a Python needs from the node's environment. The compiler sees neither secrets nor a GPU.
PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR")
_encoder = msgspec.msgpack.Encoder()

Key = tuple[str, str, bytes]  # tenant, vocabulary, digest of the grammar


@dataclass(slots=True, eq=False)
class Grammar:
    """A grammar that waits for a compiler or is being compiled."""

    key: Key
    spec: EngineSpec
    text: bytes
    made: asyncio.Future[bytes]
    wanted: int = 0  # requests that wait for the grammar
    task: asyncio.Task[None] | None = None  # compiles the grammar


class Grammars:
    """The grammars of a node: a queue, the grammars under way, and a cache of compiled grammars and refusals."""

    def __init__(self, settings: RuntimeSettings) -> None:
        limits = CompileLimits(settings.grammar_cpu_s, int(settings.grammar_memory), int(settings.grammar_compiled_max))
        self._jobs_max, self._cache_bytes_max = settings.grammar_jobs, int(settings.grammar_cache)
        self._compiler = Compiler(limits)
        self._queue: FairQueue[Grammar] = FairQueue(TENANT_QUEUE_MAX)
        self._wanted: dict[Key, Grammar] = {}  # grammars that wait or are being compiled
        self._under_way = 0
        self._cache: OrderedDict[Key, bytes | str] = OrderedDict()  # compiled grammars, and sentences of refusals
        self._cache_bytes = 0

    async def compiled(self, spec: EngineSpec, tenant: str, text: bytes) -> bytes:
        """Wait for the compiled form of the grammar `text` of a request of `tenant` for the model of `spec`.

        Returns the compiled form. Cancel the call if the request has ended: compiling stops
        once no request wants the grammar. Raises NotCompiled."""
        key = tenant, spec.digest or spec.path, hashlib.blake2b(text, digest_size=16).digest()
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            if isinstance(known, str):
                raise NotCompiled(known)
            return known
        grammar = self._wanted.get(key)
        if grammar is None:
            grammar = Grammar(key, spec, text, asyncio.get_running_loop().create_future())
            if not self._queue.put(tenant, grammar):
                raise NotCompiled(
                    f"{TENANT_QUEUE_MAX} grammars of this tenant wait already: send fewer different ones at a time",
                    Finish.ERROR,
                )
            self._wanted[key] = grammar
            self._begin()
        grammar.wanted += 1
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                return await asyncio.shield(grammar.made)
        except TimeoutError:
            reason = f"the grammar was not compiled within {WAIT_S_MAX:g} s, for others came first: try again later"
            raise NotCompiled(reason, Finish.ERROR) from None
        finally:
            grammar.wanted -= 1
            if not grammar.wanted:
                self._leave(grammar)

    def _leave(self, grammar: Grammar) -> None:
        """Stop the work on a grammar that no request wants."""
        if self._wanted.get(grammar.key) is grammar:
            del self._wanted[grammar.key]
        self._queue.remove(grammar.key[0], grammar)
        if grammar.task is not None:
            grammar.task.cancel()

    def _begin(self) -> None:
        """Begin to compile waiting grammars while fewer than `_jobs_max` are under way."""
        while self._under_way < self._jobs_max and (taken := self._queue.take()):
            _, grammar = taken
            self._under_way += 1
            grammar.task = asyncio.create_task(self._compile(grammar))
            grammar.task.add_done_callback(partial(self._over, grammar))

    def _over(self, grammar: Grammar, task: asyncio.Task[None]) -> None:
        """Free the grammar's place after the task `task`, and begin with waiting grammars.

        Called whether the grammar was compiled, refused or dropped, even before the task took a step."""
        self._under_way -= 1
        self._queue.done(grammar.key[0])
        if self._wanted.get(grammar.key) is grammar:
            del self._wanted[grammar.key]
        self._begin()

    async def _compile(self, grammar: Grammar) -> None:
        try:
            made = await self._compiler.compile(grammar.spec, grammar.text)
            self._keep(grammar.key, made)
            grammar.made.set_result(made)
        except Exception as error:
            if not isinstance(error, NotCompiled):
                log.error("grammars.not_compiled", error=place_of(error))
                error = NotCompiled("the runtime could not compile the grammar", Finish.LOST)
            if error.finish is Finish.REFUSED:
                self._keep(grammar.key, str(error))
            grammar.made.set_exception(error)
            grammar.made.exception()  # asked for, lest asyncio complain: the requests may have left

    def _keep(self, key: Key, made: bytes | str) -> None:
        assert key not in self._cache, "a grammar that is known is not compiled again"
        self._cache[key] = made
        self._cache_bytes += len(made) + len(key[0])
        while self._cache_bytes > self._cache_bytes_max:
            (tenant, _, _), old = self._cache.popitem(last=False)
            self._cache_bytes -= len(old) + len(tenant)

    async def close(self) -> None:
        """End the work on grammars and the compiler."""
        await ended(*(grammar.task for grammar in self._wanted.values() if grammar.task))
        await self._compiler.ended()


class Compiler:
    """The process that compiles grammars. The first grammar starts the process: a start takes seconds and memory."""

    def __init__(self, limits: CompileLimits) -> None:
        self._limits = limits
        self._numbers = itertools.count(1)
        self._orders: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def compile(self, spec: EngineSpec, text: bytes) -> bytes:
        """Compile the grammar `text` for the vocabulary of `spec`. Returns the compiled form. Raises NotCompiled.

        If the call is cancelled, the child that compiles the grammar is killed."""
        orders, number = await self._started(), next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs:
            self._send(orders, CompileOrder(number, spec, self._limits), [theirs.fileno()], ours)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(text)
            writer.write_eof()
            async with asyncio.timeout(HANG_S):
                answer = await self._all(reader)
            return self._understood(answer)
        except TimeoutError:
            self.close()
            raise NotCompiled(f"the compiler of grammars said nothing for {HANG_S:g} s", Finish.LOST) from None
        finally:
            writer.close()
            with suppress(OSError):
                orders.send(_encoder.encode(DropOrder(number)))

    def _send(self, orders: socket.socket, order: Order, descriptors: list[int], ours: socket.socket) -> None:
        try:
            data = _encoder.encode(order)
            assert len(data) <= ORDER_BYTES_MAX, f"an order has {len(data)} bytes, at most {ORDER_BYTES_MAX}"
            socket.send_fds(orders, [data], descriptors)
        except OSError as error:
            ours.close()
            self.close()
            raise NotCompiled("the runtime's compiler of grammars is gone", Finish.LOST) from error

    async def _all(self, reader: asyncio.StreamReader) -> bytes:
        answer = bytearray()
        with suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                answer += data
                if len(answer) > self._limits.compiled_bytes + len(MADE):
                    return REFUSED + self._limits.too_large(len(answer)).encode()
        return bytes(answer)

    def _understood(self, answer: bytes) -> bytes:
        kind, said = answer[:1], answer[1:]
        if kind == MADE:
            return said
        if kind == REFUSED:
            raise NotCompiled(said.decode("utf-8", "replace"))
        if kind != KILLED:
            self.close()
            raise NotCompiled("the runtime's compiler of grammars is gone", Finish.LOST)
        by = int(said)
        if by in (signal.SIGPROF, signal.SIGXCPU):
            raise NotCompiled(self._limits.too_slow())
        if by == signal.SIGKILL:  # sent by the kernel when the machine is short of memory
            raise NotCompiled(self._limits.too_much_memory())
        raise NotCompiled(f"the grammar ended its compiler (signal {by}): make it smaller, or nest it less deep")

    async def _started(self) -> socket.socket:
        async with self._starting:
            if self._orders is not None and self._process is not None and self._process.returncode is None:
                return self._orders
            self.close()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "runtime.engine.compiling", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,  # errors quote tenants' text
                    pass_fds=[theirs.fileno()],
                    env={name: os.environ[name] for name in PASSED if name in os.environ}
                    | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
                )
            log.info("grammars.compiler_started", process=self._process.pid)
            self._orders = ours
            return ours

    def close(self) -> None:
        """End the compiler's process; the children end with the process."""
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def ended(self) -> None:
        """End the compiler's process, and return when the process is gone."""
        self.close()
        if self._process is not None:
            await self._process.wait()
