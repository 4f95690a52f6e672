"""Groups of heads of fixed-order attention, and the mask that replaces it; its results are tested on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.kernels import fixed_order_attention
from meshwright.kernels.fixed_order_attention import _groups
from meshwright.spec.score_memory import score_bytes
from meshwright.workload.activations import score_gradient_bytes
from tests.models.tiny import LLAMA


@pytest.mark.parametrize("limit", [1, 3 * 2 * 128 * 128 * 2, 1 << 40])
@pytest.mark.parametrize(("samples", "kv_heads", "shared"), [(1, 1, 4), (3, 4, 2), (2, 5, 1)])
def test_groups_take_each_head_once(
    monkeypatch: pytest.MonkeyPatch, limit: int, samples: int, kv_heads: int, shared: int
) -> None:
    monkeypatch.setattr(fixed_order_attention, "SCORE_BYTES", limit)
    q, k = torch.zeros(samples, kv_heads * shared, 100, 8), torch.zeros(samples, kv_heads, 100, 8)
    for queries, keys in _groups(q, k):
        q[queries] += 1
        k[keys] += 1
        heads = q[queries].shape[0] * q[queries].shape[1]
        assert heads == shared or score_bytes(100, heads) <= limit
        assert q[queries].shape[1] == shared * k[keys].shape[1]
    assert torch.all(q == 1) and torch.all(k == 1)


def test_the_memory_of_a_plan_is_that_of_the_largest_group() -> None:
    groups = 2 * LLAMA.kv_heads
    assert score_gradient_bytes(LLAMA, 2, 100, 1) == groups * score_bytes(100, LLAMA.heads / LLAMA.kv_heads)
    most = score_gradient_bytes(LLAMA, 2, np.array([1 << 13, 1 << 15]), 1)
    assert most[0] <= fixed_order_attention.SCORE_BYTES < most[1] == score_bytes(1 << 15, LLAMA.heads / LLAMA.kv_heads)
