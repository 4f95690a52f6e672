"""Features of other systems' expert parallelism, one by one: DeepSeek-V3's step with all of them is near the published one."""

from __future__ import annotations

import pytest

from meshwright.config.load import load_run
from meshwright.planner.exchange_features import FEATURES, feature_steps
from meshwright.planner.objectives import point_of
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

PUBLISHED_SECONDS = 19.9
"""DeepSeek-V3 on 2,048 H800, 15,360 sequences of 4,096 tokens: 2.664 million GPU-hours for 14.8T tokens (arXiv 2412.19437)."""


def _planned(*words: str) -> tuple[RunSpec, Plan]:
    run = load_run(None, [*words, "data.mix=stdlib", "train.steps=9"])
    answer = point_of(run, trainable=False).answer
    assert answer is not None
    return run, answer.best.plan


def test_deepseek_v3_with_the_published_features_takes_the_published_time() -> None:
    run, plan = _planned(
        "model=deepseek-v3",
        "cluster.gpu=H800",
        "cluster.nodes=256",
        "cluster.gpus_per_node=8",
        "train.seq_len=4096",
        "train.global_batch=15360",
        "plan.pipeline=16",
        "plan.expert=64",
        "plan.schedule=1f1b",
    )
    steps = feature_steps(run, plan)
    assert [step.feature for step in steps] == [feature.name for feature in FEATURES]
    assert plan.predicted and plan.predicted.step_seconds and plan.predicted.step_seconds > 2 * PUBLISHED_SECONDS
    together = [step.together for step in steps]
    assert together == sorted(together, reverse=True)
    assert together[-1] == pytest.approx(PUBLISHED_SECONDS, rel=0.1)
    for step in steps:
        assert step.alone < plan.predicted.step_seconds * 1.0001 and not step.present


@pytest.mark.parametrize(("chip", "has_fp8"), [("H100", True), ("A100", False)])
def test_matmuls_in_fp8_are_a_feature_of_chips_with_fp8_only(chip: str, has_fp8: bool) -> None:
    words = ("model=qwen3-30b-a3b", f"cluster.gpu={chip}", "cluster.nodes=2", "cluster.gpus_per_node=8")
    steps = feature_steps(*_planned(*words, "train.seq_len=4096", "train.global_batch=64", "plan.expert=8"))
    assert steps[0].feature == FEATURES[0].name
    in_fp8 = [step.feature for step in steps if step.alone_matmuls == "fp8"]
    assert in_fp8 == (["matmuls in fp8 blocks"] if has_fp8 else [])
    assert ("matmuls in fp8 blocks" in [step.feature for step in steps]) == has_fp8
    assert steps[-1].together_matmuls == ("fp8" if has_fp8 else None)


def test_dense_models_have_no_such_features() -> None:
    words = [
        "model=llama3-1b",
        "cluster.gpu=H100",
        "cluster.gpus_per_node=8",
        "train.seq_len=2048",
        "train.global_batch=64",
    ]
    assert feature_steps(*_planned(*words)) == ()
