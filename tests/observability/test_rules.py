"""Rules, alerts and dashboards: promtool takes them, the alerts' stories hold, and expressions ask for existing
series.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.observability import dashboards
from tests.observability.expressions import (
    FOLDER,
    RULES,
    alerts,
    copy,
    panels,
    recorded,
    rules,
    samples,
    selectors,
    tool,
)

NOT_OURS = ("up", "process_resident_memory_bytes", "process_cpu_seconds_total")


def promtool(*arguments: object) -> None:
    run = subprocess.run([tool("promtool"), *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_rules_and_the_configuration_are_valid(tmp_path: Path) -> None:
    promtool("check", "rules", *RULES)
    promtool("check", "config", copy(tmp_path / "installed", "key", "127.0.0.1:1"))


def test_the_stories_of_the_alerts_hold() -> None:
    promtool("test", "rules", FOLDER / "tests" / "alerts_test.yml")


def test_every_alert_has_a_story_in_which_it_fires() -> None:
    stories = yaml.safe_load((FOLDER / "tests" / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for story in stories for case in story["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {alert["alert"] for alert in alerts()}


def test_every_expression_of_the_dashboards_is_valid(tmp_path: Path) -> None:
    groups = [{"name": "all", "rules": [{"record": f"p{n}", "expr": expr} for n, expr in enumerate(panels().values())]}]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": groups}))
    promtool("check", "rules", tmp_path / "panels.yml")


def test_the_dashboards_are_what_their_source_says() -> None:
    for uid in dashboards.DASHBOARDS:
        kept = (dashboards.FOLDER / f"{uid}.json").read_text()
        assert kept == dashboards.written(uid), "run python deploy/observability/dashboards.py"


def test_nothing_is_asked_for_that_is_not_declared() -> None:
    known = samples() | {rule["record"] for rule in rules() if "record" in rule} | set(NOT_OURS)
    asked = {**panels(), **recorded(), **{alert["alert"]: alert["expr"] for alert in alerts()}}
    for where, expression in asked.items():
        names = [selector.partition("{")[0] for selector in selectors(expression)]
        assert names or expression.startswith("vector"), f"{where} reads nothing"
        assert set(names) <= known, where


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_every_alert_has_a_page_that_says_what_to_do(alert: dict[str, dict[str, str]]) -> None:
    page = (FOLDER / alert["annotations"]["runbook"]).read_text()
    assert page.startswith(f"# {alert['alert']}\n") and "\n## Look at\n" in page and "\n## Do\n" in page
    assert alert["labels"]["severity"] in ("page", "ticket")


def test_no_page_is_left_without_its_alert() -> None:
    assert {page.stem for page in (FOLDER / "runbooks").iterdir()} == {alert["alert"] for alert in alerts()}
