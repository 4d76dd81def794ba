"""Usage in OpenAI's shape: the official client reads usage page by page, and sees the bookings."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from openai import OpenAI
from openai.types.admin.organization import UsageCompletionsResponse

from gateway.billing.organization import PATH
from store.db import tenants, usage
from tests.gateway.plane import Plane, made
from tests.store.db.test_usage import DAY_US, NOVEMBER_US, message

START_S = NOVEMBER_US // 10**6
HOUR_US = DAY_US // 24


@pytest.fixture
async def used(plane_on_both: Plane) -> AsyncIterator[Plane]:
    """A plane with bookings of `acme`, two in the first hour and a third in the third hour, and of a second tenant."""
    plane = plane_on_both
    async with plane.database.write() as connection:
        acme, other = [await tenants.create(connection, name, 1) for name in ("acme", "other")]
        tokens = dict(prompt_tokens=10, cached_tokens=4, output_tokens=3)
        sent = [
            message("r1", tenant_id=acme.id, **tokens),
            message("r2", tenant_id=acme.id, started_us=NOVEMBER_US + HOUR_US - 1, **tokens),
            message("r3", tenant_id=acme.id, started_us=NOVEMBER_US + 2 * HOUR_US, **tokens),
            message("r4", tenant_id=other.id, **tokens),
        ]
        await usage.book(connection, sent, NOVEMBER_US)
    yield plane


async def client(plane: Plane, tenant: str = "acme", **key: object) -> httpx.AsyncClient:
    return plane.client(made(await plane.admin.post(f"/tenants/{tenant}/keys", json=key))["key"])


async def asked(client: httpx.AsyncClient, path: str = PATH, **query: object) -> UsageCompletionsResponse:
    """Usage as read by the official types: a field of a wrong type raises."""
    answer = await client.get(f"http://gateway{path}", params={"start_time": START_S} | query)
    assert answer.status_code == 200, answer.text
    return UsageCompletionsResponse.model_validate(answer.json(), strict=True)


async def test_buckets_lie_side_by_side_and_empty_ones_are_there(used: Plane) -> None:
    page = await asked(await client(used), bucket_width="1h", limit=4)
    assert [bucket.start_time - START_S for bucket in page.data] == [0, 3600, 7200, 10_800]
    assert all(bucket.end_time == bucket.start_time + 3600 for bucket in page.data)
    assert [len(bucket.results) for bucket in page.data] == [1, 0, 1, 0]
    first = page.data[0].results[0]
    figures = (first.input_tokens, first.input_cached_tokens, first.output_tokens, first.num_model_requests)
    assert figures == (20, 8, 6, 2) and first.model is None and first.project_id is None
    assert page.has_more and page.next_page


async def test_pages_join_without_gap_or_repeat(used: Plane) -> None:
    own, query = await client(used), {"bucket_width": "1h", "end_time": START_S + 5 * 3600 + 1}
    whole = (await asked(own, limit=24, **query)).data
    pages, cursor = [], {}
    while True:
        page = await asked(own, limit=2, **query, **cursor)
        pages += page.data
        if not page.has_more:
            break
        cursor = {"page": page.next_page}
    assert pages == whole and len(whole) == 6 and page.next_page is None


async def test_a_time_within_a_bucket_counts_from_there(used: Plane) -> None:
    page = await asked(await client(used), start_time=START_S + 1, end_time=START_S + 7200, bucket_width="1d")
    (bucket,) = page.data
    assert (bucket.start_time, bucket.results[0].num_model_requests) == (START_S, 1)


async def test_groups_and_filters_are_told_apart(used: Plane) -> None:
    own = await client(used)
    acme, other = [(await used.admin.get(f"/tenants/{name}")).json()["id"] for name in ("acme", "other")]
    query = {"end_time": START_S + 86_400, "group_by[]": ["model", "project_id", "user_id"]}
    (result,) = (await asked(own, **query)).data[0].results
    assert (result.model, result.project_id, result.user_id, result.num_model_requests) == ("chat", acme, None, 3)
    for filters, requests in (
        ({"models": "chat"}, 3),
        ({"models[]": ["poet", "chat"]}, 3),
        ({"models": "poet"}, 0),
        ({"api_key_ids": "k"}, 3),
        ({"project_ids[]": [acme, other]}, 3),
        ({"project_ids": other}, 0),
        ({"user_ids": "u"}, 0),
        ({"batch": "true"}, 0),
        ({"batch": "false"}, 3),
    ):
        results = (await asked(own, end_time=START_S + 86_400, **filters)).data[0].results
        assert sum(result.num_model_requests for result in results) == requests, filters


async def test_a_tenant_sees_itself_and_the_operator_all(used: Plane) -> None:
    query = {"end_time": START_S + 86_400, "group_by": "project_id"}
    every = (await asked(used.admin, **query)).data[0].results
    assert sorted(result.num_model_requests for result in every) == [1, 3]
    (one,) = (await asked(used.admin, path=f"/t/other{PATH}", **query)).data[0].results
    assert one.num_model_requests == 1
    own = await client(used)
    assert (await asked(own, path=f"/t/acme{PATH}", **query)).data[0].results[0].num_model_requests == 3
    assert (await own.get(f"http://gateway/t/other{PATH}")).status_code == 404


async def test_a_key_for_inference_alone_is_refused_in_openais_words(used: Plane) -> None:
    answer = await (await client(used, scopes=["inference"])).get(f"http://gateway{PATH}?start_time=1")
    assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=soon", "start_time"),
        ("start_time=5&end_time=5", "end_time"),
        ("start_time=5&bucket_width=1w", "bucket_width"),
        ("start_time=5&limit=0", "limit"),
        ("start_time=5&limit=32", "limit"),
        ("start_time=5&group_by=colour", "group_by"),
        ("start_time=5&page=nonsense", "page"),
    ],
)
async def test_what_can_not_be_asked_is_said_in_openais_words(plane: Plane, query: str, param: str) -> None:
    error = made(await plane.admin.get(f"http://gateway{PATH}?{query}"), 400)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "invalid_value")


def test_the_official_client_asks_where_we_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The official client writes lists as `group_by[]=…`, and asks the path below the base URL."""
    official = OpenAI(api_key="k", admin_api_key="k", base_url="http://gateway/v1")
    asked: list[str] = []

    def send(request: object, **_: object) -> None:
        asked.append(str(request.url))  # type: ignore[attr-defined]
        raise ConnectionError

    monkeypatch.setattr(official._client, "send", send)
    with pytest.raises(ConnectionError):
        completions = official.with_options(max_retries=0).admin.organization.usage.completions
        completions(start_time=5, group_by=["model", "project_id"])
    url = httpx.URL(asked[0])
    assert url.path == PATH and url.params.get_list("group_by[]") == ["model", "project_id"]
