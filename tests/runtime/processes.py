"""A runtime's real device process, with vLLM: the test plays the node."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from runtime import ipc
from store.contract.wire import Finish, Run
from store.fork.client import ForkedProcess
from tests.conftest import ROOT
from tests.forks import forked, shared
from tests.runtime.engines import payload, spec

SOON_S = 120


class DeviceProcess:
    """A device process. `state` is the last state told. By stream, `said`, `cached` and `beside` are tokens, cached
    tokens, and what the last delta has beside tokens."""

    end: ipc.NodeEnd
    state: ipc.State
    said: dict[int, list[int]]
    cached: dict[int, int]
    beside: dict[int, bytes | None]
    ended: dict[int, tuple[Finish, str]]

    @classmethod
    async def start(
        cls, pool_bytes: int, host_bytes: int, tensor_parallel: int = 1, **more: str | int | tuple[int, float]
    ) -> DeviceProcess:
        """Start the process. `more`: further settings of runtime/ipc.Began."""
        self = cls()
        self.process: asyncio.subprocess.Process | ForkedProcess
        ours, theirs = ipc.pair()
        with theirs:
            began = replace(
                ipc.Began(theirs.fileno(), "round-robin", pool_bytes, host_bytes, tensor_parallel=tensor_parallel),
                **more,
            )
            fd, forks = theirs.fileno(), shared()
            if forks is None or tensor_parallel > 1:
                command = (sys.executable, "-m", "runtime.device", *began.arguments())
                self.process = await asyncio.create_subprocess_exec(*command, pass_fds=[fd], cwd=ROOT)
            else:
                files = {number: number for number in (0, 1, 2, fd)}
                self.process = await forked(forks, "runtime.device", began.arguments(), os.environ, files)
        self.end = await ipc.NodeEnd.open(ours)
        self.state = ipc.State()
        self.said = {}
        self.cached = {}
        self.beside = {}
        self.ended = {}
        self._streams = 0
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        async for message in self.end.messages():
            async with self._news:
                self._hear(message)
                self._news.notify_all()

    def _hear(self, message: ipc.ToNode) -> None:
        match message:
            case ipc.State():
                self.state = message
            case ipc.Made(deltas):
                for delta in deltas["g"]:
                    self.said[delta.stream] += delta.tokens
                    self.beside[delta.stream] = delta.logprobs
                    self.cached[delta.stream] = self.cached.get(delta.stream, 0) + delta.cached_tokens
                    if delta.finish is not None:
                        self.ended[delta.stream] = (delta.finish, delta.error)

    def ask(self, model: str, asked: dict[str, Any], salt: str = "") -> int:
        sampling = {key: value for key, value in asked.items() if key != "prompt"}
        written = payload(asked["prompt"], salt, **sampling, ignore_eos=True)
        return self.send(model, written, len(asked["prompt"]), asked["max_tokens"])

    def send(self, model: str, written: bytes, prompt_tokens: int, max_tokens: int) -> int:
        """Send a request whose payload is `written`. Returns the request's stream."""
        self._streams += 1
        self.said[self._streams] = []
        run = Run(
            gateway="g",
            stream=self._streams,
            model=model,
            request="",
            attempt=1,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            payload=written,
            engine="",
        )
        self.end.send(ipc.Start(run))
        return self._streams

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(SOON_S), self._news:
            await self._news.wait_for(done)

    async def load(self, models: Mapping[str, Path]) -> None:
        for key, path in models.items():
            self.end.send(ipc.Place(spec(path, key=key)))
        await self.until(lambda: all(key in self.state.models and self.state.models[key].load_ms for key in models))

    async def answer(self, stream: int) -> list[int]:
        await self.until(lambda: stream in self.ended)
        assert self.ended[stream] == (Finish.LENGTH, "")
        return self.said[stream]

    def rss_kib(self, kind: str) -> int:
        """`RssAnon` or `RssShmem` of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith(kind)))

    async def stop(self) -> None:
        self.end.send(ipc.Quit())
        await self.process.wait()
        await self._reader
        self.end.close()
