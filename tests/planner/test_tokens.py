"""The search chooses copy engines for tokens between tensor ranks where that was measured, else kernels."""

from __future__ import annotations

import pytest

from meshwright.config.load import load_run
from meshwright.planner.search import search
from meshwright.spec.plan import Plan

PAIR = "model=llama3-8b train.seq_len=8192 train.global_batch=4 plan.recompute=none plan.micro_batch=2 plan.tensor=2"
GPUS = "cluster.gpu=H200 cluster.gpus_per_node=2"


def chosen(words: str) -> Plan:
    return search(load_run(None, [*PAIR.split(), *GPUS.split(), *words.split()]), trainable=True).best.plan


def token_reason(plan: Plan) -> str:
    return next((reason for reason in plan.why if reason.startswith("tokens")), "")


def test_copy_engines_carry_tokens_between_two_ranks_and_need_room_for_them() -> None:
    copied, kernels = chosen(""), chosen("plan.tensor_transport=nccl")
    assert copied.tensor_transport == "copy_engine" and kernels.tensor_transport == "nccl"
    assert copied.predicted and kernels.predicted and copied.predicted.step_seconds and kernels.predicted.step_seconds
    assert 1.05 < kernels.predicted.step_seconds / copied.predicted.step_seconds < 1.15
    window = copied.predicted.memory_bytes["framework"] - kernels.predicted.memory_bytes["framework"]
    assert window == 2 * 2 * 8192 * 4096 * 2, "two slots, each for all tokens of a micro-batch in bf16"
    assert token_reason(copied).startswith("tokens by copy engines: the best plan found with kernels takes")
    assert not token_reason(kernels), "what is pinned needs no reason"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("cluster.emulate_nodes=2", "tokens by kernels: the tensor ranks are on several nodes"),
        ("cluster.gpu=A100", "tokens by kernels: copy engines were not measured for them on A100"),
        (
            "plan.tensor=4 cluster.gpus_per_node=4",
            "tokens by kernels: with more than 2 tensor ranks copy engines were slower",
        ),
        ("cluster.gpu=cpu cluster.memory_gib=900 model=llama-nano model.vocab_size=512 train.seq_len=256", ""),
    ],
)
def test_kernels_carry_them_where_copies_cannot_or_were_not_measured(words: str, reason: str) -> None:
    plan = chosen(words)
    assert (
        plan.tensor_transport == "nccl"
        and token_reason(plan).startswith(reason)
        and bool(token_reason(plan)) == bool(reason)
    )


def test_the_search_copies_without_a_pinned_axis_too() -> None:
    words = "model=llama3-8b train.seq_len=8192 train.global_batch=3"  # which two data ranks do not divide
    answer = search(load_run(None, [*words.split(), *GPUS.split()]))
    pairs = [candidate.plan for candidate in (answer.best, *answer.others) if candidate.plan.axis_size("tensor") == 2]
    assert pairs and pairs[0].tensor_transport == "copy_engine"


def test_one_sequence_at_a_time_gains_no_more_than_a_predictions_doubt() -> None:
    """Kernels gather a single sequence in order: nothing is copied into place, so copy engines could hide only the exchange."""
    plan = chosen("plan.micro_batch=1")
    assert (
        plan.tensor_transport == "nccl"
        and "the best plan found with copy engines cannot be told apart" in token_reason(plan)
    )
