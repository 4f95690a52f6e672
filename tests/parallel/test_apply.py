"""Recompute and compilation of a block change neither its results nor its parameters' names."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import initialise_shards, wrap_blocks
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, Precision, Recompute

SPEC = ModelSpec(
    family="llama",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn_hidden=24,
    vocab_size=37,
    max_seq_len=12,
    init_std=0.2,
)


def plan(mode: Recompute, *, compiled: bool = False) -> Plan:
    return Plan(
        mesh=(MeshAxis(axis="shard", size=1),),
        batch=BatchPlan(global_batch=2, micro_batch=2, accumulate=1),
        layers=(LayerStrategy(recompute=mode),),
        precision=Precision(compute="fp32"),
        compile=compiled,
    )


def loss_and_gradients(wrapped: Plan | None, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = Decoder(SPEC, loss_chunk=7)
    initialise_shards(model, seed=3)
    model.to(dtype)
    if wrapped is not None:
        wrap_blocks(model, wrapped)
    assert [name for name, _ in model.named_parameters()] == [parameter.name for parameter in parameters(SPEC)]
    draw = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(37, (2, 2, 12), generator=draw)
    loss = model(tokens, targets=targets, positions=None, documents=None)
    loss.backward()
    return {"loss": loss.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}


@pytest.mark.parametrize("mode", get_args(Recompute))
def test_recompute_changes_no_bit(mode: Recompute) -> None:
    without_recompute, wrapped = loss_and_gradients(None), loss_and_gradients(plan(mode))
    assert all(torch.equal(wrapped[name], without_recompute[name]) for name in without_recompute)


class Counting(TorchDispatchMode):
    """Counts the operators that are really run, below any other mode."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[Any] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[operator] += 1
        return operator(*args, **(kwargs or {}))


def test_recompute_runs_again_what_it_says() -> None:
    matmuls, attention, elementwise = {}, {}, {}
    for mode in get_args(Recompute):
        with Counting() as counter:
            loss_and_gradients(plan(mode))
        matmuls[mode] = counter.runs[torch.ops.aten.mm.default]
        attention[mode] = counter.runs[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
        elementwise[mode] = counter.runs[torch.ops.aten.silu.default]
    assert matmuls["full"] == matmuls["all_but_attention"] > matmuls["selective"] == matmuls["none"]
    assert (
        attention["full"]
        == 2 * attention["all_but_attention"]
        == 2 * attention["selective"]
        == 2 * attention["none"]
        > 0
    )
    elementwise_counts = {elementwise[mode] for mode in ("selective", "all_but_attention", "full")}
    assert elementwise_counts == {2 * elementwise["none"]} and elementwise["none"] > 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_compiled_blocks_equal_plain_ones() -> None:
    """Two blocks, one compilation: they share it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # torch 2.11 compiles no attention of fp64 on a processor: it declares the log-sum to be fp32 there.
    exact = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
    dtype, bounds = (torch.float64, (1e-9, 1e-12)) if exact else (torch.float32, (1e-4, 1e-5))
    uncompiled = loss_and_gradients(None, dtype)
    compiled = loss_and_gradients(plan("selective", compiled=True), dtype)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for name in uncompiled:
        torch.testing.assert_close(compiled[name], uncompiled[name], rtol=bounds[0], atol=bounds[1])
