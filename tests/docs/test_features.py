"""Tests of the tables of docs/reference/features.md against the equality tests and the refusals."""

from __future__ import annotations

from itertools import combinations
from typing import get_args

import pytest
from tests.docs import families
from tests.docs.features import FEATURES, PAGE, Feature, compared, rewritten
from tests.docs.pages import codes, table, text_of

from meshwright.config.load import load_run
from meshwright.families.registry import FAMILIES
from meshwright.launch.prepare import training_plan
from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import check_tensor
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import AxisName

BASE = [
    "model=llama-nano",
    "model.layers=8",
    "model.vocab_size=512",
    "train.steps=100",
    "train.global_batch=8",
    "cluster.gpu=cpu",
    "cluster.gpus_per_node=2",
]


def test_the_table_of_pairs_agrees_with_the_equality_tests() -> None:
    assert text_of(PAGE) == rewritten(text_of(PAGE)), f"`make features` updates {PAGE}"


def test_the_table_of_families_agrees_with_their_tests_and_the_engine() -> None:
    assert text_of(PAGE) == families.rewritten(text_of(PAGE)), f"`make features` updates {PAGE}"


def test_each_family_has_each_axis_or_is_refused() -> None:
    """Training on two ranks of an axis is compared with one device in float64, or the model cannot be divided so, and is refused."""
    tested = families.axes_by_family()
    models: dict[str, list[ModelSpec]] = {}
    for _, spec in compared():
        models.setdefault(spec.family, []).append(spec)
    assert set(models) == set(FAMILIES)
    for family, specs in models.items():
        untested = {*get_args(AxisName), families.EXPERT} - tested[family]
        if not any(spec.experts for spec in specs):
            untested.remove(families.EXPERT)
        if all(spec.qk_norm_whole for spec in specs):
            untested.remove("tensor")
            for spec in specs:
                assert "norms all heads together" in str(check_tensor(spec, 2))
        if all(is_windowed(spec) or spec.sinks or spec.score_cap for spec in specs):
            untested.discard("hybrid")  # olmo3 and phi3 are tested without
        assert not untested, family


def is_windowed(spec: ModelSpec) -> bool:
    """Whether layers attend to a window, which `test_hybrid` tests to be refused on hybrid ranks."""
    return any(isinstance(kind.mixer, AttentionSpec) and kind.mixer.window is not None for kind in spec.block_kinds)


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
