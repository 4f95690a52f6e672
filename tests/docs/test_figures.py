"""Figures of the pages are those of the raw files that the comments beside them name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tools import figures
from tools.figures import PAGES, ROOT, corrected, mistakes, value_of

from meshwright.spec.errors import BadInput

MEASURED = "docs/results.md"
"""The page on which every paragraph and table with figures says where they come from."""
PAGE = """# Page

<!-- figures
in rates.json
at runs/name=ours
{figure} = rate / /runs/name=theirs/rate; 58.5% = mfu; 58,500 ~ rate; 5.2e-5 = difference
given 8,192
-->

| 8,192 tokens | {figure} | 58.5% |
|---|---:|---:|
| seeds | 58,500 | 5.2e-5 |

Another paragraph has 1.17.
"""


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of raw files with one file."""
    runs = [{"name": "ours", "rate": 58512, "mfu": 0.5849, "difference": 5.17e-5}, {"name": "theirs", "rate": 50000}]
    (tmp_path / "rates.json").write_text(json.dumps({"runs": runs}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)


def with_figures() -> list[str]:
    return [page for page in PAGES if "<!-- figures" in (ROOT / page).read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", with_figures())
def test_figures_are_those_of_their_files(page: str) -> None:
    assert not mistakes((ROOT / page).read_text(encoding="utf-8")), "python -m tools.figures --write"


def test_every_part_of_the_results_says_where_its_figures_come_from() -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / MEASURED).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    others = figures.PART.sub("", text).split("\n\n")
    assert not [
        part[:80] for part in others if re.search("[.%]", "".join(number[0] for number in figures.numbers_of(part)))
    ]


@pytest.mark.usefixtures("rates")
def test_a_figure_that_differs_is_named_and_written() -> None:
    stale, right = PAGE.format(figure="1.16"), PAGE.format(figure="1.17")
    assert mistakes(right) == []
    (mistake,) = mistakes(stale)
    assert "1.16, but 1.17 by rates.json: runs/name=ours rate / /runs/name=theirs/rate" in mistake
    assert corrected(stale) == right


@pytest.mark.usefixtures("rates")
def test_a_number_of_which_nothing_is_said_is_named() -> None:
    (mistake,) = mistakes(PAGE.format(figure="1.17").replace("| seeds |", "| seeds, 0.3% |"))
    assert mistake.endswith("0.3% has neither a source nor `given` or `no file`")


@pytest.mark.parametrize(
    ("text", "value", "rounded"),
    [
        ("1.25", 1.245, False),
        ("−2.1%", -0.0213, False),
        ("53,200", 53_151, True),
        ("+13", 13.4, False),
        ("110.8", 110.85, False),
    ],
)
def test_a_text_is_right_if_it_is_the_rounded_value(text: str, value: float, rounded: bool) -> None:
    assert figures.Figure(text, (0, 0), value, "", rounded).right


@pytest.mark.parametrize(
    ("text", "value", "rounded", "written"),
    [
        ("1.25", 1.244, False, "1.24"),
        ("−2.1%", 0.0, False, "+0.0%"),
        ("53,200", 53_251, True, "53,300"),
        ("5.2e-5", 1e-4, False, "1.0e-4"),
    ],
)
def test_a_value_is_written_like_the_text(text: str, value: float, rounded: bool, written: str) -> None:
    figure = figures.Figure(text, (0, 0), value, "", rounded)
    assert not figure.right
    assert figure.corrected == written


@pytest.mark.usefixtures("rates")
def test_summaries_and_terms_are_computed_from_the_left() -> None:
    assert value_of("max runs/*/rate - 8512 / 10000", "rates.json", "") == 5
    assert value_of("count runs/*/rate", "rates.json", "") == 2


@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rates.json", "rate.json", "rate.json: no such file in benchmarks/results"),
        ("name=ours", "name=our", r"runs/name=our/rate reaches 0 elements, 0 of them numbers; expected one number"),
        ("58.5% = mfu", "58.4% = mfu", "`58.4% = mfu`: the text has no 58.4% behind the figure before it"),
        ("-->\n\n", "-->\n", "a comment with figures has no end, or no blank line and text behind it"),
        ("given 8,192", "gives 8,192", "`gives 8,192`: expected in FILE, at PLACE, given NUMBERS, no file NUMBERS or"),
    ],
)
def test_a_comment_that_cannot_be_followed_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        mistakes(PAGE.format(figure="1.17").replace(old, new, 1))
