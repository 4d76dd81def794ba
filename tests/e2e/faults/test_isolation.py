"""Two tenants of a model share the engine and nothing else. A prompt leaves no readable trace."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import json
import os
import random
import resource
import secrets
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from deploy.demo.random_weights import write_random
from tests.conftest import free_port
from tests.e2e.conftest import Platform

CONTEXT = 2048
PROMPT_TOKENS = 1500
SHAPE = dict(hidden=384, heads=6, layers=6, context=CONTEXT)  # a prefill takes much longer than a request's transport
AT_ONCE = 8  # number of prompts whose KV cache fits at once: the oldest cached prefix goes first
PAIRS = 40
P_LEAST = 0.001  # a difference with a larger p counts as none


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with a deployment of `acme` and of `globex` from a single artefact. Every file lies below a single
    folder, and the platform writes as much as possible."""
    folder = tmp_path_factory.mktemp("shared")
    for name in ("tmp", "cache", "journal"):
        (folder / name).mkdir()
    settings = {
        "STACCATO_LOG_LEVEL": "debug",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "STACCATO_JOURNAL": str(folder / "journal"),
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    platform = Platform(folder / "data", free_port(), settings)
    with core_files_allowed():
        try:
            platform.start()
            platform.model("llama", write_random(folder / "model", "llama", **SHAPE))
            for tenant in ("acme", "globex"):
                platform.tenant(tenant)
                assert platform.deploy(tenant, "chat", "llama", scaling={"idle": "never"})["status"]["phase"] == "awake"
            yield platform
        finally:
            code = platform.stop()
    assert code == 0


@contextlib.contextmanager
def core_files_allowed() -> Iterator[None]:
    """Allow core files for processes started in the context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


# ── the prefix cache ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Asker:
    """A client that asks for one token, by token ids: the time is the prompt's prefill."""

    platform: Platform
    tenant: str
    client: httpx.Client

    def first_token_ms(self, prompt: list[int], **more: object) -> float:
        body = {"model": "chat", "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
        headers = {"authorization": f"Bearer {self.platform.keys[self.tenant]}"}
        began = time.perf_counter()
        answer = self.client.post(f"{self.platform.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
        return (time.perf_counter() - began) * 1000

    def cached_tokens(self, requests: int) -> int:
        """Cached tokens of the tenant's prompts, after `requests` requests are booked."""
        found: dict[str, int] = {}

        def booked() -> bool:
            (row,) = self.platform.get("/api/v1/usage", key=self.platform.keys[self.tenant]).json()["data"] or ({},)
            found.update(row)
            return row.get("requests") == requests

        self.platform.until(booked)
        return found["cached_tokens"]


@pytest.fixture
def askers(shared: Platform) -> Iterator[tuple[Asker, Asker]]:
    with httpx.Client(timeout=60) as client:
        yield Asker(shared, "acme", client), Asker(shared, "globex", client)


def prompt_of(chance: random.Random) -> list[int]:
    return [chance.randrange(5, 500) for _ in range(PROMPT_TOKENS)]


def test_a_prefix_is_cached_for_its_tenant_alone_whatever_salt_is_sent(
    shared: Platform, askers: tuple[Asker, Asker]
) -> None:
    acme, globex = askers
    prompt = prompt_of(random.Random(1))
    acme.first_token_ms(prompt, cache_salt="mine")
    acme.first_token_ms(prompt)  # the salt sent first was not used: the prefix is found
    assert acme.cached_tokens(2) > PROMPT_TOKENS * 0.9
    tenant_id = shared.get("/api/v1/tenants/acme").json()["id"]
    pepper = bytes.fromhex((shared.data / "pepper").read_text())
    salt = hmac.new(pepper, tenant_id.encode(), hashlib.sha256).hexdigest()[:32]
    globex.first_token_ms(prompt, cache_salt=salt)  # acme's real salt
    globex.first_token_ms(prompt_of(random.Random(2)), cache_salt="mine")
    assert globex.cached_tokens(2) == 0
    globex.first_token_ms(prompt)
    assert globex.cached_tokens(3) > 0  # globex's own prefix


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_another_has_cached_is_not_faster(askers: tuple[Asker, Asker]) -> None:
    """Measured in pairs, in random order. A tenant's own cached prefix is faster: the test would see a difference."""
    acme, globex = askers
    chance = random.Random(3)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = functools.partial(acme.first_token_ms, max_tokens=100, ignore_eos=True)
        list(pool.map(together, [prompt_of(chance) for _ in range(AT_ONCE)]))
    others, own = [], []
    for _ in range(PAIRS):
        cached = prompt_of(chance)
        acme.first_token_ms(cached)
        others.append(_difference_ms(globex, cached, prompt_of(chance), chance))
        own.append(_difference_ms(acme, cached, prompt_of(chance), chance))
    print(f"cached by another: {_told(others)}; by oneself: {_told(own)}")
    assert signed_ranks_p(own) < P_LEAST and statistics.median(own) < 0
    assert signed_ranks_p(others) > P_LEAST


def _difference_ms(asker: Asker, cached: list[int], fresh: list[int], chance: random.Random) -> float:
    if chance.random() < 0.5:
        return asker.first_token_ms(cached) - asker.first_token_ms(fresh)
    return -asker.first_token_ms(fresh) + asker.first_token_ms(cached)


def _told(differences_ms: list[float]) -> str:
    return f"median {statistics.median(differences_ms):+.1f} ms, p {signed_ranks_p(differences_ms):.4f}"


def signed_ranks_p(differences: list[float]) -> float:
    """P value of Wilcoxon's signed ranks, two-sided, by 20,000 permutations of the signs."""
    rng = np.random.default_rng(0)
    signed = np.array(differences)
    ranks = np.argsort(np.argsort(np.abs(signed))) + 1
    seen = abs(float(np.sum(np.sign(signed) * ranks)))
    by_chance = np.abs(rng.choice((-1, 1), size=(20_000, len(ranks))) @ ranks)
    return float((np.sum(by_chance >= seen) + 1) / (len(by_chance) + 1))


def test_a_difference_is_found_and_none_is_not() -> None:
    rng = np.random.default_rng(1)
    noise = rng.standard_t(2, size=PAIRS) * 5
    assert signed_ranks_p(list(noise - 10)) < P_LEAST < signed_ranks_p(list(noise))


# ── the marked prompt ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def client(shared: Platform) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {shared.keys['acme']}"}
    with httpx.Client(base_url=shared.url, timeout=240, headers=headers) as client:
        yield client


def test_a_marked_prompt_and_its_answer_are_found_nowhere(shared: Platform, client: httpx.Client) -> None:
    """No file has a trace after success, refusals, a client's leaving, and processes killed or crashing in
    mid-stream."""
    marker = f"zq{secrets.token_hex(12)}"
    text = f"remember {marker} well"
    tokens = client.post("/v1/tokenize", json={"model": "chat", "prompt": text}).json()["tokens"]
    said = _answered(client, text)
    _refused(client, text)
    _left(client, text)
    for words, number in ((("runtime.device",), signal.SIGKILL), (("gateway.app",), signal.SIGSEGV)):
        said += _hurt(shared, client, text, words, number)
        shared.until(lambda: shared.get("/readyz").status_code == 200, 240)
    for path in ("/metrics", "/api/v1/metrics", "/api/v1/audit", "/api/v1/usage", "/api/v1/gpus"):
        assert not [needle for needle in needles(marker, tokens, said) if needle in shared.get(path).content], path
    shared.post("/api/v1/tenants/acme/keys", {"name": f"known-{marker[:8]}"})
    place = shared.data.parent
    assert traces(place, [f"known-{marker[:8]}".encode()]), "what is in the database would not be found"
    journals = {path.name.partition("-")[0] for path in (place / "journal").iterdir()}
    assert journals == {"g", "r1", "r1.journal"}, "of gateways, the node and the device"
    found = traces(place, needles(marker, tokens, said))
    assert not found
    shared.stop()
    assert not traces(place, needles(marker, tokens, said))
    assert not list(place.rglob("core*.[0-9]*")) and not list(Path.cwd().glob("core*"))
    shared.start()


def test_no_process_leaves_a_core_file(shared: Platform) -> None:
    assert shared.process is not None
    limits = {child.pid: child.rlimit(resource.RLIMIT_CORE) for child in shared.children("")}
    assert len(limits) >= 5 and set(limits.values()) == {(0, 0)}


def _body(text: str, **more: object) -> dict[str, object]:
    return {
        "model": "chat",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 60,
        "ignore_eos": True,
    } | more


def _answered(client: httpx.Client, text: str) -> str:
    """Ask for a chat and a completion of `text`. Returns the text of both answers."""
    chat = client.post("/v1/chat/completions", json=_body(text)).json()
    completed = client.post("/v1/completions", json={"model": "chat", "prompt": text, "max_tokens": 60}).json()
    return str(chat["choices"][0]["message"]["content"]) + "\n" + str(completed["choices"][0]["text"])


def _refused(client: httpx.Client, text: str) -> None:
    """Send requests that the gateway or vLLM refuses."""
    bodies: list[object] = [
        _body(text, temperature=text),
        _body(text, max_tokens=10**9),
        _body(text * 1000),
        _body(text, tools=[{"type": "function", "function": {"name": text}}], tool_choice="required"),
        _body(text, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": text}}}),
        _body(text, stop=[text] * 1000, logit_bias={text: 1}),
        {"model": "none", "messages": text},
    ]
    statuses = [client.post("/v1/chat/completions", json=body).status_code for body in bodies]
    broken = client.post("/v1/chat/completions", content=f'{{"model": "chat", "messages": "{text}'.encode())
    assert all(400 <= status < 500 for status in [*statuses, broken.status_code]), statuses


def _left(client: httpx.Client, text: str) -> None:
    with client.stream("POST", "/v1/chat/completions", json=_body(text, stream=True, max_tokens=900)) as stream:
        next(stream.iter_lines())


def _hurt(platform: Platform, client: httpx.Client, text: str, words: tuple[str, ...], number: int) -> str:
    """Send the signal `number` to a process in the middle of a stream. Returns the text of the stream."""
    said = ""
    with (
        contextlib.suppress(httpx.HTTPError),
        client.stream("POST", "/v1/chat/completions", json=_body(text, stream=True, max_tokens=400)) as stream,
    ):
        for count, line in enumerate(stream.iter_lines()):
            if count == 20:
                os.kill(platform.child(*words).pid, number)
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                said += "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))
    return "\n" + said


def needles(marker: str, tokens: list[int], said: str) -> list[bytes]:
    """Forms in which a file might hold the marker, the prompt's tokens or pieces of the answers."""
    forms = [marker.encode(), marker.encode().hex().encode(), marker.encode("utf-16-le")]
    forms += [base64.b64encode(b"x" * shift + marker.encode())[4:-4] for shift in range(3)]
    ids = tokens[2:-2]
    forms += [separator.join(map(str, ids)).encode() for separator in (", ", ",", " ")]
    forms += [np.array(ids, kind).tobytes() for kind in ("<i4", "<i8")] + [msgspec.msgpack.encode(ids)[1:][3:]]
    pieces = [line[at : at + 24] for line in said.split("\n") for at in range(0, len(line) - 24, 24)]
    assert len(pieces) > 5 and len(ids) > 8
    forms += [form for piece in pieces for form in (piece.encode(), json.dumps(piece)[1:-1].encode())]
    return forms


def traces(folder: Path, needles: list[bytes]) -> list[str]:
    """Files that hold a needle, among databases and database logs, the bus's store, journals and processes' output."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            with contextlib.suppress(FileNotFoundError):
                content = path.read_bytes()
                found += [f"{path}: {needle!r}" for needle in needles if needle in content]
    return found
