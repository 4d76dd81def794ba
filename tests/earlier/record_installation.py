"""Makes `installation-71e32b0.tar.xz` and the record beside the archive, from a run of 71e32b0 that ends by SIGKILL.

    git worktree add ../old 71e32b0 && make -C ../old/csrc
    python -m tests.earlier.record_installation ../old

From the middle of the run on, the ledger sleeps, so that JetStream holds usage that no ledger has read. The device
sleeps in mid-stream, for longer than the gateway's period of checkpoints. At last SIGKILL ends every process, while
streams run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil

from gateway.inference.meter import UsageJournal
from store.bus import Bus
from store.contract import grants, wire
from tests.conftest import free_port
from tests.e2e.conftest import AWAKE, Platform
from tests.earlier.installation import ARCHIVE, JOURNAL, MODELS, RECORD, TENANT, Installation, Sent, asked

PROMPT_PICO, OUTPUT_PICO = 1_000_000, 3_000_000
CREDIT_MINOR = -1250
KEPT = ("pepper", "staccato.db", "staccato.db-wal", "nats", JOURNAL)
BOOKED = (("faq", "What is a turn?"), ("weather", "How is the weather in Oslo?"))
STORED = (("faq", "What is scale to zero?"), ("weather", "How is the weather in Rome?"), ("faq", "What is Staccato?"))
BEGUN = (("faq", "Explain a turn to me."), ("weather", "How is the weather in Paris?"), ("faq", "What does it cost?"))
YOUNG = (("weather", "How is the weather in Berlin?"), ("faq", "Why is it called Staccato?"))
TORN = {"ignore_eos": True, "max_tokens": 900}


def record(old: Path) -> None:
    """Run the tree at `old`, and write the archive and the record.

    Raises AssertionError if a kill hit the gateway between a write to a client and the count of the write, so that the
    journal does not say what clients were sent: then the run must be repeated."""
    with tempfile.TemporaryDirectory() as folder:
        platform = Platform(Path(folder) / "data", free_port(), {"PYTHONPATH": str(old)})
        try:
            found = run(platform, old / "deploy" / "demo" / "models")
        finally:
            if platform.process is not None and platform.process.poll() is None:
                kill(platform)
        agree(platform.data, found)
        text = msgspec.json.format(msgspec.json.encode(found), indent=1)
        RECORD.write_bytes(re.sub(rb"\s+(?=\d+,?\n)", b" ", text) + b"\n")  # the tokens of an answer in a line
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for name in KEPT:
                archive.add(platform.data / name, name, filter=anonymous)


def run(platform: Platform, models: Path) -> Installation:
    """Ask every question, and kill the platform in mid-stream. Returns what clients were sent."""
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    prepare(platform, models)
    key = platform.keys[TENANT]
    booked, stored, begun, young = ([Sent(*asking) for asking in group] for group in (BOOKED, STORED, BEGUN, YOUNG))
    with asked(platform.url, key, booked):
        pass
    platform.until(lambda: platform.usage(TENANT)["requests"] == len(booked))
    time.sleep(1)  # the ledger acknowledges
    platform.child("store.ledger").suspend()
    with asked(platform.url, key, stored):
        pass
    with asked(platform.url, key, begun, **TORN):
        with frozen(platform, begun):
            messages = len(booked) + len(stored) + len(begun)
            platform.until(lambda: asyncio.run(stored_messages(platform)) >= messages)
        with asked(platform.url, key, young, **TORN):
            platform.until(lambda: all(len(sent.tokens) >= 40 for sent in young))
            kill(platform)
    return Installation(key, started_at, "USD", PROMPT_PICO, OUTPUT_PICO, CREDIT_MINOR, booked, stored, begun, young)


def prepare(platform: Platform, models: Path) -> None:
    """Start the platform with a tenant, a price, a credit and deployed copies of the models."""
    neutral = platform.data.parent / "models"
    for name in MODELS:
        shutil.copytree(models / name, neutral / name)
    platform.start()
    platform.tenant(TENANT)
    limits = {"monthly_budget": {"amount": "1000"}}
    platform.request("PATCH", f"/api/v1/tenants/{TENANT}", {"limits": limits}).raise_for_status()
    platform.post("/api/v1/prices", {"currency": "USD", "prompt_pico": PROMPT_PICO, "output_pico": OUTPUT_PICO})
    correction = {"tenant": TENANT, "amount_minor": CREDIT_MINOR, "reason": "a credit of the earlier version"}
    headers = {"authorization": f"Bearer {platform.admin_key}", "idempotency-key": "credit-1"}
    httpx.post(f"{platform.url}/api/v1/billing/corrections", json=correction, headers=headers).raise_for_status()
    for name in MODELS:
        platform.model(name, neutral / name)
        assert platform.deploy(TENANT, name, **AWAKE)["status"]["phase"] == "awake"


@contextlib.contextmanager
def frozen(platform: Platform, streams: list[Sent]) -> Iterator[None]:
    """Stop the device once each of `streams` has tokens; the device goes on after the context."""
    platform.until(lambda: all(len(sent.tokens) >= 20 for sent in streams))
    device = platform.child("runtime.device")
    device.suspend()
    yield
    device.resume()


async def stored_messages(platform: Platform) -> int:
    """Number of usage messages in JetStream."""
    url = f"nats://127.0.0.1:{(platform.data / 'nats.port').read_text().strip()}"
    seed = platform.data / "nats-users" / "ledger.nk"
    async with Bus.connect(url, "recorder", grants.LEDGER, seed) as bus:
        return (await bus._js.stream_info(wire.USAGE_STREAM)).state.messages


def kill(platform: Platform) -> None:
    """SIGKILL for every process, the gateway first. The supervisor sleeps meanwhile, and so starts no process again."""
    assert platform.process is not None
    up = psutil.Process(platform.process.pid)
    gateway, others = platform.children("gateway.app"), up.children(recursive=True)
    up.suspend()
    for process in (*gateway, *others, up):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(others, 30)
    platform.process.wait(30)


def agree(data: Path, found: Installation) -> None:
    """Assert that the journal has a slot for each torn stream, with the tokens that the client was sent."""
    copy = data.with_name("copy.journal")
    shutil.copy(data / JOURNAL, copy)
    journal = UsageJournal(copy)
    counted = {call.opened.request: call.output_tokens for call in journal.left_behind()}
    journal.close()
    assert counted == {sent.request: len(sent.tokens) for sent in found.torn}, counted
    assert all(sent.ended for sent in found.whole) and not any(sent.ended for sent in found.torn)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The member without the recording user."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of 71e32b0 with its memory library built")
    record(parser.parse_args().old.resolve())
