"""Grafana dashboards of the docs from tables of panels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, COLUMNS = 8, 7, 3
"""Size of a panel on Grafana's grid of 24 columns, and panels in a row."""


@dataclass(frozen=True)
class Panel:
    """A graph of one or several expressions of Prometheus; `unit` is Grafana's name, empty for a plain number."""

    title: str
    expressions: tuple[str, ...]
    unit: str = ""
    legend: str = ""


def _quantiles(metric: str) -> tuple[str, ...]:
    by = 'sum by (le) (rate({}_bucket{{instance=~"$instance"}}[5m]))'
    return tuple(f"histogram_quantile({share}, {by.format(metric)})" for share in (0.5, 0.99))


_RUN, _SERVER = '{run=~"$run"}', '{instance=~"$instance"}'
TRAINING = (
    Panel("Loss", (f"meshwright_loss{_RUN}",), legend="{{run}}"),
    Panel("Tokens per second", (f"meshwright_tokens_per_second{_RUN}",), "short", "{{run}}"),
    Panel("Model FLOPs utilisation", (f"meshwright_mfu{_RUN}",), "percentunit", "{{run}}"),
    Panel("Seconds per step", (f"meshwright_step_seconds{_RUN}",), "s", "{{run}}"),
    Panel("Gradient norm", (f"meshwright_gradient_norm{_RUN}",), legend="{{run}}"),
    Panel("Goodput", (f"meshwright_goodput{_RUN}",), "percentunit", "{{run}}"),
    Panel("Steps", (f"meshwright_step{_RUN}", f"meshwright_checkpoint_step{_RUN}"), legend="{{__name__}}"),
    Panel(
        "Failures and restarts",
        (f"meshwright_incidents_total{_RUN}", f"meshwright_restarts_total{_RUN}"),
        legend="{{__name__}}",
    ),
    Panel("Tokens", (f"meshwright_tokens{_RUN}",), "short", "{{run}}"),
    Panel(
        "Ranks behind the first",
        (f"max by (run) (meshwright_rank_step{_RUN}) - min by (run) (meshwright_rank_step{_RUN})",),
    ),
    Panel(
        "Longest time in a phase", (f"max by (run, phase) (meshwright_rank_phase_age_seconds{_RUN})",), "s", "{{phase}}"
    ),
    Panel(
        "Health of hosts",
        (f"sum by (instance, rule, part) (meshwright_host_finding{_RUN})",),
        legend="{{instance}} {{part}} {{rule}}",
    ),
)
SERVING = (
    Panel(
        "Requests",
        tuple(f"meshwright:num_requests_{state}{_SERVER}" for state in ("running", "waiting")),
        legend="{{__name__}}",
    ),
    Panel("Time to first token, median and 99%", _quantiles("meshwright:time_to_first_token_seconds"), "s"),
    Panel(
        "Time per further token, median and 99%", _quantiles("meshwright:request_time_per_output_token_seconds"), "s"
    ),
    Panel(
        "New tokens per second", (f"rate(meshwright:generation_tokens_total{_SERVER}[1m])",), "short", "{{instance}}"
    ),
    Panel("Prompt tokens per second", (f"rate(meshwright:prompt_tokens_total{_SERVER}[1m])",), "short", "{{instance}}"),
    Panel("Cache in use", (f"meshwright:kv_cache_usage_perc{_SERVER}",), "percentunit", "{{instance}}"),
    Panel(
        "Prompt tokens from the cache",
        (
            f"rate(meshwright:prefix_cache_hits_total{_SERVER}[5m]) / rate(meshwright:prefix_cache_queries_total{_SERVER}[5m])",
        ),
        "percentunit",
        "{{instance}}",
    ),
    Panel(
        "Texts ended",
        (f"sum by (finished_reason) (rate(meshwright:request_success_total{_SERVER}[5m]))",),
        legend="{{finished_reason}}",
    ),
    Panel(
        "Refused and preempted",
        tuple(
            f"rate(meshwright:num_{name}_total{_SERVER}[5m])"
            for name in ("requests_rejected", "preemptions", "requests_not_finite")
        ),
        legend="{{__name__}}",
    ),
    Panel("Router: healthy servers", ("sum by (role) (meshwright_router:healthy)",), legend="{{role}}"),
    Panel(
        "Router: answers by status",
        ("sum by (status) (rate(meshwright_router:statuses_total[1m]))",),
        legend="{{status}}",
    ),
    Panel(
        "Router: retries and broken answers",
        ("rate(meshwright_router:retries_total[5m])", "rate(meshwright_router:broken_total[5m])"),
    ),
)
DASHBOARDS = {
    "training.json": ("Meshwright: training", "run", "label_values(meshwright_step, run)", TRAINING),
    "serving.json": (
        "Meshwright: serving",
        "instance",
        "label_values(meshwright:num_requests_running, instance)",
        SERVING,
    ),
}


def dashboard(title: str, variable: str, values: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    """The content of a dashboard's file. `variable` chooses among label `values`; all are shown at first."""
    source = {"type": "prometheus", "uid": "${source}"}
    chooser = {
        "name": variable,
        "type": "query",
        "datasource": source,
        "query": values,
        "includeAll": True,
        "multi": True,
    }
    chooser |= {"refresh": 2, "current": {"text": "All", "value": "$__all"}}
    return {
        "title": title,
        "uid": title.lower().replace(": ", "-"),
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}, chooser]},
        "panels": [_panel(number, panel, source) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    place = {"x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
    targets = [
        {"refId": "ABC"[index], "datasource": source, "expr": expression, "legendFormat": panel.legend or "__auto"}
        for index, expression in enumerate(panel.expressions)
    ]
    defaults = {"unit": panel.unit} if panel.unit else {}
    graph = {"id": number + 1, "type": "timeseries", "title": panel.title, "datasource": source}
    return {**graph, "gridPos": place, "fieldConfig": {"defaults": defaults, "overrides": []}, "targets": targets}


def text(name: str) -> str:
    """The text of a dashboard's file."""
    return json.dumps(dashboard(*DASHBOARDS[name]), indent=1) + "\n"
