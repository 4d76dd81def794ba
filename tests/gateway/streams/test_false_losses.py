"""A living runtime that was taken for dead: the relay counts the false loss, waits longer the next time, and
reads waiting messages before a judgement. A request with many losses in a row makes few attempts."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.metrics import Metrics
from gateway.inference.timing import Timing
from gateway.streams import dispatch
from gateway.streams import relay as relay_module
from gateway.streams.dispatch import LOSSES_APART_S, RESUME_PAUSE_S_MOST, Open, resume_pause_s
from gateway.streams.relay import Relay
from store.contract.wire import Finish
from tests.conftest import NatsServer, soon
from tests.gateway.plane import Plane
from tests.gateway.streams.test_dispatch import Runtimes, ended, two
from tests.gateway.streams.test_relay import Heard, ScriptedRuntime, joined, run

__all__ = ["two"]  # the fixture


async def lost_and_heard_again(relay: Relay, runtime: ScriptedRuntime, stream: int) -> float:
    """Lose a living, silent runtime, then hear the runtime again. Returns the seconds of silence before the loss."""
    heard = Heard()
    await relay.run("r1", run(stream), heard)
    began = time.monotonic()
    runtime.mute = True
    async with asyncio.timeout(15):
        await heard._ended.wait()
    assert heard.end is not None and "silent" in heard.end.error
    silent_s = time.monotonic() - began
    runtime.mute = False
    await runtime.make(stream, 0, [1])
    return silent_s


async def test_a_runtime_that_is_heard_again_is_a_false_loss_and_may_be_silent_for_longer(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 1.0)
    async with joined(nats_server) as (relay, runtime):
        first_s = await lost_and_heard_again(relay, runtime, 1)
        await soon(lambda: relay.false_losses == 1)
        second_s = await lost_and_heard_again(relay, runtime, 2)
        await soon(lambda: relay.false_losses == 2)
        assert first_s >= 0.9 and second_s >= 1.8, (first_s, second_s)


async def test_a_runtime_that_was_restarted_was_lost_truly(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 0.3)
    async with joined(nats_server) as (relay, runtime):
        old, new = Heard(), Heard()
        await relay.run("r1", run(1), old)
        runtime.mute = True
        await old.until_end()
        runtime.epoch, runtime.mute = 2, False
        await relay.run("r1", run(2), new)
        assert relay.false_losses == 0


async def test_a_gateway_whose_own_loop_was_busy_takes_no_runtime_for_dead(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 0.5)
    async with joined(nats_server) as (relay, runtime):
        heard = Heard()
        await relay.run("r1", run(1), heard)
        for _ in range(3):
            await asyncio.sleep(0.1)
            time.sleep(0.9)  # too short for the relay to think the bus absent
        await runtime.make(1, 0, [1], Finish.STOP)
        await heard.until_end()
        assert heard.tokens == [1] and relay.false_losses == 0


async def test_false_losses_are_a_metric_of_the_gateway_and_of_each_runtime(plane: Plane) -> None:
    metrics = Metrics(plane.fleet, _NoMeter(), lambda: 3)  # type: ignore[arg-type]
    await plane.report({}, "r1", false_losses=2)
    shown = (await metrics.shown(plane.database)).decode()
    assert "staccato_false_losses_total 3.0" in shown
    assert 'staccato_runtime_false_losses_total{runtime="r1"} 2.0' in shown


class _NoMeter:
    open_calls = pending_calls = 0
    last_stored = None


# ── the next attempt ──────────────────────────────────────────────────────────────────────────────────────────────────


# Eighths of a second: their sums are exact, so a gap is as long for the code as for the test.
gaps = st.integers(1, int(24 * LOSSES_APART_S)).map(lambda eighths: eighths / 8)


@given(st.lists(gaps, max_size=30))
def test_the_pause_doubles_with_losses_in_a_row_and_begins_anew_after_a_while(gaps_s: list[float]) -> None:
    request, now = Open("a", run(1), 0.0, None), 100.0  # type: ignore[arg-type]
    row = 0
    for gap_s in gaps_s:
        now += gap_s
        row = row + 1 if row and gap_s < LOSSES_APART_S else 1
        request.lose(now)
        pause_s = resume_pause_s(request.losses)
        assert request.losses == row and 0.0 <= pause_s <= RESUME_PAUSE_S_MOST
        assert (pause_s == 0.0) == (row == 1) and pause_s >= resume_pause_s(row - 1)


def test_a_stream_that_loses_a_runtime_each_time_it_gets_one_has_few_attempts_in_ninety_seconds() -> None:
    """A silence lasts as long as the patience at the time: 2, 4, 8 and then 10 seconds."""
    now, attempts = 0.0, 1
    while (now := now + min(10.0, 2.0**attempts) + resume_pause_s(attempts)) < 90.0:
        attempts += 1
    assert attempts <= 8


async def test_the_second_loss_in_a_row_waits_before_the_next_attempt(
    two: Runtimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "RESUME_PAUSE_S_FIRST", 1.0)
    await two.submit()
    first = await two.taken_by("r1")
    await two.lose("r1", first, 0)
    second = await two.taken_by("r2")
    lost_at = time.monotonic()
    await two.lose("r2", second, 0)
    third = await two.taken_by("r1", 2)
    assert time.monotonic() - lost_at >= 0.9
    await two.all["r1"].make(third.stream, 0, [7], Finish.STOP)
    await ended(two)
    assert two.taken.tokens == {"a": [7]}
    assert isinstance(two.timings["a"], Timing)
