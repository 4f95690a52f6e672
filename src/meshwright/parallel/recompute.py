"""Activation recompute: which results of a block's forward are saved, and which the backward computes again.

- `none` saves what autograd saves.
- `selective` saves the results that take longest to compute: of matmuls, of attention, and of the exchanges of experts and tensor ranks. It
  recomputes element-wise operations and the exchanges of Ulysses. (Korthikanti et al. 2022 recompute attention instead.)
- `all_but_attention` saves the block's input and the result of attention: the cost of attention grows with the square of the sequence
  length, that of other operations linearly (Li et al. 2023, arXiv 2310.03294).
- `full` saves only the block's input (Chen et al. 2016).

In all modes the choices of routers are saved. A recomputed choice could differ by rounding. A token would then go to another expert, and
with expert parallelism the ranks would expect different numbers of rows from each other and deadlock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.kernels.grouped import GROUPED_OPERATOR
from meshwright.kernels.grouped_fp8 import GROUPED_FP8_OPERATOR
from meshwright.kernels.router import CHOICE_OPERATOR
from meshwright.parallel import exchanges, experts, linear_exchanges, norms, ring, span_attention, span_loads  # noqa: F401  # register the operators
from meshwright.spec.plan import Recompute

Forward = Callable[..., Any]


def with_recompute(forward: Forward, mode: Recompute, routed: bool = False, compiled: bool = False) -> Forward:
    """Return `forward` with the recompute `mode`.

    - `routed`: `forward` contains a router of an MoE model, whose choices must be saved.
    - `compiled`: the result will be part of a compiled function. Without a policy for operators, the compiler of torch 2.11 would save the
      matmuls inside autograd functions, such as those of a split backward. So `full` has a policy here even without a router.
    """
    if mode == "none":
        return forward
    checkpointed = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    if mode == "full":
        return partial(checkpointed, context_fn=_routing_contexts) if routed or compiled else checkpointed
    return partial(checkpointed, context_fn=_selective_contexts if mode == "selective" else _attention_contexts)


def _keeps_log_record(record: logging.LogRecord) -> bool:
    """Logging filter that drops the compiler's warning about in-place operations in checkpointed blocks: our blocks have none."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _routing_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_routing)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_selected)


def _attention_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_attention)


def _save_routing(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _ROUTING else CheckpointPolicy.MUST_RECOMPUTE


def _save_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in _ATTENTION or operator in _ROUTING
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE


def _save_selected(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SELECTED else CheckpointPolicy.PREFER_RECOMPUTE


_aten = torch.ops.aten
_ROUTING = {
    _aten.topk.default,
    _aten.sort.stable,
    CHOICE_OPERATOR,
    torch.ops.meshwright.exchange_loads.default,
    torch.ops.meshwright.route_tokens.default,
    torch.ops.meshwright.sum_loads.default,
    torch.ops.meshwright.sum_span_loads.default,
}
_ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.meshwright.fixed_order_attention.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.meshwright.ring_forward.default,
    torch.ops.meshwright.sink_attention.default,
    torch.ops.meshwright.span_forward.default,
    torch.ops.meshwright.window_attention.default,
}
_SELECTED = {
    *_ROUTING,
    *_ATTENTION,
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    GROUPED_OPERATOR,
    GROUPED_FP8_OPERATOR,
    torch.ops.meshwright.exchange_rows.default,
    torch.ops.meshwright.move_tokens.default,
    torch.ops.meshwright.add_over_ranks.default,
    torch.ops.meshwright.all_gather_matmul.default,
    torch.ops.meshwright.matmul_reduce_scatter.default,
}
logging.getLogger("torch._higher_order_ops.wrap").addFilter(_keeps_log_record)
