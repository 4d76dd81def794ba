"""Usage in the form of OpenAI's administration API, for tools that read usage from OpenAI.

A tenant's key with the scope control sees the tenant; the admin key sees all tenants. A project is a tenant. A model is
a deployment, since clients name deployments. Users, batches and tiers do not exist here: such fields are null, and
such filters find no requests.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response

from gateway.http.api import Call, Operation, Query, Shown, answered
from gateway.http.errors import Fault, Problem
from store.db import usage
from store.db.database import now_us

PATH = "/v1/organization/usage/completions"

_S_US = 1_000_000


@dataclass(frozen=True)
class Width:
    """Width of a bucket in seconds, with the default and the largest number of buckets in an answer."""

    seconds: int
    default: int
    most: int


WIDTHS = {"1m": Width(60, 60, 1440), "1h": Width(3600, 24, 168), "1d": Width(86_400, 7, 31)}
COLUMNS = {"project_id": "tenant_id", "api_key_id": "key_id", "model": "deployment"}  # OpenAI's name → column
UNKNOWN = ("user_id", "batch", "service_tier", "api_source")  # accepted, and always null
FILTERS = {"project_ids": "tenant_id", "api_key_ids": "key_id", "models": "deployment"}


@dataclass(frozen=True)
class UsageQuery:
    """Parameters of a query, in seconds of UNIX time; buckets begin at multiples of the width."""

    start: int  # inclusive
    end: int  # exclusive
    width: Width
    first: int  # number of the page's first bucket, counted in widths
    limit: int
    group_by: tuple[str, ...]
    batch: bool

    @property
    def last(self) -> int:
        """Number of the bucket after the page's last bucket."""
        return min(self.first + self.limit, -(-self.end // self.width.seconds))


class Result(Shown, frozen=True, kw_only=True):
    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    input_audio_tokens: Literal[0] = 0
    output_audio_tokens: Literal[0] = 0
    num_model_requests: int
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    user_id: None = None
    batch: None = None
    service_tier: None = None
    api_source: None = None


class UsageBucket(Shown, frozen=True, kw_only=True):
    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[Result]


class UsagePage(Shown, frozen=True, kw_only=True):
    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


@Operation(
    UsagePage,
    query=(
        Query("start_time", int, "The first second, of UNIX time.", required=True),
        Query("end_time", int, "The second that it ends before; else now."),
        Query("bucket_width", Literal[tuple(WIDTHS)], "1d unless it is said."),
        Query("limit", int, "How many buckets."),
        Query("page", str, "An earlier answer's `next_page`."),
        *(Query(name, list[str], "Some of what `group_by` names.") for name in (*FILTERS, "user_ids")),
        Query("batch", bool, "Only these requests; there are no batches."),
        Query("group_by", list[str], f"Some of {', '.join((*COLUMNS, *UNKNOWN))}."),
    ),
    openai=True,
    lenient=True,
    problems=(400, 404),
    operator=("billing:read", "billing"),
)
async def completions(call: Call) -> Response:
    """Tell the usage as OpenAI does: a project is a tenant, a model is a deployment."""
    tenant_id = await call.tenant_id(call.request.path_params.get("tenant"))
    asked = _asked(call)
    only = {column: values for name, column in FILTERS.items() if (values := _values(call, name))}
    if tenant_id:
        only["tenant_id"] = [tenant_id] if tenant_id in only.get("tenant_id", [tenant_id]) else []
    columns = [COLUMNS[name] for name in asked.group_by]
    width_us, from_us = asked.width.seconds * _S_US, max(asked.start, asked.first * asked.width.seconds) * _S_US
    to_us = min(asked.end, asked.last * asked.width.seconds) * _S_US
    async with call.database.read() as connection:
        found = await usage.buckets(connection, only, from_us, to_us, width_us, columns)
    nobody = bool(_values(call, "user_ids")) or asked.batch
    more = asked.last * asked.width.seconds < asked.end
    data = list(_buckets(asked, [] if nobody else found))
    return answered(UsagePage(data=data, has_more=more, next_page=_cursor(asked.last) if more else None))


def _buckets(asked: UsageQuery, found: Sequence[usage.Bucket]) -> Iterator[UsageBucket]:
    """Yield the page's buckets, empty buckets included."""
    for index in range(asked.first, asked.last):
        yield UsageBucket(
            start_time=index * asked.width.seconds,
            end_time=(index + 1) * asked.width.seconds,
            results=[_result(asked, bucket) for bucket in found if bucket.index == index],
        )


def _result(asked: UsageQuery, bucket: usage.Bucket) -> Result:
    counts = bucket.counts
    group: dict[str, Any] = dict(zip(asked.group_by, bucket.group, strict=True))
    return Result(
        input_tokens=counts.prompt_tokens,
        input_cached_tokens=counts.cached_tokens,
        output_tokens=counts.output_tokens,
        num_model_requests=bucket.requests,
        **group,
    )


# ── what is asked ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _asked(call: Call) -> UsageQuery:
    """Return the query's parameters. Raises Problem."""
    name = call.query("bucket_width", "1d")
    if name not in WIDTHS:
        raise _wrong("bucket_width", f"{name!r} is none of {', '.join(WIDTHS)}")
    width = WIDTHS[name]
    start, end = _number(call, "start_time", None), _number(call, "end_time", now_us() // _S_US)
    if end <= start:
        raise _wrong("end_time", f"{end} is not after start_time, {start}")
    limit = _number(call, "limit", width.default)
    if not 1 <= limit <= width.most:
        raise _wrong("limit", f"{limit} is not from 1 to {width.most}, for buckets of {name}")
    first = max(start // width.seconds, _bucket(call))
    batch = call.query("batch")
    if batch not in (None, "true", "false"):
        raise _wrong("batch", f"{batch!r} is neither true nor false")
    return UsageQuery(start, end, width, first, limit, _group_by(call), batch == "true")


def _group_by(call: Call) -> tuple[str, ...]:
    """Return the grouping columns of this platform, without OpenAI's columns that are always null. Raises Problem."""
    names = _values(call, "group_by")
    for name in names:
        if name not in COLUMNS and name not in UNKNOWN:
            raise _wrong("group_by", f"{name!r} is none of {', '.join((*COLUMNS, *UNKNOWN))}")
    return tuple(name for name in COLUMNS if name in names)


def _values(call: Call, name: str) -> list[str]:
    """Return a parameter's values, given as `name=a&name=b`, `name[]=a&name[]=b` or `name=a,b`."""
    params = call.request.query_params
    said = [*params.getlist(name), *params.getlist(f"{name}[]")]
    return [value for one in said for value in one.split(",") if value]


def _number(call: Call, name: str, default: int | None) -> int:
    said = call.query(name)
    if said is None and default is not None:
        return default
    if said is None or not re.fullmatch(r"\d{1,12}", said):
        raise _wrong(name, f"{said or ''!r} is not a whole number" + (" of UNIX seconds" if "time" in name else ""))
    return int(said)


def _bucket(call: Call) -> int:
    """Return the number of the page's first bucket; 0 for the first page. Raises Problem."""
    said = call.query("page")
    if said is None:
        return 0
    try:
        return int(base64.b64decode(said.encode(), b"-_", validate=True).decode("ascii"))
    except (binascii.Error, ValueError) as error:
        raise _wrong("page", "it is not one that an earlier answer gave as next_page") from error


def _cursor(bucket: int) -> str:
    return base64.urlsafe_b64encode(str(bucket).encode()).decode()


def _wrong(param: str, message: str) -> Problem:
    return Problem(400, "invalid_value", f"{param}: {message}", [Fault(param, message)])
