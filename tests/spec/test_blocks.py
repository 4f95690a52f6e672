"""Block tables beside the torch modules that they describe, and beside sizes by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.tiny import ALL, DEEPSEEK_V2, DENSE, LATENT, LLAMA, PARALLEL, QWEN3_MOE, built
from torch.utils.flop_counter import FlopCounterMode

from meshwright.kernels.grouped import GROUPED_OPERATOR
from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.blocks.memory import Elements, saved
from meshwright.spec.blocks.moe import MoESpec
from meshwright.spec.blocks.positions import RopeScaling
from meshwright.spec.blocks.transfers import transfers
from meshwright.spec.dimension_checks import check_dimensions
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec, block_of, sequence

MODELS = {
    **ALL,
    **LATENT,
    **DENSE,
    "parallel with shared": replace(
        PARALLEL, experts=4, experts_per_token=2, expert_hidden=40, shared_expert_hidden=16
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_table_has_the_parameters_of_its_module_in_their_order(name: str) -> None:
    model = built(MODELS[name], vary=False)
    for run in sequence(MODELS[name]):
        module = model.layers[str(run.first)]
        table = [(weight.name, weight.shape, weight.trained) for weight in run.block.table().weights]
        assert table == [(key, tuple(p.shape), p.requires_grad) for key, p in module.named_parameters()]


def grouped_flops(rows: torch.Size, weight: torch.Size, *args: object, **kwargs: object) -> int:
    """FLOPs of rows `(rows, in)`, each times one matrix of the experts `(experts, out, in)`."""
    return 2 * rows[0] * weight[1] * weight[2]


COUNTED = {GROUPED_OPERATOR.overloadpacket: grouped_flops}
"""The counter knows no operators of our own."""


@pytest.mark.parametrize("name", MODELS)
def test_a_table_counts_the_flops_that_torch_counts(name: str) -> None:
    """In the reference implementation, which computes the whole square of attention's scores."""
    spec = MODELS[name]
    model = built(spec, reference=True)
    tokens = torch.zeros(2, 24, dtype=torch.long)
    shared = model.shared_inputs(tokens, None, None, torch.float64)
    x = torch.randn(2, 24, spec.hidden, dtype=torch.float64)
    for run in sequence(spec):
        block, table = model.layers[str(run.first)], run.block.table()
        with FlopCounterMode(display=False, custom_mapping=COUNTED) as whole, torch.no_grad():
            block(x, *shared.of(block.attention_kind))
        attention = sum(2 * op.heads * (op.key_dim + op.value_dim) * tokens.shape[1] for op in table.attends)
        assert whole.get_total_flops() == tokens.numel() * (2 * table.multiplications + attention)


def test_operations_read_only_what_is_written_before() -> None:
    for spec in MODELS.values():
        for run in sequence(spec):
            for spread in (False, True):
                table, written = run.block.table(spread=spread), {"x0"}
                for op in table.operations:
                    assert set(op.reads) <= written, op.name
                    written |= {value.name for value in op.writes}
                    assert all(not value.inside or value.inside in written for value in op.writes)
                assert len(table.writer) == sum(len(op.writes) for op in table.operations)


def test_saved_elements_by_hand() -> None:
    """A Llama block of width 64 with 4 heads and 2 key/value heads of 16, and a feed-forward width of 96."""
    table = block_of(LLAMA, routed=False).table()
    hidden, queries, keys, ffn = 64, 64, 32, 96
    rotated = queries + keys
    whole = (
        2 * hidden + (queries + 2 * keys) + rotated + queries + 2 * ffn
    )  # both norms' inputs, qkv, attention, gate and up
    assert saved(table, "none", narrow=False) == Elements(own=whole, rounded=2 * hidden + ffn)
    assert saved(table, "none", narrow=True) == Elements(own=whole, rounded=2 * hidden + ffn + queries)
    selected = 2 * hidden + (queries + 2 * keys) + queries + 2 * ffn  # the block's input and results of matmuls
    assert saved(table, "selective", narrow=True) == Elements(own=selected)
    assert saved(table, "all_but_attention", narrow=True) == Elements(own=hidden + queries)
    assert saved(table, "full", narrow=True) == Elements(own=hidden)


def test_inputs_that_several_operations_read_count_once() -> None:
    """Router, dispatch and shared expert read one tensor; branches of a parallel block read one norm's output."""
    routed = block_of(replace(QWEN3_MOE, shared_expert_hidden=16), routed=True).table()
    readers = [op.name for op in routed.operations if "mlp_norm" in op.reads]
    assert readers == ["moe.router", "moe.sort", "moe.shared.gate_up"]
    alone = block_of(QWEN3_MOE, routed=True).table()
    added = saved(routed, "none", narrow=False), saved(alone, "none", narrow=False)
    assert added[0].rounded - added[1].rounded == 16 and added[0].own - added[1].own == 32
    parallel, plain = (saved(block_of(spec, routed=False).table(), "none", narrow=False) for spec in (PARALLEL, LLAMA))
    assert (plain.own - parallel.own, plain.rounded - parallel.rounded) == (64, 64)
    selective = [
        saved(block_of(spec, routed=False).table(), "selective", narrow=False).own for spec in (LLAMA, PARALLEL)
    ]
    assert selective[0] - selective[1] == 64  # no sum between the branches, so none is computed again


@pytest.mark.parametrize(
    ("spec", "gathered", "scattered"),
    [
        (LLAMA, [64, 64], [64, 64]),
        (PARALLEL, [64], [64]),
        (MODELS["parallel with shared"], [64, 64], [64, 64]),
        (QWEN3_MOE, [64], [64]),
        (replace(DEEPSEEK_V2, shared_expert_hidden=0), [28, 20, 6], [64]),
        (replace(DEEPSEEK_V2, q_rank=0), [64, 20, 6, 64], [64, 64]),
    ],
    ids=["llama", "parallel", "parallel with shared", "experts", "latent", "queries of the stream"],
)
def test_tensor_ranks_transfer_where_the_division_changes(
    spec: ModelSpec, gathered: list[int], scattered: list[int]
) -> None:
    found = transfers(block_of(spec, routed=spec.experts > 0))
    assert [value.width for group in found.gathered for value in group] == gathered
    assert [value.width for value in found.scattered] == scattered


def test_mistakes_name_keys_and_the_nearest_value() -> None:
    heads = AttentionSpec(heads=8, kv_heads=3, head_dim=16)
    assert list(map(str, heads.mistakes())) == ["kv_heads is 3: expected a divisor of heads (8); nearest: 2"]
    (moe,) = (body for body in block_of(QWEN3_MOE, routed=True).bodies if isinstance(body, MoESpec))
    wrong = replace(moe, per_token=9)
    assert list(map(str, wrong.mistakes())) == ["experts_per_token is 9: expected 1 to experts (6); nearest: 6"]


@pytest.mark.parametrize(
    ("keys", "mistake"),
    [
        ({"norm_plus_one": True, "norm": "layernorm"}, "norm_plus_one is true: expected false with norm: layernorm"),
        ({"output_norms": True, "parallel_block": True}, "output_norms is true: expected false with parallel_block"),
        (
            {"rope_scaling": RopeScaling(kind="linear", factor=8.0, low_freq_factor=2.0)},
            "rope_scaling is linear with keys beside factor: expected none of them with kind: linear",
        ),
    ],
    ids=str,
)
def test_keys_that_do_not_match_are_refused(keys: dict[str, Any], mistake: str) -> None:
    with pytest.raises(BadInput, match=f"model: {mistake}"):
        check_dimensions(replace(LLAMA, **keys))
