"""What fp8 matmuls require of a model and its mesh (docs/design/fp8.md)."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.spec.model import ModelSpec

FP8_MULTIPLE = 16
"""Every dimension of an fp8 matmul must be a multiple of this."""
FP8_WIDTH_KEYS = (
    "hidden",
    "ffn_hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "expert_hidden",
    "shared_expert_hidden",
    "q_rank",
    "kv_rank",
    "rope_head_dim",
    "value_head_dim",
)
"""Keys of a model that decide the dimensions of its matmuls."""


def supports_fp8(model: ModelSpec, seq_len: int, context: int = 1) -> bool:
    """Return whether the dimensions of all matmuls allow fp8, with `seq_len` tokens divided over `context` ranks."""
    return not any(size % FP8_MULTIPLE for size in linear_dimensions(vars(model), seq_len, context).values())


def linear_dimensions(model: Mapping[str, int | None], seq_len: int | None, context: int) -> dict[str, int]:
    """Return the dimensions of the linear layers' matmuls on one of `context` ranks, by a name for messages.

    Unknown ones are left out.
    """
    hidden, ffn_hidden, heads, kv_heads, head_dim, expert, shared, queries, latent, rotated, value = (
        model.get(key) for key in FP8_WIDTH_KEYS
    )
    tokens = "train.seq_len" if context == 1 else f"train.seq_len ÷ {context} context ranks"
    dimensions = {tokens: seq_len and seq_len // context, "model.hidden": hidden, "model.ffn_hidden": ffn_hidden}
    dimensions |= {"model.expert_hidden": expert, "model.shared_expert_hidden": shared}
    if heads and head_dim:
        dimensions["heads × head_dim"] = heads * head_dim
    if heads and kv_heads and head_dim and not latent:
        dimensions["(heads + 2 × kv_heads) × head_dim"] = (heads + 2 * kv_heads) * head_dim
    if heads and head_dim and latent and rotated and value:
        dimensions |= {"model.q_rank": queries, "model.kv_rank": latent, "heads × value_head_dim": heads * value}
        dimensions["q_rank + kv_rank + rope_head_dim"] = (queries or 0) + latent + rotated
        dimensions["heads × (head_dim - rope_head_dim + value_head_dim)"] = heads * (head_dim - rotated + value)
    return {name: size for name, size in dimensions.items() if size}
