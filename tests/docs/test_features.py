"""The tables of docs/reference/features.md: what goes together is what the equality tests try, what is refused is refused."""

from __future__ import annotations

from itertools import combinations

import pytest
from tests.docs.features import FEATURES, PAGE, Feature, compared, rewritten
from tests.docs.pages import codes, table, text_of

from meshwright.config.load import load_run
from meshwright.launch.prepare import training_plan
from meshwright.spec.errors import BadInput

BASE = [
    "model=llama-nano", "model.layers=8", "model.vocab_size=512", "train.steps=100", "train.global_batch=8", "cluster.gpu=cpu",
    "cluster.gpus_per_node=2",
]  # fmt: skip


def test_what_goes_together_is_what_the_equality_tests_try() -> None:
    assert text_of(PAGE) == rewritten(text_of(PAGE)), f"`make features` brings {PAGE} up to date"


def test_every_run_of_the_tests_compares_axes_two_and_three_at_a_time() -> None:
    axes = {
        name: FEATURES[name]
        for name in ("shard (FSDP)", "replicate (HSDP)", "tensor", "context ring", "Ulysses", "expert parallelism")
    }
    axes["pipeline"] = Feature(lambda plan, spec: plan.axis_size("pipeline") > 1)
    together = {frozenset(name for name in axes if axes[name].has(*one)) for one in compared(slow=False)}
    assert not [pair for pair in combinations(axes, 2) if not any(set(pair) <= found for found in together)]
    assert len([found for found in together if len(found) >= 3]) >= 6


@pytest.mark.parametrize("row", table(PAGE, "asked"), ids=lambda row: codes(row["asked"])[0])
def test_what_is_refused_is_refused_before_the_start(row: dict[str, str]) -> None:
    training_plan(load_run(None, [*BASE, "plan.pipeline=2"]), print)
    with pytest.raises(BadInput):
        training_plan(load_run(None, [*BASE, *codes(row["asked"])[0].split()]), print)
