"""The pages of the documentation taken apart: fenced blocks, inline code, links, tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: the language, what else stands behind it, and where it begins."""

    page: str
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]

    def option(self, name: str) -> str | None:
        """VALUE of `name=VALUE` behind the language."""
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")), None)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    text, found = text_of(page), []
    for match in _FENCE.finditer(text):
        language, *words = match[1].split() or [""]
        found.append(Block(page, text.count("\n", 0, match.start()) + 1, language, tuple(words), match[2]))
    return found


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


def inline_code(page: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def links(page: str) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def table(page: str, first_head: str) -> list[dict[str, str]]:
    """The rows of the table whose first column is headed `first_head`, by column; escaped bars are kept apart."""
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
    """The inline code in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
