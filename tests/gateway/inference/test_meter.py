"""Counted usage is booked, for any process that dies: calls end in JetStream exactly as in the journal."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.inference import meter as meter_module
from gateway.inference.meter import SLOTS, Meter, MeterFull, UsageJournal
from store.bus import Bus
from store.contract import wire
from tests.conftest import NatsServer, soon
from tests.store.test_bus import usage


async def booked(bus: Bus, count: int) -> dict[str, wire.Usage]:
    """The next `count` closing records of the stream."""
    final: dict[str, wire.Usage] = {}
    batches = bus.usage_batches("test", 100)
    async with asyncio.timeout(20):
        while len(final) < count:
            batch = await anext(batches)
            await batch.ack()
            final |= {u.request: u for u in batch.usages if u.final}
    await batches.aclose()
    return final


async def test_a_closed_call_is_booked_with_its_last_counters(nats_server: NatsServer, tmp_path: Path) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        meter = Meter(bus, tmp_path / "journal")
        await meter.start()
        call = meter.open(usage("q"))
        call.prompt_tokens, call.output_tokens = 7, 3
        meter.count(call)
        meter.close(call, "stop")
        record = (await booked(bus, 1))["q"]
        assert (record.prompt_tokens, record.output_tokens, record.finish, record.final) == (7, 3, "stop", True)
        await meter.stop()


async def test_calls_that_a_dead_gateway_left_behind_are_booked_by_the_next_gateway(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    dead = UsageJournal(tmp_path / "journal")
    for n in range(3):
        call = meter_module.MeteredCall(usage(f"q{n}"), dead.take(usage(f"q{n}")))
        call.prompt_tokens, call.output_tokens = 5, n
        dead.count(call)
    dead.close()  # the counters stay: no slot was freed
    async with Bus.connect(nats_server.url, "test") as bus:
        meter = Meter(bus, tmp_path / "journal")
        await meter.start()
        records = await booked(bus, 3)
        assert {r.request: (r.output_tokens, r.finish) for r in records.values()} == {
            f"q{n}": (n, "gateway_lost") for n in range(3)
        }
        await meter.stop()
    empty = UsageJournal(tmp_path / "journal")
    assert empty.left_behind() == []
    empty.close()


async def test_a_journal_whose_gateway_the_host_no_longer_has_is_booked_by_the_first_gateway(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    gone, used = UsageJournal(tmp_path / "gone"), UsageJournal(tmp_path / "used")
    for journal, request in ((gone, "q1"), (used, "q2")):
        call = meter_module.MeteredCall(usage(request), journal.take(usage(request)))
        call.output_tokens = 4
        journal.count(call)
    gone.close()
    async with Bus.connect(nats_server.url, "test") as bus:
        meter = Meter(bus, tmp_path / "journal", [tmp_path / "gone", tmp_path / "used"])
        await meter.start()
        records = await booked(bus, 1)
        assert {r.request: (r.output_tokens, r.finish) for r in records.values()} == {"q1": (4, "gateway_lost")}
        await meter.stop()
    assert not (tmp_path / "gone").exists()
    assert len(used.left_behind()) == 1  # a gateway has the file
    used.close()


async def test_a_call_closed_while_nats_is_away_is_booked_when_it_is_back(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        meter = Meter(bus, tmp_path / "journal")
        await meter.start()
        call = meter.open(usage("q"))
        nats_server.kill()
        call.output_tokens = 9
        meter.close(call, "length")
        await asyncio.sleep(0.3)
        nats_server.start()
        assert (await booked(bus, 1))["q"].output_tokens == 9
        await meter.stop()


async def test_a_tenant_takes_at_most_four_times_the_slots_that_it_leaves(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        meter = Meter(bus, tmp_path / "journal")
        calls = []
        with pytest.raises(MeterFull, match="of this tenant are open"):
            for n in range(SLOTS):
                calls.append(meter.open(usage(f"q{n}")))
        assert len({call.slot for call in calls}) == len(calls) == SLOTS * 4 // 5 + 1
        for tenant in ("another", "a third"):
            meter.open(wire.replace(usage(tenant), tenant_id=tenant))
        meter._journal.close()


def test_two_gateways_never_share_a_journal(tmp_path: Path) -> None:
    first = UsageJournal(tmp_path / "journal")
    with pytest.raises(BlockingIOError):
        UsageJournal(tmp_path / "journal")
    first.close()


WATCH = """
import mmap, struct, sys
with open(sys.argv[1], "r+b") as file:
    journal = mmap.mmap(file.fileno(), 0)
print("watching", flush=True)
last = 0
while last < int(sys.argv[2]):
    (seen,) = struct.unpack_from("@Q", journal, int(sys.argv[3]))
    assert seen >= last, f"{seen} after {last}"
    last = seen
"""


def test_a_kill_at_any_moment_finds_the_counter_before_or_after(tmp_path: Path) -> None:
    """A second process sees the counter that a kill would leave: the counter never goes back."""
    path, times = tmp_path / "journal", 300_000
    journal = UsageJournal(path)
    call = meter_module.MeteredCall(usage("q"), journal.take(usage("q")))
    at = call.slot * meter_module.SLOT_BYTES + 4 * meter_module.WORD_BYTES
    command = [sys.executable, "-c", WATCH, str(path), str(times), str(at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None and watcher.stdout.readline() == "watching\n"
        for _ in range(times):
            call.output_tokens += 1
            journal.count(call)
        assert watcher.communicate(timeout=60) == ("", "") and watcher.returncode == 0
    journal.close()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["open", "count", "free"]), st.integers(0, 7)), max_size=40))
def test_the_journal_holds_exactly_the_open_calls(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:  # type: ignore[type-arg]
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal, calls, made = UsageJournal(path), {}, 0
    for step, which in steps:
        if step == "open":
            made += 1
            opened = usage(f"q{made}")
            calls[f"q{made}"] = meter_module.MeteredCall(opened, journal.take(opened))
        elif calls:
            name = sorted(calls)[which % len(calls)]
            if step == "count":
                calls[name].output_tokens += 1
                journal.count(calls[name])
            else:
                journal.free(calls.pop(name).slot)
    journal.close()
    again = UsageJournal(path)
    assert {c.opened.request: c.output_tokens for c in again.left_behind()} == {
        name: call.output_tokens for name, call in calls.items()
    }
    again.close()


async def test_acknowledged_usage_that_jetstream_lost_is_published_again(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """JetStream had acknowledged the usage, and its folder was deleted before the ledger had booked it."""
    async with Bus.connect(nats_server.url, "test") as bus:
        meter = Meter(bus, tmp_path / "journal")
        await meter.start()
        meter.close(meter.open(usage("q")), "stop")
        await soon(lambda: meter.last_stored is not None)
        nats_server.kill()
        shutil.rmtree(tmp_path / "nats" / "js")
        await soon(lambda: not bus.connected)
        nats_server.start()
        assert (await booked(bus, 1))["q"].finish == "stop"
        await soon(lambda: meter.pending_calls == 0)
        await meter.stop()


async def test_a_call_counts_as_pending_while_a_booker_waits_for_jetstream(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        meter = Meter(bus, tmp_path / "journal")
        await meter.start()
        open_still = meter.open(usage("open"))
        nats_server.kill()
        meter.close(meter.open(usage("q")), "stop")
        await soon(lambda: meter._closed.empty())  # a booker has taken the usage
        assert meter.pending_calls == 1
        nats_server.start()
        await soon(lambda: meter.pending_calls == 0)
        meter.close(open_still, "stop")
        await meter.stop()


def test_the_journal_has_its_room_on_the_disk_from_the_start(tmp_path: Path) -> None:
    """A page of a mapped file for which a full disk has no block ends the process with SIGBUS."""
    journal = UsageJournal(tmp_path / "journal")
    assert (tmp_path / "journal").stat().st_blocks * 512 >= SLOTS * meter_module.SLOT_BYTES
    journal.close()
