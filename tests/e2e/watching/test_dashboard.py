"""The dashboard in a browser, on the live platform and on a played fleet: shown values equal the platform's values."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Platform
from tests.e2e.feed import PAGES, Feed, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `make setup` does it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: `apt-get install chromium` brings it"),
    pytest.mark.filterwarnings("ignore"),  # warnings of playwright's own event loop
]
TENANT = ["deployments", "plan", "events", "cold-starts", "objectives", "usage", "playground"]
OPERATOR = ["now", "timeline", "pages", *TENANT]
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
CPU_MOST = 0.05  # of a core

# Mean colour of each cell of the page map → number of cells.
CELLS = """() => {
  const canvas = document.querySelector('.map canvas'), ratio = canvas.width / parseFloat(canvas.style.width);
  const { columns, cell } = canvas.dataset, side = Math.floor((cell - 1) * ratio), found = {};
  const { data, width, height } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let page = 0; ; page += 1) {
    const left = (page % columns) * cell * ratio, top = Math.floor(page / columns) * cell * ratio, sums = [0, 0, 0, 0];
    if (top + side > height) return found;
    for (let y = top; y < top + side; y += 1)
      for (let x = left; x < left + side; x += 1)
        for (const part of [0, 1, 2, 3]) sums[part] += data[4 * (y * width + x) + part];
    const color = sums.map((sum) => Math.round(sum / side / side)).join();
    found[color] = (found[color] ?? 0) + 1;
  }
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium: Any) -> Iterator[Any]:
    """A page in the browser. Errors, refused policies and requests to foreign hosts fail the test."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if "//127.0.0.1" not in request.url else None)
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error('policy', e.violatedDirective, e.blockedURI))"
    )
    yield page
    context.close()
    assert not wrong


def sign_in(tab: Any, url: str, key: str) -> None:
    tab.goto(f"{url}/dashboard")
    tab.fill("#key", key)
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#page")


def until(tab: Any, done: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait in the browser's time, as the browser's messages are only heard then. Returns the value of `done()`."""
    deadline = time.monotonic() + timeout_s
    while not (found := done()):
        assert time.monotonic() < deadline, "it did not come"
        tab.wait_for_timeout(100)
    return found


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def rows(tab: Any, caption: str) -> list[list[str]]:
    table = tab.locator("table", has=tab.locator("caption", has_text=caption))
    found: list[list[str]] = table.locator("tbody tr").evaluate_all(
        "lines => lines.map(line => [...line.cells].map(cell => cell.textContent))"
    )
    return found


# ── on the live platform ──────────────────────────────────────────────────────────────────────────────────────────────


def test_every_page_is_reached_by_the_keyboard_and_says_something(tab: Any, platform: Platform) -> None:
    ask(platform, "faq", "poet")
    sign_in(tab, platform.url, platform.admin_key)
    for name in OPERATOR:
        tab.focus(f"#to-{name}")
        tab.keyboard.press("Enter")
        tab.wait_for_selector(f'#page[data-page="{name}"] h1')
        if name == "now":  # there may be no requests just then
            until(tab, lambda: "r1" in (tab.text_content("#page") or ""))
        elif name not in ("playground", "plan"):
            until(tab, lambda: tab.locator("tbody tr").count())
        assert not tab.text_content("#said")
    tab.get_by_role("button", name="Theme: system").click()
    tab.get_by_role("button", name="Theme: light").click()
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.get_by_role("button", name="Sign out").click()
    assert tab.evaluate("sessionStorage.getItem('staccato.key')") is None


def last_minute(platform: Platform) -> Any:
    now = time.time()
    window = "&".join(f"{name}={iso(at)}" for name, at in (("from", now - 60), ("to", now)))
    return platform.get(f"/api/v1/gpus/r1/timeline?{window}").json()


def covered_s(platform: Platform) -> float:
    said = last_minute(platform)
    return float(said["to_us"] - said["from_us"]) / 1e6


def test_the_timeline_covers_all_of_the_time(tab: Any, platform: Platform) -> None:
    until(tab, lambda: covered_s(platform) > 59.9, 90)  # a device just started has no full minute yet
    sign_in(tab, platform.url, platform.admin_key)
    tab.click("#to-timeline")
    ask(platform, "faq", "poet", "faq", "poet")
    tab.wait_for_timeout(5000)  # time for new spans, and for a new look
    said = last_minute(platform)
    spans = said["spans"]
    assert sum(span["us"] for span in spans) == said["to_us"] - said["from_us"]
    assert 0.99 <= (said["to_us"] - said["from_us"]) / 60e6 <= 1.01 and said["bucket_us"] == 0
    assert all(a["at_us"] + a["us"] == b["at_us"] for a, b in pairwise(spans))
    used = {span["use"] for span in spans}
    assert {"steps", "switch", "idle"} <= used <= {"steps", "switch", "idle", "platform", "open", "away"}
    # A deployment deleted by an earlier test within the minute has no name any more.
    switch = next(span for span in spans if span["use"] == "switch" and span["model"] in said["models"])
    assert switch["why"]["requests"] >= 1
    gpu, *parts = rows(tab, "Where the time of each GPU went")[0]
    assert gpu == "r1" and abs(sum(float(part.rstrip(" %")) for part in parts[:6]) - 100) <= 1
    assert parts[6] == "1.0 min" and abs(int(parts[7]) - sum(span["use"] == "steps" for span in spans)) <= 2
    tab.focus(".lanes canvas")
    for key in (",", ",", "."):
        tab.keyboard.press(key)
    assert "r1" in tab.text_content(".tip")


def test_the_page_map_is_the_allocators(tab: Any, platform: Platform) -> None:
    maps: list[dict[str, Any]] = []
    tab.on(
        "response", lambda answer: maps.append(answer.json()) if answer.url.endswith("/pages") and answer.ok else None
    )
    sign_in(tab, platform.url, platform.admin_key)
    tab.click("#to-pages")
    until(tab, lambda: maps and rows(tab, "Pages by content"))
    gpu = platform.get("/api/v1/gpus").json()["data"][0]
    last = maps[-1]
    assert last["pages"] * last["page_bytes"] == gpu["memory_bytes"]
    counts: Counter[tuple[str, str]] = Counter()
    for run in last["runs"]:
        counts[run["content"], run["model"]] += run["pages"]
    assert (last["pages"] - counts["free", ""]) * last["page_bytes"] == gpu["used_bytes"]
    for key, model in gpu["models"].items():
        weights = counts["weights", key] + counts["cache", key]
        assert (weights * last["page_bytes"], counts["kv", key] * last["page_bytes"]) == (
            model["weights_bytes"],
            model["kv_bytes"],
        )
    assert sorted(int(row[2]) for row in rows(tab, "Pages by content")) == sorted(counts.values())


def test_what_it_costs_is_what_the_export_bills_credits_included(tab: Any, platform: Platform) -> None:
    prices = {"prompt_pico": 1_234_567, "output_pico": 7_654_321, "gpu_s_pico": 10**9 + 7}
    platform.post("/api/v1/prices", prices)
    credit = {"tenant": "acme", "amount_minor": -1250, "reason": "sorry"}
    headers = {"authorization": f"Bearer {platform.admin_key}", "idempotency-key": "once"}
    assert httpx.post(f"{platform.url}/api/v1/billing/corrections", json=credit, headers=headers).status_code == 201
    ask(platform, "faq", "weather")
    month = time.strftime("%Y-%m", time.gmtime())

    def billed() -> Decimal:
        text = platform.get(f"/api/v1/billing/export?period={month}&format=jsonl").text
        return sum((Decimal(json.loads(line)["unrounded"]) for line in text.splitlines()), Decimal())

    def settled() -> bool:
        """Whether the bill is at rest: usage of earlier tests may still be on the way to the ledger."""
        before = billed()
        tab.wait_for_timeout(2000)
        return Decimal("-12.5") < before == billed()

    def compared() -> str:
        tab.evaluate("document.querySelector('#verdict').textContent = ''")
        tab.get_by_role("button", name="Compare with the export").click()
        return str(until(tab, lambda: tab.text_content("#verdict")))

    until(tab, settled)
    sign_in(tab, platform.url, platform.admin_key)
    tab.click("#to-usage")
    until(tab, lambda: rows(tab, "Usage"))
    assert compared() == f"Equal to the export: {billed():.9f} USD, of which corrections -12.50 USD."
    names, values = (tab.locator(f".figures {part}").all_text_contents() for part in ("dt", "dd"))
    figures = dict(zip(names, values, strict=True))
    assert figures["Cost, USD"] == f"{billed():.6f}" and figures["Corrections, USD"] == "-12.500000"
    assert figures["Usage, USD"] == f"{billed() + Decimal('12.5'):.6f}"
    assert [row[1:] for row in rows(tab, "Corrections")] == [[month, "sorry", "-12.50 USD"]]

    def without_corrections(route: Any) -> None:
        lines = [line for line in route.fetch().text().splitlines() if '"correction"' not in line]
        route.fulfill(body="\n".join(lines))

    tab.route("**/billing/export**", without_corrections)
    said = compared()
    assert said.startswith("Not equal to the export: ") and f"this page has {billed():.9f} USD" in said
    assert "wrong" in tab.get_attribute("#verdict", "class")


def test_a_plan_says_what_the_plane_says(tab: Any, platform: Platform) -> None:
    sign_in(tab, platform.url, platform.admin_key)
    tab.click("#to-plan")
    until(tab, lambda: tab.locator("select option").count() >= 4)
    tab.get_by_label("Tenant").select_option("acme")
    tab.get_by_label("Model").select_option("faq")
    tab.get_by_label("Context, tokens").fill("64")
    tab.get_by_role("button", name="Plan").click()
    until(tab, lambda: tab.text_content("#fits"))
    assert tab.text_content("#fits").startswith("It fits.")
    asked = {"name": "plan", "model": "faq", "tenant": "acme", "max_model_len": 64}
    (said,) = platform.post("/api/v1/deployments:plan", asked)["runtimes"]
    ((gpu, fits, tokens, _, longest, *_),) = rows(tab, "Where it fits")
    assert (gpu, fits) == (said["id"], "yes")
    assert (int(tokens.replace(",", "")), int(longest.replace(",", ""))) == (
        said["kv_tokens"],
        said["longest_requests"],
    )


def test_what_is_done_to_a_deployment_stands_in_the_events(tab: Any, platform: Platform) -> None:
    sign_in(tab, platform.url, platform.keys["acme"])
    tab.click("#to-deployments")
    tab.get_by_role("button", name="poet", exact=True).click()
    tab.get_by_role("link", name="What was done to it").click()

    def told(kind: str) -> int:
        return [row[1] for row in rows(tab, "Events")].count(kind)

    until(tab, lambda: told("deployment.created"))

    def turned() -> bool:
        """Order the phase that the deployment does not have. To be repeated: the page may miss a phase before its first
        event."""
        (one,) = [d for d in platform.get("/api/v1/deployments?tenant=acme").json()["data"] if d["name"] == "poet"]
        if order := {"asleep": "wake", "awake": "sleep"}.get(one["status"]["phase"]):
            platform.post(f"/api/v1/deployments/{one['id']}:{order}", {})
        tab.wait_for_timeout(3000)
        return told("deployment.phase") >= 2

    until(tab, turned, 60)
    assert {row[2] for row in rows(tab, "Events")} == {"poet"}
    tab.get_by_role("button", name="Verify the log").click()
    assert "are as they were written" in until(tab, lambda: tab.text_content("#chain"))


def test_names_and_answers_stay_text(tab: Any, platform: Platform) -> None:
    sign_in(tab, platform.url, platform.admin_key)

    def evil(route: Any) -> None:
        if route.request.url.endswith("/events"):  # the stream has no end
            return route.continue_()
        answer, escaped = route.fetch(), json.dumps(EVIL)
        body = answer.text().replace('"faq"', escaped).replace("acme/faq@1", escaped[1:-1])
        route.fulfill(response=answer, body=body)

    def says(route: Any) -> None:
        event = {"choices": [{"delta": {"content": EVIL}}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    tab.route("**/api/v1/**", evil)
    tab.route("**/v1/chat/completions", says)
    for name in OPERATOR:
        tab.click(f"#to-{name}")
        tab.wait_for_selector(f'#page[data-page="{name}"] h1')
        tab.wait_for_timeout(1200)
        assert tab.locator("#page img, #page script").count() == 0
    assert EVIL in until(tab, lambda: tab.locator("select").first.text_content())
    tab.fill("textarea", EVIL)
    tab.keyboard.press("Control+Enter")
    until(tab, lambda: tab.locator(".talk .model p").first.text_content() == EVIL)
    assert tab.locator(".talk .user p").text_content() == EVIL
    assert tab.title() != "owned" and tab.locator("#page img, #page script").count() == 0


def test_a_tenant_sees_its_own_alone(tab: Any, platform: Platform) -> None:
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    # A tenant of this test alone: other tests on this platform deploy models of the operator for `globex`.
    sign_in(tab, platform.url, platform.keys.get("onlooker") or platform.tenant("onlooker"))
    links = tab.locator("nav a:not(.brand)").evaluate_all("links => links.map(link => link.hash.slice(1))")
    assert links == TENANT
    for name in [*TENANT, "timeline"]:  # a page that is not offered is not shown either
        tab.evaluate(f"location.hash = '#{name}'")
        tab.wait_for_selector(f'#page[data-page="{name if name in TENANT else "deployments"}"] h1')
        tab.wait_for_timeout(500)
        text = tab.text_content("#page")
        models = () if name == "plan" else ("faq", "weather", "poet")  # a plan shows the operator's models
        assert not any(word in text for word in ("acme", *models))
    assert not any("/gpus" in url for url in asked)


def test_a_chat_streams_into_the_playground(tab: Any, platform: Platform) -> None:
    sign_in(tab, platform.url, platform.keys["acme"])
    tab.click("#to-playground")
    until(tab, lambda: tab.locator("select option").count() >= 3)
    tab.locator("select").select_option(label="faq")
    tab.fill("textarea", "What is a turn?")
    tab.keyboard.press("Control+Enter")
    facts = tab.locator(".talk .model .small")
    until(tab, lambda: "first token" in (facts.text_content() or ""), 60)
    assert tab.locator(".talk .model p").first.text_content()


def test_a_wrong_key_is_told_and_not_kept(chromium: Any, platform: Platform) -> None:
    page = chromium.new_page()
    page.goto(f"{platform.url}/dashboard")
    page.fill("#key", "sk-st-wrong")
    page.keyboard.press("Enter")
    until(page, lambda: page.text_content(".wrong"))
    assert page.evaluate("sessionStorage.getItem('staccato.key')") is None
    page.close()


def ask(platform: Platform, *models: str) -> None:
    client = platform.client("acme")
    for model in models:
        said = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        assert said.choices


# ── on a played fleet ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def served_to(tab: Any, feed: Feed) -> Iterator[str]:
    """Yields the address of the served feed. The browser's page leaves the server before the server stops.

    A page that still polls a stopped server writes errors to its console, and each such error fails the test.
    """
    with serving(feed) as url:
        yield url
        tab.goto("about:blank")


def test_every_page_of_the_pool_is_a_cell_in_its_colour(tab: Any) -> None:
    feed = Feed(gpus=1, models=12)
    feed.runs = False
    with served_to(tab, feed) as url:
        sign_in(tab, url, "any")
        with tab.expect_response(lambda answer: answer.url.endswith("/pages")) as asked:
            tab.click("#to-pages")
        runs = asked.value.json()["runs"]
        until(tab, lambda: rows(tab, "Pages by content"))
        cells = tab.evaluate(CELLS)
    counts: Counter[tuple[str, str]] = Counter()
    for run in runs:
        counts[run["content"], run["model"]] += run["pages"]
    cells.pop("0,0,0,0", None)  # behind the last page
    assert counts.total() == PAGES == sum(cells.values())
    assert sorted(cells.values()) == sorted(counts.values())


def test_every_turn_is_reached_by_the_keyboard_and_says_what_it_was(tab: Any) -> None:
    feed = Feed(gpus=2, models=12)
    with served_to(tab, feed) as url:
        feed.runs = False
        sign_in(tab, url, "any")
        with tab.expect_response(lambda answer: "/r2/timeline" in answer.url):
            tab.click("#to-timeline")
        until(tab, lambda: rows(tab, "Where the time of each GPU went"))
        tab.focus(".lanes canvas")
        tab.keyboard.press("ArrowDown")
        said = []
        for _ in range(60):
            tab.keyboard.press(",")
            said.append(tab.locator(".tip strong").text_content())
        tab.keyboard.press("-")
        tab.keyboard.press("ArrowLeft")
        until(tab, lambda: tab.locator("header button.on").count() == 0)
    assert any("idle" in text for text in said) and any("switch to" in text for text in said)
    assert all(text.startswith("r2 · ") for text in said)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_fifty_models_on_eight_gpus_leave_the_browser_idle(tab: Any, chromium: Any, record_property: Any) -> None:
    """The test measures the CPU of the browser's processes. `pytest -m long -rP` prints the figures."""
    session = chromium.new_browser_cdp_session()

    def cpu_s() -> float:
        return float(sum(process["cpuTime"] for process in session.send("SystemInfo.getProcessInfo")["processInfo"]))

    with served_to(tab, Feed(gpus=8, models=50)) as url:
        sign_in(tab, url, "any")
        for name in ("now", "timeline", "pages", "deployments", "plan", "events", "cold-starts", "objectives", "usage"):
            tab.click(f"#to-{name}")
            if name == "plan":
                tab.click("button:text-is('Plan')")
            tab.wait_for_timeout(5000)
            assert tab.locator("tbody tr, .lanes canvas, .ways li").count() > 0, f"{name} is empty"
            began, before = time.monotonic(), cpu_s()
            tab.wait_for_timeout(20000)
            share = (cpu_s() - before) / (time.monotonic() - began)
            print(f"{name}: {share:.3f} of one core")
            record_property(name, share)
            assert share < CPU_MOST
