"""The report's card of what was predicted beside what was measured: a table, and a bar above a bar for each part of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from meshwright.observe import figures
from meshwright.observe.prediction_account import WARM_UP, Account, Beside, Part, why_unpredicted
from meshwright.observe.runfolder import RunFolder

COLOURS = {
    "compute": "c-forward", "forward": "c-forward", "forward, backward": "c-forward", "backward": "c-backward", "reduce": "c-reduce",
    "optim": "c-optim", "norm, optimizer": "c-optim", "data": "c-data", "host": "c-host", "bubble": "c-event", "idle": "c-event",
    "between phases": "c-event", "exposed pipeline": "k5", "exposed shard": "k3", "exposed replicate": "c-checkpoint",
}  # fmt: skip
"""CSS classes of what parts are made of; measured and predicted words for one thing share theirs."""
OTHER_COLOUR = "c-validate"

Text = Callable[[float], str]


def predicted_and_measured(run: RunFolder) -> str:
    """The newest account of the run as a card; nothing for a run that has none."""
    told = run.account
    if told is None:
        return ""
    rows = [
        _row("Step time", told.step_seconds, figures.duration),
        _row("Tokens per second and rank", told.tokens_per_second_per_gpu, figures.short),
        _row("MFU, causal", told.mfu, figures.percent),
        _row("Memory, resident" if told.resident else "Memory, allocated", told.memory_bytes, figures.size),
    ]
    heads = "".join(f"<th>{text}</th>" for text in ("", "predicted", "80% band", "measured", "difference"))
    return f"""<section class="card account" id="account"><h2>Predicted and measured</h2>
<div class="pair"><div><table class="beside"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>
{_words(told)}</div><div>{_bars(told)}</div></div></section>"""


def _row(label: str, both: Beside | None, text: Text) -> str:
    if both is None:
        return ""
    expected = text(both.predicted) if both.predicted is not None else "–"
    band = f"{text(both.low)} to {text(both.high)}" if both.low is not None and both.high is not None else ""
    off = f"{100 * both.error:+.1f}%" if both.error is not None else ""
    mark = ' class="off"' if both.outside else ""
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in (expected, band, text(both.measured)))
    return f"<tr><th>{escape(label)}</th>{cells}<td{mark}>{escape(off)}</td></tr>"


def _words(told: Account) -> str:
    said = [
        f"Steps {told.steps[0]:,} to {told.steps[1]:,}, without the first {WARM_UP} of this start; step time and rates are medians, "
        "memory is the fullest rank's."
    ]
    if told.step_seconds.predicted is None:
        why = why_unpredicted(told)
        said.append(f"{why[0].upper()}{why[1:]}; meshwright profile measures this machine.")
    elif told.step_seconds.outside:
        said.append(
            "The step time is outside of its band; meshwright profile --from-run corrects the costs by this run."
        )
    if told.resident:
        said.append("Resident memory has the interpreter and its libraries in it, and is comparable only roughly.")
    if told.parts and told.recorded:
        said.append(
            f"Parts, predicted above measured, are from the timeline of steps {told.recorded[0]:,} to {told.recorded[1]:,}."
        )
    elif told.parts:
        said.append(
            "Parts, predicted above measured, are means over the middle half of the steps. Phases cannot tell communication that no "
            "compute hides from compute; a timeline (train --timeline) can."
        )
    return "".join(f'<p class="aside">{escape(text)}</p>' for text in said)


def _bars(told: Account) -> str:
    """Every part on one scale: predicted above measured."""
    top = max((max(p.measured_seconds, p.predicted_seconds) for p in told.parts), default=0.0)
    if not top:
        return ""
    names = dict.fromkeys(name for part in told.parts for name in (*part.predicted, *part.measured))
    keys = "".join(f'<li class="{_colour(name)} column">{escape(name)}</li>' for name in names)
    return (
        f"""<div class="bars">{"".join(_part(part, top) for part in told.parts)}</div><ul class="legend">{keys}</ul>"""
    )


def _part(part: Part, top: float) -> str:
    expected, found = (_seconds(seconds) for seconds in (part.predicted_seconds, part.measured_seconds))
    return f"""<p class="bar-label"><span>{escape(part.name)}</span><span>predicted <b>{expected}</b> measured <b>{found}</b></span></p>
<div class="bar slim">{_stack(part.predicted, top)}</div><div class="bar slim last">{_stack(part.measured, top)}</div>"""


def _stack(shares: Mapping[str, float], top: float) -> str:
    return "".join(
        f'<i class="{_colour(name)}" style="width:{100 * seconds / top:.2f}%" title="{escape(f"{name} {_seconds(seconds)}")}"></i>'
        for name, seconds in shares.items()
    )


def _colour(name: str) -> str:
    return COLOURS.get(name, OTHER_COLOUR)


def _seconds(value: float) -> str:
    return figures.duration(value) if value else "0"
