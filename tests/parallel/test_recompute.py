"""Recompute silences a repeated compiler warning, and a block saves the predicted bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch._logging import warning_once

from meshwright.kernels.linear import Linear, with_taps
from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import COMPILER_OPTIONS, _forward_with_recompute
from meshwright.parallel.recompute import with_recompute
from meshwright.spec.blocks.table import LinearOp
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Recompute
from meshwright.workload.activations import saved_elements
from tests.adapted import adapter_of
from tests.models.tiny import DEEPSEEK_V3, DENSE, GEMMA, GPT_OSS, LLAMA, PARALLEL, QWEN2_MOE, QWEN3_MOE, built
from tests.slow import quick_first


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    """One process compiles a function for few models only."""
    torch.compiler.reset()


def test_a_compiler_warning_for_every_block_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    warning_once.cache_clear()  # torch gives this warning once a process; an earlier test may have caused it
    block = torch.compile(with_recompute(lambda x: torch.sin(x @ x).sum(), "selective"), backend="aot_eager")
    with caplog.at_level(logging.WARNING):
        block(torch.eye(3, requires_grad=True)).backward()
        logging.getLogger("torch._higher_order_ops.wrap").warning("another remark")
    assert [record.getMessage() for record in caplog.records] == ["another remark"]


MODELS = {
    "qwen3 moe": replace(
        QWEN3_MOE,
        layers=1,
        hidden=256,
        head_dim=48,
        heads=4,
        kv_heads=1,
        first_dense_layers=0,
        experts=16,
        experts_per_token=8,
        expert_hidden=104,
    ),
    "gpt-oss": replace(
        GPT_OSS,
        layers=1,
        hidden=256,
        head_dim=48,
        kv_heads=1,
        experts=16,
        experts_per_token=8,
        expert_hidden=104,
        blocks={},
        pattern=(),
        sliding_window=None,  # with a mask a CPU computes scores explicitly, and saves no result of attention
    ),
    "qwen2 moe": replace(
        QWEN2_MOE, layers=1, hidden=256, head_dim=48, kv_heads=1, experts=16, experts_per_token=8, expert_hidden=104
    ),
    "llama": replace(LLAMA, layers=1, hidden=256, head_dim=48, heads=4, kv_heads=1, ffn_hidden=300),
    "parallel": replace(PARALLEL, layers=1, hidden=256, head_dim=48, heads=4, kv_heads=1, ffn_hidden=300),
    # Values as wide as keys: the CPU computes narrower ones without a fused kernel and saves scores in fp32, which no GPU does.
    "latent": replace(
        DEEPSEEK_V3,
        layers=1,
        hidden=256,
        head_dim=48,
        value_head_dim=48,
        rope_head_dim=16,
        heads=4,
        kv_heads=4,
        kv_rank=64,
        q_rank=96,
        ffn_hidden=300,
        first_dense_layers=1,
    ),
    "gemma": replace(
        GEMMA, layers=1, hidden=256, head_dim=48, heads=4, kv_heads=1, ffn_hidden=300, blocks={}, pattern=()
    ),
    "olmo": replace(
        DENSE["olmo3"], layers=1, hidden=256, head_dim=48, heads=4, kv_heads=1, ffn_hidden=300, blocks={}, pattern=()
    ),
    "glm4": replace(DENSE["glm4"], layers=1, hidden=256, head_dim=48, heads=4, kv_heads=1, ffn_hidden=300),
}
UNPREDICTED = [("olmo", "all_but_attention")]
"""Not within the bound: at this small width the statistics of norms and attention are 5.4% of what is saved beside a block without norms
of inputs.
"""
MODES: tuple[Recompute, ...] = ("selective", "none", "all_but_attention")
MAX_EXCESS, BYTES_PER_ROUTER_CHOICE = 0.05, 32
"""Bytes that the prediction leaves out: at most this share of the saved bytes, and bytes per choice of a router.

The share is that of the statistics of norms and attention; a choice is an expert's number, two indices and a weight.
"""


def saved_by(run: Callable[..., Any], model: Decoder, x: torch.Tensor) -> dict[int, int]:
    """Bytes by address that a block of the model saves beside weights and shared inputs."""
    shared = model.shared_inputs(torch.zeros(x.shape[:2], dtype=torch.long), None, None, torch.bfloat16)
    inputs = shared.of(model.attention_kinds[0])
    masks = [inputs[1].dense] if inputs[1] is not None and inputs[1].dense is not None else []
    unsaved_storages = {
        tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *shared.rotary_tensors, *masks]
    }
    saved_bytes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in unsaved_storages:
            saved_bytes[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(x, *inputs)
    return saved_bytes


@pytest.mark.parametrize(
    "model_name, mode",
    quick_first(1, (case for case in product(MODELS, MODES) if case not in UNPREDICTED), unpack=True),
)
def test_a_compiled_block_saves_the_predicted_bytes(model_name: str, mode: Recompute) -> None:
    model = built(MODELS[model_name]).bfloat16()
    block, tokens = model.layers["0"], torch.zeros(2, 64, dtype=torch.long)
    run = torch.compile(
        with_recompute(block.forward, mode, block.routed), fullgraph=True, dynamic=False, options=COMPILER_OPTIONS
    )
    x = torch.randn(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    saved_bytes = saved_by(run, model, x)
    predicted = 2 * tokens.numel() * saved_elements(MODELS[model_name], 0, mode)
    router_bytes = BYTES_PER_ROUTER_CHOICE * tokens.numel() * MODELS[model_name].experts_per_token
    assert predicted <= sum(saved_bytes.values()) <= (1 + MAX_EXCESS) * predicted + router_bytes


ADAPTED = adapter_of(replace(MODELS["llama"], ffn_hidden=304), rank=4)
FROZEN = adapter_of(replace(MODELS["llama"], ffn_hidden=304), rank=4, targets=("down_proj",))
"""Most frozen layers have no adapter, and keep no input."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "fp8", "mode"),
    [
        (ADAPTED, True, "none"),
        (FROZEN, False, "none"),
        (ADAPTED, False, "none"),
        (FROZEN, True, "none"),
        (ADAPTED, True, "selective"),
        (ADAPTED, False, "all_but_attention"),
    ],
    ids=lambda value: "adapters" if isinstance(value, ModelSpec) else str(value),
)
def test_a_compiled_block_with_adapters_saves_the_predicted_bytes(spec: ModelSpec, fp8: bool, mode: Recompute) -> None:
    """An adapter keeps its layer's input in the dtype of compute, also where the frozen weight multiplies in fp8.

    The prediction leaves out what has the rank's width, and the matrices of fused layers' adapters: 0.2% of a real model's.
    """
    model = built(spec).bfloat16()
    for linear in model.modules():
        if fp8 and isinstance(linear, Linear):
            linear.scaling = "tensorwise"
    block = model.layers["0"]
    run = torch.compile(
        with_recompute(block.forward, mode, block.routed), fullgraph=True, dynamic=False, options=COMPILER_OPTIONS
    )
    x = torch.randn(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    saved_bytes = sum(saved_by(run, model, x).values())
    predicted = 2 * 128 * saved_elements(spec, 0, mode, 0.5 if fp8 else 1.0)
    linears = [op for op in spec.block(0).table().operations if isinstance(op, LinearOp)]
    ranks = [(op, sum(part.rank for part in op.adapters)) for op in linears]
    left_out = 2 * sum(rank * (128 + (op.inputs + op.outputs) * (len(op.adapters) > 1)) for op, rank in ranks)
    assert predicted <= saved_bytes <= (1 + MAX_EXCESS) * predicted + left_out


def test_full_recompute_saves_the_input_of_a_block_with_a_split_backward() -> None:
    """The compiler of torch 2.11 would save all matmuls, whose factors are gradients of its taps."""
    model = built(MODELS["llama"]).bfloat16()
    (block,) = model.layers.values()
    compiled = torch.compile(_forward_with_recompute, fullgraph=True, backend="aot_eager_decomp_partition")
    block.hooks.run = with_taps(partial(compiled, block.hooks.run, "full"), [block])
    x = torch.randn(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    saved_bytes = saved_by(block.forward, model, x)
    assert saved_bytes.pop(x.data_ptr()) == x.nbytes
    assert sum(saved_bytes.values()) < 0.1 * x.nbytes
