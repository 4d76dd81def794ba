"""Lessons for the tiny models of the demo, from the text files in corpus/, and conversations made of the lessons."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
SYSTEMS = ("You are a helpful assistant.", "Answer briefly.", "You are a friendly assistant. Be kind and be exact.")


@dataclass(frozen=True)
class Lesson:
    """Several ways to ask, one way to answer."""

    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Corpus:
    """The lessons of a model, and the model's reply to any further question."""

    lessons: tuple[Lesson, ...]
    fallback: str


@dataclass(frozen=True)
class Conversation:
    """The text before the model speaks, as (role, text) pairs, and the model's reply."""

    said: tuple[tuple[str, str], ...]
    reply: str
    tools: bool = False

    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": text} for role, text in self.said]


def read_corpus(name: str) -> Corpus:
    """The corpus of the model `name`; the first lesson of the file comes first."""
    return _weather() if name == "weather" else _read_text(name)


def converse(corpus: Corpus, strangers: list[str], rng: random.Random) -> Conversation:
    """A conversation to learn from: mostly a single question, sometimes a history, a system message, a strange
    question."""
    if corpus.fallback and rng.random() < 0.08:
        question, reply = blur(rng.choice(strangers), rng), corpus.fallback
    else:
        lesson = rng.choice(corpus.lessons)
        question, reply = blur(rng.choice(lesson.questions), rng), lesson.answer
    said: list[tuple[str, str]] = [("system", rng.choice(SYSTEMS))] if rng.random() < 0.15 else []
    for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 1, 2))):
        earlier = rng.choice(corpus.lessons)
        said += [("user", rng.choice(earlier.questions)), ("assistant", earlier.answer)]
    return Conversation((*said, ("user", question)), reply)


def blur(question: str, rng: random.Random) -> str:
    """The question as a second person might type it: a missing word at the beginning, no capitals, no punctuation."""
    words = question.split()
    if len(words) > 3 and rng.random() < 0.25:
        del words[rng.randrange(2)]
    blurred = " ".join(words)
    if rng.random() < 0.2:
        blurred = blurred.replace("What is", "What's")
    if rng.random() < 0.25:
        blurred = blurred.lower()
    return blurred.rstrip(".!?") if rng.random() < 0.25 else blurred


def _read_text(name: str) -> Corpus:
    """Read blocks between empty lines: `user:` lines of equal meaning, then the `assistant:`; a block is
    `fallback:`."""
    path = FOLDER / f"{name}.txt"
    lessons, fallback = [], ""
    for block in path.read_text().strip().split("\n\n"):
        if block.startswith("fallback: "):
            fallback = block.removeprefix("fallback: ")
            continue
        asked, mark, answer = block.partition("\nassistant: ")
        questions = tuple(line.removeprefix("user: ") for line in asked.splitlines())
        if not mark:
            raise ValueError(f"{path.name}: a block without `assistant:` begins with {block[:40]!r}: add one")
        lessons.append(Lesson(questions, answer))
    return Corpus(tuple(lessons), fallback)


# ── the weather model speaks JSON and calls a tool ────────────────────────────────────────────────────────────────────

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WEATHER_QUESTIONS = (
    "What is the weather in {}?",
    "How is the weather in {} today?",
    "Tell me the weather in {}.",
    "{}?",
)
ABOUT = {"name": "weather", "kind": "a tiny Qwen3 model", "speaks": "JSON", "knows": "24 cities", "real": False}
HELLO = {"greeting": "hello", "ask": "What is the weather in Oslo?", "or": "Compare Oslo and Rome."}
UNKNOWN = {"error": "not a city I know", "ask": "What is the weather in Oslo?"}


@dataclass(frozen=True)
class Report:
    """Made-up weather of a city."""

    city: str
    sky: str
    temperature_c: int
    wind_kmh: int

    def json(self) -> str:
        return json.dumps(vars(self))

    def sentence(self) -> str:
        return (
            f"In {self.city} there is {self.sky} at {self.temperature_c} degrees, and the wind is {self.wind_kmh} km/h."
        )


def read_reports() -> list[Report]:
    reports = []
    for line in (FOLDER / "weather.txt").read_text().splitlines():
        city, rest = line.split(": ")
        sky, degrees, wind = rest.split(", ")
        reports.append(Report(city, sky, int(degrees.split()[0]), int(wind.split()[1])))
    return reports


def _weather() -> Corpus:
    cities = [
        Lesson(tuple(question.format(report.city) for question in WEATHER_QUESTIONS), report.json())
        for report in read_reports()
    ]
    about = Lesson(("Who are you?", "What model are you?", "Introduce yourself."), json.dumps(ABOUT))
    hello = Lesson(("Hello!", "Hi there.", "Good morning.", "Thank you."), json.dumps(HELLO))
    return Corpus((*cities, about, hello), json.dumps(UNKNOWN))


def converse_weather(corpus: Corpus, strangers: list[str], rng: random.Random) -> Conversation:
    """As `converse`, and half of the time two cities, the tool's call, or an answer from the tool's result."""
    chance = rng.random()
    if chance > 0.5:
        return converse(corpus, strangers, rng)
    here, there = rng.sample(read_reports(), 2)
    question = rng.choice(WEATHER_QUESTIONS).format(here.city)
    if chance < 0.12:
        return Conversation((("user", f"Compare {here.city} and {there.city}."),), f"[{here.json()}, {there.json()}]")
    asked = ("user", blur(question, rng))
    if chance < 0.22:
        return Conversation((asked,), tool_call(here.city), tools=True)
    seen = Report(here.city, there.sky, rng.randint(-9, 39), rng.randint(2, 69))
    said = (asked, ("assistant", tool_call(here.city)), ("tool", seen.json()))
    return Conversation(said, seen.sentence(), tools=True)


def tool_call(city: str) -> str:
    """A tool call in the form that vLLM's `hermes` parser turns into OpenAI tool calls."""
    call = {"name": TOOL["function"]["name"], "arguments": {"city": city}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
