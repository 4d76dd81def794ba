"""Decisions of a device are decided again, byte for byte, from the journal: by a second machine in a second process."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deploy.demo.random_weights import write_random
from runtime.config import RuntimeSettings
from runtime.core.device.events import Arrived, Cancelled, Placed, Stepped
from runtime.core.device.instance import Instance
from runtime.core.device.pages import Pages
from runtime.core.device.request import ModelKey, Request, request_id
from runtime.core.engine import Output
from runtime.core.ledgers.costs import ModelCosts, model_size, unknown
from runtime.core.ledgers.device_time import DeviceTime
from runtime.core.turns.registry import POLICIES
from runtime.core.turns.turn import RoundRobin, Turns
from runtime.device.journal import (
    AnswerRecord,
    BeginRecord,
    CostsRecord,
    DecideRecord,
    DecisionJournal,
    EventRecord,
    Record,
    Recorded,
    event_of,
    read,
)
from runtime.sim.replay import NO_ANSWER, ReplayReport, compare, replay
from store.contract.kv_curve import KeptLayers, LayerKind
from store.contract.wire import EngineSpec
from store.files.records import appended
from tests.conftest import ROOT, NatsServer
from tests.runtime.core.device import test_instance_any_order
from tests.runtime.devices import Driven, Kept, Script, kept
from tests.runtime.engines import awake
from tests.runtime.engines import spec as real_spec
from tests.runtime.world import PAGE_BYTES, World, request, spec

SHORT = {"short": lambda: RoundRobin(2)}  # short turns lead to many decisions
PAGES_TOTAL = 10
BEGIN = BeginRecord("slack", 1, 1)
NIL, NOTHING = msgspec.Raw(b"\xc0"), AnswerRecord(msgspec.Raw(b"\x90"))


class Asking:
    """A machine whose questions are written into a journal; in every other respect the real machine."""

    def __init__(self, turns: Turns, journal: DecisionJournal, account: DeviceTime) -> None:
        self._machine = Instance(turns, Pages(PAGES_TOTAL, PAGE_BYTES), journal.noting(guess), account)
        recorded = Recorded(self._machine, journal)
        self.hear, self.decide = recorded.hear, recorded.decide

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


def guess(spec: EngineSpec) -> ModelCosts:
    return unknown(model_size(spec))


def written_by(
    world: World, policy: str, policies: Mapping[str, Callable[[], Turns]], file: io.BytesIO
) -> DecisionJournal:
    """From now on, write questions to the world's machine into a journal. Returns the journal."""
    journal = DecisionJournal(file, BeginRecord(policy, PAGES_TOTAL, PAGE_BYTES))
    world.instance = Asking(policies[policy](), journal, world.account)  # type: ignore[assignment]
    return journal


def a_day(file: io.BytesIO, world: World | None = None, rounds: int = 3) -> World:
    """Run three models on pages for two models, with some requests and a cancel, and write the journal into `file`."""
    world = world or World(PAGES_TOTAL, {"a": 3, "b": 3, "c": 4})
    written_by(world, "short", SHORT, file)
    for key in "abc":
        world.hear(Placed(spec(key)))
    world.settle()
    for stream in range(3 * rounds):
        asked = replace_payload(request(stream, "abc"[stream % 3], world.now))
        world.open.add(asked.id)
        world.hear(Arrived(asked))
        if stream == 4:
            world.open.discard(asked.id)
            world.hear(Cancelled([asked.id]))
    world.settle(1000)
    return world


def replace_payload(request: Request, payload: bytes = b"what is asked") -> Request:
    request.payload = payload
    return request


def records(data: bytes) -> list[Record]:
    return list(read(io.BytesIO(data)))


def file_of(data: list[Record]) -> bytes:
    file = io.BytesIO()
    first, *others = data
    assert isinstance(first, BeginRecord)
    journal = DecisionJournal(file, first)
    for record in others:
        journal.write(record)
    return file.getvalue()


@cache
def written() -> bytes:
    file = io.BytesIO()
    a_day(file)
    return file.getvalue()


@pytest.fixture
def day() -> bytes:
    return written()


# ── it says the same again ────────────────────────────────────────────────────────────────────────────────────────────


class AnyOrderRecorded(test_instance_any_order.AnyOrder):
    """Any order of events can be replayed from the journal."""

    policy: str

    def __init__(self) -> None:
        super().__init__()
        self.file = io.BytesIO()
        written_by(self.world, self.policy, POLICIES, self.file)

    def teardown(self) -> None:
        super().teardown()
        report = compare(read(io.BytesIO(self.file.getvalue())))
        assert report.difference is None and report.runs == 1, str(report.difference)


for _policy in POLICIES:
    _recorded = type(f"AnyOrderRecorded_{_policy}", (AnyOrderRecorded,), {"policy": _policy})
    _recorded.TestCase.settings = settings(max_examples=10, stateful_step_count=40)
    globals()[f"TestAnyOrderRecorded_{_policy.replace('-', '_')}"] = _recorded.TestCase
del _recorded


def test_all_that_was_asked_is_compared(day: bytes) -> None:
    report = compare(records(day), SHORT)
    asked = [record for record in records(day) if isinstance(record, DecideRecord)]
    heard = [record for record in records(day) if isinstance(record, EventRecord)]
    assert report == ReplayReport(runs=1, heard=len(heard), asked=len(asked))
    assert len(asked) > 50 and len(heard) > 50


@given(data=st.data())
@settings(max_examples=50)
def test_one_decision_that_was_changed_is_found(data: st.DataObject) -> None:
    day = records(written())
    places = [place for place, record in enumerate(day) if isinstance(record, AnswerRecord)]
    place = data.draw(st.sampled_from(places))
    effects = msgspec.msgpack.decode(day[place].effects)  # type: ignore[union-attr]
    changed = effects[:-1] if effects else [["Step", "a", 1]]
    day[place] = AnswerRecord(msgspec.Raw(msgspec.msgpack.encode(changed)))
    difference = compare(records(file_of(day)), SHORT).difference
    assert difference is not None
    assert (difference.record, difference.recorded, difference.replayed) == (place + 1, str(changed), str(effects))
    question = next(record for record in reversed(day[:place]) if isinstance(record, EventRecord | DecideRecord))
    assert difference.now == question.now


def test_another_policy_decides_otherwise(day: bytes) -> None:
    assert compare(records(day), {"short": lambda: RoundRobin(3)}).difference is not None


def test_the_costs_that_were_told_are_told_again() -> None:
    """Costs are part of the journal: a journal can be replayed without the profile."""
    file = io.BytesIO()
    world = World(PAGES_TOTAL, {"a": 3})
    journal = written_by(world, "slack", POLICIES, file)
    slow = replace(guess(spec("a")), step_s=7.0)
    Instance(RoundRobin(), Pages(1, 1), journal.noting(lambda spec: slow)).hear(Placed(spec("a")), 0.0)
    told = [record.told() for record in records(file.getvalue()) if isinstance(record, CostsRecord)]
    assert told == [slow]


# ── prompts and completions reach no file ─────────────────────────────────────────────────────────────────────────────


class Secret(NamedTuple):
    payload: bytes
    token: int
    logprobs: bytes | None
    stop_reason: int | str | None


SECRETS = st.builds(
    Secret,
    st.binary(max_size=50),
    st.integers(0, 1 << 40),
    st.none() | st.binary(max_size=50),
    st.none() | st.integers(0, 1 << 40) | st.text(max_size=20),
)


class Telling(World):
    """A world whose engines say only the secret."""

    def __init__(self, secret: Secret) -> None:
        super().__init__(PAGES_TOTAL, {"a": 3, "b": 3, "c": 4})
        self.secret = secret
        self.refuses = {request_id("g", 2)}

    def _step(self, *arguments: Any) -> Stepped:
        stepped = super()._step(*arguments)
        return replace(stepped, outputs=[self._said(output) for output in stepped.outputs])

    def _said(self, output: Output) -> Output:
        _, token, logprobs, stop_reason = self.secret
        return replace(output, tokens=[token] * len(output.tokens), logprobs=logprobs, stop_reason=stop_reason)

    def _hear(self, event: Any) -> None:
        if isinstance(event, Arrived):
            replace_payload(event.request, self.secret.payload)
        super()._hear(event)


def day_of(secret: Secret) -> bytes:
    file = io.BytesIO()
    a_day(file, Telling(secret), rounds=1)
    return file.getvalue()


@given(SECRETS, SECRETS)
@settings(max_examples=30)
def test_what_was_asked_and_said_changes_no_byte_of_the_file(one: Secret, other: Secret) -> None:
    assert day_of(one) == day_of(other)


def test_no_token_no_payload_and_no_sentence_about_a_request_is_in_the_file() -> None:
    secret = Secret(b"THE PROMPT", 0x7BADCAFE, b"THE LOGPROBS", "THE STOP")
    data = day_of(secret)
    for part in (b"THE", secret.token.to_bytes(4, "big"), b"too long"):
        assert part not in data
    outputs = [
        o for r in records(data) if isinstance(r, EventRecord) and r.kind == "Stepped" for o in event_of(r).outputs
    ]  # type: ignore[union-attr]
    assert outputs and {token for output in outputs for token in output.tokens} == {0}


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    with appended(tmp_path / "r1.journal") as file:
        DecisionJournal(file, BeginRecord("slack", 1, 1))
    assert (tmp_path / "r1.journal").stat().st_mode & 0o777 == 0o600


# ── files that end ────────────────────────────────────────────────────────────────────────────────────────────────────


@given(share=st.floats(0, 1))
@settings(max_examples=50)
def test_a_file_that_ends_anywhere_is_replayed_up_to_there(share: float) -> None:
    report = compare(records(written()[: int(len(written()) * share)]), SHORT)
    assert report.difference is None


def test_a_full_journal_says_so_once_and_is_whole(day: bytes) -> None:
    file = io.BytesIO()
    with structlog.testing.capture_logs() as said:
        journal = DecisionJournal(file, BeginRecord("short", PAGES_TOTAL, PAGE_BYTES), bytes_most=len(day) // 2)
        for record in records(day)[1:]:
            journal.write(record)
    assert [line["event"] for line in said] == ["journal.stopped"]
    assert f"{len(day) // 2} bytes" in said[0]["reason"]
    assert day.startswith(file.getvalue()) and len(day) // 2 - 200 < len(file.getvalue()) <= len(day) // 2
    assert compare(records(file.getvalue()), SHORT).difference is None


class FullDisk(io.BytesIO):
    """A file with room for `room` bytes more. If bytes do not fit, the disk writes a part (`partly`) or nothing."""

    def __init__(self, room: int, partly: bool) -> None:
        super().__init__()
        self.room, self.partly = room, partly

    def write(self, data: Any) -> int:
        if len(data) <= self.room:
            self.room -= len(data)
        elif self.partly:
            data = data[: self.room]
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("partly", [False, True])
def test_a_full_disk_costs_the_rest_of_the_journal_and_nothing_else(day: bytes, partly: bool) -> None:
    file = FullDisk(2000, partly)
    with structlog.testing.capture_logs() as said:
        world = a_day(file)
    assert not world.open, "requests are served as ever"
    assert [line["event"] for line in said] == ["journal.stopped"]
    assert "free some space" in said[0]["reason"]
    assert day.startswith(file.getvalue()) and len(file.getvalue()) > 1500
    assert compare(records(file.getvalue()), SHORT).difference is None


def test_a_device_that_is_started_again_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "r1.journal"
    for _ in range(2):
        with appended(path) as file:
            asking = Asking(
                POLICIES["slack"](),
                DecisionJournal(file, BeginRecord("slack", PAGES_TOTAL, PAGE_BYTES)),
                DeviceTime.open(0.0),
            )
            asking.hear(Placed(spec("a")), 1.0)
            asking.decide(2.0)
    assert replay(path) == ReplayReport(runs=2, heard=2, asked=2)


def test_the_question_over_which_the_machine_stumbled_is_in_the_journal_and_it_stumbles_again(day: bytes) -> None:
    file = io.BytesIO()
    world = a_day(file)
    with pytest.raises(KeyError):
        world.instance.hear(Stepped(ModelKey("nobody"), [], False, world.instance.pages.of(ModelKey("a")), 0.1), 99.0)
    for more in (b"", day):  # the journal ends there, or is started anew
        difference = compare(records(file.getvalue() + more), SHORT).difference
        assert difference is not None
        assert (difference.now, difference.recorded) == (99.0, NO_ANSWER)
        assert difference.replayed == "KeyError: 'nobody'" and "nobody" in difference.question


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{'some': 'text', 'of': 'another kind'}", "at byte 0 a record of"),
        (b"\x03\x00\x00\x00abc", "the record at byte 0"),
        (file_of([BeginRecord("slack", 1, 1), DecideRecord(1.0)])[4 + len(msgspec.msgpack.encode(BEGIN)) :], "began"),
        (file_of([BeginRecord("slack", 1, 1, version=99)]), "a journal of version 99, and version 1 is read"),
        (file_of([BeginRecord("wishful", 1, 1)]), "turn policy 'wishful'"),
        (file_of([BeginRecord("slack", 1, 1), EventRecord(1.0, "Rumoured", NIL), NOTHING]), "Rumoured"),
        (file_of([BeginRecord("slack", 1, 1), NOTHING]), "record 2 of the journal answers nothing"),
    ],
)  # fmt: skip
def test_what_is_no_journal_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compare(records(data))


# ── the real thing ────────────────────────────────────────────────────────────────────────────────────────────────────

PAGE = 2 << 20
POOL_PAGES, HOST_BYTES = 6, 256 << 20
OPEN_MOST, REQUESTS = 8, 60
SHAPES: dict[str, dict[str, Any]] = {
    "llama": dict(architecture="llama", layers=4, heads=4, kv_heads=2),
    "qwen3": dict(architecture="qwen3", layers=3, heads=4, kv_heads=4),
    "opt": dict(architecture="opt", layers=2),
}
ASKED: list[dict[str, Any]] = [
    dict(prompt=[44, 301, 17], temperature=0, max_tokens=30),
    dict(prompt=[5, 6] * 90, temperature=0, max_tokens=40),
    dict(prompt=[9, 10, 11] * 40, temperature=1.0, seed=7, max_tokens=30),
    dict(prompt=[12, 13], temperature=0.7, seed=3, repetition_penalty=1.3, max_tokens=20),
]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[EngineSpec]:
    folder = tmp_path_factory.mktemp("journalled")
    paths = [write_random(folder / name, **shape) for name, shape in SHAPES.items()]
    return [replace(real_spec(path), weight_bytes=4 << 20, kv_bytes_per_token=2048) for path in paths]


@pytest.fixture(scope="module")
def engines() -> Iterator[Kept]:
    with kept(POOL_PAGES * PAGE, HOST_BYTES) as engines:
        yield engines


@pytest.fixture
def build(engines: Kept) -> Iterator[Kept]:
    """The engines, after which no test meets what a failed test left behind."""
    yield engines
    engines.settle()


def crowd(driven: Driven, rng: random.Random) -> Script:
    """A script: requests come one by one while earlier requests are served; some clients go away."""
    yield lambda: True, driven.place()
    yield driven.placed, []
    for _ in range(REQUESTS):
        start = driven.start(rng.choice(list(driven.specs)), rng.choice(ASKED))
        yield lambda: len(driven.open) <= OPEN_MOST and rng.random() < 0.2, [start]
        if rng.random() < 0.2:
            yield lambda: True, [driven.stop(stream) for stream in driven.open[:1]]


@pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
@pytest.mark.parametrize("policy", POLICIES)
def test_a_device_with_real_engines_is_replayed_byte_for_byte(
    policy: str, build: Kept, specs: list[EngineSpec], tmp_path: Path
) -> None:
    driven = Driven(build, policy, tmp_path / "r1.journal", specs)
    driven.run(crowd(driven, random.Random(1)))
    assert sum(model.loads.fetches for model in driven.models.values()) > 2 * len(specs), "nobody had to go for another"

    report = replay(tmp_path / "r1.journal")
    assert report.difference is None and report.runs == 1, str(report.difference)
    assert report.heard + report.asked > 1000
    data = (tmp_path / "r1.journal").read_bytes()
    assert not any(
        payload[at : at + 16] in data for payload in driven.payloads for at in range(0, len(payload) - 16, 16)
    )

    for seed in "1", "2":  # strings hash differently: sets are walked in a different order
        command = [sys.executable, "-m", "runtime.sim", "replay", str(tmp_path / "r1.journal")]
        again = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True)
        assert again.returncode == 0, again.stdout.decode() + again.stderr.decode()


@pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
def test_an_engine_that_a_failed_test_closed_or_left_with_pages_is_built_anew(
    build: Kept, specs: list[EngineSpec]
) -> None:
    """A single failed step made every later test of the module fail: the tests got a closed engine."""
    closed = build(specs[-1], lambda *_: None)
    closed.close()
    left = build(specs[-1], lambda *_: None)
    awake(left, 1)
    build.settle()
    new = build(specs[-1], lambda *_: None)
    assert len({closed, left, new}) == 3
    build.settle()
    assert build(specs[-1], lambda *_: None) is new, "an engine without pages and requests is kept"
    assert build.pages_used() == 0


@pytest.mark.timeout(600)  # on a machine busy with other work, the fork server alone took more than 150 s to start
def test_a_runtime_that_is_killed_leaves_its_journal(nats_server: NatsServer, tmp_path: Path) -> None:
    path = tmp_path / "r7.journal"
    told = {"NATS_URL": nats_server.url, "RUNTIME_ID": "r7", "JOURNAL": str(tmp_path), "DEVICE_MEMORY": "32MiB"}
    environment = os.environ | {f"STACCATO_{name}": value for name, value in told.items()}
    runtime = subprocess.Popen(
        [sys.executable, "-m", "runtime.node"], cwd=ROOT, env=environment, start_new_session=True
    )
    deadline = time.monotonic() + 540
    try:
        while not (path.exists() and any(isinstance(record, AnswerRecord) for record in records(path.read_bytes()))):
            assert time.monotonic() < deadline and runtime.poll() is None, "the device never came to a decision"
            time.sleep(0.1)
    finally:
        os.killpg(runtime.pid, signal.SIGKILL)
        runtime.wait()
    report = replay(path)
    assert report.difference is None and (report.runs, report.asked > 0) == (1, True)


def test_a_device_without_a_journal_asks_the_machine_itself() -> None:
    from tests.runtime.device.test_device import Node

    node = Node()
    assert node.device._machine is node.device.instance
    node.run(until=lambda: True)


def test_a_journal_is_kept_in_a_folder_that_is_there(tmp_path: Path) -> None:
    RuntimeSettings(journal=tmp_path).check()
    with pytest.raises(ValueError, match="STACCATO_JOURNAL=.*nowhere is no folder to write into"):
        RuntimeSettings(journal=tmp_path / "nowhere").check()


def test_costs_of_a_model_with_windows_are_the_same_in_the_journal(tmp_path: Path) -> None:
    plain = ModelCosts(10**9, 1024, 0.02, 0.001, 1e-7, 0.03, 1e-4, 1e-9, 1.0, 0.01, 1e-9)
    layers = (KeptLayers(LayerKind.WINDOW, 5, 512, reach=1024), KeptLayers(LayerKind.FULL, 1, 512))
    windowed = replace(plain, kv_layers=layers, step_s_of_windows=((1024, 1e-8),))
    with (tmp_path / "journal").open("wb") as file:
        journal = DecisionJournal(file, BeginRecord("slack", 8, 1 << 20))
        for costs in (plain, windowed):
            journal.write(CostsRecord.of(ModelKey("a"), costs))
    with (tmp_path / "journal").open("rb") as file:
        told = [record.told() for record in read(file) if isinstance(record, CostsRecord)]
    assert told == [plain, windowed] and told[1].kv == windowed.kv
