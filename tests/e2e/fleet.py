"""A platform with several runtimes, streams over every model, and faults for the runtimes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.demo.random_weights import write_random
from store.bus import Bus, NoAnswer
from store.contract import grants, wire
from store.tasks import ended
from tests.conftest import free_port
from tests.e2e.conftest import Platform

ARCHITECTURES = ("llama", "qwen3", "opt")
RUNTIMES = 3
TOKENS, MANY_TOKENS = 240, 900
EACH = 4  # streams of every model
SILENCE_MOST_S = 240.0


@dataclass
class Fleet:
    """A platform with several runtimes and models slow enough to be hurt in mid-stream."""

    platform: Platform
    models: list[str] = field(default_factory=list)
    tokens: int = 0  # delivered, over every stream
    calm: dict[tuple[int, int], dict[tuple[str, int], list[int]]] = field(default_factory=dict)  # see `undisturbed`

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        folder: Path,
        models: int,
        *arguments: str,
        runtimes: int | str = RUNTIMES,
        settings: dict[str, str] | None = None,
    ) -> Iterator[Fleet]:
        settings = {"STACCATO_DRAIN_S": "1", "STACCATO_HANG_S": "4", **(settings or {})}
        # Every runtime may be starting again at once, and a loaded machine takes a minute to start a runtime.
        settings |= {"STACCATO_HOLD_DEADLINE_S": f"{SILENCE_MOST_S}", "STACCATO_RESUME_DEADLINE_S": f"{SILENCE_MOST_S}"}
        fleet = cls(Platform(folder / "data", free_port(), settings))
        try:
            fleet.platform.start("--runtimes", str(runtimes), *arguments)
            fleet.platform.tenant("acme")
            for number in range(models):
                fleet.deploy(folder, number)
            yield fleet
        except BaseException:
            for log in sorted(folder.glob("**/*.log")):
                lines = [line[:300] for line in log.read_text(errors="replace").splitlines() if "level" in line]
                print(log.name, *lines[-15:], sep="\n  ")
            raise
        finally:
            code = fleet.platform.stop()
        assert code == 0

    def deploy(self, folder: Path, number: int) -> None:
        architecture = ARCHITECTURES[number % len(ARCHITECTURES)]
        name = f"{architecture}-{number}"
        self.platform.model(name, write_random(folder / name, architecture, seed=number, hidden=256, layers=4))
        assert self.platform.deploy("acme", name)["status"]["phase"] in ("awake", "asleep")
        self.models.append(name)

    async def ready(self, runtimes: int = RUNTIMES) -> None:
        """Return when `runtimes` runtimes know every model; fail after 300 s."""

        deadline = time.monotonic() + 300
        while sum(len(gpu["models"]) == len(self.models) for gpu in await self.gpus()) < runtimes:
            assert time.monotonic() < deadline, "the runtimes did not come back"
            await asyncio.sleep(0.3)

    async def drain(self, runtime: str, on: bool) -> None:
        """Drain the runtime, or with `on=False` end the drain. Returns when the gateway sees the change."""
        await asyncio.to_thread(self.platform.post, f"/api/v1/gpus/{runtime}:drain", {"on": on})
        async with asyncio.timeout(10):
            while any(gpu["id"] == runtime and gpu["draining"] != on for gpu in await self.gpus()):
                await asyncio.sleep(0.1)

    async def gpus(self) -> list[dict[str, Any]]:
        """State of the GPUs. On an overloaded machine the gateway may answer 503: ask again, for 30 s at most."""
        async with asyncio.timeout(30):
            while (answer := await asyncio.to_thread(self.platform.get, "/api/v1/gpus")).status_code == 503:
                await asyncio.sleep(0.1)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    async def busy(self) -> set[str]:
        """Runtimes with requests, as soon as a lease reports a request."""
        async with asyncio.timeout(10):
            while True:
                gpus = await self.gpus()
                if busy := {gpu["id"] for gpu in gpus for m in gpu["models"].values() if m["running"] + m["waiting"]}:
                    return busy
                await asyncio.sleep(0.1)

    async def scheduler(self) -> str | None:
        """The leading scheduler; None without a leader."""
        said: str | None = (await asyncio.to_thread(self.platform.get, "/api/v1/fleet")).json()["scheduler"]
        return said

    async def moved(self) -> dict[str, int]:
        """Number of running requests that left each runtime for a new runtime, since the runtime's start."""
        return {gpu["id"]: gpu["moved"] for gpu in await self.gpus()}

    @contextlib.asynccontextmanager
    async def moving(self, chance: random.Random) -> AsyncIterator[Counter[str]]:
        """Keep telling random requests to move. Yields a growing count of moves, by source runtime."""
        moves: Counter[str] = Counter()
        async with asyncio.TaskGroup() as group:  # an error in the task ends the context, too
            task = group.create_task(self._keep_moving(chance, moves))
            yield moves
            await ended(task)  # a single cancel may be swallowed by nats-py

    async def _keep_moving(self, chance: random.Random, moves: Counter[str]) -> None:
        last = await self.moved()
        url = f"nats://127.0.0.1:{(self.platform.data / 'nats.port').read_text().strip()}"
        seed = self.platform.data / "nats-users" / "scheduler.nk"
        async with Bus.connect(url, "test", grants.SCHEDULER, seed) as bus:
            while True:
                source, target = chance.sample([f"r{number}" for number in range(1, RUNTIMES + 1)], 2)
                order = wire.Migrate(target=target, count=chance.randint(1, 3), term=1 << 62)  # above any scheduler's
                with contextlib.suppress(NoAnswer):  # the source was killed
                    reply = wire.decode(wire.Reply, await bus.request(wire.migrate_subject(source), order, 1.0))
                    assert reply.refusal is None, reply.reason
                await asyncio.sleep(0.1)
                now = await self.moved()
                moves.update({id: count - last.get(id, 0) for id, count in now.items() if count > last.get(id, 0)})
                last = now

    async def stream(
        self, model: str, number: int, tokens: int = TOKENS, url: str | None = None, **sampling: object
    ) -> list[int]:
        """Tokens of a stream to its end. Fails on an error or a silence. `url`: of another gateway."""
        body = {"model": model, "prompt": [5 + number, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "return_token_ids": True} | sampling
        headers = {"authorization": f"Bearer {self.platform.keys['acme']}"}
        said: list[int] = []
        try:
            async with (
                httpx.AsyncClient(timeout=SILENCE_MOST_S) as client,
                client.stream(
                    "POST", f"{url or self.platform.url}/v1/completions", json=body, headers=headers
                ) as response,
            ):
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return said
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        assert "error" not in event, f"{model} {number} after {len(said)} tokens: {event}"
                        made = event["choices"][0]["token_ids"] or ()
                        said += made
                        self.tokens += len(made)
        except httpx.TransportError as error:
            raise AssertionError(f"{model} {number} after {len(said)} tokens: {error!r}") from None
        raise AssertionError(f"the stream ended without [DONE] after {len(said)} tokens")

    async def streams(self, each: int, prefix: str = "", tokens: int = TOKENS) -> dict[tuple[str, int], list[int]]:
        """Tokens of `each` streams of every model, run at once; every third stream is sampled with a seed.

        `prefix` goes before the names of the deployments. Returns tokens by model and number.
        """
        asked = [(model, number) for number in range(each) for model in self.models]
        jobs = [
            self.stream(
                prefix + model, number, tokens, **({"temperature": 0.8, "seed": number} if number % 3 == 2 else {})
            )
            for model, number in asked
        ]
        async with asyncio.TaskGroup() as group:  # a failed stream ends the rest
            tasks = [group.create_task(job) for job in jobs]
        return dict(zip(asked, (task.result() for task in tasks), strict=True))

    async def streams_that_return(self, each: int, tbt_ms: int) -> dict[tuple[str, int], list[int]]:
        """Run streams of MANY_TOKENS tokens with the objective `tbt_ms`. Returns tokens by model and number.

        The streams begin on r1 alone, and the other runtimes come back during the streams. The streams last long enough
        for leases to report the runtimes' return, and for the scheduler to see the leases.
        """
        others = [f"r{number}" for number in range(2, RUNTIMES + 1)]
        names = [f"in-{tbt_ms}-{model}" for model in self.models]
        hurried = [
            self.platform.deploy("acme", name, model, slo={"tbt_ms": tbt_ms})
            for name, model in zip(names, self.models, strict=True)
        ]
        try:
            for runtime in others:
                await self.drain(runtime, True)
            before = self.tokens
            streams = asyncio.create_task(self.streams(each, f"in-{tbt_ms}-", MANY_TOKENS))
            assert await self.past(before + 50, streams)
            assert await self.busy() == {"r1"}
            for runtime in others:
                await self.drain(runtime, False)
            said = await streams
            await asyncio.sleep(1.5)  # the next lease
            return said
        finally:
            for deployment in hurried:
                self.platform.request("DELETE", f"/api/v1/deployments/{deployment['id']}")

    async def undisturbed(self, each: int, tokens: int = TOKENS) -> dict[tuple[str, int], list[int]]:
        """Tokens of streams without any fault. Asked once for each `each` and `tokens`, then remembered."""
        await self.ready()
        if (each, tokens) not in self.calm:
            self.calm[each, tokens] = await self.streams(each, tokens=tokens)
        return self.calm[each, tokens]

    async def past(self, tokens: int, streams: asyncio.Task[object]) -> bool:
        """Return True when `tokens` tokens were delivered, False when the streams ended before.

        Raises an error of the streams.
        """
        while self.tokens < tokens and not streams.done():
            await asyncio.sleep(0.005)
        if streams.done():
            streams.result()
        return not streams.done()

    async def booked(self, tokens: int, within_s: float = 30.0) -> None:
        """Return when the bill has exactly `tokens` output tokens; fail after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while (found := await asyncio.to_thread(self.platform.usage, "acme"))["output_tokens"] != tokens:
            assert time.monotonic() < deadline, f"{found} were booked, and {tokens} tokens delivered"
            await asyncio.sleep(0.3)

    async def hurt(self, each: int, times: int, chance: random.Random, signal_number: int) -> tuple[object, int]:
        """Run streams while random runtimes get the signal `times` times, at random numbers of delivered tokens.

        Returns the tokens of the streams, and the number of signals sent before the streams ended.
        """
        before, sent = self.tokens, 0
        streams = asyncio.create_task(self.streams(each))
        total = TOKENS * each * len(self.models)
        for at in sorted(chance.randrange(total // 50, total * 9 // 10) for _ in range(times)):
            if not await self.past(before + at, streams):
                break
            while (victim := self.platform.runtime(f"r{chance.randint(1, RUNTIMES)}")) is None:
                await asyncio.sleep(0.05)
            victim.send_signal(signal_number)
            sent += 1
        return await streams, sent
