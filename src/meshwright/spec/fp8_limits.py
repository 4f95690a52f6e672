"""What products in fp8 ask of a model and its mesh (docs/design/fp8.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Linear, Plan

FP8_MULTIPLE = 16
"""What every side of a product in fp8 must be a multiple of."""
FP8_WIDTH_KEYS = ("hidden", "ffn_hidden", "heads", "kv_heads", "head_dim")
"""Keys of a model that say how wide its products are."""


def fp8_conflict(plan: Plan, *, experts: bool) -> str | None:
    """What of the plan products in fp8 do not train beside, of a model with or without `experts`; None where they do, or none is."""
    formats = (layer.linear or plan.precision.linear for layer in plan.layers)
    return fp8_format_conflict(formats, plan.axis_size("tensor"), experts=experts)


def fp8_format_conflict(formats: Iterable[Linear], tensor: int, *, experts: bool) -> str | None:
    """`fp8_conflict` of layers in `formats` on so many `tensor` ranks."""
    beside = ["tensor ranks"] * (tensor > 1) + ["a mixture of experts"] * experts
    return " and ".join(beside) if beside and any(kind != "compute" for kind in formats) else None


def supports_fp8(model: ModelSpec, seq_len: int, context: int = 1) -> bool:
    """Whether a model's products can be in fp8, at `seq_len` tokens on `context` ranks."""
    return not any(size % FP8_MULTIPLE for size in product_sides(vars(model), seq_len, context).values())


def product_sides(model: Mapping[str, int | None], seq_len: int | None, context: int) -> dict[str, int]:
    """Sides of the linear layers' products on one of `context` ranks, by name, as far as `FP8_WIDTH_KEYS` of the model are known."""
    hidden, ffn_hidden, heads, kv_heads, head_dim = (model[key] for key in FP8_WIDTH_KEYS)
    tokens = "train.seq_len" if context == 1 else f"train.seq_len ÷ {context} context ranks"
    found = {tokens: seq_len and seq_len // context, "model.hidden": hidden, "model.ffn_hidden": ffn_hidden}
    if heads and kv_heads and head_dim:
        found["heads × head_dim"] = heads * head_dim
        found["(heads + 2 × kv_heads) × head_dim"] = (heads + 2 * kv_heads) * head_dim
    return {name: size for name, size in found.items() if size}
