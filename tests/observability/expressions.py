"""Queries of deploy/observability to Prometheus: every expression of rules, alerts and dashboards, by place."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from store.contract.series import METRICS
from tests.conftest import ROOT

FOLDER = ROOT / "deploy" / "observability"
DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
RULES = sorted((FOLDER / "rules").glob("*.yml"))
_NAME = re.compile(r"\b(?:\w+:)?(?:staccato|vllm|process|up)(?:[:_]\w+)*\b(?:\{[^}]*\})?")


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: install Debian's `prometheus`")
    return found


def rules() -> list[dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def panels() -> dict[str, str]:
    """Expressions of the panels by place, with Grafana's variables as without a choice."""
    return {
        f"{path.stem}/{panel['title']}/{target['legendFormat']}": plain(target["expr"])
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    }


def recorded() -> dict[str, str]:
    return {f"{rule['record']} {rule.get('labels', '')}": rule["expr"] for rule in rules() if "record" in rule}


def plain(expression: str, interval: str = "1m") -> str:
    return expression.replace("$__rate_interval", interval).replace("$deployment", ".*")


def selectors(expression: str) -> list[str]:
    """The series read by the expression."""
    return _NAME.findall(expression)


def samples() -> set[str]:
    """Names of the declared metrics in Prometheus."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {metric.name + suffix for metric in METRICS.values() for suffix in suffixes[metric.kind]}


def copy(folder: Path, key: str, target: str, scrape_s: int = 1) -> Path:
    """Copy Prometheus' configuration as installed, but for target and interval; returns the path of prometheus.yml."""
    shutil.copytree(FOLDER, folder)
    (folder / "metrics.key").write_text(key)
    config = folder / "prometheus.yml"
    config.write_text(config.read_text().replace("127.0.0.1:8080", target).replace("15s", f"{scrape_s}s"))
    return config
