"""The report's card of predicted and measured figures: a table, and two bars for each part of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from meshwright.observe import number_text
from meshwright.observe.prediction_check import WARM_UP, CheckPart, Comparison, PredictionCheck, why_unpredicted
from meshwright.observe.runfolder import RunFolder

COLOURS = {
    "compute": "c-forward",
    "forward": "c-forward",
    "forward, backward": "c-forward",
    "backward": "c-backward",
    "reduce": "c-reduce",
    "optim": "c-optim",
    "norm, optimizer": "c-optim",
    "data": "c-data",
    "host": "c-host",
    "bubble": "c-event",
    "idle": "c-event",
    "between phases": "c-event",
    "hand-over of weights": "k3",
    "sampling": "c-rollout",
    "waiting for rewards": "c-optim",
    "training": "c-forward",
    "exposed pipeline": "k5",
    "exposed shard": "k3",
    "exposed replicate": "c-checkpoint",
}
"""CSS class of each component of a step's part. Predicted and measured components of the same meaning share a class."""
OTHER_COLOUR = "c-validate"

Text = Callable[[float], str]
"""Formats a number."""


def predicted_and_measured(run: RunFolder) -> str:
    """Return the card of the run's newest prediction check; empty if there is none."""
    prediction_check = run.prediction_check
    if prediction_check is None:
        return ""
    lines = [
        _table_line("Step time", prediction_check.step_seconds, number_text.duration),
        _table_line("Tokens per second and rank", prediction_check.tokens_per_second_per_gpu, number_text.short),
        _table_line("MFU, causal", prediction_check.mfu, number_text.percent),
        _table_line(
            "Memory, resident" if prediction_check.resident else "Memory, allocated",
            prediction_check.memory_bytes,
            number_text.size,
        ),
    ]
    heads = "".join(f"<th>{text}</th>" for text in ("", "predicted", "80% band", "measured", "difference"))
    return f"""<section class="card check" id="prediction-check"><h2>Predicted and measured</h2>
<div class="pair"><div><table class="beside"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>
{_remarks(prediction_check)}</div><div>{_bars(prediction_check)}</div></div></section>"""


def _table_line(label: str, comparison: Comparison | None, text: Text) -> str:
    """Return the table line of one figure; empty if it was not compared. A value outside of its band is highlighted."""
    if comparison is None:
        return ""
    expected = text(comparison.predicted) if comparison.predicted is not None else "–"
    band = (
        f"{text(comparison.low)} to {text(comparison.high)}"
        if comparison.low is not None and comparison.high is not None
        else ""
    )
    error_text = f"{100 * comparison.error:+.1f}%" if comparison.error is not None else ""
    style = ' class="off"' if comparison.outside else ""
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in (expected, band, text(comparison.measured)))
    return f"<tr><th>{escape(label)}</th>{cells}<td{style}>{escape(error_text)}</td></tr>"


def _remarks(prediction_check: PredictionCheck) -> str:
    """Return sentences about which steps were compared, and how to read the comparison."""
    sentences = [
        f"Steps {prediction_check.steps[0]:,} to {prediction_check.steps[1]:,}, without the first {WARM_UP} of this start; "
        f"{'' if prediction_check.samples else 'step time and '}rates are medians, memory is the fullest rank's."
    ]
    if prediction_check.step_seconds.predicted is None:
        reason = why_unpredicted(prediction_check)
        advice = "" if prediction_check.samples else "; meshwright profile measures this machine"
        sentences.append(f"{reason[0].upper()}{reason[1:]}{advice}.")
    elif prediction_check.step_seconds.outside:
        sentences.append(
            "The step time is outside of its band; meshwright profile --from-run corrects the costs by this run."
        )
    if prediction_check.resident:
        sentences.append("Resident memory has the interpreter and its libraries in it, and is comparable only roughly.")
    if prediction_check.parts and prediction_check.recorded:
        sentences.append(
            f"Parts, predicted above measured, are from the timeline of steps "
            f"{prediction_check.recorded[0]:,} to {prediction_check.recorded[1]:,}."
        )
    elif prediction_check.samples:
        sentences.append(
            "A step's time and its parts, predicted above measured, are means; the prediction is for the lengths of the answers."
        )
    elif prediction_check.parts:
        sentences.append(
            "Parts, predicted above measured, are means over the middle half of the steps. Phases cannot tell communication that no "
            "compute hides from compute; a timeline (train --timeline) can."
        )
    return "".join(f'<p class="aside">{escape(text)}</p>' for text in sentences)


def _bars(prediction_check: PredictionCheck) -> str:
    """Return the bars of all parts on one scale, each predicted bar above the measured one."""
    top = max((max(part.measured_seconds, part.predicted_seconds) for part in prediction_check.parts), default=0.0)
    if not top:
        return ""
    names = dict.fromkeys(name for part in prediction_check.parts for name in (*part.predicted, *part.measured))
    keys = "".join(f'<li class="{_colour(name)} column">{escape(name)}</li>' for name in names)
    return f"""<div class="bars">{"".join(_part(part, top) for part in prediction_check.parts)}</div><ul class="legend">{keys}</ul>"""


def _part(part: CheckPart, top: float) -> str:
    expected, measured = (_seconds(seconds) for seconds in (part.predicted_seconds, part.measured_seconds))
    expected = expected if part.known else "not known"
    return f"""<p class="bar-label"><span>{escape(part.name)}</span><span>predicted <b>{expected}</b> measured <b>{measured}</b></span></p>
<div class="bar slim">{_stacked_bar(part.predicted, top)}</div><div class="bar slim last">{_stacked_bar(part.measured, top)}</div>"""


def _stacked_bar(seconds_by_component: Mapping[str, float], top: float) -> str:
    return "".join(
        f'<i class="{_colour(name)}" style="width:{100 * seconds / top:.2f}%" title="{escape(f"{name} {_seconds(seconds)}")}"></i>'
        for name, seconds in seconds_by_component.items()
    )


def _colour(name: str) -> str:
    return COLOURS.get(name, OTHER_COLOUR)


def _seconds(value: float) -> str:
    return number_text.duration(value) if value else "0"
