"""Chats rendered for the event loop: turns of tenants, chats that take long or do harm, processes that end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from jinja2 import TemplateError

from gateway.inference.context import TENANT
from gateway.vllm import chats, templates
from gateway.vllm.chats import LATE_S, ChatRenderer, LinkedProcess
from gateway.vllm.rendering import TEXT_MOST
from gateway.vllm.templates import NotedTemplate, RenderingProcess
from gateway.vllm.threads import TooManyWaiting
from tests.conftest import soon

# "loop" never ends; "long" takes some tenths of a second; "large" makes too much text; "die" takes all memory.
TEMPLATE = """{% set said = messages[0].content %}{{ bos }}{{ said }}
{%- if said == "loop" %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endif %}
{%- if said == "long" %}{% for i in range(30) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endif %}
{%- if said == "large" %}{{ " " * (messages | length * 20000000) }}{% endif %}
{%- if said == "die" %}{{ "a" * (messages | length * 10000000000) }}{% endif %}
{%- if said == "refuse" %}{{ raise_exception("no " ~ said) }}{% endif %}"""


@pytest.fixture
async def renderer() -> AsyncIterator[ChatRenderer]:
    made = await asyncio.to_thread(ChatRenderer, NotedTemplate(TEMPLATE, {"bos": "<s>"}), None)
    yield made
    for linked in made._processes:
        linked.process.end()


def job(said: str) -> bytes:
    return templates.chat_job([{"role": "user", "content": said}])


def asked(renderer: ChatRenderer, said: str, tenant: str = "acme") -> asyncio.Task[str]:
    async def ask() -> str:
        TENANT.set(tenant)
        return await renderer.text(job(said))

    return asyncio.create_task(ask())


def only(renderer: ChatRenderer) -> LinkedProcess:
    (linked,) = renderer._processes
    return linked


@pytest.mark.parametrize("said", ["hello", "wär' es \U0001f600 \ud800?", "x" * 300_000, ""])
async def test_a_chat_has_the_text_that_the_template_makes(renderer: ChatRenderer, said: str) -> None:
    assert await asked(renderer, said) == f"<s>{said}"


async def test_many_chats_of_many_tenants_all_get_their_own_texts_from_one_process(renderer: ChatRenderer) -> None:
    texts = [asked(renderer, f"chat {number}", f"tenant {number % 7}") for number in range(200)]
    assert await asyncio.gather(*texts) == [f"<s>chat {number}" for number in range(200)]
    assert not any(linked.process.slowed for linked in renderer._processes)


async def test_tenants_take_turns(renderer: ChatRenderer) -> None:
    order = list[str]()

    async def note(said: str, tenant: str) -> None:
        order.append((await asked(renderer, said, tenant))[3:])

    many = [note(f"acme {number}", "acme") for number in range(20)]
    await asyncio.gather(*many, note("globex", "globex"), note("initech", "initech"))
    assert {order.index("globex"), order.index("initech")} <= {0, 1, 2}


async def test_a_chat_that_takes_long_leaves_a_second_process_to_other_tenants(renderer: ChatRenderer) -> None:
    held = asked(renderer, "loop", "acme")
    queued = asked(renderer, "mine", "acme")
    for number in range(20):
        assert await asked(renderer, f"other {number}", "globex") == f"<s>other {number}"
    assert not held.done() and not queued.done() and len(renderer._processes) == 2
    with pytest.raises(TemplateError, match="did not end within 3 s"):
        await held
    assert await queued == "<s>mine"


async def test_the_process_of_a_slow_chat_is_replaced(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "PATIENCE_S", LATE_S)
    assert await asked(renderer, "first") == "<s>first"
    slow = only(renderer)
    assert await asked(renderer, "long") == "<s>long"
    assert slow.process.slowed and not slow.process.alive and slow not in renderer._processes
    assert await asked(renderer, "next") == "<s>next"


@pytest.mark.parametrize(("said", "why"), [("large", f"at most {TEXT_MOST}"), ("die", "MiB"), ("refuse", "no refuse")])
async def test_a_chat_that_asks_too_much_hears_why_and_the_next_chat_is_rendered(
    renderer: ChatRenderer, said: str, why: str
) -> None:
    with pytest.raises(TemplateError, match=why):
        await asked(renderer, said)
    assert await asked(renderer, "next") == "<s>next"


async def test_a_process_that_ends_in_a_chat_is_named_and_an_idle_process_that_ends_is_replaced(
    renderer: ChatRenderer,
) -> None:
    held = asked(renderer, "loop")
    await soon(lambda: bool(renderer._processes) and only(renderer).timer is not None)
    os.kill(only(renderer).process._child.pid, signal.SIGKILL)
    with pytest.raises(TemplateError, match=r"ended its process \(-9\)"):
        await held
    assert await asked(renderer, "again") == "<s>again"
    idle = only(renderer)
    os.kill(idle.process._child.pid, signal.SIGKILL)
    await soon(lambda: not idle.link.there)
    assert await asked(renderer, "once more") == "<s>once more" and idle not in renderer._processes


async def test_a_client_that_leaves_takes_its_chat_along_and_no_other(renderer: ChatRenderer) -> None:
    assert await asked(renderer, "first") == "<s>first"
    held, waiting, last = (asked(renderer, said) for said in ("long", "waiting", "last"))
    await asyncio.sleep(0)
    held.cancel()
    waiting.cancel()
    assert await last == "<s>last"
    assert held.cancelled() and waiting.cancelled() and not len(renderer._queue)


async def test_the_waiting_chats_of_a_tenant_are_bounded(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer._queue, "_tenant_max", 3)
    assert await asked(renderer, "first") == "<s>first"
    held = [asked(renderer, f"{number}") for number in range(5)]
    done = await asyncio.gather(*held, return_exceptions=True)
    assert [type(text) for text in done] == [str] * 4 + [TooManyWaiting]
    monkeypatch.undo()
    monkeypatch.setattr(chats, "WAITING_BYTES_MOST", 4 * len(job("0")))
    held = [asked(renderer, f"{number}") for number in range(5)]
    other = asked(renderer, "other", "globex")
    done = await asyncio.gather(*held, return_exceptions=True)
    assert [type(text) for text in done] == [str] * 4 + [TooManyWaiting] and "wait to be rendered" in str(done[-1])
    assert await other == "<s>other" and await asked(renderer, "next") == "<s>next"
    assert not renderer._waiting_bytes


async def test_without_a_process_the_reason_reaches_the_client(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await asked(renderer, "first") == "<s>first"
    os.kill(only(renderer).process._child.pid, signal.SIGKILL)
    await soon(lambda: not only(renderer).link.there)

    def refuse(*_: Any) -> RenderingProcess:
        raise OSError("no memory for a process")

    monkeypatch.setattr(chats, "_started", refuse)
    failed = [asked(renderer, f"{number}", f"tenant {number}") for number in range(3)]
    for text in await asyncio.gather(*failed, return_exceptions=True):
        assert isinstance(text, TemplateError) and "no memory for a process" in str(text)
    monkeypatch.undo()
    assert await asked(renderer, "next") == "<s>next"


async def test_processes_end_with_the_renderer() -> None:
    made = await asyncio.to_thread(ChatRenderer, NotedTemplate(TEMPLATE, {"bos": ""}), None)
    assert await asked(made, "hello") == "hello"
    pid = only(made).process._child.pid
    del made
    gc.collect()
    await soon(lambda: not os.path.exists(f"/proc/{pid}"))


async def test_a_running_process_of_a_thread_is_taken_over() -> None:
    def make() -> tuple[int, ChatRenderer]:
        templates.Compiled("{{ 1 }}").render()
        pid = templates._OF_THREAD.process._child.pid
        return pid, ChatRenderer(NotedTemplate(TEMPLATE, {"bos": ""}), templates.process_of_thread())

    pid, made = await asyncio.to_thread(make)
    assert await asked(made, "hello") == "hello" and only(made).process._child.pid == pid


async def test_a_faulty_template_is_refused_at_once_by_a_running_process_and_else_at_the_first_chat() -> None:
    faulty = NotedTemplate("{% for %}", {})
    with pytest.raises(TemplateError, match="Expected"):
        await asyncio.to_thread(lambda: ChatRenderer(faulty, RenderingProcess()))
    made = await asyncio.to_thread(ChatRenderer, faulty, None)
    for said in ("first", "next"):
        with pytest.raises(TemplateError, match="Expected"):
            await asked(made, said)


async def test_processes_end_without_chats_and_the_next_chat_starts_a_process(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "IDLE_S", 0.2)
    assert await asked(renderer, "first") == "<s>first"
    first = only(renderer).process
    held = asked(renderer, "loop", "acme")  # a process with a chat stays
    await soon(lambda: len(renderer._processes) == 1 and not renderer._idle)
    await asyncio.sleep(2 * chats.IDLE_S)
    assert first.alive and not held.done()
    with pytest.raises(TemplateError, match="did not end"):
        await held
    assert await asked(renderer, "next") == "<s>next"
    await soon(lambda: not renderer._processes)
    assert await asked(renderer, "last") == "<s>last" and only(renderer).process is not first


async def test_chats_keep_the_process_and_a_process_without_any_chat_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "IDLE_S", 1.0)
    process = await asyncio.to_thread(RenderingProcess)
    made = await asyncio.to_thread(ChatRenderer, NotedTemplate(TEMPLATE, {"bos": ""}), process)
    made.watch()
    began = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began + 2 * chats.IDLE_S:
        assert await asked(made, "hello") == "hello" and only(made).process is process
        await asyncio.sleep(0.05)
    await soon(lambda: not process.alive)
    unused = await asyncio.to_thread(RenderingProcess)
    made = await asyncio.to_thread(ChatRenderer, NotedTemplate(TEMPLATE, {"bos": ""}), unused)
    made.watch()
    await soon(lambda: not unused.alive)
    assert await asked(made, "hello") == "hello"


async def test_a_noted_template_is_not_rendered() -> None:
    with templates.noting() as noted:
        assert templates.Compiled("{{ 1 }}").render(messages=[1], bos="s") == templates.NOTED
    assert noted == [NotedTemplate("{{ 1 }}", {"messages": [1], "bos": "s"})]
    assert await asyncio.to_thread(templates.Compiled("{{ 1 }}").render) == "1"
