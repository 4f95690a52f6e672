"""Tests of the tables of docs/reference/features.md and families.md against the equality tests and the refusals."""

from __future__ import annotations

from itertools import combinations

import pytest
from tests.docs.pages import codes, table
from tools import families
from tools.features import FEATURES, PAGE, Feature, compared

from meshwright.config.load import load_run
from meshwright.families.registry import FAMILIES
from meshwright.launch.prepare import training_plan
from meshwright.spec.errors import BadInput

BASE = [
    "model=llama-nano",
    "model.layers=8",
    "model.vocab_size=512",
    "train.steps=100",
    "train.global_batch=8",
    "cluster.gpu=cpu",
    "cluster.gpus_per_node=2",
]


@pytest.mark.parametrize("feature", families.COLUMNS)
def test_each_family_has_each_feature_in_a_test_or_a_rule_refuses_it(feature: str) -> None:
    assert set(families.SPECIMENS) == set(FAMILIES)
    cells = {family: families.cell(family, feature) for family in FAMILIES}
    assert not [family for family, (word, _) in cells.items() if word == "untested"]
    assert all(refusal for word, refusal in cells.values() if word != "yes")


def test_quick_tests_combine_axes_two_and_three_at_a_time() -> None:
    axes = {
        name: FEATURES[name]
        for name in ("shard (FSDP)", "replicate (HSDP)", "tensor", "context ring", "Ulysses", "expert parallelism")
    }
    axes["pipeline"] = Feature(lambda plan, spec: plan.axis_size("pipeline") > 1)
    together = {frozenset(name for name in axes if axes[name].in_plan(*case)) for case in compared(slow=False)}
    assert not [pair for pair in combinations(axes, 2) if not any(set(pair) <= names for names in together)]
    assert len([names for names in together if len(names) >= 3]) >= 6


@pytest.mark.parametrize("refusal", table(PAGE, "asked"), ids=lambda refusal: codes(refusal["asked"])[0])
def test_a_listed_refusal_is_raised_before_the_start(refusal: dict[str, str]) -> None:
    training_plan(load_run(None, [*BASE, "plan.pipeline=2"]), print)
    with pytest.raises(BadInput):
        training_plan(load_run(None, [*BASE, *codes(refusal["asked"])[0].split()]), print)
