"""Memory of the gradients of attention scores, for the kernel that writes them and for the plan that counts them.

Without torch.
"""

from __future__ import annotations

from typing import Any

SCORE_BYTES = 2 << 30
"""Maximum number of bytes of these gradients, which `kernels.fixed_order_attention` writes with `train.deterministic`.

On an H200, 4 heads of 16,384 tokens keep the device busy. With fewer bytes, groups of heads would be too small for
that.
"""
_ROWS = 128
"""Numbers of queries and keys are padded to a multiple of this."""


def score_bytes(seq: Any, heads: Any) -> Any:
    """Return the bytes of the gradients of the scores of `heads` heads, each with `seq` queries and keys.

    Works on numbers and NumPy arrays.
    """
    rows = -(-seq // _ROWS) * _ROWS
    return 2.0 * heads * rows * rows
