"""Headers and types of the dashboard's files. tests/e2e/watching/test_dashboard.py runs the dashboard in a browser."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from gateway import dashboard

FOLDER = Path(dashboard.__file__).parent
# uPlot 1.6.32 from npm: dist/ and LICENSE of `npm pack uplot@1.6.32`.
VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|setHTML")


@pytest.fixture
def browser() -> Iterator[TestClient]:
    with TestClient(Starlette(routes=dashboard.routes())) as client:
        yield client


def test_the_vendored_files_are_what_their_authors_published() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (FOLDER / "vendor").iterdir()}
    assert found == VENDORED
    assert "MIT License" in (FOLDER / "vendor" / "uPlot.LICENSE").read_text()


def test_everything_is_served_without_a_key_and_with_a_strict_policy(browser: TestClient) -> None:
    paths = ["", *(f"/{name}" for name in dashboard.files() if name)]
    assert "/app.js" in paths and "/vendor/uPlot.iife.min.js" in paths
    for path in paths:
        answer = browser.get("/dashboard" + path)
        assert answer.status_code == 200 and answer.content, path
        for name, value in dashboard.HEADERS.items():
            assert answer.headers[name] == value, path
        assert "set-cookie" not in answer.headers
    policy = dashboard.POLICY
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "*" not in policy
    for part in ("script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"):
        assert part in policy


def test_types_are_right_for_nobody_may_guess_them(browser: TestClient) -> None:
    for path, kind in (("", "text/html"), ("/app.js", "text/javascript"), ("/style.css", "text/css")):
        assert browser.get("/dashboard" + path).headers["content-type"] == f"{kind}; charset=utf-8"


@pytest.mark.parametrize(
    "path",
    [
        "/__init__.py",
        "/../auth.py",
        "/%2e%2e/auth.py",
        "/..%2fauth.py",
        "/vendor",
        "/vendor/",
        "/vendor/uPlot.LICENSE",
        "/vendor/../__init__.py",
        "/index.html",
        "//etc/passwd",
        "/",
        "/app.js/",
        "/APP.JS",
    ],
)
def test_nothing_else_is_served(browser: TestClient, path: str) -> None:
    answer = browser.get("/dashboard" + path, follow_redirects=False)
    assert answer.status_code == (200 if path == "/" else 404), answer.text[:100]
    assert path != "/" or answer.content == (FOLDER / "index.html").read_bytes()


def test_a_browser_that_has_a_file_is_told_so(browser: TestClient) -> None:
    etag = browser.get("/dashboard/app.js").headers["etag"]
    again = browser.get("/dashboard/app.js", headers={"if-none-match": etag})
    assert again.status_code == 304 and not again.content
    assert browser.get("/dashboard/style.css", headers={"if-none-match": etag}).status_code == 200


def test_no_file_parses_markup_or_keeps_the_key_beyond_the_tab() -> None:
    for path in FOLDER.glob("*.js"):
        text = path.read_text()
        assert not MARKUP.search(text), path.name
        assert "localStorage" not in text and "document.cookie" not in text, path.name
    page = (FOLDER / "index.html").read_text()
    assert "<script>" not in page and "style=" not in page and "http" not in page


def test_every_module_that_is_asked_for_is_there() -> None:
    for path in FOLDER.glob("*.js"):
        for name in re.findall(r'from "\./([\w-]+\.js)"', path.read_text()):
            assert (FOLDER / name).is_file(), f"{path.name} wants {name}"


def test_no_module_is_too_long_to_be_read_at_once() -> None:
    lines = {path.name: path.read_text().count("\n") for path in FOLDER.glob("*.js")}
    assert max(lines.values()) <= 350 and sum(lines.values()) < 2200
