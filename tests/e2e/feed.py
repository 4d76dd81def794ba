"""A played control plane: many GPUs and models in made-up turns, to test the dashboard with a large fleet.

`python -m tests.e2e.feed [PORT]` serves the control plane for a look in a browser; any key signs in.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway import dashboard
from gateway.control.watching import SPANS_MOST, ShownStage, _span
from runtime.core.ledgers.timeline import History
from store.contract.views import Span, Stage, Use, Why
from tests.conftest import free_port

S = 1_000_000
MIB = 1 << 20
PAGE_BYTES, PAGES = 32 * MIB, 2368  # pages of a GPU with 80 GB, without vLLM's own memory
PAST_S = 1800
NAMES = ("faq", "support", "search", "summary", "code", "weather", "legal", "poet", "triage", "router")
TENANTS = ("acme", "globex", "initech", "umbrella", "hooli")


class Played:
    """A GPU whose models take turns: a switch of some ms, then steps for a fraction of a second."""

    def __init__(self, number: int, models: int, now_us: int) -> None:
        self.id = f"r{number + 1}"
        self.chance = random.Random(number)
        self.keys = [f"{number:02x}{model:02x}{'ab' * 6}" for model in range(models)]
        self.tokens = dict.fromkeys(self.keys, 0)
        self.history = History(now_us - PAST_S * S)
        self.at_us = now_us - PAST_S * S
        self.holder = self.keys[0]
        self.switches = 0
        for key in self.keys[:6]:
            self._come(key, built=True)
        self.until(now_us)

    def _come(self, key: str, built: bool = False) -> None:
        parts = [("build", 9 * S), ("fetch", 700_000), ("check", 160_000)] if built else [("fetch", 380_000)]
        at_us, stages, spent = self.at_us, [], 0
        for name, us in parts:
            took = round(us * self.chance.uniform(0.6, 1.7))
            stages.append(Stage(at_us + spent, took, key, name))
            spent += took
        self._pass([Span(at_us, spent, Use.PLATFORM)] if built else [], stages)

    def _pass(self, spans: list[Span], stages: list[Stage]) -> None:
        self.history.add(spans, stages, Use.OPEN)
        if spans:
            self.at_us = spans[-1].at_us + spans[-1].us

    def until(self, now_us: int) -> None:
        chance = self.chance
        while self.at_us < now_us:
            if chance.random() < 0.05:
                self._pass([Span(self.at_us, round(chance.expovariate(1 / 300_000)) + 1, Use.IDLE)], [])
            self.holder = self.keys[min(len(self.keys) - 1, int(chance.paretovariate(0.9)) - 1)]
            if chance.random() < 0.12:
                self._come(self.holder)
            requests = chance.randint(1, 24)
            way_us, turn_us = chance.randint(800, 24_000), round(chance.lognormvariate(12.6, 0.6))
            steps = max(1, turn_us // 22_000)
            why = Why(requests, requests // 4, round(chance.gauss(260, 160)))
            self._pass(
                [
                    Span(self.at_us, way_us, Use.SWITCH, self.holder, 0, requests, why),
                    Span(self.at_us + way_us, turn_us, Use.STEPS, self.holder, steps, requests),
                ],
                [],
            )
            self.switches += 1
            self.tokens[self.holder] += steps * requests

    def shown(self, names: dict[str, list[str]]) -> dict[str, Any]:
        models = {}
        chance = random.Random(f"{self.id} {self.switches}")
        runs = self.pages()
        pages: Counter[tuple[str, str]] = Counter()
        for run in runs:
            pages[run["model"], run["content"]] += run["pages"]
        for key in self.keys:
            held = {kind: pages[key, kind] for kind in KINDS}
            busy = key == self.holder or chance.random() < 0.15
            models[key] = {
                "deployments": names[key],
                "residency": "resident" if held["weights"] else "staged",
                "error": None,
                "load_ms": 9800.0,
                "fetches": 12,
                "fetch_ms": 380.0,
                "weights_bytes": (held["weights"] + held["cache"]) * PAGE_BYTES,
                "kv_bytes": held["kv"] * PAGE_BYTES,
                "kv_fragmentation": 0.1,
                "running": chance.randint(1, 24) if busy else 0,
                "waiting": chance.randint(0, 5) if busy else 0,
                "turns": self.switches,
                "tokens": self.tokens[key],
                "attainment": None,
            }
        used = sum(run["pages"] for run in runs if run["content"] != "free")
        return {
            "id": self.id,
            "engine": "played",
            "draining": False,
            "role": "both",
            "holder": self.holder,
            "switches": self.switches,
            "moved": 0,
            "memory_bytes": PAGES * PAGE_BYTES,
            "used_bytes": used * PAGE_BYTES,
            "time": {},
            "models": models,
        }

    def pages(self) -> list[dict[str, Any]]:
        """A page map with half a dozen models at a time, in pieces, as after some hours of service."""
        chance, runs, left = random.Random(f"{self.id} {self.switches // 4}"), [], PAGES
        there = chance.sample(self.keys, min(6, len(self.keys)))
        while left > 0:
            key, content = chance.choice(there), chance.choice(("weights", "weights", "kv", "kv", "cache", "free"))
            pages = min(left, chance.randint(20, 260) if content in ("weights", "cache") else chance.randint(1, 70))
            runs.append({"pages": pages, "content": content, "model": "" if content == "free" else key})
            left -= pages
        return runs


KINDS = ("weights", "kv", "cache")


class Feed:
    """The state of the control plane: `gpus` GPUs with `models` models each, every model different."""

    def __init__(self, gpus: int = 8, models: int = 50) -> None:
        now_us = time.time_ns() // 1000
        self.gpus = [Played(number, models, now_us) for number in range(gpus)]
        self.names = {
            key: [f"{TENANTS[place % len(TENANTS)]}/{NAMES[place % len(NAMES)]}-{number}{place:02}@1"]
            for number, gpu in enumerate(self.gpus)
            for place, key in enumerate(gpu.keys)
        }
        self.runs = True  # False: the fleet stands still
        self._lock = threading.Lock()

    def app(self) -> Starlette:
        routes = [
            Route("/api/v1/events", self.events),
            Route("/api/v1/{path:path}", self.answer, methods=["GET", "POST"]),
        ]
        return Starlette(routes=[*dashboard.routes(), *routes])

    async def events(self, request: Request) -> Response:
        """Stream events: a model falls asleep or wakes up, two events per second."""

        async def told() -> AsyncIterator[bytes]:
            chance = random.Random(2)
            shown = {one["id"]: one for one in self._deployments()}
            for id in shown:
                yield _event(shown[id], shown[id]["status"]["phase"])
            while True:
                await asyncio.sleep(0.5)
                one = shown[chance.choice(list(shown))]
                yield _event(one, chance.choice(("awake", "asleep")))

        return StreamingResponse(told(), media_type="text/event-stream")

    def answer(self, request: Request) -> Response:
        path = request.path_params["path"]
        with self._lock:
            match path.split("/"):
                case ["me"]:
                    return JSONResponse({"admin": True, "tenant": None, "key_id": None, "scopes": ["control"]})
                case ["gpus"]:
                    return JSONResponse({"data": [gpu.shown(self.names) for gpu in self._now()], "next_cursor": None})
                case ["gpus", id, "timeline"]:
                    return self._timeline(id, request.query_params)
                case ["gpus", id, "pages"]:
                    runs = next(gpu for gpu in self._now() if gpu.id == id).pages()
                    said = {"gpu": id, "pages": PAGES, "page_bytes": PAGE_BYTES, "runs": runs, "models": self.names}
                    return JSONResponse(said)
                case ["deployments"]:
                    return JSONResponse({"data": self._deployments(), "next_cursor": None})
                case ["usage"]:
                    return JSONResponse({"data": self._usage(request.query_params["group_by"]), "next_cursor": None})
                case ["billing", "corrections"]:
                    return JSONResponse({"data": [], "next_cursor": None})
                case ["audit"]:
                    return JSONResponse({"data": self._audit(), "next_cursor": None})
                case ["models"]:
                    found = [{"name": name, "state": "ready"} for name in NAMES]
                    return JSONResponse({"data": found, "next_cursor": None})
                case ["tenants"]:
                    return JSONResponse({"data": [{"name": name} for name in TENANTS], "next_cursor": None})
                case ["deployments:plan"]:
                    return JSONResponse(self._plan())
                case _:
                    return JSONResponse({"detail": f"nobody plays {path}"}, 404)

    def _now(self) -> list[Played]:
        for gpu in self.gpus if self.runs else []:
            gpu.until(time.time_ns() // 1000)
        return self.gpus

    def _deployments(self) -> list[dict[str, Any]]:
        """Deployments of the first ten models of each GPU."""
        chance = random.Random(1)
        found = []
        for gpu in self.gpus:
            for key in gpu.keys[:10]:
                tenant, _, name = self.names[key][0].removesuffix("@1").partition("/")
                strict = chance.betavariate(40, 2)
                shares = {
                    "token": strict,
                    "token_rebased": min(1.0, strict + 0.02),
                    "first_token": chance.betavariate(60, 2),
                }
                shares |= {"token_time_weighted": min(1.0, strict + 0.03), "requests": chance.randint(20, 4000)}
                asleep = chance.random() < 0.4
                status = {
                    "phase": "asleep" if asleep else "awake",
                    "desired_state": "awake",
                    "active_revision": chance.choice((1, 1, 2, 3)),
                    "target_revision": None,
                    "residency": "staged" if asleep else "resident",
                    "conditions": [],
                    "last_cold_start_ms": chance.uniform(4000, 16_000),
                    "attainment": shares,
                }
                slo = {"ttft_ms": 10_000, "tbt_ms": 100}
                one = {"id": key, "name": name, "tenant": tenant, "model": name, "slo": slo, "status": status}
                found.append(one | {"target": None, "canary": None, "created_at": "2026-11-01T08:00:00.000000Z"})
        return found

    def _audit(self) -> list[dict[str, Any]]:
        """Rows of the audit log, the newest first. A row is added each second."""
        now_s = int(time.time())
        rows = []
        for seq in range(now_s, now_s - 100, -1):
            chance = random.Random(seq)
            change = {"name": chance.choice(NAMES), "weight": chance.randint(0, 50)}
            rows.append(
                {"id": f"{seq:032x}", "seq": seq, "at_us": seq * S, "kind": "canary.changed", "tenant_id": "t"}
                | {
                    "subject_id": f"{chance.randint(0, 79):032x}",
                    "by": "admin",
                    "old": change | {"weight": 0},
                    "new": change,
                }
            )
        return rows

    def _plan(self) -> dict[str, Any]:
        times = {"ms": 380.0, "by": "measured"}
        runtime = {"fits": True, "reason": None, "kv_tokens": 480_000, "kv_tokens_now": 21_000, "longest_requests": 14}
        runtime |= {"cold_start": dict.fromkeys(("pages", "host", "files"), times), "step": times, "busy": 0.4}
        slowed = [{"deployment": name, "tenant": tenant, "busy": 0.1} for name in NAMES for tenant in TENANTS]
        return {
            "fits": True,
            "reasons": [],
            "weight_bytes": 15 << 30,
            "kv_bytes_per_token": 131_072,
            "max_model_len": 32_768,
            "runtimes": [runtime | {"id": gpu.id} for gpu in self.gpus],
            "slows": [one | {"runtime": gpu.id} for gpu in self.gpus for one in slowed],
            "objective": None,
            "price": None,
        }

    def _usage(self, group_by: str) -> list[dict[str, Any]]:
        chance = random.Random(group_by)
        days = [time.strftime(f"%Y-%m-{day:02}", time.gmtime()) for day in range(1, time.gmtime().tm_mday + 1)]
        names = (
            [{"day": day} for day in days]
            if group_by == "day"
            else [
                {"tenant": tenant, "deployment": f"{name}-{number}", "model": name, "key": f"key-{number}"}
                for number, tenant in enumerate(TENANTS)
                for name in NAMES[:4]
            ]
        )
        rows = []
        for name in names:
            output = chance.randint(20_000, 900_000)
            rows.append(
                name
                | {
                    "requests": output // 180,
                    "prompt_tokens": output * 3,
                    "cached_tokens": output,
                    "output_tokens": output,
                }
                | {
                    "gpu_ms": output * 1.7,
                    "switch_ms": output * 0.06,
                    "cache_gb_s": output / 900,
                    "kv_gb_s": output / 80,
                }
                | {"amount": f"{output * 0.000_001_730_204_5:.21f}", "currency": "USD"}
            )
        return rows

    def _timeline(self, id: str, query: Any) -> Response:
        from_us, to_us = (round(datetime.fromisoformat(query[name]).timestamp() * S) for name in ("from", "to"))
        gpu = next(gpu for gpu in self._now() if gpu.id == id)
        found = gpu.history.shown(from_us, to_us, time.time_ns() // 1000, SPANS_MOST)
        keys = {span.model for span in found.spans} | {stage.model for stage in found.stages}
        shown = {
            "gpu": id,
            "from_us": found.from_us,
            "to_us": found.to_us,
            "bucket_us": found.bucket_us,
            "spans": [_span(span) for span in found.spans],
            "stages": [
                ShownStage(at_us=s.at_us, us=s.us, model=s.model, name=s.name, deployments=self.names[s.model])
                for s in found.stages
            ],
            "models": {key: self.names[key] for key in keys if key},
        }
        return Response(msgspec.json.encode(shown), media_type="application/json")


def _event(deployment: dict[str, Any], phase: str) -> bytes:
    said = {"deployment_id": deployment["id"], "deployment": deployment["name"], "tenant": deployment["tenant"]}
    return b"data: " + msgspec.json.encode(said | {"phase": phase}) + b"\n\n"


@contextmanager
def serving(feed: Feed, port: int = 0) -> Iterator[str]:
    """Serve the feed in a thread. Yields the address."""
    port = port or free_port()
    server = uvicorn.Server(uvicorn.Config(feed.app(), port=port, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "it does not listen"
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


if __name__ == "__main__":
    with serving(Feed(), int(sys.argv[1]) if len(sys.argv) > 1 else 8090) as url:
        print(f"{url}/dashboard")
        time.sleep(86_400)
