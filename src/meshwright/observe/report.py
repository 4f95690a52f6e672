"""report.html: a self-contained page about a run, which can be opened from disk, printed and sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from meshwright.durable.writes import write_durable
from meshwright.observe import number_text, report_parts
from meshwright.observe.chart_page import chart_document, charts_head
from meshwright.observe.report_balance import balance_card
from meshwright.observe.report_benchmarks import benchmarks_card
from meshwright.observe.report_charts import Sheet, sheet
from meshwright.observe.report_check import predicted_and_measured
from meshwright.observe.report_expert_loads import expert_loads_card
from meshwright.observe.report_goodput import goodput_card
from meshwright.observe.report_heat_map import HeatMapFigures, heat_map_card
from meshwright.observe.report_stragglers import stragglers_card
from meshwright.observe.runfolder import RunFolder, read_run
from meshwright.observe.svg import draw


@dataclass(frozen=True)
class SpanFindings:
    """What the analysis of a run's spans has found, for the report. Each part may be missing."""

    heat_map: HeatMapFigures | None = None
    stragglers: Mapping[str, Any] | None = None
    """Result of the straggler analysis, as JSON values."""
    stragglers_sentence: str = ""
    timeline: str = ""
    """HTML figure of the measured pipeline step and the predicted one."""
    notes: tuple[str, ...] = ()
    """Why parts are missing."""


def write_report(run_folder: Path, findings: SpanFindings = SpanFindings()) -> Path:
    """Write `report.html` atomically into the run's folder, and return its path."""
    path = run_folder / "report.html"
    write_durable(path, render(read_run(run_folder), findings))
    return path


def render(run: RunFolder, findings: SpanFindings = SpanFindings()) -> str:
    """Return the HTML of the page."""
    charts = sheet(run)
    parts = (
        _header(run),
        report_parts.tiles(run),
        _charts(run, charts),
        predicted_and_measured(run),
        goodput_card(run.goodput),
        benchmarks_card(run.benchmarks),
        expert_loads_card(run.steps),
        balance_card(run.plan, run.steps, run.setting("model", "kv_heads")),
        heat_map_card(findings.heat_map),
        stragglers_card(findings.stragglers, findings.stragglers_sentence),
        findings.timeline,
        report_parts.plan_picture(run),
        report_parts.answers(run),
        report_parts.samples(run),
        f'<div class="grid">{report_parts.history(run)}</div>',
        f'<div class="grid">{report_parts.environment(run)}{report_parts.config(run)}</div>',
        report_parts.notes((*run.notes, *findings.notes)),
    )
    return chart_document(run.name, parts, charts)


def _header(run: RunFolder) -> str:
    text, css_class = _status(run)
    model = run.setting("model", "preset") or run.setting("model", "family")
    gpu = run.setting("cluster", "gpu")
    ranks = run.plan.ranks if run.plan else None
    facts = [
        str(model) if model else None,
        f"{number_text.short(run.parameters)} parameters" if run.parameters else None,
        f"{ranks}\u00a0×\u00a0{gpu}" if ranks and gpu else None,
        run.plan.precision.compute if run.plan else None,
    ]
    line = " · ".join(escape(fact) for fact in facts if fact)
    return f"""<header><p class="product">meshwright <span>training report</span></p>
<h1>{escape(run.name)}</h1><p class="facts-line"><span class="status {css_class}">{escape(text)}</span>{line}</p></header>"""


def _status(run: RunFolder) -> tuple[str, str]:
    """Return (text, CSS class) about the progress of the run towards its configured number of steps."""
    done = run.steps[-1]["step"] if run.steps else 0
    planned = run.setting("train", "steps")
    if not done:
        return "no steps yet", "part"
    if isinstance(planned, int):
        return ("finished", "done") if done >= planned else (f"{done:,} of {planned:,} steps", "part")
    return f"{done:,} steps", "part"


def _charts(run: RunFolder, charts: Sheet) -> str:
    """Return all charts. The figure of memory comes after the charts of speed."""
    memory = report_parts.memory(run)
    if not charts.charts:
        return f'<div class="grid">{memory}</div>' if memory else ""
    first, *later = (draw(chart, charts.tables, charts.axes[0]) for chart in charts.charts)
    after_speed = next(
        (index for index, chart in enumerate(charts.charts[1:]) if chart.key in ("lr", "grad_norm")), len(later)
    )
    cards = [*later[:after_speed], memory, *later[after_speed:]]
    return f"""{charts_head(charts)}
<div class="grid"><div class="wide">{first}</div>{"".join(cards)}</div>"""
