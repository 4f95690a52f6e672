"""Tests of the examples of the planner's output: their commands, and how they are shortened."""

from __future__ import annotations

import pytest
from tests.docs.examples import WIDTH, examples, options, refusal, rewritten, shorten
from tests.docs.pages import PAGES, Block, blocks

TEXT = """model on 8 GPUs
1.0 s a step

plan
  batch   8
  layers  all

runner-ups, and why they were not chosen
  1.  first,
      slower
  2.  second
  3.  third,
      slower
"""


@pytest.mark.parametrize(
    ("only", "cut", "expected"),
    [
        ([], {}, TEXT),
        (["head"], {}, "model on 8 GPUs\n1.0 s a step\n"),
        (
            ["runner"],
            {"runner-ups": (1, 0)},
            "runner-ups, and why they were not chosen\n  1.  first,\n      slower\n  …\n",
        ),
        (
            ["runner"],
            {"runner-ups": (0, 1)},
            "runner-ups, and why they were not chosen\n  …\n  3.  third,\n      slower\n",
        ),
        (["plan"], {"plan": (1, 1)}, "plan\n  batch   8\n  layers  all\n"),
    ],
)
def test_sections_and_entries_are_omitted(only: list[str], cut: dict[str, tuple[int, int]], expected: str) -> None:
    assert shorten(TEXT, only, cut) == expected


def test_an_unknown_section_is_an_error() -> None:
    with pytest.raises(ValueError, match="no section memory; there are head, plan, runner-ups"):
        shorten(TEXT, ["memory"], {})


def test_a_refusal_begins_with_the_program_name() -> None:
    assert refusal("no run file: assumed\nmeshwright: no plan fits\nChanges that make it fit\n") == (
        "meshwright: no plan fits\nChanges that make it fit"
    )


def test_examples_are_replaced_in_place() -> None:
    text = "before\n```console output\nold\nold\n```\nbetween\n```console output\nold\n```\nafter\n"
    first, second = Block("p", 2, "console", ("output",), "old\nold\n"), Block("p", 7, "console", ("output",), "old\n")
    expected = "before\n```console output\n1\n```\nbetween\n```console output\n2\n3\n```\nafter\n"
    assert rewritten(text, {first: "1\n", second: "2\n3\n"}) == expected


def test_every_output_follows_the_command_that_prints_it() -> None:
    shown = list(examples())
    assert {"docs/how-to/choose-a-plan.md", "docs/how-to/fit-memory.md", "docs/how-to/simulate.md"} <= {
        block.page for _, block in shown
    }
    for command, block in shown:
        assert "norun" not in command.options and "meshwright " in command.text, command.location
        shorten(block.text, *options(block)) if not block.option("only") else options(block)
        assert max(map(len, block.text.splitlines())) <= max(WIDTH, 138), block.location


def test_planner_output_is_marked_as_output() -> None:
    """Only the planner prints a headline with the band of a step."""
    unmarked = [
        b.location
        for page in PAGES
        for b in blocks(page)
        if b.language == "console" and "output" not in b.options and "(80%" in b.text
    ]
    assert not unmarked, "mark the block as `console output`; `make examples` updates it"


def test_the_options_of_a_block() -> None:
    block = Block("p", 1, "console", ("output", "only=head,plan", "cut=plan:2+1,why:3"), "")
    assert options(block) == (["head", "plan"], {"plan": (2, 1), "why": (3, 0)})
