"""Memory of the gradients of attention's scores: of the kernel that writes them, and of the plan that counts them. No torch."""

from __future__ import annotations

from typing import Any

SCORE_BYTES = 2 << 30
"""Most memory for these gradients, which `kernels.fixed_order_attention` writes with `train.deterministic`.

On an H200 4 heads of 16,384 tokens fill the device; groups of fewer bytes would be too small.
"""
_ROWS = 128
"""Queries and keys are padded to a multiple of this."""


def score_bytes(seq: Any, heads: Any) -> Any:
    """Bytes of the gradients of the scores of so many heads, each of `seq` queries and keys; numbers or NumPy arrays."""
    rows = -(-seq // _ROWS) * _ROWS
    return 2.0 * heads * rows * rows
