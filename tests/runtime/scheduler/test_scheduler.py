"""The scheduler: orders that follow from leases and, on a real bus, the lead among several schedulers. The test plays
the runtimes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from runtime.config import SchedulerSettings
from runtime.core.fleet.cluster import Rules
from runtime.core.fleet.headroom import HEADROOM
from runtime.core.fleet.rebalance import Load
from runtime.core.fleet.scaling import Band
from runtime.scheduler import controller as scheduler_module
from runtime.scheduler.controller import ALL, LeasedFleet, Scheduler
from store.bus import Bus
from store.contract import wire
from store.contract.wire import ModelState, Residency
from store.tasks import ended
from tests.conftest import NatsServer, soon
from tests.runtime.world import spec

PAGE = 1 << 20


def lease(runtime: str, epoch: int = 1, engine: str = "e", **busy: float) -> wire.Lease:
    """A lease of a runtime with models a and b. `busy`: share of the device's time by model with requests."""
    models = {model: ModelState(residency=Residency.STAGED) for model in "ab"}
    models |= {
        model: ModelState(residency=Residency.RESIDENT, running=1, kv_pages=1, weights_pages=2, busy=share)
        for model, share in busy.items()
    }
    return wire.Lease(runtime=runtime, epoch=epoch, engine=engine, page_bytes=PAGE, pages_total=64, models=models)


def told(fleet: LeasedFleet, now: float, *leases: wire.Lease) -> list[tuple[str, wire.Migrate]]:
    for each in leases:
        fleet.heard(each, now)
    return fleet.tick(now)


OVERFULL = lease("r1", a=0.7, b=0.4)


def test_a_model_moves_from_a_device_with_too_much_to_do_to_one_with_little() -> None:
    fleet = LeasedFleet(Rules(migrate=True))
    ((source, order),) = told(fleet, 1.0, OVERFULL, lease("r2"))
    assert (source, order.target, order.model) == ("r1", "r2", "b")
    assert order.count > 1000  # every request of the model: the model has one place
    assert not told(fleet, 2.0, OVERFULL, lease("r2")), "the model is on its way"
    fleet.settled("r1")
    assert told(fleet, 3.0, OVERFULL, lease("r2"))


def test_of_a_model_that_needs_more_memory_than_a_device_has_some_requests_move() -> None:
    """Two models that need as much together stay whole: models that take turns would be split for nothing."""
    fleet = LeasedFleet(Rules(migrate=True))
    for name in "ab":
        fleet.spec_changed(name, wire.encode(wire.replace(spec(name), weight_bytes=10 * PAGE, kv_bytes_per_token=99)))
    full = ModelState(residency=Residency.RESIDENT, running=8, waiting=4, kv_pages=54, weights_pages=10, busy=0.5)
    alone = wire.replace(full, head_bytes=PAGE, queued_bytes=3 * PAGE)
    ((source, order),) = told(fleet, 1.0, wire.replace(lease("r1"), models={"a": alone}), lease("r2"))
    assert (source, order.target, order.model, order.count) == ("r1", "r2", "a", 3)
    grown = wire.replace(full, running=12, waiting=0, wanted_pages=60)
    ((_, order),) = told(fleet, 5.0, wire.replace(lease("r1", epoch=3), models={"a": grown}), lease("r2", epoch=3))
    assert (order.model, order.count) == ("a", 3), "requests that grew lack memory as well"
    half = wire.replace(alone, kv_pages=27, running=4, waiting=2)
    shared = wire.replace(lease("r1", epoch=4), models={"a": half, "b": half})
    assert not any(order.count < ALL for _, order in told(fleet, 9.0, shared, lease("r2", epoch=4)))


def test_a_balanced_fleet_is_left_alone() -> None:
    fleet = LeasedFleet(Rules(migrate=True))
    for now in range(1, 10):
        assert not told(fleet, float(now), lease("r1", a=0.5), lease("r2", b=0.5), lease("r3"))


def test_nothing_is_ordered_of_or_for_a_runtime_that_is_not_heard_of_or_starts() -> None:
    fleet = LeasedFleet(Rules(migrate=True))
    told(fleet, 1.0, lease("r1"), lease("r2"))
    assert not told(fleet, 9.0, OVERFULL), "r2 was silent for eight seconds"
    assert not told(fleet, 10.0, OVERFULL, lease("r2", engine=""))
    assert told(fleet, 11.0, OVERFULL, lease("r2", epoch=2)), "r2 is back"


def test_a_runtime_that_was_started_again_is_a_new_device() -> None:
    fleet = LeasedFleet(Rules(migrate=True))
    told(fleet, 1.0, lease("r1"), lease("r2"))
    assert told(fleet, 2.0, lease("r1", epoch=2, a=0.7, b=0.4), lease("r2"))
    assert len(fleet.cluster.devices) == 2


def test_runtimes_that_come_and_go_under_new_names_do_not_pile_up() -> None:
    fleet = LeasedFleet(Rules(migrate=True))
    for number in range(50):
        now = number * 200.0
        told(fleet, now, lease("old"), lease(f"r{number}"))
        assert len(fleet.cluster.devices) <= 6, "each is remembered for ten minutes"
    assert told(fleet, 20_000.0, lease("new", a=0.7, b=0.4), lease("old"))[0][0] == "new"


def test_who_waits_for_memory_makes_a_runtime_look_fuller() -> None:
    fleet = LeasedFleet(Rules())
    states = {
        "a": ModelState(residency=Residency.RESIDENT, kv_pages=3, head_bytes=500, queued_bytes=40, least_bytes=7),
        "b": ModelState(residency=Residency.STAGED, head_bytes=900, least_bytes=900),
        "c": ModelState(residency=Residency.STAGED),
    }
    told(fleet, 1.0, wire.replace(lease("r1"), models=states), lease("r2"))
    one, other = (fleet.cluster.devices[number].report for number in (0, 1))
    assert one is not None and other is not None
    assert (one.used_bytes, one.queued_bytes, one.least_bytes) == (3 * PAGE + 900, 540, 7)
    assert (other.used_bytes, other.queued_bytes, other.least_bytes) == (0, 0, None)


def test_pages_kept_after_a_peak_are_no_load() -> None:
    peak = ModelState(residency=Residency.RESIDENT, running=9, kv_pages=60, weights_pages=4)
    after = wire.replace(peak, running=1, spare_pages=58)
    assert (reported({"a": peak}).used_bytes, reported({"a": after}).used_bytes) == (60 * PAGE, 2 * PAGE)


def reported(states: dict[str, ModelState]) -> Load:
    fleet = LeasedFleet(Rules())
    told(fleet, 1.0, wire.replace(lease("r1"), models=states))
    report = fleet.cluster.devices[0].report
    assert report is not None
    return report


def test_weights_kept_without_requests_are_room_for_keys_and_values() -> None:
    works = ModelState(residency=Residency.RESIDENT, weights_pages=20, running=1)
    idle = ModelState(residency=Residency.RESIDENT, weights_pages=10)
    parked = ModelState(residency=Residency.STAGED, weights_pages=5, waiting=1)
    assert reported({"a": works, "b": idle, "c": parked}).kv_bytes == (64 - 20) * PAGE


def test_prefixes_of_ended_requests_do_not_make_a_runtime_look_fuller() -> None:
    cache = ModelState(residency=Residency.RESIDENT, weights_pages=20, running=1, kv_pages=44, spare_pages=40)
    report = reported({"a": cache})
    assert (report.used_bytes, report.kv_bytes) == (4 * PAGE, 44 * PAGE)


def test_a_running_request_of_high_priority_makes_a_runtime_look_fuller() -> None:
    usual = ModelState(residency=Residency.RESIDENT, weights_pages=4, running=2, busy=0.25)
    one, other = reported({"a": wire.replace(usual, high=1)}), reported({"a": usual})
    assert one.busy - other.busy == pytest.approx(HEADROOM)
    assert one.used_bytes - other.used_bytes == pytest.approx(HEADROOM * 60 * PAGE)
    assert one.shares == other.shares == {"a": 0.25}, "a move is decided by what requests need"


# ── how many there should be ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Scaled:
    """Obedient runtimes of a fleet that may scale from two to four runtimes."""

    fleet: LeasedFleet = field(default_factory=lambda: LeasedFleet(Rules(band=Band(2, 4))))
    busy: dict[str, float] = field(default_factory=dict)  # by live runtime
    draining: set[str] = field(default_factory=set)  # by order of the scheduler
    held: set[str] = field(default_factory=set)  # drained by an operator
    now: float = 0.0

    def go_on(self, seconds: int) -> list[tuple[str, wire.Migrate | wire.Drain]]:
        said: list[tuple[str, wire.Migrate | wire.Drain]] = []
        for _ in range(seconds):
            self.now += 1.0
            for runtime, busy in self.busy.items():
                shown = {"m": busy} if busy else {}
                surplus = runtime in self.draining
                told = wire.replace(lease(runtime, **shown), draining=surplus or runtime in self.held, surplus=surplus)
                self.fleet.heard(told, self.now)
            for runtime, order in self.fleet.tick(self.now):
                said.append((runtime, order))
                if isinstance(order, wire.Drain):
                    self.draining = self.draining | {runtime} if order.on else self.draining - {runtime}
        return said

    @property
    def wish(self) -> tuple[int, list[str]]:
        wish = self.fleet.wish("s", 1)
        return wish.wanted, wish.draining


def test_more_runtimes_are_wished_for_while_there_is_too_much_to_do() -> None:
    scaled = Scaled(busy={"r1": 1.2, "r2": 1.2})
    scaled.go_on(1)
    assert scaled.wish == (2, [])
    scaled.go_on(20)
    assert scaled.wish[0] > 2
    scaled.busy |= {"r3": 0.0, "r4": 0.0}
    scaled.go_on(2)
    assert scaled.wish == (4, [])


def test_a_runtime_that_is_not_needed_drains_and_may_go() -> None:
    scaled = Scaled(busy={"r1": 0.0, "r2": 0.0, "r3": 0.0})
    ((runtime, order),) = scaled.go_on(30)
    assert order == wire.Drain(on=True) and scaled.wish == (2, [runtime])
    assert not scaled.go_on(30) and scaled.wish == (2, [runtime])
    del scaled.busy[runtime]
    scaled.go_on(10)
    assert scaled.wish == (2, []), "it went, as it was told to, and is not waited for"


def test_a_runtime_that_drains_is_taken_back_before_another_is_wished_for() -> None:
    scaled = Scaled(busy={"r1": 0.0, "r2": 0.0, "r3": 0.0})
    ((runtime, _),) = scaled.go_on(30)
    scaled.busy = {name: 0.0 if name == runtime else 1.2 for name in scaled.busy}
    said = scaled.go_on(20)
    assert (runtime, wire.Drain(on=False)) in said
    assert scaled.wish[0] >= 3 and not scaled.wish[1]


EACH, FIXED = 2, 1  # runtimes of a node; runtimes of other pools


def test_the_nodes_that_kubernetes_ends_are_the_nodes_that_the_scheduler_drained() -> None:
    """A StatefulSet keeps the pods with the lowest numbers, and an autoscaler asks for as many as the metric, less the
    runtimes of other pools, divided by a node's runtimes: both rules stand in this test for a cluster."""

    def runtimes(nodes: int) -> set[str]:
        return {f"st-runtime-h100-{node}-r{number}" for node in range(nodes) for number in range(1, EACH + 1)}

    fleet = LeasedFleet(Rules(band=Band(FIXED + EACH, FIXED + 12 * EACH, node_devices=EACH)), "st-runtime-h100")
    scaled = Scaled(fleet, busy=dict.fromkeys([*runtimes(11), "st-runtime-h200-0-r1"], 0.0))
    sizes = [11]
    for load in (0.0, 1.2, 0.0):
        for _ in range(400):
            scaled.busy = dict.fromkeys(scaled.busy, load)
            scaled.go_on(1)
            wanted = -(-(scaled.wish[0] - FIXED) // EACH)
            assert (scaled.wish[0] - FIXED) % EACH == 0, "no node is half wanted"
            there = {name for name in scaled.busy if "h100" in name}
            gone = there - runtimes(wanted)
            assert gone <= scaled.draining, "a node that serves is ended"
            assert there - gone == there - scaled.draining, "a drained node is kept"
            scaled.draining = scaled.draining - gone
            scaled.busy = {name: 0.0 for name in (set(scaled.busy) - gone) | runtimes(wanted)}
            sizes.append(wanted)
    assert min(sizes[:401]) == 1 and max(sizes) == 12 and sizes[-1] == 1


def test_nodes_that_come_and_go_need_a_number_of_runtimes() -> None:
    with pytest.raises(ValueError, match="NODES_SCALED=pool without a number of runtimes: set STACCATO_RUNTIMES_MOST"):
        SchedulerSettings(nodes_scaled="pool").check()
    SchedulerSettings(nodes_scaled="pool", runtimes_most=8).check()


def test_the_node_that_would_leave_last_is_taken_back_first() -> None:
    names = [f"p-{node}-r{number}" for node in (2, 9, 10) for number in (1, 2)]
    fleet = LeasedFleet(Rules(band=Band(2, 8, node_devices=2)), "p")
    scaled = Scaled(fleet, busy=dict.fromkeys(names, 0.0))
    drained = [runtime for runtime, _ in scaled.go_on(60)]
    assert [runtime.rpartition("-")[0] for runtime in drained] == ["p-10", "p-10", "p-9", "p-9"]
    scaled.busy = {name: 0.0 if name in drained else 0.995 for name in scaled.busy}
    back = [runtime for runtime, order in scaled.go_on(4) if order == wire.Drain(on=False)]
    assert back == ["p-9-r1", "p-9-r2"]


def test_another_scheduler_learns_from_the_leases_who_drains() -> None:
    scaled = Scaled(busy={"r1": 0.0, "r2": 0.0, "r3": 0.0}, draining={"r3"})
    assert not scaled.go_on(30) and scaled.wish == (2, ["r3"])


def test_a_runtime_drained_by_an_operator_is_not_asked_back_and_is_not_counted() -> None:
    scaled = Scaled(busy={"r1": 1.2, "r2": 1.2, "r3": 0.0}, held={"r3"})
    said = scaled.go_on(20)
    assert not [order for runtime, order in said if runtime == "r3"]
    assert scaled.wish == (3, []), "two runtimes that serve, and one runtime to come"


def test_a_surplus_runtime_that_an_operator_drains_too_is_no_longer_asked_back() -> None:
    scaled = Scaled(busy={"r1": 0.0, "r2": 0.0, "r3": 0.0})
    ((runtime, _),) = scaled.go_on(30)
    scaled.draining, scaled.held = set(), {runtime}
    scaled.busy = {name: 0.0 if name == runtime else 1.2 for name in scaled.busy}
    assert not [order for told, order in scaled.go_on(20) if told == runtime]
    assert scaled.wish == (3, [])


def test_a_surplus_runtime_that_was_ended_before_it_was_asked_back_is_replaced() -> None:
    scaled = Scaled(busy={"r1": 0.0, "r2": 0.0, "r3": 0.0})
    ((runtime, _),) = scaled.go_on(30)
    scaled.busy = {name: 1.2 for name in scaled.busy}
    while (runtime, wire.Drain(on=False)) not in scaled.go_on(1):
        assert scaled.now < 100
    del scaled.busy[runtime]  # the order came too late
    scaled.go_on(5)
    assert scaled.wish[0] >= 3 and not scaled.wish[1]


def test_a_runtime_that_did_not_get_the_order_to_drain_is_told_again() -> None:
    scaled = Scaled(busy={"r1": 0.0, "r2": 0.0, "r3": 0.0})
    while not (said := scaled.go_on(1)):
        assert scaled.now < 100
    scaled.draining = set()
    scaled.fleet.not_drained(said[0][0])
    assert scaled.wish == (3, [])
    assert [order for _, order in scaled.go_on(30)] == [wire.Drain(on=True)]


async def test_the_wanted_number_is_known_before_a_runtime_drains(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a runtime that drains would look like a missing runtime to the process that starts runtimes."""
    monkeypatch.setattr(scheduler_module, "TICK_S", 0.1)
    wanted: list[int] = []

    async def obey(data: bytes) -> wire.Reply:
        leader, _ = await bus.read(wire.LEADER, scheduler_module.ROLE, wire.Leader)
        wanted.append(leader.wanted if leader else 0)
        return wire.Reply()

    async with Bus.connect(nats_server.url, "s") as theirs, Bus.connect(nats_server.url, "b") as bus:
        for runtime in ("r1", "r2"):  # either is drained: the lease of r2 may be heard first
            await bus.respond(wire.drain_subject(runtime), obey)
        stop = asyncio.Event()
        task = asyncio.create_task(Scheduler(theirs, Rules(band=Band(1, 2, cooldown_s=0.1)), "s").run(stop))
        report = asyncio.create_task(_report(bus, lease("r1"), lease("r2")))
        await soon(lambda: bool(wanted))
        stop.set()
        await task
        await ended(report)
    assert wanted[0] == 1


async def test_a_lost_order_to_drain_is_given_again(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "TICK_S", 0.1)
    orders: list[wire.Drain] = []

    async def refuse(data: bytes) -> wire.Reply:
        orders.append(wire.decode(wire.Drain, data))
        return wire.Reply(refusal=wire.Refusal.DRAINING, reason="not now")

    async with Bus.connect(nats_server.url, "s") as theirs, Bus.connect(nats_server.url, "b") as bus:
        for runtime in ("r1", "r2"):
            await bus.respond(wire.drain_subject(runtime), refuse)
        band = Band(1, 2, high_checks=1, cooldown_s=0.1)
        stop = asyncio.Event()
        task = asyncio.create_task(Scheduler(theirs, Rules(band=band), "s").run(stop))
        report = asyncio.create_task(_report(bus, lease("r1"), lease("r2")))
        await soon(lambda: len(orders) >= 2)
        stop.set()
        await task
        await ended(report)
    assert all(order.on for order in orders)


def test_a_fleet_without_a_band_wishes_nothing() -> None:
    fleet = LeasedFleet(Rules(migrate=True))
    told(fleet, 1.0, OVERFULL)
    assert fleet.wish("s", 1) == wire.Leader(holder="s", term=1)


def test_a_model_does_not_move_to_a_runtime_that_does_not_host_it() -> None:
    fleet = LeasedFleet(Rules(migrate=True))
    other = wire.replace(lease("r2"), models={})
    assert not told(fleet, 1.0, OVERFULL, other)
    assert told(fleet, 2.0, OVERFULL, lease("r2"))


# ── who leads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Two:
    """Two schedulers, and a runtime r1 with too much to do beside an idle r2."""

    def __init__(self, bus: Bus, buses: list[Bus]) -> None:
        self.bus = bus
        self.all = [Scheduler(each, Rules(migrate=True), f"s{n}") for n, each in enumerate(buses)]
        self.orders: list[wire.Migrate] = []
        self.stops = [asyncio.Event() for _ in self.all]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.bus.respond(wire.migrate_subject("r1"), self._obey)
        self._tasks = [asyncio.create_task(_report(self.bus, OVERFULL, lease("r2")))]
        for scheduler, stop in zip(self.all, self.stops, strict=True):
            self._tasks.append(asyncio.create_task(scheduler.run(stop)))

    async def _obey(self, data: bytes) -> wire.Reply:
        self.orders.append(wire.decode(wire.Migrate, data))
        return wire.Reply(refusal=wire.Refusal.BUSY, reason="not now")  # the scheduler repeats a refused order

    async def kill(self, number: int) -> None:
        """Kill a scheduler without a goodbye."""
        await ended(self._tasks[1 + number])

    async def until_ordered(self, count: int, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while len(self.orders) < count:
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        await ended(*self._tasks)


async def _report(bus: Bus, *leases: wire.Lease) -> None:
    while True:
        for each in leases:
            await bus.put(wire.LEASES, each.runtime, each)
        await asyncio.sleep(0.2)


@pytest.fixture
async def two(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Two]:
    monkeypatch.setattr(scheduler_module, "TICK_S", 0.2)
    async with contextlib.AsyncExitStack() as stack:
        bus, *buses = [await stack.enter_async_context(Bus.connect(nats_server.url, f"b{n}")) for n in range(3)]
        made = Two(bus, buses)
        await made.start()
        yield made
        await made.end()


async def test_of_two_schedulers_one_acts_and_the_other_follows_when_it_is_gone(two: Two) -> None:
    await two.until_ordered(3)
    leaders = [scheduler.leads for scheduler in two.all]
    assert sorted(leaders) == [False, True]
    assert {order.term for order in two.orders} == {two.all[leaders.index(True)]._term}
    await two.kill(leaders.index(True))
    before = len(two.orders)
    await two.until_ordered(before + 3)  # the lead runs out, then the second scheduler leads from the leases
    after = two.orders[-1]
    assert after.term > two.orders[0].term and after.target == "r2"


async def test_one_that_is_told_to_stop_gives_the_lead_away_at_once(two: Two) -> None:
    await two.until_ordered(1)
    leader = [scheduler.leads for scheduler in two.all].index(True)
    said: list[bytes | None] = []
    await two.bus.watch(wire.LEADER, lambda _, value: said.append(value))
    two.stops[leader].set()
    await soon(lambda: None in said)
    await soon(lambda: two.all[1 - leader].leads)


async def test_a_lead_that_was_taken_by_another_is_noticed(two: Two, nats_server: NatsServer) -> None:
    await two.until_ordered(1)
    leader = two.all[[scheduler.leads for scheduler in two.all].index(True)]
    term = leader._term
    await two.bus.delete(wire.LEADER, scheduler_module.ROLE)
    await soon(lambda: leader._term != term)
    await soon(lambda: sum(scheduler.leads for scheduler in two.all) == 1)
    assert max(scheduler._term for scheduler in two.all) > term


async def test_the_leader_places_models_and_says_how_many_runtimes_there_should_be(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "TICK_S", 0.1)
    said: dict[str, wire.Places] = {}
    wishes: list[wire.Leader] = []

    def placed(key: str, value: bytes | None) -> None:
        if value is None:
            said.pop(key, None)
        else:
            said[key] = wire.decode(wire.Places, value)

    async with Bus.connect(nats_server.url, "s") as theirs, Bus.connect(nats_server.url, "b") as bus:
        stop = asyncio.Event()
        task = asyncio.create_task(Scheduler(theirs, Rules(band=Band(3, 4)), "s").run(stop))
        await bus.watch(wire.PLACES, placed)
        await bus.watch(wire.LEADER, lambda _, value: wishes.append(wire.decode(wire.Leader, value)) if value else None)
        report = asyncio.create_task(_report(bus, lease("r1"), lease("r2")))
        for key in ("m", "n"):
            await bus.put(wire.MODELS, key, wire.replace(spec(key), replicas=1))
        await soon(lambda: {places.runtimes[0] for places in said.values()} == {"r1", "r2"})
        await soon(lambda: wishes[-1].wanted == 3)
        await bus.delete(wire.MODELS, "m")
        await soon(lambda: set(said) == {"n"})
        stop.set()
        await task
        await ended(report)


async def test_who_led_before_and_does_not_know_that_it_does_not_changes_no_places(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "TICK_S", 0.1)
    async with contextlib.AsyncExitStack() as stack:
        bus, *theirs = [await stack.enter_async_context(Bus.connect(nats_server.url, f"b{n}")) for n in range(3)]
        old, new = [Scheduler(each, Rules(), f"s{n}") for n, each in enumerate(theirs)]
        heard: list[wire.Places] = []
        await bus.watch(wire.PLACES, lambda _, value: heard.append(wire.decode(wire.Places, value)) if value else None)
        report = asyncio.create_task(_report(bus, lease("r1")))
        await bus.put(wire.MODELS, "m", wire.replace(spec("m"), replicas=1))
        leading = asyncio.create_task(old.run(asyncio.Event()))
        await soon(lambda: len(heard) == 1)
        (said,) = heard
        await ended(leading)  # the leader stands still, just before a new word
        _, last = await bus.read(wire.PLACES, "m", wire.Places)
        late = wire.Places(runtimes=["r9"], term=old._term)
        assert said.term == old._term > 0

        await bus.delete(wire.LEADER, scheduler_module.ROLE)  # the leader's time is up
        following = asyncio.create_task(new.run(asyncio.Event()))
        await soon(lambda: len(heard) == 2)
        assert heard[1] == wire.replace(said, term=new._term) and new._term > old._term
        assert await theirs[0].swap(wire.PLACES, "m", late, last) is None
        assert old.leads and not await old._say("m", late) and not old.leads
        await soon(lambda: heard[-1] == late)  # a watcher still hears the late word
        assert new._fleet.placing.places["m"].runtimes == ["r1"]
        assert await bus.read(wire.PLACES, "m", wire.Places) == (heard[1], last + 1)
        await ended(following, report)
