"""Activation recompute: what a block's forward keeps for backward, and what backward computes again.

selective keeps the results of matrix products, attention and exchanges between ranks, which are dear to compute; it recomputes the
element-wise rest (Korthikanti et al. 2022). full keeps the block's input only (Chen et al. 2016). all_but_attention keeps what attention
gave besides: its cost grows with the square of the sequence, that of the rest does not (Li et al. 2023, arXiv 2310.03294). Routers' choices
are always kept: made again from other roundings, they could send a token elsewhere, and with spread experts ranks would wait for rows that
never come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.kernels.grouped import GROUPED_OPERATOR
from meshwright.parallel import exchanges, experts, products, ring  # noqa: F401  # make the operators named below
from meshwright.spec.plan import Recompute

Forward = Callable[..., Any]


def recomputing(forward: Forward, mode: Recompute, chooses: bool = False) -> Forward:
    """`forward` with its activations kept according to `mode`; `chooses` says that routers in it choose."""
    if mode == "none":
        return forward
    again = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    if mode == "full":
        return partial(again, context_fn=_choosing_contexts) if chooses else again
    return partial(again, context_fn=_selective_contexts if mode == "selective" else _attention_contexts)


def _tells(record: logging.LogRecord) -> bool:
    """Disables the compiler's check that selectively recomputed blocks contain no in-place operations; they contain none."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _choosing_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_choices)


def _keep_choices(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _CHOICES else CheckpointPolicy.MUST_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _attention_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_attention)


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in _ATTENTION or operator in _CHOICES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_aten = torch.ops.aten
_CHOICES = {
    _aten.topk.default,
    _aten.sort.stable,
    torch.ops.meshwright.exchanged_loads.default,
    torch.ops.meshwright.summed_loads.default,
}
_ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.meshwright.ring_forward.default,
}
_KEPT = {
    *_CHOICES,
    *_ATTENTION,
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    GROUPED_OPERATOR,
    torch.ops.meshwright.exchanged_rows.default,
    torch.ops.meshwright.gathered_products.default,
    torch.ops.meshwright.scattered_products.default,
}
logging.getLogger("torch._higher_order_ops.wrap").addFilter(_tells)
