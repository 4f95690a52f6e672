"""Parts of self-contained HTML pages without scripts, in the style of the report: document, headline figures, tables, lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from meshwright import __version__

UNWRAPPED_CHARACTERS = 12
"""A cell's text of at most this many characters stays on one line."""
STYLE = """
table.rows td { text-align: left; color: var(--text); padding-right: 18px; }
table.rows td { overflow-wrap: normal; }
table.rows th { width: auto; border-top: 0; }
@media screen and (max-width: 600px) {
  table.rows { font-size: 12.5px; }
  table.rows th, table.rows td { white-space: normal; padding-right: 8px; }
}
section.card + section.card, .grid + section.card, .tiles + section.card { margin-bottom: 20px; }
"""
"""Styles for tables with several columns, in addition to the report's style sheet."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy of the pages."""


def document(title: str, parts: Iterable[str]) -> str:
    """Return the HTML of a page whose content is `parts`, which are HTML."""
    css = (files("meshwright.observe") / "template" / "report.css").read_text(encoding="utf-8").strip()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{escape(title)}</title><style>{css}{STYLE}</style></head>
<body><main>
{"".join(parts)}
</main><footer>meshwright {__version__}</footer></body></html>
"""


def header(product: str, name: str, line: str, note: str = "", status: str = "") -> str:
    """Return the head of a page: `product` is the command, `name` the title, `line` the facts, `note` a remark below.

    `status` is a word in a coloured box before the facts.
    """
    word = f'<span class="status done">{escape(status)}</span>' if status else ""
    return f"""<header><p class="product">meshwright <span>{escape(product)}</span></p><h1>{escape(name)}</h1>
<p class="facts-line">{word}{escape(line)}</p><p class="aside">{escape(note)}</p></header>"""


def tile_list(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return headline figures, given as (name, value, context)."""
    cells = "".join(
        f'<div class="tile"><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd class="sub">{escape(c)}</dd></div>'
        for a, b, c in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def table(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table with a title; empty if it has no lines."""
    return card(title, rows(heads, lines))


def listing(title: str, sentences: Iterable[str]) -> str:
    """Return a list with a title; empty if it has no sentences."""
    return card(title, items(sentences))


def card(title: str, body: str) -> str:
    """Return a box with a title around `body`, which is HTML; empty if `body` is."""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def rows(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table with the headings `heads`; empty if it has no lines.

    A line may have fewer cells than there are headings.
    """
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in line)}</tr>" for line in lines)
    if not body:
        return ""
    head = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in heads)}</tr></thead>" if any(heads) else ""
    return f'<div class="scroll"><table class="facts rows">{head}<tbody>{body}</tbody></table></div>'


def items(sentences: Iterable[str]) -> str:
    """Return a list; empty if it has no sentences."""
    lines = "".join(f"<li>{escape(text)}</li>" for text in sentences)
    return f'<ul class="why">{lines}</ul>' if lines else ""


def _cell(text: str) -> str:
    """Return the HTML of a cell. Short text, such as a number with its unit, stays on one line."""
    return escape(text.replace(" ", "\u00a0") if len(text) <= UNWRAPPED_CHARACTERS else text)
