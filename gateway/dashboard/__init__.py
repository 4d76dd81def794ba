"""The dashboard: files for a browser. The browser asks the control plane with the key typed by the user.

The dashboard has no build step: native modules, and uPlot as published by its authors (`vendor/`, MIT). Files are read
once, and no other file is served: a path is looked up, never opened. There are no cookies, so no other site can send
requests on behalf of a signed-in user.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH = "/dashboard"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class StaticFile:
    body: bytes
    type: str
    etag: str


def files() -> dict[str, StaticFile]:
    """Read the files, by path below PATH; the page itself has the empty path."""
    folder = Path(__file__).parent
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in TYPES:
            body = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            found["" if name == "index.html" else name] = StaticFile(body, TYPES[path.suffix], etag)
    return found


def routes() -> list[Route]:
    """Return the routes of the files. The files need no key, since the sources are public."""
    known = files()

    async def serve(request: Request) -> Response:
        file = known.get(request.path_params.get("path", ""))
        if file is None:
            return Response("there is no such file", 404, HEADERS, media_type="text/plain")
        headers = HEADERS | {"etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.type)

    return [Route(PATH, serve), Route(PATH + "/{path:path}", serve)]
