"""Remembering for a while, and asking once."""

from __future__ import annotations

import asyncio

from gateway.http.cache import Cache


class Source:
    """A source that counts the calls."""

    def __init__(self) -> None:
        self.asked = 0
        self.fails = False

    async def __call__(self) -> int:
        self.asked += 1
        await asyncio.sleep(0)
        if self.fails:
            raise OSError("away")
        return self.asked


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
    assert [type(error) for error in told] == [OSError] * 3 and source.asked == 1
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
