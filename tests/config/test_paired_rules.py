"""Refusals of the schedule `paired`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.config.test_key_rules import MOE, mistakes

PINS = [*MOE, "plan.schedule=paired", "plan.expert=2", "plan.shard=2"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], None),
        (["plan.expert=1", "plan.tensor=2"], None),
        (["plan.recompute=selective", "plan.expert_policy=fixed", "plan.expert_slots=3"], None),
        (["plan.expert=1", "plan.tensor=1"], "no tokens go to experts of other ranks"),
        (["plan.expert_policy=fixed", "plan.expert_slots=4"], "no tokens go to experts of other ranks"),
        (["plan.pipeline=2"], "it needs plan.pipeline 1"),
        (["cluster.gpu=H100", "plan.expert_exchange=peer"], "exchange peer sends the tokens of one micro-batch"),
        (["plan.recompute=full"], "recompute full would exchange tokens again"),
        (["plan.layers=[{recompute: all_but_attention}]"], "recompute all_but_attention would exchange tokens again"),
        (["plan.offload=both"], "offload both copies the activations of one micro-batch at a time"),
    ],
)
def test_pins_beside_paired(tmp_path: Path, overrides: list[str], reason: str | None) -> None:
    found = mistakes(tmp_path, "cluster.gpus_per_node=4", *PINS, *overrides)
    if reason is None:
        assert found == []
        return
    (mistake,) = found
    assert (mistake.key, mistake.nearest) == ("plan.schedule", "1f1b")
    assert mistake.expected.startswith("another schedule than paired, as ") and reason in mistake.expected


def test_a_dense_model_has_no_exchange(tmp_path: Path) -> None:
    (mistake,) = mistakes(tmp_path, "plan.schedule=paired")
    assert mistake.key == "plan.schedule" and "no tokens go to experts of other ranks" in mistake.expected
