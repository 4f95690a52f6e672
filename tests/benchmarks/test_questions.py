"""Random questions to the planner: a few of them, and that the checks of their answers find what is wrong."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
import questions as asking

if TYPE_CHECKING:
    from meshwright.cli.plan_answer import PlanAnswer

SMALL = ("model=llama3-8b", "cluster.gpu=H100", "cluster.nodes=1", "cluster.gpus_per_node=8", "train.seq_len=8192")


@pytest.mark.parametrize("seed", [0, 20])
def test_an_answer_to_a_random_question_is_without_faults(seed: int) -> None:
    outcome = asking.outcome_of(seed)
    assert not outcome["faults"], outcome["question"]
    assert outcome["end"] == "plan" and outcome["claims"] > 15
    assert 0 < outcome["utilised"] <= asking.MOST_UTILISED


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (("train.global_batch=7", "plan.replicate=8", "plan.shard=1"), "refused"),
        (("train.global_batch=8", "cluster.memory_gib=1"), "does not fit"),
        (("train.global_batch=8", "cluster.gpu=H10"), "refused"),
    ],
)
def test_a_question_without_an_answer_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], end: str
) -> None:
    monkeypatch.setattr(asking, "question_of", lambda seed: asking.Asked((*SMALL, *arguments), {}))
    outcome = asking.outcome_of(0)
    assert outcome["end"] == end and outcome["reason"] and not outcome["faults"]


@pytest.fixture(scope="module")
def answer() -> PlanAnswer:
    return asking.answered(asking.Asked((*SMALL, "train.global_batch=16"), {}))


def test_the_checks_pass_for_the_planners_own_words(answer: PlanAnswer) -> None:
    checks = [*asking.plan_checks(answer), *asking.why_checks(answer, Random(0), []), *asking.limit_checks(answer)]
    assert len(checks) > 12 and not any(checks)


@pytest.mark.parametrize(
    "claim",
    [
        "recompute selective on all layers: without it micro-batches of 1 sequence do not fit into memory",
        "weights freed after the forward and gathered again for the backward on all layers: if they stayed gathered, "
        "micro-batches of 1 sequence would not fit into memory",
        "activations take 3.5 GB of each host's memory",
        "recompute selective on all layers: without it the sun shines",
    ],
)
def test_a_wrong_claim_is_found(answer: PlanAnswer, claim: str) -> None:
    roomy = replace(answer.run, cluster=replace(answer.run.cluster, memory_gib=2000.0))
    plan = answer.plan
    checks = (asking.check_recompute, asking.check_reshard, asking.check_host_bytes)
    assert any(check(roomy, plan, claim) for check in checks)


def test_a_plan_that_a_pin_makes_faster_is_found(answer: PlanAnswer) -> None:
    predicted = answer.plan.predicted
    assert predicted is not None and predicted.step_seconds is not None
    slow = replace(answer.plan, predicted=replace(predicted, step_seconds=10 * predicted.step_seconds))
    (check,) = asking.compared(
        answer.run,
        replace(answer, best=replace(answer.best, plan=slow)),
        "no tensor ranks: the best plan found with 2 takes 9.00 s longer",
        [],
    )
    assert "tensor 2 takes" in check()


@pytest.mark.parametrize(
    ("arguments", "options", "step"),
    [
        # A chip without fp32 in the table, as the run's chip and as one to compare.
        (("model=llama3-1b", "cluster.gpu=Ascend910"), {}, "the plan"),
        (("model=llama3-1b", "cluster.gpu=A100"), {"chips": "Ascend910"}, "Ascend910"),
        # Steps whose linear layers multiply in fp8 while those of the plan do not.
        (("model=hunyuan-a13b", "cluster.gpu=H20", "plan.shard=8"), {"features": True}, "matmuls in fp8 blocks"),
        (
            ("model=llama3-1b", "cluster.gpu=H20"),
            {"software": "megatron-bridge", "precision": "fp8-tensor"},
            "megatron-bridge",
        ),
    ],
)
def test_a_step_is_compared_with_the_peaks_of_its_own_chip_and_formats(
    arguments: tuple[str, ...], options: dict[str, str | bool], step: str
) -> None:
    sizes = ("cluster.nodes=2", "cluster.gpus_per_node=8", "train.seq_len=4096", "train.global_batch=256")
    answer = asking.answered(asking.Asked((*arguments, *sizes), options))
    assert step in dict(asking.uses(answer))
    assert not any(asking.use_checks(answer))


def test_an_answer_with_idle_devices_counts_those_that_train() -> None:
    arguments = (
        "model=llama3-1b",
        "cluster.gpu=H100",
        "cluster.nodes=1",
        "cluster.gpus_per_node=7",
        "train.seq_len=4096",
    )
    answer = asking.answered(asking.Asked((*arguments, "train.global_batch=8"), {"tokens": "1e9"}))
    assert answer.idle is not None and not any(asking.plan_checks(answer))


def test_too_fast_a_step_is_found(answer: PlanAnswer) -> None:
    predicted = answer.plan.predicted
    assert predicted is not None and predicted.step_seconds is not None
    fast = replace(answer.plan, predicted=replace(predicted, step_seconds=predicted.step_seconds / 3))
    assert not any(asking.use_checks(answer))
    assert any(asking.use_checks(replace(answer, best=replace(answer.best, plan=fast))))
    assert any(asking.plan_checks(replace(answer, best=replace(answer.best, plan=fast))))
