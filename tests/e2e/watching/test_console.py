"""The dashboard on a played fleet: actions on a deployment, a phone's screen, charts."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.feed import Feed
from tests.e2e.watching.test_dashboard import OPERATOR, pytestmark, rows, served_to, sign_in, until
from tests.e2e.watching.test_dashboard import chromium as chromium
from tests.e2e.watching.test_dashboard import tab as tab

__all__ = ["pytestmark"]
PHONE = {"width": 390, "height": 844}
CONDITIONS = {"conditions": [], "progress": None, "last_cold_start_ms": None, "attainment": None, "residency": "cold"}
SPEC = {"dtype": "auto", "max_model_len": None, "priority": "normal", "scaling": {"idle": "auto"}, "digest": "d"}
CANARY = {"weight": 20, "errors_most": 0.05}


def deployment(name: str, phase: str, desired: str, target: dict[str, Any] | None = None) -> dict[str, Any]:
    status = {"phase": phase, "desired_state": desired, "active_revision": 1, **CONDITIONS}
    status["target_revision"] = target["revision"] if target else None
    live = SPEC | {"model": f"{name}-v1", "slo": {"ttft_ms": 2000, "tbt_ms": 100}, "engine": "e"}
    canary = target["canary"] if target else None
    return live | {"id": name, "name": name, "tenant": "acme", "status": status, "target": target, "canary": canary}


TARGET = SPEC | {"model": "mine-v2", "slo": {"ttft_ms": 1000, "tbt_ms": 100}, "engine": "f", "revision": 2}
DEPLOYMENTS = [
    deployment("mine", "awake", "awake", TARGET | {"canary": CANARY}),
    deployment("rolling", "awake", "awake", TARGET | {"canary": None}),
    deployment("poet", "awake", "asleep"),  # ordered to sleep, then woken by a request
    deployment("tired", "asleep", "awake"),
]


def played(tab: Any) -> list[str]:
    """Orders given by the page, in a list that grows; DEPLOYMENTS stand in for the feed's deployments."""
    orders: list[str] = []

    def answer(route: Any) -> None:
        if route.request.method == "POST":
            orders.append(route.request.url.rpartition("/")[2])
        one = DEPLOYMENTS[0] if route.request.method == "POST" else {"data": DEPLOYMENTS, "next_cursor": None}
        route.fulfill(content_type="application/json", body=json.dumps(one))

    tab.route("**/api/v1/deployments**", answer)
    return orders


def test_a_deployment_offers_what_makes_sense_and_shows_what_serves(tab: Any) -> None:
    orders = played(tab)
    asked: list[str] = []
    tab.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    with served_to(tab, Feed(gpus=1, models=2)) as url:
        sign_in(tab, url, "any")
        tab.click("#to-deployments")
        until(tab, lambda: len(rows(tab, "Deployments")) == 4)
        offered = {row[0]: row[-1] for row in rows(tab, "Deployments")}
        assert (offered["mine"], offered["rolling"]) == ("SleepPromoteRoll back", "SleepRoll back")
        assert (offered["poet"], offered["tired"]) == ("Sleep", "Wake")
        (mine,) = [row for row in rows(tab, "Deployments") if row[0] == "mine"]
        assert "mine-v1" in mine and "1 → 2 (20 %)" in mine and "mine-v2" not in mine
        tab.get_by_role("button", name="rollback mine").click()
        until(tab, lambda: orders == ["mine:rollback"])
        assert asked == ["Give up revision 2 of mine? Revision 1 keeps all requests."]
        tab.get_by_role("button", name="mine", exact=True).click()
        detail = tab.locator(".detail")
        live, target = (detail.locator("dl").nth(place).text_content() for place in (0, 1))
        assert "mine-v1" in live and "2000" in live and "mine-v2" not in live and "1000" not in live
        assert "mine-v2" in target and "1000" in target
        assert "Revision 2, the canary: 20 % of the requests" in detail.text_content()


def test_no_page_scrolls_sideways_on_a_phone(tab: Any) -> None:
    tab.set_viewport_size(PHONE)
    with served_to(tab, Feed(gpus=3, models=12)) as url:
        tab.goto(f"{url}/dashboard")
        assert tab.evaluate(WIDTHS)[0] <= PHONE["width"]
        sign_in(tab, url, "any")
        for name in OPERATOR:
            tab.evaluate(f"location.hash = '#{name}'")
            tab.wait_for_selector(f'#page[data-page="{name}"] h1')
            if name == "plan":
                until(tab, lambda: tab.locator("select option").count() >= 4)
                tab.click("button:text-is('Plan')")
            if name == "deployments":
                until(tab, lambda: rows(tab, "Deployments"))
                tab.locator("td button.link").first.click()
            if name != "playground":
                until(tab, lambda: tab.locator("tbody tr").count())
            scroll, client, nav = tab.evaluate(WIDTHS)
            assert scroll <= client == PHONE["width"], f"{name} is {scroll} px wide"
            assert nav <= 60, f"the navigation is {nav} px tall on {name}"


WIDTHS = """() => {
  const { scrollWidth, clientWidth } = document.documentElement;
  return [scrollWidth, clientWidth, document.querySelector('nav')?.offsetHeight ?? 0];
}"""
TICKS = """() => {
  const { plot } = document.querySelector('.chart');
  return plot.axes.map((axis, place) => axis.values(plot, axis._splits ?? []).map(String));
}"""


def test_an_idle_gpu_has_a_chart_of_whole_numbers_that_stays_when_the_page_is_left(tab: Any) -> None:
    feed = Feed(gpus=1, models=2)
    with served_to(tab, feed) as url:
        feed.runs = False  # nothing makes tokens
        sign_in(tab, url, "any")
        until(tab, lambda: tab.locator(".chart canvas").count())
        until(tab, lambda: tab.evaluate(POINTS) >= 3)
        assert tab.text_content("#totals") == "1 GPU · 2 models · 0 tokens/s"
        times, tokens = tab.evaluate(TICKS)
        assert tokens[0] == "0" and all(tick.isdigit() for tick in tokens) and int(tokens[-1]) >= 10
        assert times and all(len(tick) == 8 and tick.count(":") == 2 for tick in times)
        before = tab.evaluate(POINTS)
        tab.click("#to-usage")
        until(tab, lambda: rows(tab, "Usage"))
        days, tokens = tab.evaluate(TICKS)
        assert days and all(tick[:2].isdigit() and tick[2] == " " and len(tick) == 6 for tick in days)
        tab.click("#to-now")
        until(tab, lambda: tab.locator(".chart canvas").count())
        assert tab.evaluate(POINTS) >= before


POINTS = "() => document.querySelector('.chart').plot?.data[0].length ?? 0"
