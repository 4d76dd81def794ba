"""Usage of each request: counters that survive the death of the gateway's process until JetStream has the counters.

Every open call has a slot in a memory-mapped journal. Delivered tokens are counted in the slot right after the gateway
handed the tokens to the socket. A killed gateway therefore leaves a record of what clients got, and the next gateway on
the same data folder books the record. A slot is free again only when JetStream has acknowledged the call's last
counters.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from runtime.core.ledgers.fair_share import may_take
from store.bus import Bus, BusError
from store.contract import wire
from store.contract.elapsed import Elapsed

log = structlog.get_logger()

SLOTS = 8192  # calls open or not yet booked
SLOT_BYTES = 1024
CHECKPOINT_PERIOD_S = 5.0
RETRY_PAUSE_S = 0.5
BOOKERS = 16  # tasks, each of which waits for JetStream's disk
STORED_KEPT = 4096  # the last acknowledged ends of calls: JetStream may be lost before the ledger has booked them
WORD_BYTES = 8
SLOT_WORDS = SLOT_BYTES // WORD_BYTES
# The words of a slot: length of the record (0: free), then the counters in the order of Call. Then comes the record.
HEAD_WORDS = 9
RECORD_BYTES_MOST = SLOT_BYTES - HEAD_WORDS * WORD_BYTES


class MeterFull(Exception):
    """No slot is free for the tenant: usage can't be recorded, and the request may not be served."""

    def __init__(self, own: int, free: int) -> None:
        super().__init__(
            f"{own} requests of this tenant are open or not yet booked, and this gateway has room for {free} of all "
            "tenants: try again later"
        )


@dataclass(slots=True)
class MeteredCall:
    """A client's request, from admission to the last byte. `opened` holds every field but the counters."""

    opened: wire.Usage
    slot: int
    seq: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_us: int = 0
    switch_us: int = 0
    kv_byte_s: int = 0
    cache_byte_s: int = 0
    finish: str = "open"

    def usage(self, final: bool, now: float) -> wire.Usage:
        return wire.replace(
            self.opened,
            seq=self.seq,
            final=final,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            gpu_us=self.gpu_us,
            switch_us=self.switch_us,
            kv_byte_s=self.kv_byte_s,
            cache_byte_s=self.cache_byte_s,
            ended_at=now,
            finish=self.finish,
        )


class UsageJournal:
    """Fixed slots in a mapped file. A write survives the death of the process, not a power cut."""

    def __init__(self, path: Path) -> None:
        """Open or make the file at `path`, and lock the file.

        Raises BlockingIOError if a second gateway has the file open, OSError if the disk has no room for the file.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(self._file, 0, SLOTS * SLOT_BYTES)  # a page without a block on a full disk would be SIGBUS
        self._map = mmap.mmap(self._file, SLOTS * SLOT_BYTES)
        # A word is stored at once: a kill leaves the old or the new value. (struct writes zeros first.)
        self._words = memoryview(self._map).cast("Q")
        self._free = [slot for slot in reversed(range(SLOTS)) if not self._words[slot * SLOT_WORDS]]

    def take(self, opened: wire.Usage) -> int:
        """Take a slot for the call and return the slot's number. The caller has checked that a slot is free."""
        record = wire.encode(opened)
        if len(record) > RECORD_BYTES_MOST:
            raise ValueError(f"a usage record has {len(record)} bytes, at most {RECORD_BYTES_MOST} fit")
        slot = self._free.pop()
        start = (slot + 1) * SLOT_BYTES - RECORD_BYTES_MOST
        self._map[start : start + len(record)] = record
        self._set(slot, (0,) * (HEAD_WORDS - 1))
        self._words[slot * SLOT_WORDS] = len(record)  # last: now the slot counts
        return slot

    @property
    def slots_free(self) -> int:
        return len(self._free)

    def count(self, call: MeteredCall) -> None:
        # Word by word, without a loop: called for each piece of each stream.
        words, at = self._words, call.slot * SLOT_WORDS
        words[at + 1] = call.seq
        words[at + 2] = call.prompt_tokens
        words[at + 3] = call.cached_tokens
        words[at + 4] = call.output_tokens
        words[at + 5] = call.gpu_us
        words[at + 6] = call.switch_us
        words[at + 7] = call.kv_byte_s
        words[at + 8] = call.cache_byte_s

    def _set(self, slot: int, counters: Iterable[int]) -> None:
        for word, value in enumerate(counters, slot * SLOT_WORDS + 1):
            self._words[word] = value

    def free(self, slot: int) -> None:
        self._words[slot * SLOT_WORDS] = 0
        self._free.append(slot)

    def left_behind(self) -> list[MeteredCall]:
        """Calls that a dead process left open, or closed and not booked."""
        calls = []
        for slot in range(SLOTS):
            at = slot * SLOT_WORDS
            if length := self._words[at]:
                start = (slot + 1) * SLOT_BYTES - RECORD_BYTES_MOST
                opened = wire.decode(wire.Usage, self._map[start : start + length])
                seq, prompt, cached, output, *device = self._words[at + 1 : at + HEAD_WORDS]
                gpu_us, switch_us, kv_byte_s, cache_byte_s = device
                tokens = (seq, prompt, cached, output)
                calls.append(MeteredCall(opened, slot, *tokens, gpu_us, switch_us, kv_byte_s, cache_byte_s))
        return calls

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._file)


class Meter:
    """Opens, counts and closes calls, and books the usage of calls through the bus."""

    def __init__(self, bus: Bus, path: Path, left: Sequence[Path] = ()) -> None:
        """`path`: the journal of this gateway. `left`: journals of gateways that no longer exist, to be booked too."""
        self._bus = bus
        self._journal, self._left = UsageJournal(path), left
        self._open: dict[int, MeteredCall] = {}
        self._slots_of: Counter[str] = Counter()  # by tenant
        self._closed: asyncio.Queue[tuple[MeteredCall, wire.Usage]] = asyncio.Queue()  # bounded by the slots
        self._stored: deque[wire.Usage] = deque(maxlen=STORED_KEPT)
        self._again: asyncio.Queue[wire.Usage] = asyncio.Queue()  # bounded by STORED_KEPT for each loss
        self._tasks: list[asyncio.Task[None]] = []
        self.last_stored: tuple[str, float] | None = None  # request whose end JetStream has, and UNIX seconds of it

    @property
    def open_calls(self) -> int:
        return len(self._open)

    @property
    def pending_calls(self) -> int:
        """Number of calls that are closed, and not acknowledged by JetStream."""
        return SLOTS - self._journal.slots_free - len(self._open) + self._again.qsize()

    async def start(self) -> None:
        for path in self._left:
            self._adopt(path)
        for call in self._journal.left_behind():
            log.warning("meter.recovered", request=call.opened.request, output_tokens=call.output_tokens)
            call.finish = "gateway_lost"
            self._slots_of[call.opened.tenant_id] += 1
            self._close(call)
        self._bus.on_lost(self._bus_lost)
        jobs = [self._checkpoint(), self._store_again(), *(self._book() for _ in range(BOOKERS))]
        self._tasks = [asyncio.create_task(job) for job in jobs]

    def _adopt(self, path: Path) -> None:
        """Take the calls of another gateway's journal into the journal of this gateway, and remove an empty file.

        A call stays in both files if the process dies in between, and is booked once for all that."""
        try:
            other = UsageJournal(path)
        except BlockingIOError:
            log.warning("meter.journal_in_use", path=path.name)
            return
        calls = other.left_behind()
        adopted = calls[: self._journal.slots_free]
        for call in adopted:
            left, call.slot = call.slot, self._journal.take(call.opened)
            self._journal.count(call)
            other.free(left)
        other.close()
        if len(adopted) == len(calls):
            path.unlink()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Wait until closed calls are booked. A call not booked in time stays in the journal for the next gateway."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.join()
        except TimeoutError:
            log.warning("meter.not_booked", calls=self._closed.qsize())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._journal.close()

    def open(self, opened: wire.Usage) -> MeteredCall:
        """Open a call, which the caller must close. Raises MeterFull."""
        own, free = self._slots_of[opened.tenant_id], self._journal.slots_free
        if not may_take(own, free):
            raise MeterFull(own, free)
        call = MeteredCall(opened, self._journal.take(opened))
        self._open[call.slot] = call
        self._slots_of[opened.tenant_id] += 1
        return call

    def count(self, call: MeteredCall) -> None:
        """Store the call's changed counters. To be called right after the client was handed what the counters count."""
        self._journal.count(call)

    def close(self, call: MeteredCall, finish: str, elapsed: Elapsed | None = None) -> None:
        """Close the call and queue the usage for booking.

        `elapsed`: where the time of the request went, if a runtime was asked.
        """
        del self._open[call.slot]
        call.finish = finish
        self._close(call, elapsed)

    def _close(self, call: MeteredCall, elapsed: Elapsed | None = None) -> None:
        call.seq += 1
        self._journal.count(call)
        usage = wire.replace(call.usage(final=True, now=time.time()), elapsed=elapsed)
        self._closed.put_nowait((call, usage))

    async def _book(self) -> None:
        while True:
            call, usage = await self._closed.get()
            while not await self._publish(usage):
                await asyncio.sleep(RETRY_PAUSE_S)
            self.last_stored = (usage.request, usage.ended_at)
            self._stored.append(usage)
            self._journal.free(call.slot)
            self._slots_of[call.opened.tenant_id] -= 1
            self._closed.task_done()

    def _bus_lost(self, names: frozenset[str]) -> None:
        """Publish acknowledged usage again: the ledger may not have booked the usage, and books each usage once."""
        if wire.USAGE_STREAM in names:
            log.warning("meter.stream_lost", calls=len(self._stored))
            while self._stored:
                self._again.put_nowait(self._stored.popleft())

    async def _store_again(self) -> None:
        while True:
            usage = await self._again.get()
            while not await self._publish(usage):
                await asyncio.sleep(RETRY_PAUSE_S)
            self._stored.append(usage)

    async def _checkpoint(self) -> None:
        """Book long streams as the streams go. If the machine is lost with its journal, little usage is unknown."""
        while True:
            await asyncio.sleep(CHECKPOINT_PERIOD_S)
            for call in list(self._open.values()):
                if call.output_tokens and call.slot in self._open:
                    call.seq += 1
                    self._journal.count(call)
                    await self._publish(call.usage(final=False, now=time.time()))

    async def _publish(self, usage: wire.Usage) -> bool:
        try:
            await self._bus.publish_usage(usage)
        except BusError as error:
            log.warning("meter.not_stored", request=usage.request, error=str(error))
            return False
        return True
