"""Which constants hold for a stack on a generation, and that this program's own leave published runs alone."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path

import pytest
import yaml

from meshwright.costs.constants import FILE, GENERATION, OWN, OWN_FILE, constants, is_measured, table, with_own
from meshwright.costs.of_plan import STACK
from meshwright.costs.predict import predict_rows

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published-runs.csv"


def test_what_was_measured_together_goes_first() -> None:
    rows = table()
    for name, value in rows["measured"][OWN]["hopper"].items():
        assert getattr(constants("hopper", OWN), name) == value
    assert constants("hopper", "torchtitan").gemm == rows["generations"]["hopper"]["gemm"]


@pytest.mark.parametrize("generation", ["ampere", "blackwell", "volta"])
def test_where_it_never_ran_the_generation_s_own_row_holds(generation: str) -> None:
    assert is_measured("hopper") and not is_measured(generation)
    own, other = constants(generation, OWN), constants(generation, "torchtitan")
    assert all(getattr(own, name) == getattr(other, name) for name in GENERATION)
    assert own.slow == table()["stacks"][OWN]["slow"] < other.slow


def test_plans_are_priced_with_own_constants_and_a_band_around_one() -> None:
    assert STACK == OWN
    low, high = table()["bands"][OWN]
    assert -0.1 < low < 0 < high < 0.1


def test_own_constants_leave_published_runs_alone() -> None:
    published = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    own = yaml.safe_load(OWN_FILE.read_text(encoding="utf-8"))
    other = with_own(published, {**own, "stack": {**own["stack"], "slow": 9.0, "copies": 1.0}})
    with RUNS.open(encoding="utf-8", newline="") as file:
        rows = list(islice(csv.DictReader(file), 0, None, 40))
    assert predict_rows(rows, published) == predict_rows(rows, other) == predict_rows(rows)
