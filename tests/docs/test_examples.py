"""The examples of the planner's output: where they stand, what they show, and how they are shortened."""

from __future__ import annotations

import pytest
from tests.docs.examples import WIDTH, examples, options, refusal, rewritten, shorten
from tests.docs.pages import PAGES, Block, blocks

TEXT = """model on 8 GPUs
1.0 s a step

plan
  batch   8
  layers  all

runner-ups, and why they lost
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
        (["runner"], {"runner-ups": (1, 0)}, "runner-ups, and why they lost\n  1.  first,\n      slower\n  …\n"),
        (["runner"], {"runner-ups": (0, 1)}, "runner-ups, and why they lost\n  …\n  3.  third,\n      slower\n"),
        (["plan"], {"plan": (1, 1)}, "plan\n  batch   8\n  layers  all\n"),
    ],
)
def test_sections_and_entries_are_left_out(only: list[str], cut: dict[str, tuple[int, int]], expected: str) -> None:
    assert shorten(TEXT, only, cut) == expected


def test_a_section_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no section memory; there are head, plan, runner-ups"):
        shorten(TEXT, ["memory"], {})


def test_a_refusal_begins_with_the_programs_name() -> None:
    assert refusal("no run file: assumed\nmeshwright: no plan fits\nWhat makes it fit\n") == (
        "meshwright: no plan fits\nWhat makes it fit"
    )


def test_examples_are_replaced_where_they_stand() -> None:
    text = "before\n```console output\nold\nold\n```\nbetween\n```console output\nold\n```\nafter\n"
    first, second = Block("p", 2, "console", ("output",), "old\nold\n"), Block("p", 7, "console", ("output",), "old\n")
    made = "before\n```console output\n1\n```\nbetween\n```console output\n2\n3\n```\nafter\n"
    assert rewritten(text, {first: "1\n", second: "2\n3\n"}) == made


def test_every_output_of_the_planner_stands_under_a_command_that_makes_it() -> None:
    shown = list(examples())
    assert {"docs/how-to/choose-a-plan.md", "docs/reference/cluster-file.md", "docs/how-to/simulate.md"} <= {
        block.page for _, block in shown
    }
    for command, block in shown:
        assert "norun" not in command.words and "meshwright " in command.text, command.where
        shorten(block.text, *options(block)) if not block.option("only") else options(block)
        assert max(map(len, block.text.splitlines())) <= max(WIDTH, 138), block.where


def test_what_looks_like_an_answer_is_marked_as_one() -> None:
    """A headline with a step's band is printed by nothing else."""
    bare = [
        b.where
        for page in PAGES
        for b in blocks(page)
        if b.language == "console" and "output" not in b.words and "(80%" in b.text
    ]
    assert not bare, "`console output` blocks are brought up to date by `make examples`"


def test_the_words_of_a_block() -> None:
    block = Block("p", 1, "console", ("output", "only=head,plan", "cut=plan:2+1,why:3"), "")
    assert options(block) == (["head", "plan"], {"plan": (2, 1), "why": (3, 0)})
