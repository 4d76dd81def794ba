"""Grammars compiled by confined children: the cost, the end and the waiting of other tenants. Real children.

The tests share a compiler: the compiler's process takes ten seconds of a processor to start, and each order brings the
limits of its child. Each test has grammars of its own: a queue and a cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from pydantic import ByteSize

from deploy.demo.random_weights import write_random
from runtime.config import RuntimeSettings
from runtime.core.compile_orders import CompileLimits, NotCompiled
from runtime.node.grammars import Compiler, Grammars
from store.contract.wire import EngineSpec, Finish
from store.tasks import ended
from tests.conftest import soon
from tests.runtime.engines import spec

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the compiler's process belongs to a loop
SLOW = {"regex": "(" + "|".join(f"[a-z]{{1,{n}}}[0-9]{{1,{n}}}" for n in range(100, 400)) + "){1,50}"}
# For 1,000 optional properties xgrammar writes the automaton 1,000 times: 633 MB.
BOMB = {"json": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    return spec(write_random(tmp_path_factory.mktemp("models") / "m", "llama", hidden=64, layers=1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler() -> AsyncIterator[Compiler]:
    compiler = Compiler(CompileLimits(0, 0, 0))
    yield compiler
    await compiler.ended()


@contextlib.asynccontextmanager
async def limited(compiler: Compiler, cpu_s: float, memory_bytes: int, **more: Any) -> AsyncIterator[Grammars]:
    """Grammars over the shared compiler, whose children have the limits of these grammars until the context ends."""
    grammars = Grammars(RuntimeSettings(grammar_cpu_s=cpu_s, grammar_memory=ByteSize(memory_bytes), **more))
    compiler._limits, grammars._compiler = grammars._compiler._limits, compiler
    try:
        yield grammars
    finally:
        await ended(*(grammar.task for grammar in grammars._wanted.values() if grammar.task))
        await soon(lambda: not children(grammars))


@pytest_asyncio.fixture(loop_scope="module")
async def grammars(compiler: Compiler) -> AsyncIterator[Grammars]:
    async with limited(compiler, 2, 256 << 20, grammar_compiled_max=ByteSize(1 << 20)) as grammars:
        yield grammars


@pytest_asyncio.fixture(loop_scope="module")
async def patient(compiler: Compiler) -> AsyncIterator[Grammars]:
    """Grammars whose children reach no limit."""
    async with limited(compiler, 300, 4 << 30) as grammars:
        yield grammars


async def compiled(grammars: Grammars, model: EngineSpec, tenant: str = "acme", **grammar: Any) -> bytes:
    return await grammars.compiled(model, tenant, json.dumps(grammar).encode())


async def refused(grammars: Grammars, model: EngineSpec, **grammar: Any) -> str:
    with pytest.raises(NotCompiled) as error:
        await compiled(grammars, model, **grammar)
    assert error.value.finish is Finish.REFUSED
    return str(error.value)


def children(grammars: Grammars) -> list[psutil.Process]:
    """Processes compiling a grammar at the moment."""
    process = grammars._compiler._process
    return psutil.Process(process.pid).children() if process else []


async def test_a_grammar_that_can_not_be_compiled_is_refused_with_the_reason_and_harms_no_other(
    grammars: Grammars, model: EngineSpec
) -> None:
    assert "2 s" in await refused(grammars, model, **SLOW)
    bomb = await refused(grammars, model, **BOMB)
    assert "256 MiB" in bomb or "2 s" in bomb, bomb
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(80)}}
    assert "bytes, at most 1048576" in await refused(grammars, model, json=wide)
    assert "can't be compiled: " in await refused(grammars, model, regex="\\p{L}+")
    for bad in ({"choice": []}, {"json": "{"}, {"grammar": "root ::= "}, {"regex": "a", "choice": ["a"]}):
        assert "can't be compiled: " in await refused(grammars, model, **bad)
    await refused(grammars, model, regex="(" * 50_000 + "a" + ")" * 50_000)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for good in ({"json": schema}, {"json_object": True}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"'}):
        assert await compiled(grammars, model, **good)


async def test_memory_of_a_child_is_limited(compiler: Compiler, model: EngineSpec) -> None:
    """The limit of memory ends the child, long before the limit of time."""
    async with limited(compiler, 100, 64 << 20) as grammars:
        assert "64 MiB" in await refused(grammars, model, **BOMB)
        assert await compiled(grammars, model, regex="a")


async def test_a_grammar_is_compiled_once_for_its_tenant_and_again_for_another(
    grammars: Grammars, model: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    compile = grammars._compiler.compile

    async def counted(spec: EngineSpec, text: bytes) -> bytes:
        begun.append(spec.key)
        return await compile(spec, text)

    monkeypatch.setattr(grammars._compiler, "compile", counted)
    first = await asyncio.gather(*(compiled(grammars, model, regex="a{3}") for _ in range(5)))
    assert first == [await compiled(grammars, model, regex="a{3}")] * 5 and len(begun) == 1
    await compiled(grammars, model, "globex", regex="a{3}")
    assert len(begun) == 2


async def test_a_child_ends_when_nobody_wants_its_grammar_and_the_queue_forgets_what_waits(
    patient: Grammars, model: EngineSpec
) -> None:
    await compiled(patient, model, regex="a")
    waiting = [asyncio.create_task(compiled(patient, model, **SLOW)) for _ in range(2)]
    behind = asyncio.create_task(compiled(patient, model, regex="behind"))
    await soon(lambda: bool(children(patient)))
    (child,) = children(patient)
    behind.cancel()
    waiting[0].cancel()
    await asyncio.wait([behind, waiting[0]])
    assert child.is_running() and len(patient._queue) == 0, "one request still wants the first grammar"
    waiting[1].cancel()
    await soon(lambda: not children(patient))
    assert await compiled(patient, model, regex="next")


async def test_a_slow_grammar_of_a_tenant_does_not_keep_others_waiting(patient: Grammars, model: EngineSpec) -> None:
    await compiled(patient, model, regex="a")
    slow = [asyncio.create_task(compiled(patient, model, **SLOW, whitespace_pattern=str(n))) for n in range(3)]
    await soon(lambda: bool(children(patient)))
    for number in range(3):
        assert await compiled(patient, model, "globex", regex=f"a{number}")
    assert not any(task.done() for task in slow) and len(children(patient)) == 1
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def test_a_compiler_that_is_gone_costs_its_requests_their_place_and_is_started_again(
    grammars: Grammars, model: EngineSpec
) -> None:
    await compiled(grammars, model, regex="a")
    waiting = asyncio.create_task(compiled(grammars, model, **SLOW))
    await soon(lambda: bool(children(grammars)))
    (child,) = children(grammars)
    process = grammars._compiler._process
    assert process is not None
    process.kill()
    with pytest.raises(NotCompiled) as lost:
        await waiting
    assert lost.value.finish is Finish.LOST
    await soon(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert await compiled(grammars, model, regex="b")


async def test_a_child_can_open_neither_files_nor_sockets_and_goes_last(patient: Grammars, model: EngineSpec) -> None:
    await compiled(patient, model, regex="a")
    waiting = asyncio.create_task(compiled(patient, model, **SLOW))
    await soon(lambda: bool(children(patient)))
    (child,) = children(patient)
    parent = child.parent()
    assert parent is not None
    await soon(lambda: child.nice() == min(19, parent.nice() + 10))
    limits = Path(f"/proc/{child.pid}/limits")
    await soon(lambda: "Max open files            0                    0" in limits.read_text())
    assert len(os.listdir(f"/proc/{child.pid}/fd")) == 4, "stdin, stdout, stderr and the socket of its order"
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_the_cache_has_a_bound(compiler: Compiler, model: EngineSpec) -> None:
    async with limited(compiler, 300, 4 << 30, grammar_cache=ByteSize(2000)) as grammars:
        for number in range(20):
            await compiled(grammars, model, regex=f"a{number}")
            assert grammars._cache_bytes <= 2000
        assert 0 < len(grammars._cache) < 20
