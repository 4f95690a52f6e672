"""A self-contained page with charts: its document, content policy and script, the selector of the x axis, the numbers.

Everything is inlined; the page's content policy forbids loading, and scripts other than its own, so text of a run
(data, samples, names) cannot execute. The charts are complete without the script, which shows the values under the
cursor and offers other x axes.
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
    """The HTML of a page with these parts, among them drawings of `charts`."""
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
    """The heading of the charts with the selector of the x axis, which the script shows."""
    first = charts.axes[0].key
    choices = "".join(
        f'<label><input type="radio" name="x" value="{axis.key}"{" checked" if axis.key == first else ""}>{axis.label}</label>'
        for axis in charts.axes
    )
    selector = f'<output id="at"></output><fieldset class="switch" hidden><legend>x axis</legend>{choices}</fieldset>'
    return f'<div class="charts-head"><h2>{escape(title)}</h2>{selector}</div>'


def figures_json(charts: Sheet) -> str:
    """The numbers of the charts as JSON, escaped so that it cannot close its script element."""
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
    """A file of the pages' style and script."""
    return (files("meshwright.observe") / "template" / name).read_text(encoding="utf-8").strip()
