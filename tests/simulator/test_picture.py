from pathlib import Path

import pytest

from meshwright.schedules.registry import build
from meshwright.simulator.picture import draw
from meshwright.simulator.simulate import simulate
from meshwright.simulator.timing import uniform_timing
from tests.schedules.sizes import PIPELINES

DOCS = Path(__file__).parents[2] / "docs" / "design" / "schedules.md"


def picture_of(name, ranks, batches):
    schedule = build(name, ranks, batches, 2 if name == "breadth_first" else None)
    return draw(simulate(schedule, uniform_timing(schedule.stages)))


def test_a_picture_of_1f1b():
    assert picture_of("1f1b", 2, 2).splitlines() == [
        "0  F0 F1 .  .  B0--- .  B1---",
        "1  .  F0 B0--- F1 B1--- .  .",
    ]


@pytest.mark.parametrize("name", PIPELINES)
def test_the_pictures_in_the_docs_are_what_the_code_draws(name):
    assert f"```\n{picture_of(name, 3, 6)}\n```" in DOCS.read_text(encoding="utf-8")
