"""Computes what a report shows from the spans of a run: heat map, straggler analysis, measured and predicted pipeline step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.spec.errors import BadInput, MeshwrightError

if TYPE_CHECKING:
    import numpy as np

    from meshwright.observe.report import SpanFindings
    from meshwright.observe.report_heat_map import HeatMapFigures
    from meshwright.simulator.timeline import Timeline

MOST_BYTES = 1 << 30
"""Spans of a larger size in bytes are not read."""
HEAT_MAP_STEPS = 1000
"""The heat map shows at most this many of the newest steps."""


def span_findings(folder: Path) -> SpanFindings:
    """Return the findings from the spans of the newest start of a run. Its `notes` say which findings are missing, and why."""
    from meshwright.diagnosis.stragglers import diagnose_run
    from meshwright.events.span_ring import starts_with_spans
    from meshwright.observe.report import SpanFindings

    starts = starts_with_spans(folder)
    if not starts:
        return SpanFindings(notes=("heat map, stragglers and timeline: the run has no spans/",))
    size = sum(path.stat().st_size for path in starts[-1].glob("rank-*.ring"))
    if size > MOST_BYTES:
        return SpanFindings(notes=(f"heat map, stragglers and timeline: spans/ has {size / 1e9:.1f} GB",))
    timeline = _timeline(folder, starts[-1])
    try:
        figures = heat_map_of_run(folder)
        diagnosis = diagnose_run(folder)
    except BadInput as error:
        return SpanFindings(timeline=timeline, notes=(f"heat map and stragglers: {_without_path(error, folder)}",))
    return SpanFindings(figures, diagnosis.as_plain(), diagnosis.sentence, timeline)


def heat_map_of_run(folder: Path) -> HeatMapFigures | None:
    """Return the heat map of the newest steps of a run.

    None if there are fewer than two ranks. Raises BadInput if the ranks have no step in common.
    """
    from meshwright.diagnosis.run_folder import compute_seconds, read_operations

    table, _ = read_operations(folder, HEAT_MAP_STEPS)
    return heat_map_figures(*compute_seconds(table))


def heat_map_figures(ranks: np.ndarray, steps: np.ndarray, seconds: np.ndarray) -> HeatMapFigures | None:
    """Return the heat map of compute times. None if there are fewer than two ranks, or no steps.

    `ranks` `(ranks,)` and `steps` `(steps,)` are numbers. `seconds` `(ranks, steps)` is 0 where a rank has no time.
    """
    import numpy as np

    from meshwright.diagnosis.heat_map import excess_of_ranks, heat_map
    from meshwright.observe.report_heat_map import MOST_COLUMNS, MOST_ROWS, HeatMapFigures

    if len(ranks) < 2 or not len(steps):
        return None
    seconds = np.where(seconds > 0, seconds, np.nan)
    numbers = ranks.tolist()
    cells = heat_map(steps, seconds, MOST_ROWS, MOST_COLUMNS)
    ratio = [[float(value) if np.isfinite(value) else None for value in values] for values in cells.ratio]
    excess = {numbers[index]: value for index, value in excess_of_ranks(seconds).items()}
    return HeatMapFigures([(numbers[first], numbers[last]) for first, last in cells.ranks], cells.steps, ratio, excess)


def _timeline(folder: Path, start: Path) -> str:
    """Return a figure of the measured pipeline step above the predicted one. Empty if the run has no pipeline."""
    from meshwright.events.clock_alignment import on_one_clock
    from meshwright.events.span_ring import read_spans
    from meshwright.observe.report_timeline import pipeline_timeline

    spans, _ = read_spans(start)
    if not any(rank.header["coordinates"].get("pipeline", 0) for rank in spans):
        return ""
    ranks, alignment = on_one_clock(spans)
    predicted, guessed, reason = _predicted(folder)
    return pipeline_timeline(ranks, alignment, predicted, reason, guessed=guessed)


def _predicted(folder: Path) -> tuple[Timeline | None, bool, str | None]:
    """Return (simulated step of the run's plan or None, whether the speeds are guessed, why there is no simulation)."""
    from meshwright.config.load import load_plan, load_resolved
    from meshwright.costs.machine_rates import is_guessed
    from meshwright.simulator.predicted_step import predicted_step

    try:
        run = load_resolved(folder / "config.yaml")
        plan = load_plan(folder / "plan.yaml", run.cluster)
    except (OSError, MeshwrightError) as error:
        return None, False, _without_path(error, folder).splitlines()[0]
    timeline, reason = predicted_step(run, plan, guessed=True)
    return timeline, is_guessed(run.cluster), reason


def _without_path(error: Exception, folder: Path) -> str:
    """Return the text of an error with the name of the run in place of its path, because reports are given to others."""
    return str(error).replace(str(folder), folder.name)
