"""MoE models on GPUs: the block against its plain version, no host synchronisation, runs equal in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.gpu.runs import RUNS_LIMIT, Record, figures, needs, steps, trained
from tests.models.tiny import MOE_LAYERS, built

from meshwright.kernels.grouped import order_by_expert, sum_copies
from meshwright.parallel.apply import COMPILER_OPTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

RUN = """
model:
  {family: qwen3_moe, layers: 3, hidden: 512, heads: 8, kv_heads: 4, head_dim: 64, ffn_hidden: 1024, max_seq_len: 512, qk_norm: true,
   experts: 16, experts_per_token: 4, expert_hidden: 256, first_dense_layers: 1}
data: {mix: stdlib, validation_tokens: 4096}
train: {steps: 6, global_batch: 8, seq_len: 512, learning_rate: 1e-3, warmup_steps: 1, timeout_seconds: 100}
cluster: {gpu: H200, gpus_per_node: 1}
checkpoint: {at_end: false}
"""
BOUND = 1e-2
"""Relative difference of bf16 losses over six steps: rounded otherwise, a token near a tie goes to another expert."""
CASES = {
    "not compiled": (1, ["plan.compile=false"]),
    "recompute full": (1, ["plan.recompute=full"]),
    "recompute selective, accumulate": (1, ["plan.recompute=selective", "plan.micro_batch=2"]),
    "fp32 on a processor": (1, ["cluster.gpu=cpu"]),
    "shard 2": (2, ["plan.shard=2", "plan.expert=1"]),
    "expert 2": (2, ["plan.expert=2"]),
    "expert 2, exchange by kernels": (2, ["plan.expert=2", "plan.expert_exchange=peer"]),
    "expert 2, exchange by kernels, not compiled, recompute full": (
        2,
        ["plan.expert=2", "plan.expert_exchange=peer", "plan.compile=false", "plan.recompute=full"],
    ),
    "expert 2, exchange by kernels, recompute selective": (
        2,
        [
            "plan.expert=2",
            "plan.expert_exchange=peer",
            "plan.expert_receive_bound=1.9",
            "plan.recompute=selective",
            "plan.micro_batch=2",
        ],
    ),
    "expert 2 x tensor 2, exchange by kernels": (
        4,
        ["plan.expert=2", "plan.shard=2", "plan.tensor=2", "plan.expert_exchange=peer"],
    ),
    "expert 2, not compiled, recompute full": (2, ["plan.expert=2", "plan.compile=false", "plan.recompute=full"]),
    "expert 2, recompute selective": (2, ["plan.expert=2", "plan.recompute=selective", "plan.micro_batch=2"]),
    "expert 2, recompute full, layered": (
        2,
        ["plan.expert=2", "plan.recompute=full", "plan.schedule=breadth_first", "plan.micro_batch=1"],
    ),
    "expert 2, two together": (2, ["plan.expert=2", "plan.schedule=paired", "plan.micro_batch=1"]),
    "expert 2, two together, not compiled, recompute selective": (
        2,
        [
            "plan.expert=2",
            "plan.schedule=paired",
            "plan.micro_batch=2",
            "plan.compile=false",
            "plan.recompute=selective",
        ],
    ),
    "tensor 2, two together, hecate": (
        2,
        [
            "plan.tensor=2",
            "plan.schedule=paired",
            "plan.micro_batch=2",
            "plan.expert_policy=hecate",
            "plan.expert_slots=4",
        ],
    ),
    "expert 2, all present": (2, ["plan.expert=2", "plan.expert_policy=fixed", "plan.expert_slots=8"]),
    "expert 2, hecate, recompute full": (
        2,
        ["plan.expert=2", "plan.expert_policy=hecate", "plan.expert_slots=4", "plan.recompute=full"],
    ),
    "expert 4, hecate, kept, accumulate": (
        4,
        [
            "plan.expert=4",
            "plan.expert_policy=hecate",
            "plan.expert_slots=6",
            "plan.expert_keep=true",
            "plan.micro_batch=1",
        ],
    ),
    "expert 2 x expert shard 2, hecate": (
        4,
        ["plan.expert=2", "plan.shard=4", "plan.expert_policy=hecate", "plan.expert_slots=8"],
    ),
    "tensor 2": (2, ["plan.tensor=2", "plan.recompute=selective"]),
    "expert 2 x tensor 2": (4, ["plan.expert=2", "plan.shard=2", "plan.tensor=2"]),
    "expert 2 x expert shard 2": (4, ["plan.expert=2", "plan.shard=4"]),
    "expert 2 over context ring 2": (2, ["plan.expert=2", "plan.context_ring=2"]),
    "expert 2 x context ulysses 2": (4, ["plan.expert=2", "plan.shard=2", "plan.context_ulysses=2"]),
    "expert 2 x pipeline 2, split backward": (
        4,
        ["plan.expert=2", "plan.shard=2", "plan.pipeline=2", "plan.schedule=zb_h1", "plan.micro_batch=1"],
    ),
    "pipeline 2, split backward": (2, ["plan.pipeline=2", "plan.schedule=zb_h1", "plan.micro_batch=1"]),
}


def checked_figures(records: list[Record]) -> list[float]:
    assert all(1 <= step["expert_load"] <= 16 for step in steps(records))
    return figures(records)


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return checked_figures(trained(tmp_path_factory.mktemp("one"), RUN, "one", 1))


@pytest.mark.parametrize("name", CASES)
def test_layouts_agree(name: str, one_gpu: list[float], tmp_path: Path) -> None:
    gpus, overrides = CASES[name]
    needs(gpus)
    assert checked_figures(trained(tmp_path, RUN, "run", gpus, overrides)) == pytest.approx(one_gpu, rel=BOUND)


def test_a_tokens_experts_are_summed_at_a_copys_rate() -> None:
    """As blocks are compiled: left to torch, a sum over eight reads rows at a sixth of it."""
    tokens, copies, width = 16384, 8, 2048
    expert_indices = torch.rand(tokens, 64, device="cuda").topk(copies).indices
    order = order_by_expert(expert_indices, expert_indices.flatten().bincount(minlength=64))
    token_copies = torch.randn(tokens * copies, width, device="cuda", dtype=torch.bfloat16)
    run = torch.compile(lambda: sum_copies(token_copies, order), fullgraph=True, options=COMPILER_OPTIONS)
    exact = token_copies[order.positions].double().sum(1)
    torch.testing.assert_close(run().double(), exact, rtol=1e-2, atol=1e-2)
    target = torch.empty_like(token_copies)
    # Read once, where a copy reads and writes.
    assert seconds(run) < seconds(lambda: target.copy_(token_copies))


def seconds(run: Callable[[], object]) -> float:
    """Of the fastest of several."""
    durations = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        durations.append(start.elapsed_time(end) / 1e3)
    return min(durations)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("moe", MOE_LAYERS)
def test_the_fast_path_equals_the_plain_one_and_never_waits(moe: str, compiled: bool) -> None:
    """Given the same choices: x is such that bf16 decides as fp64 does for all but a few tokens, which are left out."""
    exact = built(MOE_LAYERS[moe], reference=True).layers["1"].moe.cuda()
    fast = built(MOE_LAYERS[moe]).layers["1"].moe.bfloat16().cuda()
    run = torch.compile(fast, fullgraph=True, dynamic=False, options=COMPILER_OPTIONS) if compiled else fast
    x = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(0)).cuda()
    run(x.bfloat16().requires_grad_()).x.sum().backward()  # compiles, and makes cuBLAS's workspaces
    fast.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast_input = x.bfloat16().requires_grad_()
        routed = run(fast_input)
        torch.autograd.backward(
            (routed.x, routed.balance), (torch.ones_like(routed.x), torch.ones_like(routed.balance))
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        truth = exact(x.bfloat16().double())
    errors = (routed.x.double() - truth.x).norm(dim=-1) / truth.x.norm(dim=-1)
    assert errors.median() < 0.02 and (errors > 0.1).float().mean() < 0.05
    assert routed.load.sum() == truth.load.sum()
    assert fast_input.grad is not None and all(
        w.grad is not None and w.grad.isfinite().all() for w in fast.parameters()
    )
