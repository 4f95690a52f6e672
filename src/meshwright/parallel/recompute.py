"""Activation recompute: what a block's forward keeps for backward, and what backward computes again.

selective keeps the results of matrix products and attention, which are dear to compute, and routers' choices; it recomputes the
element-wise rest (Korthikanti et al. 2022); full keeps the block's input only (Chen et al. 2016).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.kernels.grouped import GROUPED_OPERATOR
from meshwright.parallel import products  # noqa: F401  # makes the operators of tensor parallelism
from meshwright.spec.plan import Recompute

Forward = Callable[..., Any]


def recomputing(forward: Forward, mode: Recompute) -> Forward:
    """`forward` with its activations kept according to `mode`."""
    if mode == "none":
        return forward
    if mode == "full":
        return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=_selective_contexts)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    GROUPED_OPERATOR,
    # A router's choice is made once: made again from other roundings, it could send a token elsewhere.
    _aten.topk.default,
    _aten.sort.stable,
    torch.ops.meshwright.gathered_product.default,
    torch.ops.meshwright.scattered_product.default,
}
