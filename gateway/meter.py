"""What each request was given: counters that survive the death of this process, until JetStream has them.

Every open call has a slot in a memory-mapped journal. Delivered tokens are counted there right after they were handed
to the socket, so a gateway that is killed leaves behind what its clients got; the next one on the same data folder
books it. A slot is free again only when JetStream has acknowledged the call's last counters.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from store import wire
from store.bus import Bus, BusError

log = structlog.get_logger()

SLOTS = 8192  # calls open or not yet booked
SLOT_BYTES = 1024
CHECKPOINT_PERIOD_S = 5.0
RETRY_PAUSE_S = 0.5
BOOKERS = 16  # each waits for JetStream's disk
# Length of the record (0: free), seq, prompt, cached, output tokens, microseconds of steps and of switches:
_COUNTERS = struct.Struct("<IQQQQQQ")


class MeterFull(Exception):
    """No slot is free: usage can't be recorded, so nothing may be served."""

    def __init__(self) -> None:
        super().__init__(f"{SLOTS} requests are open or not yet booked, the most this gateway keeps: try again later")


@dataclass(slots=True)
class Call:
    """One request of one client, from admission to its last byte. `opened` holds all but the counters."""

    opened: wire.Usage
    slot: int
    seq: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_us: int = 0
    switch_us: int = 0
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
            ended_at=now,
            finish=self.finish,
        )


class Journal:
    """Fixed slots in a mapped file. What is written survives the process, not a power cut."""

    def __init__(self, path: Path) -> None:
        """Raises BlockingIOError when another gateway has it open."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(self._file, SLOTS * SLOT_BYTES)
        self._map = mmap.mmap(self._file, SLOTS * SLOT_BYTES)
        self._free = [slot for slot in reversed(range(SLOTS)) if not self._length(slot)]

    def _length(self, slot: int) -> int:
        return int(_COUNTERS.unpack_from(self._map, slot * SLOT_BYTES)[0])

    def take(self, opened: wire.Usage) -> int:
        """A slot for the call. Raises MeterFull."""
        if not self._free:
            raise MeterFull
        record = wire.encode(opened)
        if len(record) > SLOT_BYTES - _COUNTERS.size:
            raise ValueError(f"a usage record has {len(record)} bytes, at most {SLOT_BYTES - _COUNTERS.size} fit")
        slot = self._free.pop()
        start = slot * SLOT_BYTES + _COUNTERS.size
        self._map[start : start + len(record)] = record
        _COUNTERS.pack_into(self._map, slot * SLOT_BYTES, len(record), 0, 0, 0, 0, 0, 0)  # last: now the slot counts
        return slot

    def count(self, call: Call) -> None:
        tokens = (call.prompt_tokens, call.cached_tokens, call.output_tokens)
        numbers = (call.seq, *tokens, call.gpu_us, call.switch_us)
        struct.pack_into("<QQQQQQ", self._map, call.slot * SLOT_BYTES + 4, *numbers)

    def free(self, slot: int) -> None:
        _COUNTERS.pack_into(self._map, slot * SLOT_BYTES, *([0] * 7))
        self._free.append(slot)

    def left_behind(self) -> list[Call]:
        """The calls a dead process left open."""
        calls = []
        for slot in range(SLOTS):
            if length := self._length(slot):
                start = slot * SLOT_BYTES + _COUNTERS.size
                opened = wire.decode(wire.Usage, self._map[start : start + length])
                _, *counters = _COUNTERS.unpack_from(self._map, slot * SLOT_BYTES)
                calls.append(Call(opened, slot, *counters))
        return calls

    def close(self) -> None:
        self._map.close()
        os.close(self._file)


class Meter:
    """Opens, counts and closes calls, and books them through the bus."""

    def __init__(self, bus: Bus, path: Path) -> None:
        self._bus = bus
        self._journal = Journal(path)
        self._open: dict[int, Call] = {}
        self._closed: asyncio.Queue[tuple[Call, wire.Usage]] = asyncio.Queue()  # bounded by the slots
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for call in self._journal.left_behind():
            log.warning("meter.recovered", request=call.opened.request, output_tokens=call.output_tokens)
            call.finish = "gateway_lost"
            self._close(call)
        jobs = [self._checkpoint(), *(self._book() for _ in range(BOOKERS))]
        self._tasks = [asyncio.create_task(job) for job in jobs]

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Waits for what is closed to be booked; what is not stays in the journal for the next gateway."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.join()
        except TimeoutError:
            log.warning("meter.not_booked", calls=self._closed.qsize())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._journal.close()

    def open(self, opened: wire.Usage) -> Call:
        """Raises MeterFull."""
        call = Call(opened, self._journal.take(opened))
        self._open[call.slot] = call
        return call

    def count(self, call: Call) -> None:
        """The call's counters changed: call this right after what they count was handed to the client."""
        self._journal.count(call)

    def close(self, call: Call, finish: str) -> None:
        del self._open[call.slot]
        call.finish = finish
        self._close(call)

    def _close(self, call: Call) -> None:
        call.seq += 1
        self._journal.count(call)
        self._closed.put_nowait((call, call.usage(final=True, now=time.time())))

    async def _book(self) -> None:
        while True:
            call, usage = await self._closed.get()
            while not await self._publish(usage):
                await asyncio.sleep(RETRY_PAUSE_S)
            self._journal.free(call.slot)
            self._closed.task_done()

    async def _checkpoint(self) -> None:
        """Long streams are booked as they go, so that little is unknown when this machine is lost with its journal."""
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
