"""Rotary tables and rotation against complex numbers, and against transformers' own frequencies."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.kernels.rope import rotary_tables, rotate
from meshwright.spec.model import RopeScaling

HEAD_DIM = 16


def test_rotation_is_a_complex_matmul():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 3, HEAD_DIM, generator=draw, dtype=torch.float64)
    actual = rotate(x, rotary_tables(torch.arange(7), HEAD_DIM, 10000.0, None, torch.float64))
    pairs = torch.complex(x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :])
    for position in range(7):
        for i in range(HEAD_DIM // 2):
            angle = position * 10000.0 ** (-2 * i / HEAD_DIM)
            turned = pairs[:, position, :, i] * complex(math.cos(angle), math.sin(angle))
            assert torch.allclose(actual[:, position, :, i], turned.real, rtol=0, atol=1e-13)
            assert torch.allclose(actual[:, position, :, i + HEAD_DIM // 2], turned.imag, rtol=0, atol=1e-13)


def test_scores_depend_on_distance_only():
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(HEAD_DIM, generator=draw, dtype=torch.float64).expand(1, 50, 1, -1) for _ in range(2))
    tables = rotary_tables(torch.arange(50), HEAD_DIM, 500.0, None, torch.float64)
    scores = rotate(q, tables)[0, :, 0] @ rotate(k, tables)[0, :, 0].t()
    for distance in range(-49, 50):
        line = scores.diagonal(distance)
        assert torch.allclose(line, line[0].expand_as(line), rtol=0, atol=1e-12)


def test_positions_by_row():
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    cos, _ = rotary_tables(positions, HEAD_DIM, 10000.0, None, torch.float32)
    default_table, _ = rotary_tables(torch.arange(4), HEAD_DIM, 10000.0, None, torch.float32)
    assert cos.shape == (2, 4, 1, HEAD_DIM // 2)
    assert torch.equal(cos[0], default_table[0])
    assert torch.equal(cos[1, 2:], default_table[0, :2])


def test_rotation_of_bfloat16_rounds_once():
    x = torch.randn(1, 9, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    tables = rotary_tables(torch.arange(9), HEAD_DIM, 10000.0, None, torch.bfloat16)
    assert tables[0].dtype == torch.float32
    assert torch.equal(rotate(x, tables), rotate(x.float(), tables).bfloat16())


@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=8.0), RopeScaling(factor=32.0, original_max_seq_len=64)])
def test_tables_equal_transformers_to_the_last_bit(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 500000.0}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=rope)
    positions = torch.tensor([[0, 1, 500, 8191, 131071]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = rotary_tables(positions, 128, 500000.0, scaling, torch.float32)
    assert torch.equal(ours[0][:, :, 0], cos[..., :64])
    assert torch.equal(ours[1][:, :, 0], sin[..., :64])
