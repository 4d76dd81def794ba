"""Blocks sent between hosts by TLS arrive unchanged and unread, and a node refuses strangers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.ops import certificates
from runtime.config import RuntimeSettings
from runtime.migration import nixl, transport
from runtime.migration.receiver import BlockReceiver
from runtime.migration.tls import Security
from runtime.migration.transport import NotMoved, Tcp
from store.contract.wire import KvForm
from tests.conftest import soon
from tests.runtime.hosts import Fault, HostCache, Network, host_caches
from tests.runtime.migration.test_transport import SMALL, TOKENS_MOST, _carry_all, in_time


def security_in(folder: Path, name: str = "runtime-r1") -> Security:
    certificates.make(folder, [name], [])
    return Security.load(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Security, Security]:
    """Certificates of r1 and r2, signed by a common authority."""
    folder = tmp_path_factory.mktemp("ours")
    return security_in(folder, "runtime-r1"), security_in(folder, "runtime-r2")


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Security:
    """A certificate signed by a strange authority."""
    return security_in(tmp_path_factory.mktemp("strange"))


@contextlib.asynccontextmanager
async def opened(target: HostCache, security: Security | None) -> AsyncIterator[BlockReceiver]:
    """Open a door to the host cache `target`; at the end, check that no peer is inside and no byte is taken."""
    door = BlockReceiver(target.blocks, security=security)
    door.open("127.0.0.1")
    yield door
    await soon(lambda: not door._serving)
    await door.close()
    assert target.taken() == target.blocks.taken_bytes == 0 and not door._expected and not door._strangers


# ── what arrives ──────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30)
@given(
    block_bytes=st.sampled_from([5000, 65536, 500_000]),
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    parcel_bytes=st.sampled_from([1, 100_000, 4 << 20]),
    seed=st.integers(0, 1 << 20),
)
def test_blocks_arrive_by_tls_as_they_were(
    ours: tuple[Security, Security], block_bytes: int, counts: list[int], parcel_bytes: int, seed: int
) -> None:
    rng, form = random.Random(seed), KvForm(16, block_bytes, "any")

    async def move(source: HostCache, target: HostCache) -> None:
        blocks = source.put(sum(counts), block_bytes, rng)
        async with opened(target, ours[1]) as door:
            path = Tcp(source.blocks, door.address, block_bytes, ours[0])
            arrival = door.expect(path.key, form, TOKENS_MOST)
            there: list[int] = []
            for count in counts:
                there += await path.carry(len(there), blocks[len(there) : len(there) + count])
            assert target.bytes_of(there, block_bytes) == source.bytes_of(blocks, block_bytes)
            assert arrival.has(0, there)
            path.close()
            await door.free(arrival)
        source.drop(blocks, block_bytes)

    with pytest.MonkeyPatch.context() as patch, host_caches() as (source, target):
        patch.setattr(transport, "PARCEL_BYTES", parcel_bytes)
        in_time(move(source, target))


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["cut", "flip", "stall"]),
    back=st.booleans(),
    at=st.one_of(st.integers(0, 4000), st.integers(0, 60_000)),
    times=st.sampled_from([1, 99]),
    cancelled=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_whatever_the_network_does_to_tls_blocks_arrive_whole_or_nothing_is_left(
    ours: tuple[Security, Security], kind: str, back: bool, at: int, times: int, cancelled: bool, seed: int
) -> None:
    rng = random.Random(seed)

    async def move(source: HostCache, target: HostCache) -> None:
        blocks = source.put(8, SMALL.bytes, rng)
        async with opened(target, ours[1]) as door, Network(door.address, Fault(kind, back, at), times) as address:
            path = Tcp(source.blocks, address, SMALL.bytes, ours[0])
            arrival = door.expect(path.key, SMALL, TOKENS_MOST)
            there: list[int] = []
            carrying = asyncio.ensure_future(_carry_all(path, blocks, there))
            if cancelled:
                await asyncio.sleep(rng.random() * 0.01)
                carrying.cancel()
            with contextlib.suppress(NotMoved, asyncio.CancelledError):
                await carrying
            if arrival.has(0, there):  # a block that never arrived is not read by the target's node
                sent = source.bytes_of(blocks[: len(there)], SMALL.bytes)
                assert target.bytes_of(there, SMALL.bytes) == sent
            path.close()
            await door.free(arrival)
        source.drop(blocks, SMALL.bytes)

    with pytest.MonkeyPatch.context() as patch, host_caches() as (source, target):
        for name, value in {"PARCEL_BYTES": 12_000, "PARCEL_S": 0.2, "ROOM_S": 0.3, "HELLO_S": 0.3}.items():
            patch.setattr(transport, name, value)
        in_time(move(source, target))


@pytest.mark.parametrize("secured", [False, True])
async def test_who_listens_on_the_network_reads_blocks_without_tls_and_not_with_tls(
    ours: tuple[Security, Security], secured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = bytearray()
    passed = asyncio.StreamWriter.write

    def listening(self: asyncio.StreamWriter, data: bytes) -> None:
        heard.extend(data)
        passed(self, data)

    monkeypatch.setattr(asyncio.StreamWriter, "write", listening)
    with host_caches() as (source, target):
        blocks = source.put(1, SMALL.bytes, random.Random(1))
        (content,) = source.bytes_of(blocks, SMALL.bytes)
        nothing = Fault("cut", False, 1 << 40)
        async with (
            opened(target, ours[1] if secured else None) as door,
            Network(door.address, nothing) as address,
        ):
            path = Tcp(source.blocks, address, SMALL.bytes, ours[0] if secured else None)
            arrival = door.expect(path.key, SMALL, TOKENS_MOST)
            await path.carry(0, blocks)
            path.close()
            await door.free(arrival)
        source.drop(blocks, SMALL.bytes)
    assert (content[:64] in heard) == (path.key in heard) == (not secured)


# ── who is not listened to ────────────────────────────────────────────────────────────────────────────────────────────


async def refused(shown: Security | None, asked: Security | None) -> tuple[str, str]:
    """Carry blocks from a source with the certificate `shown` to a target that asks for `asked`; None is plain TCP.

    Returns the error of the source, and the errors logged by the target."""
    with host_caches() as (source, target), capture_logs() as logs:
        blocks = source.put(1, SMALL.bytes, random.Random(1))
        async with opened(target, asked) as door:
            path = Tcp(source.blocks, door.address, SMALL.bytes, shown)
            arrival = door.expect(path.key, SMALL, TOKENS_MOST)
            with pytest.raises(NotMoved) as found:
                await path.carry(0, blocks)
            path.close()
            assert arrival.connection is None and not arrival.host and target.blocks._images is None
            await door.free(arrival)
        source.drop(blocks, SMALL.bytes)
    return str(found.value), " ".join(log["error"] for log in logs if log["event"] == "transport.not_secured")


async def test_a_target_of_another_authority_is_refused(ours: tuple[Security, Security], strange: Security) -> None:
    said, _ = await refused(ours[0], strange)
    assert "no TLS with" in said and "CERTIFICATE_VERIFY_FAILED" in said and "of the same authority" in said


async def test_a_source_of_another_authority_is_refused(ours: tuple[Security, Security], strange: Security) -> None:
    believing = Security(strange.accepting, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    believing.connecting.check_hostname, believing.connecting.verify_mode = False, ssl.CERT_NONE
    said, logged = await refused(believing, ours[1])
    assert said and "takes blocks by TLS of its authority alone" in logged


async def test_a_source_without_tls_is_refused_and_told_why(ours: tuple[Security, Security]) -> None:
    said, logged = await refused(None, ours[1])
    assert "takes blocks by TLS" in logged
    assert "if it takes blocks by TLS, give this runtime STACCATO_TRANSPORT_TLS_CERT" in said


async def test_a_target_without_tls_is_refused_and_told_why(ours: tuple[Security, Security]) -> None:
    said, logged = await refused(ours[0], None)
    assert "no TLS with" in said and "both runtimes need STACCATO_TRANSPORT_TLS_CERT" in said
    assert "a peer speaks TLS, and this runtime lacks STACCATO_TRANSPORT_TLS_CERT" in logged


async def test_strangers_that_do_not_shake_hands_are_few_and_leave_soon(
    ours: tuple[Security, Security], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HELLO_S", 0.5)
    with host_caches(1) as (target,):
        async with opened(target, ours[1]) as door:
            connections = [socket.create_connection(transport.split(door.address)) for _ in range(50)]
            await soon(lambda: door._strangers == transport.STRANGERS_MOST)
            await soon(lambda: door._strangers == 0)
            for connection in connections:
                connection.close()


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_blocks_cross_hosts_by_tls_unless_a_setting_says_plaintext(tmp_path: Path) -> None:
    certificates.make(tmp_path, ["runtime-r1"], [])
    files = {"cert": "runtime-r1.crt", "key": "runtime-r1.key", "ca": "ca.crt"}
    secured = {f"transport_tls_{part}": tmp_path / name for part, name in files.items()}
    abroad: list[dict[str, object]] = [
        {"transport_bind": "10.0.0.7"},
        {"transport_bind": "0.0.0.0", "transport_advertise": "gpu7.example.com"},
        {"transport_bind": "10.0.0.7", "transport_advertise": "localhost"},
    ]
    for said in abroad:
        with pytest.raises(ValueError, match=r"without TLS at .*: give STACCATO_TRANSPORT_TLS_CERT.*_PLAINTEXT=true"):
            RuntimeSettings(**said).check()  # type: ignore[arg-type]
        RuntimeSettings(**said, transport_plaintext=True).check()  # type: ignore[arg-type]
        RuntimeSettings(**said, **secured).check()  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="give all of STACCATO_TRANSPORT_TLS_CERT"):
            RuntimeSettings(**said, transport_tls_cert=secured["transport_tls_cert"]).check()  # type: ignore[arg-type]
    RuntimeSettings().check()
    RuntimeSettings(transport_bind="::1").check()


def test_nixl_between_hosts_has_to_be_allowed_in_plaintext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "installed", lambda: True)
    said = {"transport": "nixl", "transport_bind": "10.0.0.7"}
    with pytest.raises(ValueError, match="NIXL encrypts nothing"):
        RuntimeSettings(**said).check()  # type: ignore[arg-type]
    RuntimeSettings(**said, transport_plaintext=True).check()  # type: ignore[arg-type]


def test_certificates_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    certificates.make(tmp_path, ["runtime-r1", "runtime-r2"], [])
    for cert, key in (("runtime-r1.crt", "runtime-r2.key"), ("none.crt", "runtime-r1.key"), ("ca.crt", "ca.crt")):
        with pytest.raises(ValueError, match="can't be used .*nats-users"):
            Security.load(tmp_path / cert, tmp_path / key, tmp_path / "ca.crt")
