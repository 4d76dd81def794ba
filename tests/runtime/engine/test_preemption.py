"""Preemption is per token: a model whose first token is nearly late gets the device after the step under way.

The device's journal has the events and decisions. Meanwhile model A decodes a long answer, and makes the tokens made
alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace

from deploy.demo.random_weights import write_random
from runtime import ipc
from runtime.core.device.events import Arrived, Event, Fetched
from runtime.core.device.model import Phase
from runtime.core.device.request import Objective
from runtime.core.engine import Engine, EngineBuilder, Output, Told
from runtime.core.turns.slack import GUARD_S, PER_TTFT
from runtime.device.journal import AnswerRecord, DecideRecord, EventRecord, event_of, read
from store.contract.wire import EngineSpec
from tests.runtime.devices import Driven, Kept, Script, kept
from tests.runtime.engines import spec

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
PAGE = 2 << 20
POOL_PAGES, HOST_BYTES = 12, 256 << 20  # room for both models and the requests
LONG: dict[str, Any] = dict(prompt=[44, 301, 17], temperature=0, max_tokens=200)
SHORT: dict[str, Any] = dict(prompt=[5, 6, 7], temperature=0, max_tokens=5)
READER = Objective(ttft_s=1.0)  # reads far slower than the device writes: the request soon has a lead
URGENT, SOON = Objective(ttft_s=0.25), Objective(ttft_s=1.0)
LEAD = 20  # tokens of A before the request to B
STEP_S = 0.01  # time of a step: time passes while engines step, and nearly none in between


class Moment(NamedTuple):
    now: float
    event: Event | None  # event heard; None: the device was free
    effects: list[list[Any]]  # name and fields of each effect


class Clock:
    """A clock that advances by 1 us with each look, so that times give the order of looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Timed:
    """An engine whose steps take STEP_S by the clock."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock

    def step(self, ahead: bool = False) -> list[Output]:
        self._clock.now += STEP_S
        return self._engine.step(ahead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class TimedBuild:
    """A build that makes timed engines."""

    def __init__(self, build: EngineBuilder, clock: Clock) -> None:
        self._build, self._clock = build, clock

    def __call__(self, spec: EngineSpec, told: Told, /) -> Any:
        return Timed(self._build(spec, told), self._clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._build, name)


@pytest.fixture(scope="module")
def engines() -> Iterator[Kept]:
    with kept(POOL_PAGES * PAGE, HOST_BYTES) as engines:
        yield engines


@pytest.fixture
def build(engines: Kept) -> Iterator[Kept]:
    """The engines, after which no test meets what a failed test left behind."""
    yield engines
    engines.settle()


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[EngineSpec]:
    folder = tmp_path_factory.mktemp("preempted")
    paths = [write_random(folder / "a", "llama", layers=4), write_random(folder / "b", "opt")]
    return [replace(spec(path), weight_bytes=4 << 20, kv_bytes_per_token=2048) for path in paths]


class Story(NamedTuple):
    moments: list[Moment]
    said: dict[int, list[int]]


Tell = Callable[[Callable[[Driven], Script]], Story]


@pytest.fixture
def tell(build: Kept, specs: list[EngineSpec], tmp_path: Path) -> Tell:
    """Run scripts on a device. A call returns the events and decisions of the device, and the tokens."""

    def told(script: Callable[[Driven], Script]) -> Story:
        clock = Clock()
        driven = Driven(TimedBuild(build, clock), "slack", tmp_path / "r1.journal", specs, clock)
        driven.run(script(driven))
        moments = list(read_moments(tmp_path / "r1.journal"))
        (tmp_path / "r1.journal").unlink()
        return Story(moments, driven.said)

    return told


def read_moments(path: Path) -> Iterator[Moment]:
    with path.open("rb") as file:
        question: EventRecord | DecideRecord | None = None
        for record in read(file):
            if isinstance(record, EventRecord | DecideRecord):
                question = record
            elif isinstance(record, AnswerRecord):
                assert question is not None
                event = event_of(question) if isinstance(question, EventRecord) else None
                yield Moment(question.now, event, msgspec.msgpack.decode(record.effects))


def interrupted(driven: Driven, objective: Objective, staged: bool = False) -> Script:
    """A script: A has a lead when a request to B comes. `staged`: no page of B is on the device."""
    yield lambda: True, driven.place()
    if staged:
        yield driven.placed, [ipc.Order("b", awake=False)]
        yield partial(gone, driven), [driven.start("a", LONG, READER)]
    else:
        yield driven.placed, [driven.start("a", LONG, READER)]
    yield lambda: len(driven.said[1]) >= LEAD, [driven.start("b", SHORT, objective)]


def gone(driven: Driven) -> bool:
    model = driven.models["b"]
    return model.phase is Phase.STAGED and not driven.device.instance.pages.of(model.key).weights


def alone(driven: Driven) -> Script:
    """A script: A's request, then B's request after A's end."""
    yield lambda: True, driven.place()
    yield driven.placed, [driven.start("a", LONG, salt="alone")]
    yield lambda: 1 in driven.ended, [driven.start("b", SHORT, salt="alone")]


def after_b_came(moments: list[Moment]) -> list[Moment]:
    came = (n for n, each in enumerate(moments) if isinstance(each.event, Arrived) and each.event.request.model == "b")
    return moments[next(came) :]


def steps(moments: list[Moment]) -> list[tuple[float, str]]:
    """Time and model of each step asked for."""
    return [(each.now, effect[1]) for each in moments for effect in each.effects if effect[0] == "Step"]


def until_b_steps(moments: list[Moment]) -> list[Moment]:
    place = next(n for n, each in enumerate(moments) if any(effect[:2] == ["Step", "b"] for effect in each.effects))
    return moments[: place + 1]


def at_risk_from(objective: Objective, came_at: float) -> float:
    """Time from which the request's first token goes before a burst."""
    return came_at + objective.ttft_s - min(GUARD_S, PER_TTFT * objective.ttft_s)


def test_an_urgent_request_gets_the_step_after_its_deadline_is_at_risk(tell: Tell) -> None:
    story = tell(lambda driven: interrupted(driven, URGENT))
    moments = after_b_came(story.moments)
    waiting, risk_at = steps(until_b_steps(moments)), at_risk_from(URGENT, moments[0].now)
    assert waiting[-1][1] == "b"
    assert [model for now, model in waiting if now >= risk_at] in ([], ["b"], ["a", "b"])
    assert "a" in [model for _, model in steps(after_b_came(story.moments))], "there was nobody to interrupt"


def test_an_urgent_request_for_a_model_that_is_away_begins_its_fetch_at_once_and_steps_when_it_is_there(
    tell: Tell,
) -> None:
    story = tell(lambda driven: interrupted(driven, URGENT, staged=True))
    waiting = until_b_steps(after_b_came(story.moments))
    decided = next(each for each in waiting if each.event is None)
    assert ["Fetch", "b"] in [effect[:2] for effect in decided.effects]
    fetched = next(n for n, each in enumerate(waiting) if isinstance(each.event, Fetched) and each.event.model == "b")
    between = [model for _, model in steps(waiting[fetched:])][:-1]
    assert between in ([], ["a"])


def test_a_request_that_can_wait_lets_the_burst_go_on_until_its_deadline_is_at_risk(tell: Tell) -> None:
    story = tell(lambda driven: interrupted(driven, SOON))
    moments = after_b_came(story.moments)
    waiting = steps(until_b_steps(moments))
    assert waiting[0][1] == "a", "it had time"
    due_at, risk_at = moments[0].now + SOON.ttft_s, at_risk_from(SOON, moments[0].now)
    assert [model for now, model in waiting if now >= risk_at] in ([], ["b"], ["a", "b"])
    told = next(each for each in moments if any(effect[:2] == ["Tell", "g/2"] for effect in each.effects))
    assert told.now <= due_at


@pytest.mark.parametrize("staged", [False, True])
def test_who_was_interrupted_says_what_it_says_alone(tell: Tell, staged: bool) -> None:
    expected = tell(alone).said
    assert [len(said) for said in expected.values()] == [LONG["max_tokens"], SHORT["max_tokens"]]
    assert tell(lambda driven: interrupted(driven, URGENT, staged)).said == expected
