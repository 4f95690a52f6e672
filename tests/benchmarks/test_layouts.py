"""A file of layouts pins its plans, so that later changes of the search do not change them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted((BENCHMARKS / "layouts").glob("*.yaml"))
PINNED = {"plan.pipeline", "plan.tensor", "plan.context_ring", "plan.context_ulysses", "plan.schedule"}
"""Pins that determine the mesh up to one axis, and the order of work."""
WITHOUT_PINS = {"planned-2", "own-1", "offload", "named"}
"""Files that compare the planner's choices, or run on one GPU."""


def read_layouts(file: Path, gpus: int) -> list[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import layouts
    finally:
        sys.path.remove(str(BENCHMARKS))
    options = type("Options", (), {"gpus": gpus, "set": []})
    return list(layouts.layouts_of(yaml.safe_load(file.read_text(encoding="utf-8")), options))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_layout_pins_its_axes(file: Path) -> None:
    if file.stem in WITHOUT_PINS:
        return
    for layout in read_layouts(file, 8):
        arguments = [word.partition("=") for word in layout.words]
        keys = {key for key, _, _ in arguments}
        plan_files = [value for key, _, value in arguments if key == "plan"]
        assert layout.torchtitan or plan_files or keys >= PINNED, (layout.name, PINNED - keys)


def test_axis_sizes_follow_the_number_of_gpus() -> None:
    layouts_by_name = {layout.name: layout for layout in read_layouts(BENCHMARKS / "layouts" / "context.yaml", 8)}
    assert "plan.context_ulysses=8" in layouts_by_name["8b-128k-ulysses"].words
    assert "plan.context_ulysses=4" in layouts_by_name["8b-128k-ulysses-ring2"].words
    assert "8b-128k-ulysses" not in {layout.name for layout in read_layouts(BENCHMARKS / "layouts" / "context.yaml", 2)}
