"""Connects the command line to a gateway: URL, key, and exit codes for the gateway's refusals."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Self, TypeVar

import httpx

from gateway.cli.api import CONFLICT, ERROR, NOT_FOUND, QUOTA, RETRYABLE, USAGE, CliError, Row
from gateway.config import Settings, load, on_this_machine

EXIT_CODES = {400: USAGE, 402: QUOTA, 404: NOT_FOUND, 409: CONFLICT, 412: CONFLICT, 422: USAGE, 429: QUOTA}
TIMEOUT_S = 30.0
SILENCE_S_MOST = 120.0  # silence within a stream: longer than a gateway holds a request while the model wakes
PAGE_ROWS = 200

T = TypeVar("T")


class GatewayClient:
    """A gateway asked with a key. Every method raises CliError."""

    def __init__(self, url: str, key: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url, self.key = url, key
        # A proxy named in the environment is not used for a gateway on this host.
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=timeout_s,
            trust_env=not on_this_machine(url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **params: str | None) -> Row:
        return self._ask(self._http.build_request("GET", path, params=_given(params)))

    def post(self, path: str, body: Row | None = None, once: str | None = None) -> Row:
        """Post a body. `once` is an Idempotency-Key: a repeated post with an equal key has no further effect."""
        headers = {"idempotency-key": once} if once else {}
        return self._ask(self._http.build_request("POST", path, json=_given(body or {}), headers=headers))

    def patch(self, path: str, body: Row) -> Row:
        """Send a merge patch: a null removes a field."""
        return self._ask(self._http.build_request("PATCH", path, json=body))

    def delete(self, path: str) -> Row:
        return self._ask(self._http.build_request("DELETE", path))

    def rows(self, path: str, **params: str | None) -> list[Row]:
        """Return the rows of a list without pages."""
        return rows_of(self.get(path, **params))

    def every(self, path: str, **params: str | None) -> list[Row]:
        """Return all rows of a list with pages."""
        rows: list[Row] = []
        cursor: str | None = None
        while True:
            page = self.get(path, **params, cursor=cursor, limit=str(PAGE_ROWS))
            rows += rows_of(page)
            cursor = str(page["next_cursor"]) if page.get("next_cursor") else None
            if cursor is None:
                return rows

    def _ask(self, request: httpx.Request) -> Row:
        with self._translated():
            response = self._http.send(request)
        check(response)
        answer = _parsed(response.content) if response.content else {}
        if answer is None:
            asked = f"{request.method} {request.url.path}"
            raise CliError(f"{self.url} answered {asked} with something else than JSON: is it a Staccato gateway?")
        return answer

    @contextlib.contextmanager
    def stream(
        self, method: str, path: str, body: Row | None = None, silence_s: float = SILENCE_S_MOST, **params: str | None
    ) -> Iterator[httpx.Response]:
        """Yield a streaming answer, after a check for a refusal."""
        timeout = httpx.Timeout(TIMEOUT_S, read=silence_s)
        with (
            self._translated(),
            self._http.stream(method, path, json=body, params=_given(params), timeout=timeout) as response,
        ):
            if response.is_error:
                response.read()
            check(response)
            yield response

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise CliError(
                f"no gateway answers at {self.url}: start it with `staccato up` or give --url", RETRYABLE
            ) from error
        except httpx.TimeoutException as error:
            raise CliError(f"{self.url} did not answer within {TIMEOUT_S:g} s: try again", RETRYABLE) from error
        except httpx.InvalidURL as error:
            raise CliError(f"--url {self.url!r} is no URL: {error}", USAGE) from error
        except httpx.TransportError as error:
            raise CliError(f"the connection to {self.url} broke ({error}): try again", RETRYABLE) from error


def check(response: httpx.Response) -> None:
    """Raises CliError with the sentence of the problem, in any dialect, if the answer is a refusal."""
    if not response.is_error:
        return
    status = response.status_code
    exit_code = EXIT_CODES.get(status, RETRYABLE if status >= 500 and status != 501 else ERROR)
    raise CliError(problem_sentence(status, _parsed(response.content) or {}), exit_code, status)


def problem_sentence(status: int, problem: Row) -> str:
    """Return RFC 9457 `detail` with the pointers of its `errors`, or OpenAI's `error.message`."""
    openai = problem.get("error")
    if isinstance(openai, Mapping):
        return str(openai.get("message", f"refused with status {status}"))
    sentence = str(problem.get("detail") or problem.get("title") or f"refused with status {status}")
    errors = problem.get("errors")
    places = [_place(error) for error in errors if isinstance(error, Mapping)] if isinstance(errors, list) else []
    details = f" ({'; '.join(places)})" if len(places) > 1 else ""  # the sentence already has a single fault's pointer
    request = f" [request {problem['request_id']}]" if status >= 500 and "request_id" in problem else ""
    return sentence + details + request


def _place(error: Row) -> str:
    return f"{error.get('pointer', '')}: {error.get('message', 'refused')}"


def rows_of(page: Row) -> list[Row]:
    data = page.get("data")
    return [row for row in data if isinstance(row, Mapping)] if isinstance(data, list) else []


def _given(values: Mapping[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in values.items() if value is not None}


def _parsed(content: bytes) -> Row | None:
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


# ── which gateway, whose key ──────────────────────────────────────────────────────────────────────────────────────────


def connect(url: str | None, key: str | None, timeout_s: float = TIMEOUT_S) -> GatewayClient:
    settings = load()
    url = (url or settings.url).rstrip("/")
    return GatewayClient(url, key or local_key(settings, url), timeout_s)


def local_key(settings: Settings, url: str) -> str:
    """Return the operator's key of this host. Raises CliError for a gateway elsewhere, which must not see the key."""
    if not on_this_machine(url):
        raise CliError(f"no key for {url}: give --key or set STACCATO_KEY", USAGE)
    if settings.admin_key is not None:
        return settings.admin_key.get_secret_value()
    try:
        return settings.admin_key_file.read_text().strip()
    except OSError as error:
        raise CliError(
            f"no key: {settings.admin_key_file} cannot be read ({error.strerror}); "
            "give --key, set STACCATO_KEY, or set STACCATO_DATA to the folder of `staccato up`",
            USAGE,
        ) from error
