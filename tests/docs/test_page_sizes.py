"""Sizes of the documentation: words of a page and of all pages, columns of a line of prose."""

from __future__ import annotations

import pytest
from tests.docs.pages import PAGES, prose, text_of

MAX_COLUMNS = 120
MAX_PAGE_WORDS = 2_500
MAX_README_WORDS = 1_200
MAX_TOTAL_WORDS = 36_000
GENERATED = {
    f"docs/reference/{name}.md"
    for name in ("run-file", "serve", "features", "published-layouts", "cli", "cluster-file")
}
NOT_COUNTED = {"README.md", "docs/log.md", *GENERATED}
"""The README has a bound of its own."""


def words(page: str) -> int:
    return len(text_of(page).split())


@pytest.mark.parametrize("page", (*PAGES, "CHANGELOG.md"))
def test_prose_lines_are_short(page: str) -> None:
    lines = [line for line in prose(page).splitlines() if not line.startswith(("|", "!["))]
    assert not [line for line in lines if len(line) > MAX_COLUMNS]


LOOKED_UP = {"docs/log.md", "docs/reference/run-file.md", "docs/reference/cli.md"}
"""Pages of which nobody reads more than an entry."""


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LOOKED_UP])
def test_a_page_is_read_in_ten_minutes(page: str) -> None:
    assert words(page) <= MAX_PAGE_WORDS


def test_the_readme_is_short() -> None:
    assert words("README.md") <= MAX_README_WORDS


def test_all_pages_together_are_short() -> None:
    assert sum(words(page) for page in PAGES if page not in NOT_COUNTED) <= MAX_TOTAL_WORDS
