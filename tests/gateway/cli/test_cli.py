"""The command line against a real control plane, database and bus; only the runtime is a stand-in."""

import asyncio
import contextlib
import csv
import io
import itertools
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from gateway import cli, config
from gateway.cli.api import CONFLICT, NOT_FOUND, RETRYABLE, USAGE
from gateway.cli.chat import events
from gateway.cli.terminal.progress import bytes_coming, expected
from gateway.control.routes import ControlPlane, Engines
from gateway.http.auth import Auth
from gateway.imports.sources import Sources
from gateway.inference.metrics import Metrics
from gateway.inference.recent import Recent
from gateway.streams.runtimes import RuntimesView
from store.bus import Bus
from store.contract import wire
from store.contract.wire import Residency
from store.db.database import Database, migrate
from store.files.architectures import Known
from tests.conftest import ROOT, NatsServer, free_port
from tests.gateway.hub import COMMIT, Hub, serving

MODELS = ROOT / "deploy" / "demo" / "models"
KNOWN = Known(frozenset({"LlamaForCausalLM", "Qwen3ForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "BertModel"}))


NUMBERS = itertools.count(1)


class Runtime:
    """A stand-in runtime: loads every model at once, except models with `max_model_len` 666, which fail."""

    def __init__(self, bus: Bus) -> None:
        self._bus, self._models = bus, dict[str, wire.ModelState]()
        self._due = asyncio.Event()

    async def run(self) -> None:
        await self._bus.respond(wire.control_subject("r1"), self._control)
        await self._bus.watch(wire.MODELS, self._spec_changed)
        while True:
            lease = wire.Lease(runtime="r1", epoch=1, engine="stand-in", switches=3, models=dict(self._models))
            await self._bus.put(wire.LEASES, "r1", lease)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), 1)
            self._due.clear()

    def _spec_changed(self, key: str, value: bytes | None) -> None:
        self._models.pop(key, None)
        if value is not None:
            broken = wire.decode(wire.EngineSpec, value).max_model_len == 666
            self._models[key] = (
                wire.ModelState(residency=Residency.FAILED, error="the beast does not load")
                if broken
                else wire.ModelState(residency=Residency.RESIDENT, load_ms=12.5, step_ms=8.0)
            )
        self._due.set()

    async def _control(self, data: bytes) -> wire.Reply:
        order = wire.decode(wire.Control, data)
        state = Residency.COLD if order.op == "sleep" else Residency.RESIDENT
        self._models[order.model] = wire.ModelState(residency=state, load_ms=12.5, step_ms=8.0)
        self._due.set()
        return wire.Reply()


SAID = {"x-staccato-cold": "disk", "server-timing": "queue;dur=0.200, wake;dur=31.000, total;dur=40.000"}


async def say(request: Request) -> StreamingResponse:
    """A stand-in for vLLM: streams the tenant of the endpoint, and breaks off if the last message is "break"."""
    body = await request.json()
    assert body["stream"] and body["stream_options"] == {"include_usage": True}

    async def answer() -> AsyncIterator[str]:
        yield ": waiting for the model\n\n"
        for word in (f"{request.path_params['tenant']} ", f"{len(body['messages'])} ", "[bold]messages"):
            yield f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n"
        if body["messages"][-1]["content"] == "break":
            yield f"data: {json.dumps({'error': {'message': 'the runtime is gone'}})}\n\n"
            return
        yield f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 4, 'completion_tokens': 3}})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(answer(), media_type="text/event-stream", headers=SAID)


async def serve(settings: config.Settings, started: Callable[[uvicorn.Server], None]) -> None:
    database = Database(settings.database_url)
    assert settings.nats_url
    async with Bus.connect(settings.nats_url, "gateway") as bus, Bus.connect(settings.nats_url, "runtime") as its_bus:
        fleet = RuntimesView(bus)
        await fleet.start()
        runtime = asyncio.create_task(Runtime(its_bus).run())
        auth = Auth(database, config.pepper(settings), config.admin_key(settings))
        control = ControlPlane(
            database,
            auth,
            fleet,
            Engines(KNOWN, frozenset({"hermes"}), frozenset({"qwen3"})),
            Sources.of(settings),
            Metrics(fleet),
            Recent(),
        )
        app = Starlette(routes=[*control.routes(), Route("/t/{tenant}/v1/chat/completions", say, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, port=settings.port, log_level="error", lifespan="off"))
        started(server)
        async with control.running():
            await server.serve()
        runtime.cancel()
    await database.close()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving(Hub()) as hub:
        hub.put("demo/faq", MODELS / "faq")
        yield hub


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> Iterator[config.Settings]:
    """Settings of a gateway that runs in a thread and serves the tests."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # the tests read stdout
    folder = tmp_path_factory.mktemp("gateway")
    nats = NatsServer(folder / "nats")
    nats.start()
    settings = config.load(data=folder, port=free_port(), nats_url=nats.url, hf_endpoint=hub.url)
    migrate(settings.database_url)
    servers: list[uvicorn.Server] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve(settings, servers.append)))
    thread.start()
    deadline_s = time.monotonic() + 60
    while not (servers and servers[0].started):
        assert thread.is_alive() and time.monotonic() < deadline_s
        time.sleep(0.02)
    yield settings
    servers[0].should_exit = True
    thread.join()
    nats.kill()
    structlog.reset_defaults()


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


Staccato = Callable[..., Ran]


@pytest.fixture
def staccato(settings: config.Settings, monkeypatch: pytest.MonkeyPatch) -> Staccato:
    monkeypatch.setenv("STACCATO_DATA", str(settings.data))
    monkeypatch.setenv("STACCATO_PORT", str(settings.port))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, typed: str = "") -> Ran:
        out, err = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["staccato", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
        out.flush()
        return Ran(code, out.buffer.getvalue().decode(), err.getvalue())  # type: ignore[attr-defined]

    return run


@pytest.fixture
def tenant(staccato: Staccato) -> str:
    name = f"tenant-{next(NUMBERS)}"
    assert staccato("tenant", "create", name).code == 0
    return name


@pytest.fixture
def deployed(staccato: Staccato, tenant: str) -> str:
    """The name of a deployment of `tenant`."""
    ran = staccato("deploy", tenant + "-bot", "--model", str(MODELS / "faq"), "--tenant", tenant)
    assert ran.code == 0, ran.err
    return tenant + "-bot"


# ── tenants and keys ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_created_tenant_is_listed(staccato: Staccato, tenant: str) -> None:
    assert tenant in [row["name"] for row in staccato("tenant", "ls", "--json").json]
    listed = staccato("tenant", "ls").out.splitlines()
    assert listed[0].split() == ["NAME", "ID", "WEIGHT", "PREFIXES", "CREATED"]
    assert any(line.startswith(tenant) for line in listed)


def test_a_tenants_weight_and_retention_are_said_when_it_is_made(staccato: Staccato) -> None:
    name = f"tenant-{next(NUMBERS)}"
    said = ("tenant", "create", name, "--no-keep-prefixes", "--weight")
    assert "2.5\nPREFIXES       False\n" in staccato(*said, "2.5").out
    assert staccato(*said, "11").code == USAGE and "write a number from 0.1 to 10" in staccato(*said, "11").err


def test_a_tenants_limits_are_said_changed_and_taken_away(staccato: Staccato) -> None:
    name = f"tenant-{next(NUMBERS)}"
    said = ("--requests-per-minute", "60", "--concurrent-streams", "4", "--monthly-budget", "25.50 EUR")
    made = staccato("tenant", "create", name, *said, "--json").json["limits"]
    budget = {"amount": "25.50", "currency": "EUR"}
    assert made == {"requests_per_minute": 60, "concurrent_streams": 4, "monthly_budget": budget}
    changed = staccato("tenant", "set", name, "--requests-per-minute", "none", "--tokens-per-minute", "9", "--json")
    assert changed.json["limits"] == {"tokens_per_minute": 9, "concurrent_streams": 4, "monthly_budget": budget}
    assert "TOKENS/MIN     9\n" in staccato("tenant", "set", name, "--weight", "2").out
    assert staccato("tenant", "set", name, "--monthly-budget", "none", "--json").json["weight"] == 2
    for wrong in (("--tokens-per-minute", "many"), ("--tokens-per-minute", "0"), ("--monthly-budget", "-1")):
        assert staccato("tenant", "set", name, *wrong).code == USAGE


def test_the_same_tenant_twice_is_a_conflict(staccato: Staccato, tenant: str) -> None:
    ran = staccato("tenant", "create", tenant)
    assert ran.code == CONFLICT and ran.err.startswith("error: ") and ran.err.count("\n") == 1


def test_a_name_that_is_taken_says_which_command_helps(staccato: Staccato, deployed: str, tenant: str) -> None:
    assert f"`staccato tenant rm {tenant}`" in staccato("tenant", "create", tenant).err
    again = staccato("deploy", deployed, "--model", "faq", "--tenant", tenant)
    assert again.code == CONFLICT
    assert f"`staccato deploy {deployed} --canary PERCENT`" in again.err and f"`staccato rm {deployed}`" in again.err
    assert "`staccato model rm faq`" in staccato("model", "add", "faq", str(MODELS / "poet")).err


def test_a_tenant_is_deleted_once_somebody_says_yes(staccato: Staccato, deployed: str, tenant: str) -> None:
    for typed in ("", "n\n"):
        kept = staccato("tenant", "rm", tenant, typed=typed)
        assert kept.code == USAGE and "answer y, or give --yes" in kept.err
    in_use = staccato("tenant", "rm", tenant, "--yes")
    assert in_use.code == CONFLICT and "still has 1 deployment: delete" in in_use.err
    assert staccato("rm", deployed).code == 0
    assert staccato("tenant", "rm", tenant, typed="y\n").code == 0
    assert tenant not in [row["name"] for row in staccato("tenant", "ls", "--json").json]
    assert staccato("tenant", "rm", tenant, "--yes").code == NOT_FOUND


def test_a_key_is_printed_alone_so_that_a_shell_can_keep_it(staccato: Staccato, tenant: str) -> None:
    made = staccato("key", "create", tenant, "--name", "ci", "--scope", "inference")
    (secret,) = made.out.split()
    (listed,) = staccato("key", "ls", tenant, "--json").json
    assert secret.startswith(listed["prefix"]) and (listed["name"], listed["scopes"]) == ("ci", ["inference"])
    assert secret not in staccato("key", "ls", tenant).out


def test_a_revoked_key_is_refused_and_a_rotated_one_is_replaced(staccato: Staccato, tenant: str) -> None:
    made = staccato("key", "create", tenant, "--json").json
    rotated = staccato("key", "rotate", tenant, made["id"], "--json").json
    assert rotated["key"] != made["key"]
    assert staccato("ls", "--key", rotated["key"]).code == 0
    assert staccato("key", "revoke", tenant, rotated["id"]).code == 0
    refused = staccato("ls", "--key", rotated["key"])
    assert refused.code == 1 and "this API key was revoked: ask for a new key" in refused.err


def test_the_list_of_keys_says_which_have_ended_and_when_each_was_made(staccato: Staccato, tenant: str) -> None:
    made = [staccato("key", "create", tenant, "--json").json for _ in range(2)]
    assert staccato("key", "revoke", tenant, made[0]["id"]).code == 0
    lines = staccato("key", "ls", tenant).out.splitlines()
    assert all(title in lines[0] for title in ("STATE", "CREATED", "LAST USED"))
    states = {line.split()[0]: line for line in lines[1:]}
    assert "revoked" in states[made[0]["id"]] and "valid" in states[made[1]["id"]]
    assert all(key["created_at"] in states[key["id"]] for key in made)


def test_what_is_typed_cannot_leave_its_place_in_the_route(staccato: Staccato) -> None:
    assert staccato("key", "ls", "../tenants").code == NOT_FOUND


# ── models and deployments ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_is_waited_for_until_it_is_checked(staccato: Staccato) -> None:
    ran = staccato("model", "add", "verse", str(MODELS / "poet"), "--json")
    assert ran.code == 0 and ran.json["state"] == "ready" and ran.json["weight_bytes"] > 0
    assert "verse" in staccato("model", "ls").out
    assert staccato("model", "rm", "verse").code == 0
    assert staccato("model", "rm", "verse").code == NOT_FOUND


def test_a_refused_model_says_why_and_can_be_mended(staccato: Staccato, tmp_path: Path, tenant: str) -> None:
    folder = tmp_path / "mended"
    folder.mkdir()
    refused = staccato("deploy", "bot", "--model", str(folder), "--tenant", tenant)
    assert refused.code == 1 and "model mended is refused" in refused.err and "config.json" in refused.err
    listed = staccato("model", "ls")
    assert "refused: mended; add the model again" in listed.err and "config.json" in listed.out
    for file in (MODELS / "faq").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert staccato("deploy", "bot", "--model", str(folder), "--tenant", tenant).code == 0


def test_a_deployed_folder_becomes_a_model_and_the_endpoint_is_printed(
    staccato: Staccato, settings: config.Settings, tenant: str
) -> None:
    ran = staccato("deploy", "faq-bot", "--model", str(MODELS / "faq"), "--tenant", tenant, "--ttft", "1.5s")
    assert ran.code == 0
    assert ran.out == f"{settings.url}/t/{tenant}/v1\n"
    assert "curl" in ran.err and "openai.OpenAI" in ran.err
    shown = staccato("show", "faq-bot", "--tenant", tenant, "--json").json
    assert (shown["model"], shown["slo"]["ttft_ms"], shown["status"]["phase"]) == ("faq", 1500, "awake")


def test_the_same_folder_again_is_the_same_model(staccato: Staccato, tenant: str) -> None:
    for name in ("one", "two"):
        assert staccato("deploy", name, "--model", str(MODELS / "faq"), "--tenant", tenant).code == 0


def test_a_reasoning_parser_is_said_and_an_unknown_one_is_refused_with_those_that_there_are(
    staccato: Staccato, tenant: str
) -> None:
    said = ("--model", str(MODELS / "faq"), "--tenant", tenant, "--reasoning-parser")
    ran = staccato("deploy", "thinker", *said, "nonesuch", "--json")
    assert ran.code != 0 and "'nonesuch' is not known" in ran.err and "qwen3" in ran.err
    made = staccato("deploy", "thinker", *said, "qwen3", "--json")
    assert made.code == 0 and made.json["reasoning_parser"] == "qwen3", made.err
    assert "qwen3" in staccato("show", "thinker", "--tenant", tenant).out


def test_another_folder_of_the_same_name_is_a_conflict(staccato: Staccato, deployed: str, tmp_path: Path) -> None:
    (tmp_path / "faq").mkdir()
    ran = staccato("deploy", "other", "--model", str(tmp_path / "faq"), "--tenant", "any")
    assert ran.code == CONFLICT and "there is another model 'faq'" in ran.err and "staccato model add" in ran.err


def test_a_deployment_that_fails_ends_the_wait_with_the_runtimes_reason(
    staccato: Staccato, deployed: str, tenant: str
) -> None:
    ran = staccato("deploy", "beast", "--model", "faq", "--tenant", tenant, "--max-model-len", "666")
    assert (ran.code, ran.err) == (1, "error: beast failed: the beast does not load\n")


@pytest.fixture
def alone(staccato: Staccato, tenant: str) -> str:
    """The name of a deployment of `tenant` with an engine of its own."""
    name, tokens = f"{tenant}-alone", str(40 + next(NUMBERS))
    ran = staccato("deploy", name, "--model", str(MODELS / "faq"), "--tenant", tenant, "--max-model-len", tokens)
    assert ran.code == 0, ran.err
    return name


def test_a_deployment_is_listed_put_to_sleep_woken_and_removed(staccato: Staccato, alone: str, tenant: str) -> None:
    deployed = alone
    listed = staccato("ls", "--tenant", tenant).out.splitlines()
    assert listed[1].split()[:4] == [deployed, tenant, "faq", "awake"]
    for order, phase in (("sleep", "asleep"), ("wake", "awake")):
        ordered = staccato(order, deployed)
        assert ordered.code == 0, ordered.err
        assert re.search(rf"^PHASE +{phase}$", ordered.out, re.M), ordered.out  # the state after, not before the order
    assert f"the prefixes of {deployed} of {tenant} are forgotten" in staccato("forget", deployed).err
    assert staccato("rm", deployed).code == 0
    gone = staccato("show", deployed)
    assert gone.code == NOT_FOUND and deployed in gone.err


def test_an_order_to_sleep_that_another_deployment_outvotes_says_so(staccato: Staccato, tenant: str) -> None:
    for name in ("one", "two"):
        assert staccato("deploy", name, "--model", str(MODELS / "weather"), "--tenant", tenant).code == 0
    ordered = staccato("sleep", "one", "--tenant", tenant)
    assert ordered.code == 0 and "one is ordered to sleep, but the model stays on the device" in ordered.err
    assert staccato("sleep", "two", "--tenant", tenant, "--json").json["status"]["phase"] == "asleep"
    assert staccato("show", "one", "--tenant", tenant, "--json").json["status"]["phase"] == "asleep"


def test_an_order_to_sleep_is_not_waited_for_when_that_is_said(staccato: Staccato, alone: str) -> None:
    assert staccato("sleep", alone, "--no-wait").code == 0
    assert re.search(r"^LAST ORDER +asleep$", staccato("show", alone).out, re.M)


def test_an_objective_that_can_not_be_kept_is_said_when_it_is_deployed(staccato: Staccato, tenant: str) -> None:
    ran = staccato("deploy", "hasty", "--model", str(MODELS / "faq"), "--tenant", tenant, "--tbt", "1ms")
    assert ran.code == 0 and "warning: tokens are due every 1 ms" in ran.err and "takes 8 ms" in ran.err


def test_ps_shows_whose_turn_it_is(staccato: Staccato, deployed: str, tenant: str) -> None:
    shown = staccato("ps").out
    assert f"{tenant}/{deployed}@1" in shown and "resident" in shown
    assert staccato("ps", "--json").json[0]["switches"] == 3


def test_an_unknown_model_and_a_wrong_duration_are_the_callers_mistake(staccato: Staccato, tenant: str) -> None:
    unknown = staccato("deploy", "bot", "--model", "nosuch", "--tenant", tenant)
    assert unknown.code == USAGE and "there is no model 'nosuch'" in unknown.err
    wrong = staccato("deploy", "bot", "--model", "faq", "--ttft", "soon")
    assert wrong.code == USAGE and "write it as 100ms, 2s or 1m" in wrong.err


# ── chat ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_chat_streams_from_the_tenants_endpoint_and_says_how_cold_it_was(
    staccato: Staccato, deployed: str, tenant: str
) -> None:
    ran = staccato("chat", deployed, "hello")
    assert ran.out == f"{tenant} 1 [bold]messages\n"
    assert re.fullmatch(
        r"\[cold start from disk, first token after \d+ ms \(wake 31 ms\), 3 tokens in [\d.]+ s, [\d.e+]+ tokens/s\]\n",
        ran.err,
    )
    said = staccato("chat", deployed, "hello", "--json").json
    assert (said["text"], said["cold"], said["usage"]["completion_tokens"]) == (ran.out.strip(), "disk", 3)
    assert said["timing_ms"] == {"queue": 0.2, "wake": 31.0} and said["tokens_per_s"] > 0


def test_a_conversation_keeps_what_was_said(staccato: Staccato, deployed: str, tenant: str) -> None:
    ran = staccato("chat", deployed, "--tenant", tenant, typed="hello\n\nagain\n")
    assert [line.split()[1] for line in ran.out.splitlines()] == ["1", "3"]


def test_an_answer_that_breaks_off_is_an_error(staccato: Staccato, deployed: str) -> None:
    ran = staccato("chat", deployed, "break")
    assert ran.code == RETRYABLE and ran.err == "error: the answer broke off: the runtime is gone\n"


def test_a_stream_without_an_end_is_an_error() -> None:
    import httpx

    whole = httpx.Response(200, content=b'data: {"choices": []}\n\ndata: [DONE]\n\n')
    assert len(list(events(whole))) == 1
    with pytest.raises(cli.CliError, match="without an end"):
        list(events(httpx.Response(200, content=b'data: {"choices": []}\n\n')))


# ── usage and bill ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_usage_is_shown_by_what_is_asked_for(staccato: Staccato) -> None:
    header = staccato("usage", "--by", "tenant,deployment").out.splitlines()[0]
    assert header.split()[:3] == ["TENANT", "DEPLOYMENT", "REQUESTS"]
    assert staccato("usage", "--json").json == []
    wrong = staccato("usage", "--by", "weather")
    assert wrong.code == USAGE and "weather" in wrong.err


def test_a_bill_is_written_whole_or_not_at_all(staccato: Staccato, tmp_path: Path) -> None:
    file = tmp_path / "bill.csv"
    ran = staccato("bill", "export", "--period", "2026-10", "--output", str(file))
    assert ran.code == 0 and ran.out == ""
    assert file.read_text() == staccato("bill", "export", "--period", "2026-10").out
    assert "amount" in next(csv.reader([file.read_text()]))
    assert staccato("bill", "export", "--period", "October", "--output", str(tmp_path / "none")).code == USAGE
    assert list(tmp_path.iterdir()) == [file]


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_gateway_is_one_sentence_and_may_be_tried_again(staccato: Staccato) -> None:
    ran = staccato("ls", "--url", f"http://127.0.0.1:{free_port()}")
    assert ran.code == RETRYABLE and "no gateway answers" in ran.err and ran.err.count("\n") == 1


def test_this_machines_key_is_shown_to_no_other_machine(staccato: Staccato) -> None:
    ran = staccato("ls", "--url", "http://staccato.example")
    assert ran.code == USAGE and "give --key" in ran.err


def test_a_missing_key_says_where_it_was_looked_for(
    staccato: Staccato, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STACCATO_DATA", str(tmp_path))
    ran = staccato("ls")
    assert ran.code == USAGE and f"{tmp_path}/admin.key" in ran.err


def test_a_wrong_setting_is_one_sentence(staccato: Staccato, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_PORT", "eighty")
    ran = staccato("ls")
    assert ran.code == USAGE and ran.err.startswith("error: STACCATO_PORT is 'eighty'") and ran.err.count("\n") == 1


def test_a_mistake_of_ours_is_no_traceback(staccato: Staccato, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cli.terminal.client.load", lambda: 1 / 0)
    ran = staccato("ls")
    assert (
        ran.code == 1 and ran.err.startswith("error: internal error, ZeroDivisionError") and "Traceback" not in ran.err
    )


def test_the_version_is_an_option_and_a_command(staccato: Staccato) -> None:
    assert staccato("--version").out == staccato("version").out != ""
    assert "Many language models" in staccato("--help").out


def test_the_help_of_up_says_what_each_option_is_and_its_default(staccato: Staccato) -> None:
    said = " ".join(staccato("up", "--help").out.split())
    for words in (
        "Port of the gateway",
        "Default: 8080.",
        "Default: .staccato.",
        "Number of runtimes",
        "Default: 1.",
    ):
        assert words in said, said
    assert "How many." not in said


def test_help_waits_for_no_heavy_import() -> None:
    heavy = "httpx pydantic sqlalchemy nats vllm torch".split()
    code = f"import sys, gateway.cli; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


# ── models from elsewhere ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_is_imported_from_a_hub_and_said_again_it_is_there(staccato: Staccato, hub: Hub) -> None:
    ran = staccato("model", "import", "hf://demo/faq", "--name", "fetched", "--json")
    assert (ran.code, ran.json["state"], ran.json["revision"]) == (0, "ready", COMMIT), ran.err
    asked = len(hub.files_asked("model.safetensors"))
    again = staccato("models", "import", "hf://demo/faq", "--name", "fetched", "--json")
    assert again.json == ran.json and len(hub.files_asked("model.safetensors")) == asked
    assert staccato("model", "rm", "fetched").code == 0


def test_a_source_elsewhere_is_deployed_at_once(staccato: Staccato, tenant: str, hub: Hub) -> None:
    hub.repos["demo/Elsewhere"] = hub.repos["demo/faq"]
    ran = staccato("deploy", tenant + "-bot", "--model", "hf://demo/Elsewhere@main", "--tenant", tenant, "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["model"], ran.json["status"]["phase"]) == ("elsewhere", "awake")


def test_an_import_that_is_refused_is_an_error_and_is_taken_up_when_said_again(staccato: Staccato, hub: Hub) -> None:
    hub.lies["config.json"] = 2
    hub.repos["demo/odd"] = {**hub.repos["demo/faq"], "config.json": hub.repos["demo/faq"]["config.json"] + b"\n"}
    ran = staccato("model", "import", "hf://demo/odd")
    assert ran.code == 1 and "model odd is refused: config.json has the git blob digest" in ran.err
    assert ran.err.count("\n") == 1
    assert staccato("model", "import", "hf://demo/odd", "--json").json["state"] == "ready"
    assert staccato("model", "cancel", "odd").code == 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def in_place_of_stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_who_wakes_a_model_sees_what_was_read_of_it_and_how_long_that_took_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = in_place_of_stderr(monkeypatch)
    with expected("waking [m]", 8.0) as tell:
        tell("waking", None)
        time.sleep(0.3)
        tell("waking", {"done_bytes": 1_500_000_000, "total_bytes": 6_000_000_000, "eta_s": 3})
    said = terminal.getvalue()
    assert all(part in said for part in ("waking [m]: waking", "1.5 GB of 6.0 GB read, about 3 s left"))


def test_a_person_sees_bytes_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = in_place_of_stderr(monkeypatch)
    with bytes_coming("reading [m]") as tell:
        tell({"done_bytes": 1_500_000, "total_bytes": 3_000_000, "eta_s": 65, "waits_for": None})
        time.sleep(0.3)
        tell({"done_bytes": 1_500_000, "total_bytes": 3_000_000, "eta_s": None, "waits_for": "the hub"})
    said = terminal.getvalue()
    assert all(part in said for part in ("reading [m]", "1.5/3.0 MB", "1:05 left", "the hub"))
