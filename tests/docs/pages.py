"""Parses the documentation pages: fenced blocks, inline code, links, tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "examples/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)

_FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page and first line, its language, and the options behind the language."""

    page: str
    line: int
    language: str
    options: tuple[str, ...]
    text: str

    @property
    def location(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]

    def option(self, name: str) -> str | None:
        """Returns VALUE of the option `name=VALUE`, or None."""
        return next((text.partition("=")[2] for text in self.options if text.startswith(f"{name}=")), None)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    text, result = text_of(page), []
    for match in _FENCE.finditer(text):
        language, *options = match[1].split() or [""]
        result.append(Block(page, text.count("\n", 0, match.start()) + 1, language, tuple(options), match[2]))
    return result


def prose(page: str) -> str:
    """Returns the page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


def inline_code(page: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def links(page: str) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: str) -> set[str]:
    """Returns the anchors of a page's headings in GitHub's form."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(page: str, first_head: str) -> list[dict[str, str]]:
    """Returns the rows, by column, of the first table whose first column is headed `first_head`. An escaped bar ends no cell."""
    lines = iter(prose(page).splitlines())
    head = next(line for line in lines if line.startswith(f"| {first_head} |"))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(_cells(head), _cells(line), strict=True)))
    return rows


def codes(cell: str) -> list[str]:
    """Returns the inline code in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
