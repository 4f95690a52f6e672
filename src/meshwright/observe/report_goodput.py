"""The report's card about goodput: how the wall time was used, as a stacked bar and a table."""

from __future__ import annotations

from html import escape

from meshwright.observe import number_text
from meshwright.observe.goodput import CATEGORIES, RunGoodput

COLOURS = {
    "productive": "c-forward",
    "saving": "c-checkpoint",
    "detecting": "c-validate",
    "restarting": "c-optim",
    "recomputing": "c-backward",
    "waiting_for_data": "c-reduce",
    "idle": "c-event",
}
"""CSS class of each use of the wall time."""


def goodput_card(breakdown: RunGoodput | None) -> str:
    """Return the card of a breakdown of the wall time; empty if there is none."""
    if breakdown is None or not breakdown.wall_seconds:
        return ""
    shares = {name: seconds / breakdown.wall_seconds for name, seconds in breakdown.seconds.items() if seconds > 0}
    bar = "".join(
        f'<i class="{COLOURS[name]}" style="width:{100 * share:.3f}%" title="{_label(name)} {number_text.percent(share)}"></i>'
        for name, share in shares.items()
    )
    lines = "".join(
        f'<tr><th><span class="{COLOURS[name]} dot"></span>{_label(name)}</th><td>{_duration(breakdown.seconds[name])}</td>'
        f"<td>{number_text.percent(shares.get(name, 0.0))}</td><td>{escape(CATEGORIES[name])}</td></tr>"
        for name in CATEGORIES
    )
    total = f"<tr><th>wall time</th><td>{_duration(breakdown.wall_seconds)}</td><td>100.0%</td><td></td></tr>"
    wall = _duration(breakdown.wall_seconds)
    return f"""<section class="card goodput" id="goodput"><h2>Goodput</h2>
<p class="finding">{number_text.percent(breakdown.goodput)} of {wall} wall time was productive.</p>
<div class="bar">{bar}</div><table class="seconds"><tbody>{lines}{total}</tbody></table></section>"""


def _label(name: str) -> str:
    return name.replace("_", " ")


def _duration(seconds: float) -> str:
    return number_text.duration(seconds) if seconds > 0 else "0"
