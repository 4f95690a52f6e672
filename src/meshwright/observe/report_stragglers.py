"""The report's card of the straggler analysis: a sentence, a bar for each cause, and the slowest ranks and stages."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from meshwright.observe import number_text

LISTED = 5
"""Entries of each list that are shown."""


def stragglers_card(diagnosis: Mapping[str, Any] | None, sentence: str = "") -> str:
    """Return the card of a straggler analysis; empty without one.

    `diagnosis` has the JSON values of `diagnosis.stragglers.Diagnosis`, and `sentence` is the analysis in words.
    """
    if diagnosis is None:
        return ""
    added = {name: max(0.0, value) for name, value in diagnosis["contributions"].items()}
    contributions = sorted(added.items(), key=lambda item: -item[1])
    bars = "".join(_cause(name, value, flagged=name == diagnosis["cause"]) for name, value in contributions)
    facts = {
        "Slowdown": f"{diagnosis['slowdown']:.3f} times the ideal step",
        "Cause": (diagnosis["cause"] or "none above 2%").replace("_", " "),
        "Rank": _number(diagnosis["rank"]),
        "Stage": _number(diagnosis["stage"]),
        "Step": f"{number_text.duration(diagnosis['step_seconds'])}, ideal {number_text.duration(diagnosis['ideal_seconds'])}",
        "By type": _largest(diagnosis["by_type"]),
        "By rank": _largest(diagnosis["by_rank"]),
        "By stage": _largest(diagnosis["by_stage"]),
    }
    lines = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in facts.items())
    notes = "".join(f'<p class="aside">{escape(note)}</p>' for note in diagnosis["notes"])
    steps = diagnosis["steps"]
    return f"""<section class="card stragglers" id="stragglers"><h2>Stragglers</h2>
<p class="finding">{escape(sentence[:1].upper() + sentence[1:])}.</p>
<div class="pair"><div><table class="facts"><tbody>{lines}</tbody></table></div>
<div><p class="bar-label"><span>Part of the ideal step time that each cause adds; a full bar is a step</span></p>{bars}</div></div>
<p class="aside">Replay of {len(steps)} steps, {steps[0]:,} to {steps[-1]:,}; a slowdown of a part is the step with only this part
 as recorded, over the ideal step.</p>{notes}</section>"""


def _cause(name: str, value: float, *, flagged: bool) -> str:
    colour = "k5" if flagged else "k4"
    return f"""<p class="bar-label"><span>{escape(name.replace("_", " "))}</span><b>{number_text.percent(value)}</b></p>
<div class="bar slim last"><i class="{colour}" style="width:{100 * min(value, 1.0):.2f}%"></i></div>"""


def _largest(slowdowns: Mapping[str, float]) -> str:
    ordered = sorted(slowdowns.items(), key=lambda item: -item[1])
    rest = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return ", ".join(f"{name} {slowdown:.3f}" for name, slowdown in ordered[:LISTED]) + rest


def _number(index: int | None) -> str:
    return "–" if index is None else str(index)
