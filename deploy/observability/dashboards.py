"""Grafana's dashboards as code: `python deploy/observability/dashboards.py` writes dashboards/*.json.

A panel is a title, a unit, and expressions with their legends; rows come in the order in which a reader asks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
_NAMES = "max by (deployment_id, tenant, deployment) (staccato_deployment_info)"
NAMED = f"* on (deployment_id) group_left (tenant, deployment) {_NAMES}"
CHOSEN = '{deployment_id=~"$deployment"}'
WIDTH, HEIGHT = 8, 8  # width and height of a panel, of 24 columns

Panel = tuple[str, str, dict[str, str]]  # title, unit, legend → expression


def rate(metric: str, labels: str = "", by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{labels}[$__rate_interval]))"


def shared(metric: str, by: str, labels: str = "") -> str:
    """The rate of a metric that every gateway shows alike."""
    return f"max by ({by}) (rate({metric}{labels}[$__rate_interval]))"


def quantiles(metric: str, labels: str = "") -> dict[str, str]:
    buckets = rate(metric + "_bucket", labels, "le")
    return {f"p{q}": f"histogram_quantile(0.{q}, {buckets})" for q in (50, 95, 99)}


def shared_sum(metric: str, by: str, labels: str = "") -> str:
    """The sum over deployments of a rate that every gateway shows alike."""
    return f"sum by ({by}) ({shared(metric, f'deployment_id, {by}', labels)})"


def shared_quantile(metric: str, by: str) -> str:
    buckets = f"max without (instance, job) (rate({metric}_bucket[$__rate_interval]))"
    return f"histogram_quantile(0.95, sum by (le, {by}) ({buckets}))"


OPERATORS: dict[str, list[Panel]] = {
    "Now": [
        ("Runtimes", "short", {"alive": "max(staccato_runtimes)", "wanted": "max(staccato_runtimes_wanted)",
                               "draining": "sum(max by (runtime) (staccato_runtime_draining))"}),
        ("Requests by status", "reqps", {"{{code}}": rate("staccato_requests_total", by="code")}),
        ("Open requests", "short", {"{{instance}}": "staccato_requests_open"}),
        ("Time to first token", "s", quantiles("staccato_ttft_seconds")),
        ("Between tokens", "s", quantiles("staccato_itl_seconds")),
        ("Streams that ended too early", "reqps", {"by {{side}}": rate("staccato_stream_aborts_total", by="side")}),
    ],
    "Devices": [
        ("Time of devices", "percentunit", {"{{runtime}} {{state}}": "runtime:staccato_device_seconds:rate5m"}),
        ("Share of work spent on switches", "percentunit", {"{{runtime}}": "runtime:staccato_device_switch:share5m"}),
        ("Pages held", "percentunit",
         {"{{runtime}}": "max by (runtime) (staccato_device_pages_used / staccato_device_pages)"}),
        ("Memory of pools", "bytes",
         {"{{runtime}}": "max by (runtime) (staccato_device_pages * staccato_device_page_bytes)"}),
        ("Switches, p95", "s", {"{{runtime}}": shared_quantile("staccato_switch_seconds", "runtime")}),
        ("Wakes, p95", "s", {"from {{from}}": shared_quantile("staccato_wake_seconds", "from")}),
        ("Switches", "ops", {"{{runtime}}": shared("staccato_switches_total", "runtime")}),
        ("Requests that moved", "ops", {"{{runtime}}": shared("staccato_moves_total", "runtime")}),
        ("Taken for dead, and alive", "ops",
         {"gateways, by {{runtime}}": shared("staccato_runtime_false_losses_total", "runtime"),
          "runtimes, by {{instance}}": rate("staccato_false_losses_total", by="instance")}),
    ],
    "Models": [
        ("Running", "short", {"{{model_name}}": "max by (model_name) (vllm:num_requests_running)"}),
        ("Waiting", "short", {"{{model_name}}": "max by (model_name) (vllm:num_requests_waiting)"}),
        ("Tokens", "short", {"{{model_name}}": shared("vllm:generation_tokens_total", "model_name")}),
        ("Resident", "short", {"{{model_name}}": "max by (model_name) (staccato_model_resident)",
                               "failed {{model_name}}": "max by (model_name) (staccato_model_failed)"}),
        ("Pages", "short", {"{{model_name}} {{holds}}": "max by (model_name, holds) (staccato_model_pages)"}),
        ("Turns and fetches", "ops", {"turns {{model_name}}": shared("staccato_model_turns_total", "model_name"),
                                      "fetches {{model_name}}": shared("staccato_model_fetches_total", "model_name")}),
    ],
    "Usage and processes": [
        ("The ledger is behind", "s", {"{{instance}}": "staccato_ledger_lag_seconds"}),
        ("Not acknowledged, not reconciled", "short", {"pending {{instance}}": "staccato_usage_pending",
                                                       "unreconciled": "max(staccato_usage_unreconciled)"}),
        ("The bus", "short", {"connected {{instance}}": "staccato_bus_connected"}),
        ("Memory of gateways", "bytes", {"{{instance}}": 'process_resident_memory_bytes{job="staccato-process"}'}),
        ("CPU of gateways", "percentunit",
         {"{{instance}}": 'rate(process_cpu_seconds_total{job="staccato-process"}[$__rate_interval])'}),
        ("Versions", "short", {"{{version}}": "count by (version) (staccato_build_info)"}),
    ],
}  # fmt: skip

OBJECTIVES: dict[str, list[Panel]] = {
    "Kept": [
        ("Objectives kept, last hour", "percentunit",
         {"{{tenant}}/{{deployment}} {{slo}}": f"1 - deployment:staccato_slo_bad:ratio_rate1h{CHOSEN} {NAMED}"}),
        ("Budget burns, times what it may", "short",
         {"{{slo}} {{deployment_id}}":
          f"deployment:staccato_slo_bad:ratio_rate1h{CHOSEN} / on (slo) group_left () (1 - staccato:slo_target)"}),
        ("Budget left of three days", "percentunit",
         {"{{slo}} {{deployment_id}}":
          f"1 - deployment:staccato_slo_bad:ratio_rate3d{CHOSEN} / on (slo) group_left () (1 - staccato:slo_target)"}),
        ("Tokens on time, by definition", "percentunit",
         {"{{slo}}": shared_sum("staccato_slo_good_total", "slo", CHOSEN)
          + " / " + shared_sum("staccato_slo_total", "slo", CHOSEN)}),
        ("Time to first token", "s", quantiles("staccato_ttft_seconds", CHOSEN)),
        ("Between tokens", "s", quantiles("staccato_itl_seconds", CHOSEN)),
    ],
    "Where time goes": [
        ("Time of requests, by part", "percentunit",
         {"{{part}}": rate("staccato_request_seconds_total", CHOSEN, "part")
          + " / ignoring (part) group_left " + rate("staccato_request_seconds_total", CHOSEN)}),
        ("Queue before the first token", "s", quantiles("staccato_queue_seconds", CHOSEN)),
        ("Devices used", "percentunit",
         {"{{use}}": shared_sum("staccato_device_seconds_used_total", "use", CHOSEN)}),
    ],
    "Traffic": [
        ("Requests by status", "reqps", {"{{code}}": rate("staccato_requests_total", CHOSEN, "code")}),
        ("Tokens", "short", {"{{kind}}": rate("staccato_tokens_total", CHOSEN, "kind")}),
        ("Prompt tokens found in a cache", "percentunit",
         {"share": rate("staccato_tokens_total", '{deployment_id=~"$deployment",kind="cached"}') + " / "
          + rate("staccato_tokens_total", '{deployment_id=~"$deployment",kind="prompt"}')}),
    ],
}  # fmt: skip

SOURCE = {"type": "prometheus", "uid": "${source}"}
DASHBOARDS: dict[str, tuple[str, dict[str, list[Panel]], list[str]]] = {
    "operators": ("Staccato operators", OPERATORS, []),
    "objectives": ("Staccato objectives", OBJECTIVES, ["tenant", "deployment"]),
}
_VARIABLES = {
    "tenant": "label_values(staccato_deployment_info, tenant)",
    "deployment": 'label_values(staccato_deployment_info{tenant=~"$tenant"}, deployment_id)',
}


def panel(number: int, at: tuple[int, int], content: Panel) -> dict[str, Any]:
    title, unit, expressions = content
    targets = [
        {"refId": chr(ord("A") + n), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
        for n, (legend, expr) in enumerate(expressions.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": at[0], "y": at[1], "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def panels(rows: dict[str, list[Panel]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in rows.items():
        made.append({"id": len(made) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        for n, content in enumerate(row):
            at = (n % 3 * WIDTH, y + 1 + n // 3 * HEIGHT)
            made.append(panel(len(made) + 1, at, content))
        y += 1 + -(-len(row) // 3) * HEIGHT
    return made


def dashboard(uid: str) -> dict[str, Any]:
    title, rows, variables = DASHBOARDS[uid]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    chosen = [
        {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": _VARIABLES[name], "refId": name},
            "definition": _VARIABLES[name],
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }
        for name in variables
    ]
    return {
        "uid": f"staccato-{uid}",
        "title": title,
        "tags": ["staccato"],
        "schemaVersion": 39,
        "editable": False,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "15s",
        "templating": {"list": [source, *chosen]},
        "panels": panels(rows),
    }


def written(uid: str) -> str:
    return json.dumps(dashboard(uid), indent=1) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for uid in DASHBOARDS:
        (FOLDER / f"{uid}.json").write_text(written(uid))


if __name__ == "__main__":
    main()
