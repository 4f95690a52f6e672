"""Attention over a part of the keys, and the combination of such partial results: the operations of ring attention.

A partial result has the logsumexp of its scores beside it. Two partial results and their logsumexps are enough to combine them (online
softmax; Milakov & Gimelshein 2018, Rabe & Staats 2021). The gradients of a part need only the combined result and its logsumexp (Dao et
al. 2022). With `reference` scores are computed explicitly. Otherwise the functions call torch's inner operators of scaled-dot-product
attention, because the public function does not return the logsumexp. On CUDA that is cuDNN, or FlashAttention for shapes that cuDNN does
not support; on a CPU it is FlashAttention.

Shapes: q, out and their gradients `(batch, queries, heads, head_dim)`, k and v `(batch, keys, kv_heads, head_dim)`, logsumexps
`(batch, heads, queries)`.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from meshwright.kernels import fixed_order_attention
from meshwright.kernels.norm import accumulate_dtype

log = logging.getLogger("meshwright")
_aten = torch.ops.aten


CUDNN_TOKENS = 16384
"""With fewer keys FlashAttention is used: cuDNN computes faster, but must first make a plan for each new length.

A step of hybrid ranks with samples of at most 2,048 tokens took 2.3 s with cuDNN and 1.1 with FlashAttention on two H200s
(benchmarks/results/2026-11-29-families-2xH200.json). The bound itself is an estimate from the rates of both; it was not measured.
"""


class VisibleBlock(NamedTuple):
    """Queries of one rank, and the keys of another rank that they attend to. With `causal` each query attends to the keys up to itself."""

    queries: slice
    keys: slice
    causal: bool


def visible_block(rank: int, source: int, seq: int) -> VisibleBlock:
    """Return the queries of `rank` and the keys of `source` between which `rank` computes scores.

    A causal sequence is divided into 2n chunks for n ranks. Rank r has the chunks r and 2n-1-r, together `seq` tokens (zigzag; Zhu 2024),
    so that all ranks compute equally many scores in every step of the ring. Example: with 2 ranks, rank 0 has chunks 0 and 3, rank 1 has 1
    and 2.

    - Keys of the same rank: attention is causal.
    - Keys of an earlier rank: all queries attend to its first chunk, and none to its second.
    - Keys of a later rank: only queries of the second chunk attend to them, to both chunks.
    """
    half = seq // 2
    return visible_part(rank, source, (half, seq), (half, seq))


def visible_part(rank: int, source: int, queries: tuple[int, int], keys: tuple[int, int]) -> VisibleBlock:
    """As `visible_block`, for parts of unequal chunks: `queries` and `keys` are (tokens of the first chunk, of both)."""
    if rank == source:
        return VisibleBlock(slice(queries[1]), slice(keys[1]), True)
    if source < rank:
        return VisibleBlock(slice(queries[1]), slice(keys[0]), False)
    return VisibleBlock(slice(*queries), slice(keys[1]), False)


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, *, lengths_vary: bool = False, reference: bool = False
) -> tuple[Tensor, Tensor]:
    """Return attention over these keys alone, in the dtype of q, and the logsumexp of the scores, in fp32 (fp64 for fp64).

    Scores are scaled by 1/√head_dim; `causal` needs as many keys as queries. `lengths_vary` says that few calls have equal lengths.
    """
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    backend = "reference" if reference else _backend(*heads, causal, lengths_vary)
    if backend == "reference":
        return _reference_attention(q, k, v, causal)
    if backend == "fixed order":
        out, logsumexp = fixed_order_attention.fixed_order_attention(*heads, causal)
    elif backend == "cudnn":
        out, logsumexp, *_ = _aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, causal)
    elif backend == "cpu":
        out, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal)
    else:
        out, logsumexp, *_ = _aten._scaled_dot_product_flash_attention(*heads, 0.0, causal)
    return out.transpose(1, 2), logsumexp.reshape(out.shape[:3])


def partial_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    *,
    lengths_vary: bool = False,
    reference: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of the gradients of q, k and v that these keys contribute.

    `grad` is the gradient of the combined result `out`, whose logsumexp is `logsumexp`. `lengths_vary` must be as in the forward. With
    `reference` the results have the dtype of the logsumexp, otherwise the dtype of q.
    """
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    backend = "reference" if reference else _backend(*heads, causal, lengths_vary)
    if backend == "reference":
        return _reference_gradients(grad, q, k, v, out, logsumexp, causal)
    inputs = grad.transpose(1, 2), *heads, out.transpose(1, 2)
    lengths = q.shape[1], k.shape[1]
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of dropout, which is off
    if backend == "fixed order":
        gradients = fixed_order_attention.fixed_order_gradients(*inputs, logsumexp[..., None].contiguous(), causal)
    elif backend == "cudnn":
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            *inputs, logsumexp[..., None].contiguous(), unused, unused, None, None, None, *lengths, 0.0, causal
        )
    elif backend == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, logsumexp, 0.0, causal)
    else:
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *inputs, logsumexp.contiguous(), None, None, *lengths, 0.0, causal, unused, unused
        )
    q_grad, k_grad, v_grad = (gradient.transpose(1, 2) for gradient in gradients)
    return q_grad, k_grad, v_grad


class AttentionAccumulator:
    """Combines partial results: `out` and its `logsumexp` over all keys added so far, in fp32 (fp64 for fp64)."""

    def __init__(self, out: Tensor, logsumexp: Tensor) -> None:
        self.out = out.to(logsumexp.dtype)
        self.logsumexp = logsumexp

    def add(self, queries: slice, out: Tensor, logsumexp: Tensor) -> None:
        """Add the partial result of some queries over other keys."""
        parts = self.out[:, queries], self.logsumexp[..., queries], out, logsumexp
        if out.is_cuda:
            from meshwright.kernels.partial_triton import combine

            combine(*parts)
        else:
            _combine(*parts)


def _combine(out: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Overwrite the first two arguments with the combined result and logsumexp."""
    combined = torch.logaddexp(logsumexp, other_logsumexp)
    weight, other_weight = ((part - combined).exp().transpose(1, 2)[..., None] for part in (logsumexp, other_logsumexp))
    out.copy_(out * weight + other.to(out.dtype) * other_weight)
    logsumexp.copy_(combined)


def _backend(q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths_vary: bool) -> str:
    """Name of the backend that supports q, k and v `(batch, heads, seq, head_dim)`."""
    if not q.is_cuda:
        return "cpu" if q.shape[-1] == v.shape[-1] else "reference"
    in_fixed_order = torch.are_deterministic_algorithms_enabled()
    if in_fixed_order and fixed_order_attention.supports(q, v):
        return "fixed order"
    params = SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    cudnn = not in_fixed_order and can_use_cudnn_attention(params)
    plans_cost_more = lengths_vary and k.shape[2] < CUDNN_TOKENS
    if can_use_flash_attention(params) and (plans_cost_more or not cudnn):
        return "flash"
    if cudnn:
        return "cudnn"
    _warn_once(str(q.dtype), q.shape[-1])
    return "reference"


@cache
def _warn_once(dtype: str, head_dim: int) -> None:
    log.warning(
        "ring attention: neither cuDNN nor FlashAttention supports %s with head_dim %d; scores are materialised instead",
        dtype,
        head_dim,
    )


def _reference_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal)
    values = _repeat_heads(v, q)
    logsumexp = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - logsumexp[..., None]) @ values
    return out.transpose(1, 2).to(q.dtype), logsumexp


def _reference_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    keys = _repeat_heads(k, q)
    values = _repeat_heads(v, q)
    grad, out, queries = (tensor.to(logsumexp.dtype).transpose(1, 2) for tensor in (grad, out, q))
    weights = torch.exp(_scores(q, k, causal) - logsumexp[..., None])
    score_grads = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    q_grad = score_grads @ keys
    k_grad = score_grads.mT @ queries
    v_grad = weights.mT @ grad
    k_grad, v_grad = (gradient.unflatten(1, (k.shape[2], -1)).sum(2) for gradient in (k_grad, v_grad))
    return q_grad.transpose(1, 2), k_grad.transpose(1, 2), v_grad.transpose(1, 2)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scaled scores `(batch, heads, queries, keys)`, in fp32 (fp64 for fp64)."""
    scores = q.to(accumulate_dtype(q.dtype)).transpose(1, 2) @ _repeat_heads(k, q).mT / math.sqrt(q.shape[-1])
    if not causal:
        return scores
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~visible, float("-inf"))


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values repeated for each query head, `(batch, heads, keys, head_dim)`."""
    return x.to(accumulate_dtype(x.dtype)).repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)
