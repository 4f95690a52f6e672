"""Each module that computes has a worked example in a docstring, and the examples are true."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
MODULES = [
    *(
        path
        for package in ("planner", "simulator", "workload")
        for path in sorted((SOURCE / package).glob("*.py"))
        if path.name != "__init__.py"
    ),
    SOURCE / "policies" / "cache_blocks.py",
]
WITHOUT_FORMULA = {
    "planner.batch_ramp": "asks whether batches divide",
    "planner.conflicts": "asks the table of plan rules",
    "planner.deployment_reasons": "writes sentences",
    "planner.exchange_features": "a table of changed prices",
    "planner.expert_moves": "lists plans",
    "planner.expert_reasons": "writes sentences",
    "planner.fixes": "lists changed runs",
    "planner.layout_search": "orders moves and sweeps",
    "planner.moves": "a table of moves",
    "planner.reprice": "joins memory and simulation",
    "planner.sample_lengths": "reads files of lengths",
    "planner.sample_pins": "pins what sample_choice chose",
    "planner.sample_plans": "makes plans",
    "planner.sample_reasons": "writes sentences",
    "planner.search": "orders sweeps and moves",
    "planner.strategies": "a grid of options",
    "simulator.counted_blocks": "counts blocks as policies.cache_blocks does",
    "simulator.expert_placement_costs": "gathers inputs of policies.expert_costs",
    "simulator.predicted_step": "joins pricing and simulation",
    "simulator.sample_times": "gathers inputs of sample_steps",
    "simulator.serve_instance": "plays the engine's policy event by event",
    "simulator.serve_simulation": "plays requests event by event",
    "simulator.slow_nodes": "prices a plan for each type of node",
    "simulator.trace": "writes a file",
    "workload.rollout_memory": "adds sizes of cache_size and of the model",
}
"""Modules that join, list or write what others compute, with what they do instead."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def has_example(path: Path) -> bool:
    return "\n>>> " in path.read_text(encoding="utf-8").replace("    ", "")


@pytest.mark.parametrize("path", [path for path in MODULES if name_of(path) not in WITHOUT_FORMULA], ids=name_of)
def test_the_examples_of_a_module_are_true(path: Path) -> None:
    found = doctest.testmod(import_module(f"meshwright.{name_of(path)}"))
    assert found.attempted and not found.failed


def test_modules_without_a_formula_are_there_and_have_no_example() -> None:
    by_name = {name_of(path): path for path in MODULES}
    assert not [name for name in WITHOUT_FORMULA if name not in by_name or has_example(by_name[name])]
