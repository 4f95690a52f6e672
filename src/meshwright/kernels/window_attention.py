"""Causal attention within a sliding window by torch's FlashAttention, for CUDA in 16 bit: nothing is compiled for it.

`spec.blocks.attention.window_by_flash` says for which heads and windows it is chosen instead of flex attention. Several documents in a row
are its form for sequences of unequal length. It cannot cap scores. Sinks join its result by the log-sum-exp, as in `kernels.sinks`, outside
of the operators, so that a compiled block computes them beside its other element-wise operations.

Shapes: q, out and their gradients `(batch, seq, heads, head_dim)`, k and v `(batch, seq, kv_heads, head_dim)`, log-sum-exps
`(batch, heads, seq)` in fp32, sinks `(heads,)`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from meshwright.kernels.sinks import join_sinks, sink_gradient
from meshwright.spec.blocks.attention import window_by_flash

FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_aten = torch.ops.aten


class FlashWindow(NamedTuple):
    """A sliding window, and the documents of a micro-batch. The shapes do not depend on the documents, so a block is compiled once.

    - `begins` `(batch · seq + 1,)` int32: the index of the first token of each document, counted over all rows. The rest is filled with the
      number of tokens. Example: 2 rows of 4 tokens, the first with documents of 3 and 1 tokens: [0, 3, 4, 8, 8, 8, 8, 8, 8].
    - `sizes` `(2,)` int64 on the CPU: the number of documents, and the tokens of the longest.

    Both are None if each row is one document.
    """

    tokens: int
    """Tokens that each token attends to, itself included."""
    begins: Tensor | None = None
    sizes: Tensor | None = None


def is_chosen(
    head_dim: int | None, window: int, cap: float | None, dtype: torch.dtype | None, device: torch.device
) -> bool:
    """Whether FlashAttention computes a window on `device`. `head_dim` is None if values are narrower than keys.

    Never under `torch.use_deterministic_algorithms`: flex attention always adds in the same order, without more memory.
    """
    if head_dim is None or dtype not in FORMATS or torch.are_deterministic_algorithms_enabled():
        return False
    return window_by_flash(head_dim, window, cap, FORMATS[dtype]) and _is_supported(device, head_dim, dtype)


@cache
def _is_supported(device: torch.device, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether torch has FlashAttention with windows for this device: not for AMD's, nor for some heads on small chips."""
    if torch.version.hip is not None:
        return False
    heads = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device, requires_grad=True)
    return can_use_flash_attention(SDPAParams(heads, heads, heads, None, 0.0, True, False))


def flash_window(window: int, documents: Tensor | None, sizes: tuple[int, int] | None = None) -> FlashWindow:
    """The window and the documents `(batch, seq)`: consecutive tokens of a row with equal numbers are one document.

    `sizes` are the number of documents and the tokens of the longest; None reads them from the device, for which the host waits.
    """
    if documents is None:
        return FlashWindow(window)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    index = torch.arange(documents.numel() + 1, device=documents.device)
    begins = torch.where(torch.nn.functional.pad(first.flatten(), (0, 1)), index, documents.numel()).sort().values
    if sizes is None:
        host_sizes = torch.stack((first.sum(), begins.diff().max())).cpu()
    else:
        host_sizes = torch.tensor(sizes)
    return FlashWindow(window, begins.to(torch.int32), host_sizes)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: FlashWindow, sinks: Tensor | None = None) -> Tensor:
    """Attention within a window, and within documents if it has any; scores are scaled by 1/√head_dim. Shaped like q."""
    return _WindowAttention.apply(q, k, v, sinks, *window)


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window: int,
        begins: Tensor | None,
        sizes: Tensor | None,
    ) -> Tensor:
        out, logsumexp = window_forward(q, k, v, window, begins, sizes)
        if sinks is not None:
            out, logsumexp = join_sinks(out, logsumexp, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, logsumexp, begins, sizes)
        ctx.window = window
        return out

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, logsumexp, begins, sizes = ctx.saved_tensors
        gradients = window_backward(grad, q, k, v, out, logsumexp, ctx.window, begins, sizes)
        of_sinks = None if sinks is None else sink_gradient(grad, out, logsumexp, sinks)
        return *gradients, of_sinks, None, None, None


@torch.library.custom_op("meshwright::window_attention", mutates_args=())
def window_forward(
    q: Tensor, k: Tensor, v: Tensor, window: int, begins: Tensor | None, sizes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`window_attention` without a gradient or sinks, and the log-sum-exps of the scores."""
    batch, seq, heads, _ = q.shape
    inputs, lengths = _by_document((q, k, v), begins, sizes)
    out, logsumexp, *_ = _aten._flash_attention_forward(
        *inputs, *lengths, 0.0, True, False, window_size_left=window - 1, window_size_right=0
    )
    if begins is not None:
        logsumexp = logsumexp.view(heads, batch, seq).transpose(0, 1)
    return out.view(q.shape).contiguous(), logsumexp.contiguous()


@window_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, window: int, begins: Tensor | None, sizes: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty((batch, heads, seq), dtype=torch.float32)


@torch.library.custom_op("meshwright::window_attention_backward", mutates_args=())
def window_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    window: int,
    begins: Tensor | None,
    sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; `out` and `logsumexp` are those with sinks, and `grad` is the gradient of `out`."""
    inputs, lengths = _by_document((grad.contiguous(), q, k, v, out), begins, sizes)
    if begins is not None:
        logsumexp = logsumexp.transpose(0, 1).flatten(1)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of dropout, which is off
    gradients = _aten._flash_attention_backward(
        *inputs,
        logsumexp.contiguous(),
        *lengths,
        0.0,
        True,
        unused,
        unused,
        window_size_left=window - 1,
        window_size_right=0,
    )
    # Outputs of a custom operator have the strides of its fake.
    q_grad, k_grad, v_grad = (
        gradient.view(x.shape).contiguous() for gradient, x in zip(gradients, (q, k, v), strict=True)
    )
    return q_grad, k_grad, v_grad


@window_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    window: int,
    begins: Tensor | None,
    sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    q_grad, k_grad, v_grad = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return q_grad, k_grad, v_grad


def _by_document(
    tensors: tuple[Tensor, ...], begins: Tensor | None, sizes: Tensor | None
) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None, int, int]]:
    """Tensors as FlashAttention takes them, and where queries and keys begin, and the most tokens of each.

    With documents the rows follow each other, `(batch · seq, heads, head_dim)`.
    """
    if begins is None or sizes is None:
        return list(tensors), (None, None, tensors[0].shape[1], tensors[0].shape[1])
    count, longest = sizes.tolist()
    begins = begins[: count + 1]
    return [x.flatten(0, 1) for x in tensors], (begins, begins, longest, longest)
