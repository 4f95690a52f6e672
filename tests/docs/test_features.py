"""The tables of docs/parallelism/features.md: what goes together is what the equality tests try, what is refused is refused."""

from __future__ import annotations

import pytest
from tests.docs.features import PAGE, rewritten
from tests.docs.pages import codes, table, text_of

from meshwright.launch.prepare import training_plan
from meshwright.spec.errors import BadInput
from meshwright.spec.load import load_run

BASE = [
    "model=llama-nano", "model.layers=8", "model.vocab_size=512", "train.steps=100", "train.global_batch=8", "cluster.gpu=cpu",
    "cluster.gpus_per_node=2",
]  # fmt: skip


def test_what_goes_together_is_what_the_equality_tests_try() -> None:
    assert text_of(PAGE) == rewritten(text_of(PAGE)), f"`make features` brings {PAGE} up to date"


@pytest.mark.parametrize("row", table(PAGE, "asked"), ids=lambda row: codes(row["asked"])[0])
def test_what_is_refused_is_refused_before_the_start(row: dict[str, str]) -> None:
    training_plan(load_run(None, [*BASE, "plan.pipeline=2"]))
    with pytest.raises(BadInput):
        training_plan(load_run(None, [*BASE, *codes(row["asked"])[0].split()]))
