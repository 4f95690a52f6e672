"""Every page of the documentation can be found: the index lists it, and the site's navigation with it."""

from __future__ import annotations

import pytest
from tests.docs.pages import PAGES
from tests.docs.site import INDEX, for_mkdocs, navigation, reachable


def test_every_page_is_in_the_index() -> None:
    listed = {page for section in navigation() for pages in section.values() for page in _pages(pages)}
    assert listed >= set(PAGES), f"add to {INDEX}: {', '.join(sorted(set(PAGES) - listed))}"


def _pages(entry: str | list[dict[str, str]]) -> list[str]:
    return [entry] if isinstance(entry, str) else [page for one in entry for page in one.values()]


def test_the_readme_leads_to_every_page() -> None:
    assert reachable("README.md") >= set(PAGES)


@pytest.mark.parametrize(
    ("on_github", "for_the_site"),
    [
        ("```console output only=head\na | b\n```\n", "```console\na | b\n```\n"),
        ("Text:\n- one\n  - two\n- three\n", "Text:\n\n- one\n    - two\n- three\n"),
        ("| `a\\|b` | c |\n", "| `a|b` | c |\n"),
        ("a line\nand another\n", "a line\nand another\n"),
    ],
)
def test_pages_are_written_for_mkdocs(on_github: str, for_the_site: str) -> None:
    assert for_mkdocs(on_github) == for_the_site
