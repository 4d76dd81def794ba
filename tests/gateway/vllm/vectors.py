"""A gateway with deployments of models that make vectors and scores. The test plays the runtime."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from store.contract import wire
from store.contract.wire import Course, Delta, Finish, ModelState, Residency, Spent
from tests.gateway.plane import Plane, made
from tests.gateway.vllm.test_front import asked
from tests.runtime.pooling.models import write_vector_model

RESIDENT = ModelState(residency=Residency.RESIDENT, load_ms=1.0)
WIDTH = 128  # numbers of a vector
US = 10  # device time of a text
# By name of the deployment: the model, and the labels of a cross-encoder.
DEPLOYED = {
    "embedder": ("BertModel", 0),
    "decoder": ("Qwen3ForCausalLM", 0),
    "scorer": ("BertForSequenceClassification", 1),
    "labeller": ("BertForSequenceClassification", 3),
}


def vector(tokens: list[int]) -> list[float]:
    """Return the vector that the runtime makes of a text."""
    return [len(tokens) / 100, *[sum(tokens) % (3 + place) / 7 for place in range(WIDTH - 1)]]


def scores(tokens: list[int], labels: int) -> list[float]:
    """Return the scores that the runtime gives to a text, the last token's the highest."""
    return [(tokens[-1] % (11 + label)) / 11 for label in range(labels)]


@dataclass
class VectorRuntime:
    """Answers each text with a vector or with scores, by the model of the run."""

    plane: Plane
    labels: dict[str, int]  # by engine key; 0: vectors
    runs: list[wire.Run] = field(default_factory=list)
    texts: list[EngineCoreRequest] = field(default_factory=list)
    waiting: dict[int, int] = field(default_factory=dict)  # streams not answered yet, and the text's number
    most: int = 0  # texts waiting at a time
    answers: bool = True  # False: takes texts and makes nothing
    answers_most: int | None = None  # texts to be answered; None: all
    fails_after: int | None = None  # texts answered before the runtime ends a text with an error
    empty: bool = False  # answers without a vector
    seq: int = 0
    _due: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, data: bytes) -> wire.Reply:
        run = wire.decode(wire.Run, data)
        self.waiting[run.stream] = len(self.runs)
        self.runs.append(run)
        self.texts.append(MsgpackDecoder(EngineCoreRequest).decode(run.payload))
        self.most = max(self.most, len(self.waiting))
        asyncio.get_running_loop().call_later(0.002, self._due.set)
        return wire.Reply(epoch=1, seq=self.seq)

    def go_on(self) -> None:
        """Answer the texts that wait, and the texts to come."""
        self.answers = True
        self._due.set()

    async def cancel(self, data: bytes) -> None:
        for stream in wire.decode(wire.Cancel, data).streams:
            if self.waiting.pop(stream, None) is not None:
                await self._say(Delta(stream, [], 0, Finish.ABORT, spent=Spent(gpu_us=US)))

    async def run(self) -> None:
        """Answer the texts that wait, in the order of arrival, until cancelled."""
        answered = 0
        while True:
            await self._due.wait()
            self._due.clear()
            for stream, number in list(self.waiting.items()) if self.answers else []:
                if self.answers_most is not None and answered >= self.answers_most:
                    break
                del self.waiting[stream]
                answered += 1
                await self._say(self._answer(stream, number, answered))

    def _answer(self, stream: int, number: int, answered: int) -> Delta:
        if self.fails_after is not None and answered > self.fails_after:
            return Delta(stream, [], 0, Finish.ERROR, error="the device failed")
        tokens, labels = self.texts[number].prompt_token_ids or [], self.labels[self.runs[number].model]
        made = torch.tensor(scores(tokens, labels) if labels else vector(tokens))
        output = EngineCoreOutput("", [], pooling_output=made, finish_reason=FinishReason.STOP)
        (encoded,) = MsgpackEncoder(size_threshold=1 << 62).encode(output)
        course = Course(queue_us=1, prefill_us=US)
        said = None if self.empty else bytes(encoded)
        return Delta(stream, [], 0, Finish.STOP, logprobs=said, spent=Spent(gpu_us=US), course=course)

    async def _say(self, delta: Delta) -> None:
        self.seq += 1
        frame = wire.Frame(runtime="r1", epoch=1, seq=self.seq, deltas=[delta])
        await self.plane.bus.publish(wire.frame_subject("g1"), wire.encode(frame))


@dataclass
class VectorStage:
    """Deployments of the tenant `acme`, their runtime, and the usage booked."""

    plane: Plane
    client: httpx.AsyncClient
    key: str
    runtime: VectorRuntime
    batches: AsyncIterator[Any]
    engines: list[str]

    @property
    def app(self) -> Any:
        return self.client._transport.app  # type: ignore[attr-defined]

    async def post(self, path: str, model: str, status: int = 200, **body: object) -> Any:
        """Send a request, and return the body of the answer."""
        return made(await self.client.post(path, json={"model": model, **body}), status)

    async def row(self) -> wire.Usage:
        """Return the usage of the only call so far."""
        (row,) = await self.rows(1)
        return row

    async def rows(self, count: int) -> list[wire.Usage]:
        """Return the usage of the first `count` calls, in any order."""
        rows: list[wire.Usage] = []
        async with asyncio.timeout(20):
            while len(rows) < count:
                batch = await anext(self.batches)
                await batch.ack()
                rows += [said for said in batch.usages if said.final]
        return rows


@contextlib.asynccontextmanager
async def vector_stage(plane: Plane, names: list[str], **asking: Any) -> AsyncIterator[VectorStage]:
    """A stage with deployments of the names, from DEPLOYED. `asking`: arguments of `asked`."""
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    key = made(await plane.admin.post("/tenants/acme/keys"))["key"]
    labels: dict[str, int] = {}
    for name in names:
        model, of_labels = DEPLOYED[name]
        folder = write_vector_model(plane.folder / f"model-{name}", model, labels=of_labels or 1)
        await plane.model(name, folder=folder)
        asked_for = {"tenant": "acme", "name": name, "model": name, "dtype": "float32"}
        labels[made(await plane.admin.post("/deployments", json=asked_for))["engine"]] = of_labels
    runtime = VectorRuntime(plane, labels)
    await plane.bus.respond(wire.run_subject("r1"), runtime.take)
    await plane.bus.subscribe(wire.cancel_subject("r1"), runtime.cancel)
    await plane.report(dict.fromkeys(labels, RESIDENT))
    playing = asyncio.create_task(runtime.run())
    async with asked(plane, key, **asking) as client:
        yield VectorStage(plane, client, key, runtime, plane.bus.usage_batches("test", 100), list(labels))
    playing.cancel()
