"""The Grafana dashboards of the docs name metrics and labels that runs, servers and routers have."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT
from tools.dashboards import DASHBOARDS

from meshwright.events.exposition import exposition
from meshwright.events.messages import ProgressMessage
from meshwright.launch.metrics_endpoint import MetricsEndpoint, run_metrics
from meshwright.launch.outcome import RankState
from meshwright.launch.run_figures import RunFigureReader
from meshwright.policies.host_health import HealthFinding
from meshwright.serve.figures import EngineFigures
from meshwright.server.instances import Instances
from meshwright.server.metrics import ServerMetrics
from meshwright.server.router_state import Router
from meshwright.spec.route import RouteSpec

NAME = re.compile(r"\bmeshwright(?:_router)?[:_]\w+")
ADDED = {"instance", "__name__"}
"""Labels that Prometheus and Grafana add."""


def served(folder: Path) -> str:
    """Metrics of a run, a server and a router, all with values."""
    endpoint = MetricsEndpoint(folder)
    endpoint.update(
        [RankState(0, progress=ProgressMessage("train", 7))], [HealthFinding("thermal", "GPU 0", "too hot")]
    )
    figures = RunFigureReader(folder).read()
    known = {field.name: 1 for field in dataclasses.fields(figures) if getattr(figures, field.name) is None}
    server = ServerMetrics("model")
    server.count_first_token(0.1)
    server.count_request("stop", 1, 2, 0.1, 0.2)
    spec = RouteSpec(instances=("http://127.0.0.1:1",))
    router = Router(spec, Instances(spec.instances, spec.requests, spec.health_seconds, spec.silent_seconds))
    router.statuses[200] += 1
    healthy = 'meshwright_router:healthy{server="a",role="both"} 1\n'  # of a server that has answered
    run = exposition(run_metrics("small", dataclasses.replace(figures, **known)))
    return endpoint.text() + run + server.text(EngineFigures()) + router.metrics() + healthy


def labels_of(text: str) -> dict[str, set[str]]:
    """The label names of each metric."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([\w:]+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in DASHBOARDS:
        for panel in json.loads((ROOT / "docs" / "grafana" / name).read_text(encoding="utf-8"))["panels"]:
            yield name, panel


def test_every_metric_and_label_of_a_panel_exists(tmp_path: Path) -> None:
    known, seen = labels_of(served(tmp_path)), set()
    for file, panel in panels():
        for target in panel["targets"]:
            names = NAME.findall(target["expr"])
            assert names and set(names) <= set(known), f"{file}: {panel['title']}: {set(names) - set(known)}"
            wanted = set(re.findall(r"(\w+)=~", target["expr"])) | set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            wanted |= {
                label.strip() for group in re.findall(r"by \((.*?)\)", target["expr"]) for label in group.split(",")
            }
            for name in names:
                assert wanted <= known[name] | ADDED, f"{file}: {panel['title']}: {name} has {known[name]}"
            seen |= set(names)
    for chooser in (variable for variables in DASHBOARDS.values() for variable in NAME.findall(variables[2])):
        assert chooser in known
    assert len(seen) > 25


def test_panels_lie_side_by_side() -> None:
    places = [(file, panel["gridPos"]["x"], panel["gridPos"]["y"]) for file, panel in panels()]
    assert len(set(places)) == len(places) and all(x + 8 <= 24 for _, x, _ in places)
