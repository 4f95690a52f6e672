"""A self-contained HTML page with charts: the document, its content policy and script, and the choice of the x axis.

Everything is inside the page. Its content policy forbids loading anything and running other scripts, so that text of a
run (data, samples, names) cannot execute. The charts are complete without the script, which shows the values under the
cursor and lets the reader choose the x axis.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from meshwright import __version__
from meshwright.observe.report_charts import Sheet
from meshwright.observe.svg import numbers


def chart_document(title: str, parts: Iterable[str], charts: Sheet) -> str:
    """Return the HTML of a page. `parts` is its content, which includes the drawings of `charts`."""
    script = template("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · meshwright</title>
<style>{template("report.css")}</style>
</head>
<body>
<main>
{body}
</main>
<footer>meshwright {__version__} · written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</footer>
<script type="application/json" id="figures">{figures_json(charts)}</script>
<script>{script}</script>
</body>
</html>
"""


def charts_head(charts: Sheet, title: str = "Training") -> str:
    """Return the heading of the charts. It has a choice of the x axis, which stays hidden until the script shows it."""
    first = charts.axes[0].key
    choices = "".join(
        f'<label><input type="radio" name="x" value="{axis.key}"{" checked" if axis.key == first else ""}>{axis.label}</label>'
        for axis in charts.axes
    )
    selector = f'<output id="at"></output><fieldset class="switch" hidden><legend>x axis</legend>{choices}</fieldset>'
    return f'<div class="charts-head"><h2>{escape(title)}</h2>{selector}</div>'


def figures_json(charts: Sheet) -> str:
    """Return the numbers of the charts as JSON. `<` is escaped, so that no text can close the script element around it."""
    data = {
        "axes": {
            axis.key: {
                "low": axis.low,
                "high": axis.high,
                "ticks": [[100 * axis.position(value), text] for value, text in axis.ticks],
            }
            for axis in charts.axes
        },
        "tables": {
            name: {key: [float(f"{value:.6g}") for value in values] for key, values in table.items()}
            for name, table in charts.tables.items()
        },
        "charts": {chart.key: numbers(chart) for chart in charts.charts},
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def template(name: str) -> str:
    """Return a file of the pages' template: style or script."""
    return (files("meshwright.observe") / "template" / name).read_text(encoding="utf-8").strip()
