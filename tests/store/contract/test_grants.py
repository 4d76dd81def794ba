"""The users of the bus against a real server: every user can do its work; any further act is refused and logged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.ops import bus_users
from store.bus import Bus, BusError
from store.contract import grants, wire
from store.contract.grants import GATEWAY, LEDGER, SCHEDULER, User
from store.contract.limits import Account
from tests.conftest import NatsServer, soon
from tests.store.test_bus import usage

R1, R2 = grants.runtime("r1"), grants.runtime("r2")
EVERYTHING = User("eye", says=(">",), hears=(">",))  # sees every message that got through
USERS = (GATEWAY, SCHEDULER, LEDGER, R1, R2, EVERYTHING)
Connect = Callable[[User], AbstractAsyncContextManager[Bus]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", bus_users.make(tmp_path / "users", USERS))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def connect(server: NatsServer, tmp_path: Path) -> Connect:
    def connected(user: User) -> AbstractAsyncContextManager[Bus]:
        return Bus.connect(server.url, user.name, user, bus_users.seed_file(tmp_path / "users", user))

    return connected


@pytest.fixture
async def buses(connect: Connect) -> AsyncIterator[dict[str, Bus]]:
    """Buses of every user, by name. The gateway comes last: the first user to connect makes the buckets that it
    reads."""
    async with AsyncExitStack() as stack:
        yield {user.name: await stack.enter_async_context(connect(user)) for user in reversed(USERS)}


async def test_each_process_can_do_its_work(buses: dict[str, Bus]) -> None:
    with capture_logs() as said:
        await _serve_a_request(buses["gateway"], buses["runtime-r1"])
        await _move_a_request(buses["scheduler"], buses["runtime-r1"], buses["runtime-r2"])
        await _keep(buses)
        await buses["gateway"].publish_usage(usage("q1"))
        batches = buses["ledger"].usage_batches(grants.BOOKS, 10)
        batch = await anext(batches)
        await batch.ack()
        await batches.aclose()
        assert [usage.request for usage in batch.usages] == ["q1"]
        assert await buses["ledger"].limit_usage(86_400) and await buses["ledger"].replay_usage(grants.BOOKS) == 1
    assert not [entry for entry in said if entry["event"] == "bus.forbidden"]


async def _serve_a_request(gateway: Bus, runtime: Bus) -> None:
    heard: list[str] = []

    async def hear(data: bytes) -> None:
        heard.append(data.decode())

    async def taken(data: bytes) -> wire.Reply:
        return wire.Reply(reason="taken")

    async def repaired(data: bytes) -> wire.Repaired:
        return wire.Repaired(frames=[], complete=True)

    commands = (wire.run_subject, wire.control_subject, wire.drain_subject, wire.role_subject, wire.migrate_subject)
    for command in commands:
        await runtime.respond(command("r1"), taken)
    await runtime.respond(wire.repair_subject("r1"), repaired)
    for subject in (wire.cancel_subject("r1"), wire.GATEWAY_ALIVE):
        await runtime.subscribe(subject, hear)
    await gateway.subscribe(wire.frame_subject("g-1"), hear)
    await asyncio.sleep(0.1)
    for command in commands:
        answer = await gateway.request(command("r1"), wire.Control(model="m", op="wake"))
        assert wire.decode(wire.Reply, answer).reason == "taken"
    wire.decode(wire.Repaired, await gateway.request(wire.repair_subject("r1"), wire.GatewayAlive(gateway="g-1")))
    await gateway.publish(wire.cancel_subject("r1"), b"cancel")
    await gateway.publish(wire.GATEWAY_ALIVE, b"alive")
    await runtime.publish(wire.frame_subject("g-1"), b"frame")
    await soon(lambda: sorted(heard) == ["alive", "cancel", "frame"])


async def _move_a_request(scheduler: Bus, source: Bus, target: Bus) -> None:
    heard: list[bytes] = []

    async def hear(data: bytes) -> None:
        heard.append(data)

    async def taken(data: bytes) -> wire.Reply:
        return wire.Reply()

    for command in (wire.prepare_subject, wire.copy_subject, wire.commit_subject, wire.migrate_subject):
        await target.respond(command("r2"), taken)
    await target.subscribe(wire.abort_move_subject("r2"), hear)
    await source.subscribe(wire.release_subject("r1"), hear)
    await asyncio.sleep(0.1)
    for command in (wire.prepare_subject, wire.copy_subject, wire.commit_subject):
        await source.request(command("r2"), wire.AbortMove(move="m"))
    await scheduler.request(wire.migrate_subject("r2"), wire.Drain(on=True))
    await source.publish(wire.abort_move_subject("r2"), b"")
    await target.publish(wire.release_subject("r1"), b"")
    await soon(lambda: len(heard) == 2)


async def _keep(buses: dict[str, Bus]) -> None:
    """Check the buckets that a user reads and writes."""
    gateway, scheduler, runtime = buses["gateway"], buses["scheduler"], buses["runtime-r1"]
    seen: set[tuple[str, str, str]] = set()

    def watcher(user: str, bucket: str) -> Callable[[str, bytes | None], None]:
        return lambda key, value: seen.add((user, bucket, key))

    await gateway.put(wire.MODELS, "m", wire.GatewayAlive(gateway="g"))
    for user in (GATEWAY, SCHEDULER, R1, R2):
        for bucket in user.reads:
            if bucket != wire.QUOTAS:
                await buses[user.name].watch(bucket, watcher(user.name, bucket))
    await runtime.put(wire.LEASES, "r1", wire.GatewayAlive(gateway="g"))
    await scheduler.put(wire.PLACES, "m", wire.GatewayAlive(gateway="g"))
    assert await scheduler.take_lead("scheduler", "s")
    expected = {(user.name, wire.MODELS, "m") for user in (GATEWAY, SCHEDULER, R1, R2)}
    expected |= {(user.name, wire.LEASES, "r1") for user in (GATEWAY, SCHEDULER, R1, R2)}
    expected |= {(user.name, wire.PLACES, "m") for user in (SCHEDULER, R1, R2)}
    expected |= {(user.name, wire.LEADER, "scheduler") for user in (GATEWAY, SCHEDULER)}
    await soon(lambda: seen == expected)
    await runtime.delete(wire.LEASES, "r1")
    await gateway.delete(wire.MODELS, "m")
    assert await gateway.keys(wire.MODELS) == []
    account, last = await gateway.read(wire.QUOTAS, "t", Account)
    assert account is None and await gateway.swap(wire.QUOTAS, "t", Account(), last)


MAY_NOT_SAY = [
    (R1, "rt.r2.run"),  # prompts to a second runtime
    (R1, "rt.r2.drain"),
    (R1, "rt.r2.migrate"),
    (R1, "rt.r2.cancel"),
    (R1, "alive.gw"),
    (R1, "usage.t"),
    (R1, "$KV.leases.r2"),  # the lease of a second runtime
    (R1, "$KV.models.m"),
    (R1, "$KV.places.m"),
    (R1, "$KV.leader.scheduler"),
    (R1, "$KV.quotas.t"),
    (R1, "_INBOX.gateway.x"),  # an answer to a request never sent to r1
    (R1, "_INBOX.runtime-r2.x"),
    (R1, "$JS.API.STREAM.MSG.GET.KV_quotas"),
    (R1, "$JS.API.STREAM.MSG.GET.USAGE"),
    (R1, "$JS.API.CONSUMER.CREATE.KV_leases"),
    (R1, "$JS.API.STREAM.DELETE.KV_models"),
    (R1, "$JS.API.STREAM.UPDATE.KV_models"),
    (R1, "$JS.API.STREAM.PURGE.KV_models"),
    (R1, "$JS.API.STREAM.CREATE.other"),
    (LEDGER, "rt.r1.run"),
    (LEDGER, "gw.g-1.frames"),
    (LEDGER, "usage.t"),
    (LEDGER, "$KV.quotas.t"),
    (LEDGER, "$JS.API.STREAM.DELETE.USAGE"),
    (LEDGER, "$JS.API.STREAM.PURGE.USAGE"),
    (LEDGER, "$JS.API.CONSUMER.DELETE.USAGE.other"),
    (SCHEDULER, "rt.r1.run"),
    (SCHEDULER, "rt.r1.cancel"),
    (SCHEDULER, "gw.g-1.frames"),
    (SCHEDULER, "usage.t"),
    (SCHEDULER, "$KV.leases.r1"),
    (SCHEDULER, "$KV.models.m"),
    (SCHEDULER, "$KV.quotas.t"),
    (GATEWAY, "gw.g-1.frames"),
    (GATEWAY, "rt.r1.offer"),
    (GATEWAY, "rt.r1.commit"),
    (GATEWAY, "$KV.leases.r1"),
    (GATEWAY, "$KV.places.m"),
    (GATEWAY, "$KV.leader.scheduler"),
    (GATEWAY, "$JS.API.STREAM.DELETE.USAGE"),
    (GATEWAY, "$JS.API.STREAM.PURGE.USAGE"),
    (GATEWAY, "$JS.API.CONSUMER.MSG.NEXT.USAGE.ledger"),
    (GATEWAY, "$JS.API.CONSUMER.DELETE.USAGE.ledger"),
    (GATEWAY, "$JS.ACK.USAGE.ledger.1.1.1.1.0"),
]

MAY_NOT_HEAR = [
    (R1, ">"),
    (R1, "rt.r2.run"),
    (R1, "rt.*.run"),
    (R1, "gw.g-1.frames"),
    (R1, "usage.*"),
    (R1, "$KV.quotas.>"),
    (R1, "_INBOX.>"),
    (R1, "_INBOX.gateway.>"),
    (R1, "_INBOX.runtime-r2.>"),
    (LEDGER, "usage.*"),  # the ledger takes usage from JetStream
    (LEDGER, "rt.r1.run"),
    (LEDGER, "gw.*.frames"),
    (SCHEDULER, "rt.*.run"),
    (SCHEDULER, "gw.*.frames"),
    (SCHEDULER, "usage.*"),
    (SCHEDULER, "_INBOX.gateway.>"),
    (GATEWAY, "rt.r1.run"),
    (GATEWAY, "usage.*"),
    (GATEWAY, "_INBOX.runtime-r1.>"),
    (GATEWAY, "$JS.API.>"),
]


@pytest.mark.parametrize("user", (GATEWAY, SCHEDULER, LEDGER, R1), ids=lambda user: user.name)
async def test_what_is_not_its_work_is_refused_and_logged(buses: dict[str, Bus], user: User) -> None:
    forged: list[bytes] = []
    overheard: list[bytes] = []

    async def hear(data: bytes) -> None:
        overheard.append(data)

    async def see(data: bytes) -> None:
        if data == b"forged":
            forged.append(data)

    bus = buses[user.name]
    with capture_logs() as said:
        says = [subject for name, subject in MAY_NOT_SAY if name == user]
        for subject in says:
            await buses["eye"].subscribe(subject, see)
        hears = [subject for name, subject in MAY_NOT_HEAR if name == user]
        for subject in hears:
            await bus.subscribe(subject, hear)
        await asyncio.sleep(0.1)
        for subject in says:
            await bus.publish(subject, b"forged")
        for subject in hears:
            await buses["eye"].publish(subject.replace("*", "x").replace(">", "x"), b"for others")
        await soon(lambda: len(_forbidden(said, user)) >= len(says) + len(hears))
    assert (forged, overheard) == ([], [])
    for subject in says:
        assert any(f'publish to "{subject.lower()}"' in error for error in _forbidden(said, user)), subject
    for subject in hears:
        assert any(f'subscription to "{subject.lower()}"' in error for error in _forbidden(said, user)), subject


def _forbidden(said: list[dict[str, object]], user: User) -> list[str]:
    return [
        str(entry["error"]).lower()
        for entry in said
        if (entry["event"], entry["log_level"], entry.get("user")) == ("bus.forbidden", "error", user.name)
    ]


async def test_a_runtime_answers_a_request_once(buses: dict[str, Bus]) -> None:
    """Otherwise a runtime could go on to speak for further runtimes in the asker's inbox."""
    runtime, answers = buses["runtime-r1"], []

    async def twice(message: object) -> None:
        for _ in range(2):
            await message.respond(b"answer")  # type: ignore[attr-defined]

    async def hear(data: bytes) -> None:
        answers.append(data)

    await runtime._client.subscribe("rt.r1.run", cb=twice)
    await buses["gateway"].subscribe(f"{GATEWAY.inbox}.mine", hear)
    await asyncio.sleep(0.1)
    with capture_logs() as said:
        await buses["gateway"]._client.publish("rt.r1.run", b"", reply=f"{GATEWAY.inbox}.mine")
        await soon(lambda: bool(_forbidden(said, R1)))
    assert answers == [b"answer"]


async def test_a_stream_that_is_there_is_not_made_anew_in_another_form(buses: dict[str, Bus]) -> None:
    """Every reader of a bucket may make the bucket. A later reader does not change the bucket."""
    runtime = buses["runtime-r1"]._js
    with pytest.raises(Exception, match="already in use"):
        await runtime.add_stream(name="KV_models", subjects=["$KV.models.>", "rt.>"])


@pytest.mark.parametrize("stranger", (User("stranger"), GATEWAY), ids=lambda user: user.name)
async def test_nobody_is_let_in_without_a_key_that_the_server_knows(
    server: NatsServer, tmp_path: Path, stranger: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.bus.CONNECT_TIMEOUT_S", 2.0)
    bus_users.make(tmp_path / "others", [stranger])
    for file in (None, bus_users.seed_file(tmp_path / "others", stranger)):
        with pytest.raises(BusError, match=f"refuses the user {stranger.name}: set STACCATO_NATS_CREDENTIALS"):
            async with Bus.connect(server.url, "x", stranger, file):
                pass


async def test_a_missing_file_is_named(server: NatsServer, tmp_path: Path) -> None:
    with pytest.raises(BusError, match=f"STACCATO_NATS_CREDENTIALS={tmp_path}/none.nk: No such file"):
        async with Bus.connect(server.url, "x", LEDGER, tmp_path / "none.nk"):
            pass


def test_seeds_are_for_their_owner_alone_and_stay(tmp_path: Path) -> None:
    block = bus_users.make(tmp_path / "users", USERS)
    assert bus_users.make(tmp_path / "users", USERS) == block
    assert (tmp_path / "users").stat().st_mode & 0o777 == 0o700
    seeds = {file.name: file.read_text().strip() for file in (tmp_path / "users").iterdir()}
    assert sorted(seeds) == sorted(f"{user.name}.nk" for user in USERS)
    assert all((tmp_path / "users" / name).stat().st_mode & 0o777 == 0o600 for name in seeds)
    assert not any(seed in block for seed in seeds.values())
