"""The search chooses whether copy engines or kernels gather weights."""

from __future__ import annotations

import pytest

from meshwright.config.load import load_run
from meshwright.planner.candidate import fits, memory_budget, untrainable
from meshwright.planner.search import search
from meshwright.spec.plan import Plan

NODE = "model=llama3-8b train.seq_len=8192 train.global_batch=16 cluster.gpu=H200 cluster.gpus_per_node=8 plan.micro_batch=2"
SHARDED = "plan.tensor=1 plan.pipeline=1 plan.context_ring=1 plan.context_ulysses=1"


def chosen(words: str) -> Plan:
    return search(load_run(None, [*NODE.split(), *SHARDED.split(), *words.split()]), trainable=True).best.plan


def gather_reason(plan: Plan) -> str:
    return next((reason for reason in plan.why if reason.startswith("gathers")), "")


def test_copy_engines_gather_where_that_is_more_than_a_predictions_doubt() -> None:
    copied, kernels = chosen("plan.shard=8"), chosen("plan.shard=8 plan.gather_transport=nccl")
    assert copied.gather_transport == "copy_engine" and kernels.gather_transport == "nccl"
    assert copied.predicted and kernels.predicted and copied.predicted.step_seconds and kernels.predicted.step_seconds
    gap = kernels.predicted.step_seconds - copied.predicted.step_seconds
    assert 0.01 < gap / copied.predicted.step_seconds < 0.03
    assert (
        gather_reason(copied)
        == f"gathers by copy engines: the best plan found with kernels takes {1e3 * gap:.1f} ms longer"
    )
    assert not gather_reason(kernels), "what is pinned needs no reason"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "plan.shard=8 cluster.emulate_nodes=2",
            "gathers by kernels: the ranks that share weights are on several nodes",
        ),
        ("plan.shard=8 cluster.gpu=A100", "gathers by kernels: copy engines were not measured for them on A100"),
        ("plan.replicate=8 plan.shard=1 model=llama3-1b", ""),
        (
            "plan.shard=8 cluster.gpu=cpu cluster.memory_gib=900 model=llama-nano model.vocab_size=512 train.seq_len=256",
            "",
        ),
    ],
)
def test_kernels_gather_where_copy_engines_cannot(words: str, reason: str) -> None:
    plan = chosen(words)
    assert (
        plan.gather_transport == "nccl"
        and gather_reason(plan).startswith(reason)
        and bool(gather_reason(plan)) == bool(reason)
    )


def test_a_gain_that_no_prediction_tells_apart_leaves_kernels() -> None:
    """Weights are gathered once for many micro-batches, so gathers are a small part of the step."""
    plan = chosen("plan.shard=8 train.global_batch=512 plan.reshard=false plan.gradients=whole")
    assert (
        plan.gather_transport == "nccl"
        and "the best plan found with copy engines cannot be told apart" in gather_reason(plan)
    )


def test_pinned_copies_keep_shards_inside_a_node() -> None:
    plan = chosen("cluster.emulate_nodes=2 plan.gather_transport=copy_engine")
    assert plan.gather_transport == "copy_engine" and plan.axis_size("shard") <= 4 and untrainable(plan) is None


def test_where_the_window_does_not_fit_kernels_gather() -> None:
    """With the least memory in which a plan with kernels fits, the window of copy engines does not fit."""
    words = "plan.shard=8 plan.recompute=none plan.reshard=true plan.offload=none plan.gradients=shard"
    kernels = chosen(words + " plan.gather_transport=nccl")
    assert kernels.predicted is not None
    tight = kernels.predicted.memory_peak_bytes / 0.91 / 2**30 * 1.001
    run = load_run(None, [*NODE.split(), *SHARDED.split(), *words.split(), f"cluster.memory_gib={tight:.3f}"])
    plan = search(run, trainable=True).best.plan
    assert plan.gather_transport == "nccl" and fits(run, plan, memory_budget(run))
