"""Lines of prose in the documentation fit an editor's window."""

from __future__ import annotations

import pytest
from tests.docs.pages import PAGES, prose

MAX_COLUMNS = 120


@pytest.mark.parametrize("page", (*PAGES, "CHANGELOG.md"))
def test_prose_lines_are_short(page: str) -> None:
    lines = [line for line in prose(page).splitlines() if not line.startswith(("|", "!["))]
    assert not [line for line in lines if len(line) > MAX_COLUMNS]
