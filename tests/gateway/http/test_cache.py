"""Remembering for a while, and asking once."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http import cache as cache_module
from gateway.http.cache import Cache
from store.db.database import DatabaseError


class Source:
    """A source that counts the calls."""

    def __init__(self) -> None:
        self.asked = 0
        self.fails = False
        self.hangs = asyncio.Event()
        self.hangs.set()  # until cleared, the source answers

    async def __call__(self) -> int:
        self.asked += 1
        number = self.asked
        await asyncio.sleep(0)
        await self.hangs.wait()
        if self.fails:
            raise DatabaseError("away")
        return number


async def test_an_answer_is_remembered_and_asked_for_again_when_it_is_old() -> None:
    now, source = [0.0], Source()
    cache: Cache[str, int] = Cache(ttl_s=4, clock=lambda: now[0])
    assert [await cache.get("k", source), await cache.get("k", source)] == [1, 1]
    now[0] = 3.9
    assert await cache.get("k", source) == 1
    now[0] = 4.0
    assert await cache.get("k", source) == 2


async def test_many_who_ask_at_once_are_one_question() -> None:
    source = Source()
    cache: Cache[str, int] = Cache(ttl_s=4)
    assert set(await asyncio.gather(*(cache.get("k", source) for _ in range(50)))) == {1}


async def test_a_question_goes_on_when_the_first_who_asked_leaves() -> None:
    source = Source()
    cache: Cache[str, int] = Cache(ttl_s=4)
    first, second = (asyncio.create_task(cache.get("k", source)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1


async def test_a_failure_is_told_to_all_and_not_remembered() -> None:
    source = Source()
    source.fails = True
    cache: Cache[str, int] = Cache(ttl_s=4)
    told = await asyncio.gather(*(cache.get("k", source) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in told] == [DatabaseError] * 3 and source.asked == 1
    source.fails = False
    assert await cache.get("k", source) == 2


async def test_the_oldest_answers_leave_when_there_are_too_many() -> None:
    source = Source()
    cache: Cache[int, int] = Cache(ttl_s=4, most=3)
    for key in range(5):
        await cache.get(key, source)
    assert [await cache.get(key, source) for key in (4, 3, 2)] == [5, 4, 3]
    assert await cache.get(0, source) == 6


async def test_what_is_forgotten_is_asked_for_again() -> None:
    source = Source()
    cache: Cache[str, int] = Cache(ttl_s=4)
    await cache.get("k", source)
    cache.clear()
    assert await cache.get("k", source) == 2


async def test_while_the_source_is_away_an_old_answer_is_given_for_a_while_and_the_source_asked_again_later() -> None:
    now, source = [0.0], Source()
    cache: Cache[str, int] = Cache(ttl_s=4, kept_s=60, clock=lambda: now[0])
    assert await cache.get("k", source) == 1
    source.fails = True
    for now[0] in (4.0, 5.0, 7.9):
        assert await cache.get("k", source) == 1
    assert source.asked == 2  # a failure costs the source a question each ttl_s, however many callers there are
    now[0] = 59.0
    assert await cache.get("k", source) == 1
    now[0] = 60.0
    with pytest.raises(DatabaseError):
        await cache.get("k", source)
    source.fails = False
    assert await cache.get("k", source) == source.asked


async def test_an_answer_that_there_is_nothing_is_not_kept() -> None:
    now, fails = [0.0], [False]

    async def nothing() -> None:
        if fails[0]:
            raise DatabaseError("away")

    cache: Cache[str, None] = Cache(ttl_s=4, kept_s=60, clock=lambda: now[0])
    assert await cache.get("k", nothing) is None
    now[0], fails[0] = 4.0, True
    with pytest.raises(DatabaseError):  # the key may be known by now
        await cache.get("k", nothing)


async def test_a_source_that_hangs_costs_a_caller_patience_once_and_its_late_answer_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, source, waited = [0.0], Source(), list[float | None]()
    cache: Cache[str, int] = Cache(ttl_s=4, kept_s=60, clock=lambda: now[0])
    assert await cache.get("k", source) == 1
    wait = asyncio.wait

    async def counted(tasks: list[asyncio.Future[int]], timeout: float) -> object:
        waited.append(timeout)
        return await wait(tasks, timeout=0)

    monkeypatch.setattr(asyncio, "wait", counted)
    source.hangs.clear()
    for now[0] in (4.0, 5.0, 30.0):
        assert await cache.get("k", source) == 1
    assert waited == [cache_module.PATIENCE_S] and source.asked == 2
    source.hangs.set()
    await asyncio.sleep(0.01)
    source.hangs.clear()
    assert await cache.get("k", source) == 2  # the late answer, while the source hangs again


async def test_a_source_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "LOAD_S_MOST", 0.05)
    source = Source()
    source.hangs.clear()
    with pytest.raises(DatabaseError, match="did not answer within"):
        await Cache[str, int](ttl_s=4).get("k", source)
