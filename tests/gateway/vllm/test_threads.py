"""Tenants at the threads of a front: turns for tenants, not for texts, and a bound on waiting texts."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from gateway.core.extent import ExtentLimits
from gateway.vllm import threads
from gateway.vllm.threads import TENANT, TenantThreads, TooManyWaiting
from store.contract.wire import ModelState, Residency
from tests.gateway.http.test_hostile import deployed
from tests.gateway.plane import Plane
from tests.gateway.vllm.test_front import asked

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front

MIB = 1 << 20


def submitted(executor: TenantThreads, tenant: str, work: Callable[[], Any]) -> Future[Any]:
    def submit() -> Future[Any]:
        TENANT.set(tenant)
        return executor.submit(work)

    return contextvars.copy_context().run(submit)


def test_a_tenant_with_many_texts_has_one_thread_and_the_others_take_turns() -> None:
    executor, gate, order = TenantThreads(), threading.Event(), list[str]()
    held = submitted(executor, "acme", gate.wait)
    many = [submitted(executor, "acme", lambda: order.append("acme")) for _ in range(20)]
    for tenant in ("globex", "initech"):
        submitted(executor, tenant, lambda tenant=tenant: order.append(tenant)).result(20)  # type: ignore[misc]
    assert order == ["globex", "initech"] and not any(future.done() for future in many)
    gate.set()
    assert held.result(20) and [future.result(20) for future in many] == [None] * 20
    executor.shutdown()


def test_two_tenants_with_many_texts_let_a_third_one_in_after_one_text_of_each() -> None:
    executor, gate, order = TenantThreads(), threading.Event(), list[str]()
    waiting = [submitted(executor, tenant, gate.wait) for tenant in ("acme", "globex")]
    for tenant in ("acme", "globex", "acme", "globex", "initech"):
        work = lambda tenant=tenant: order.append(tenant)  # noqa: E731
        waiting.append(submitted(executor, tenant, work))
    gate.set()
    for future in waiting:
        future.result(20)
    assert order.index("initech") <= 2
    executor.shutdown()


def test_what_one_tenant_has_waiting_is_bounded_and_what_was_cancelled_is_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "WAITING_MOST", 3)
    executor, gate, done = TenantThreads(), threading.Event(), list[int]()
    submitted(executor, "acme", gate.wait)
    waiting = [submitted(executor, "acme", lambda: done.append(1)) for _ in range(3)]
    with pytest.raises(TooManyWaiting, match="3 texts"):
        submitted(executor, "acme", lambda: None)
    assert waiting[1].cancel() and submitted(executor, "globex", lambda: 7).result(20) == 7
    gate.set()
    waiting[2].result(20)
    assert done == [1, 1]
    executor.shutdown()


def test_threads_that_rest_end_after_their_jobs_and_later_jobs_get_threads_anew() -> None:
    executor, gate = TenantThreads(), threading.Event()
    first = submitted(executor, "acme", threading.current_thread).result(20)
    held = submitted(executor, "acme", gate.wait)
    waiting = submitted(executor, "acme", threading.current_thread)
    executor.rest()
    gate.set()
    assert held.result(20) and waiting.result(20) is not first
    first.join(20)
    assert not first.is_alive() and submitted(executor, "globex", lambda: 7).result(20) == 7
    executor.shutdown()


def test_what_goes_wrong_in_a_text_is_its_own_error_and_the_thread_goes_on() -> None:
    executor = TenantThreads()
    with pytest.raises(ZeroDivisionError):
        submitted(executor, "acme", lambda: 1 / 0).result(20)
    assert submitted(executor, "acme", lambda: 7).result(20) == 7
    executor.shutdown()


async def test_texts_without_spaces_of_one_tenant_keep_no_other_tenant_of_the_artefact_waiting(plane: Plane) -> None:
    """Texts pass through vLLM's own handlers, at a front shared by both tenants, with bounds far above the defaults."""
    keys = {tenant: (await deployed(plane, tenant)) for tenant in ("acme", "globex")}
    (engine,) = {engine for _, engine in keys.values()}
    await plane.report({engine: ModelState(residency=Residency.RESIDENT, load_ms=1.0)})
    extent = ExtentLimits(tokenize_bytes_max=4 * MIB)
    async with asked(plane, "", body_bytes=4 * MIB, extent=extent) as client:

        async def tokenize(tenant: str, prompt: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {keys[tenant][0]}"}
            body = {"model": "chat", "prompt": prompt}
            return await client.post("/v1/tokenize", json=body, headers=headers, timeout=120)

        assert (await tokenize("globex", "hello")).status_code == 200  # the front is built
        attack = [asyncio.create_task(tokenize("acme", "a" * MIB)) for _ in range(4)]
        await asyncio.sleep(0.3)  # the texts are at the front
        answer = await tokenize("globex", "hello")
        assert answer.status_code == 200 and sum(text.done() for text in attack) <= 2
        assert [text.status_code for text in await asyncio.gather(*attack)] == [200] * 4
