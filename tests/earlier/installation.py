"""An installation of 71e32b0: a data folder that SIGKILL left in mid-stream, and a record of its clients' answers.

`record_installation.py` made both files from a run of 71e32b0; `test_takeover.py` starts this version on the folder.
"""

from __future__ import annotations

import contextlib
import json
import tarfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec

FOLDER = Path(__file__).parent
ARCHIVE, RECORD = FOLDER / "installation-71e32b0.tar.xz", FOLDER / "installation-71e32b0.json"
TENANT = "acme"
MODELS = ("faq", "weather")  # models of the demo; each is deployed under the model's name
JOURNAL = "gateway.journal"  # the gateway's file of usage that JetStream does not have yet
SILENCE_S_MAX = 120.0


class Sent(msgspec.Struct):
    """What a client was sent of an answer."""

    model: str
    question: str
    request: str = ""  # id of the request in the usage
    prompt_tokens: int = 0
    tokens: list[int] = []
    ended: bool = False  # the client has the whole answer


class Installation(msgspec.Struct, frozen=True):
    """The tenant's key, the price, and the answers of the installation.

    Rates are in pico-units a token. The usage of `booked` is in the database. The usage of `stored` is in JetStream
    alone. `begun` were in mid-stream at the kill, with a checkpoint in JetStream; `young` were, too, and only the
    gateway's journal knows of `young`."""

    key: str
    started_at: str  # before the first request
    currency: str
    prompt_pico: int
    output_pico: int
    credit_minor: int  # a correction of the bill, in minor units
    booked: list[Sent]
    stored: list[Sent]
    begun: list[Sent]
    young: list[Sent]

    @property
    def whole(self) -> list[Sent]:
        """Answers that ended before the kill."""
        return self.booked + self.stored

    @property
    def torn(self) -> list[Sent]:
        """Answers in mid-stream at the kill."""
        return self.begun + self.young


def read() -> Installation:
    return msgspec.json.decode(RECORD.read_bytes(), type=Installation)


def unpack(folder: Path) -> None:
    """Unpack the data folder of the installation into `folder`."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def ask(url: str, key: str, sent: Sent, **settings: Any) -> Sent:
    """Ask the question, and note in `sent` what comes, as soon as a piece comes.

    Args:
        url: URL of the gateway.
        key: the tenant's key.
        sent: model and question; the rest is filled in.
        settings: further fields of the request.

    Returns `sent`, at the end of the answer or at the death of the gateway."""
    body = {
        "model": sent.model,
        "messages": [{"role": "user", "content": sent.question}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        **settings,
    }
    headers = {"authorization": f"Bearer {key}"}
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=SILENCE_S_MAX
        ) as response,
    ):
        assert response.status_code == 200, response.read()
        sent.request = response.headers["x-request-id"]
        for line in response.iter_lines():
            if line == "data: [DONE]":
                sent.ended = True
            elif line.startswith("data: "):
                _note(json.loads(line.removeprefix("data: ")), sent)
    return sent


def _note(event: dict[str, Any], sent: Sent) -> None:
    assert "error" not in event, event
    sent.prompt_tokens = event["usage"]["prompt_tokens"]
    for choice in event["choices"]:
        sent.tokens += choice.get("token_ids") or ()


@contextlib.contextmanager
def asked(url: str, key: str, questions: list[Sent], **settings: Any) -> Iterator[list[Future[Sent]]]:
    """Ask each of `questions` in a thread, see `ask`.

    The context ends when each answer has ended. Raises AssertionError at the end if a question was refused."""
    with ThreadPoolExecutor(len(questions)) as threads:
        streams = [threads.submit(ask, url, key, sent, **settings) for sent in questions]
        yield streams
    for stream in streams:
        stream.result()
