"""Attention over a part of the keys, and how parts add up: what ring attention is made of.

A part's result comes with the log-sum of its scores. Two parts' results are joined by these alone (online softmax; Milakov & Gimelshein
2018, Rabe & Staats 2021), and a part's gradients need nothing of the others but the joined result and log-sum (Dao et al. 2022).
The plain twin writes both out; on CUDA they are the operators behind scaled-dot-product attention, which keep the log-sum for themselves
otherwise: cuDNN's, or FlashAttention's where cuDNN cannot take the shapes.

Shapes: q, out and their gradients `(batch, queries, heads, head_dim)`, k and v `(batch, keys, kv_heads, head_dim)`, log-sums
`(batch, heads, queries)`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from meshwright.kernels.norm import accumulate_dtype

log = logging.getLogger("meshwright")
_aten = torch.ops.aten


class Piece(NamedTuple):
    """Which of a rank's queries see which of another's keys: all of these, or `causal`, each up to its own place."""

    queries: slice
    keys: slice
    causal: bool


def piece(rank: int, source: int, seq: int) -> Piece:
    """What `rank` computes of the keys of `source`, when each rank has two chunks of a causal sequence, `seq` tokens together.

    Of 2n chunks rank r has numbers r and 2n-1-r (zigzag; Zhu 2024), so that all have as many scores to compute at every turn. Its own keys
    it sees causally. Of an earlier rank's chunks all its queries see the first, and none the second; of a later rank's, its second chunk
    sees both, and its first none.
    """
    half = seq // 2
    if rank == source:
        return Piece(slice(seq), slice(seq), True)
    if source < rank:
        return Piece(slice(seq), slice(half), False)
    return Piece(slice(half, seq), slice(seq), False)


def partial_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """Attention over these keys alone, in q's dtype, and the log-sum of the scores, in fp32 (fp64 for fp64).

    Scores are scaled by 1/√head_dim; `causal` takes as many keys as queries.
    """
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    backend = "plain" if plain else _backend(*heads, causal)
    if backend == "plain":
        return _plain_attention(q, k, v, causal)
    if backend == "cudnn":
        out, total, *_ = _aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, causal)
    else:
        out, total, *_ = _aten._scaled_dot_product_flash_attention(*heads, 0.0, causal)
    return out.transpose(1, 2), total.reshape(out.shape[:3])


def partial_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool, *, plain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v that come of these keys, for `grad` of the joined result `out` with log-sum `total`.

    Those of the plain twin are in the log-sum's dtype, others in q's.
    """
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    backend = "plain" if plain else _backend(*heads, causal)
    if backend == "plain":
        return _plain_gradients(grad, q, k, v, out, total, causal)
    given = grad.transpose(1, 2), *heads, out.transpose(1, 2)
    lengths = q.shape[1], k.shape[1]
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the state of dropout, of which there is none
    if backend == "cudnn":
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            *given, total[..., None].contiguous(), unused, unused, None, None, None, *lengths, 0.0, causal
        )
    else:
        found = _aten._scaled_dot_product_flash_attention_backward(
            *given, total.contiguous(), None, None, *lengths, 0.0, causal, unused, unused
        )
    q_grad, k_grad, v_grad = (one.transpose(1, 2) for one in found)
    return q_grad, k_grad, v_grad


class Joined:
    """The result over all keys seen so far, in fp32 (fp64 for fp64): `out` and its log-sum `total`."""

    def __init__(self, out: Tensor, total: Tensor) -> None:
        self.out, self.total = out.to(total.dtype), total

    def add(self, queries: slice, out: Tensor, total: Tensor) -> None:
        """Join the result of some queries over other keys."""
        join = _compiled_join() if out.is_cuda else _join
        join(self.out[:, queries], self.total[..., queries], out, total)


def _join(out: Tensor, total: Tensor, other: Tensor, other_total: Tensor) -> None:
    """Write the joined result and log-sum over the first two arguments."""
    joint = torch.logaddexp(total, other_total)
    mine, others = ((one - joint).exp().transpose(1, 2)[..., None] for one in (total, other_total))
    out.copy_(out * mine + other.to(out.dtype) * others)
    total.copy_(joint)


@cache
def _compiled_join() -> Callable[..., None]:
    return torch.compile(_join, dynamic=False)


def _backend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    """Which operator takes q, k and v `(batch, heads, seq, head_dim)`."""
    if not q.is_cuda:
        return "plain"
    asked = SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    if can_use_cudnn_attention(asked):
        return "cudnn"
    if can_use_flash_attention(asked):
        return "flash"
    _tell_once(str(q.dtype), q.shape[-1])
    return "plain"


@cache
def _tell_once(dtype: str, head_dim: int) -> None:
    log.warning(
        "ring attention: neither cuDNN nor FlashAttention takes %s with head_dim %d; scores are written out",
        dtype,
        head_dim,
    )


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores, values = _scores(q, k, causal), _shared(v, q)
    total = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - total[..., None]) @ values
    return out.transpose(1, 2).to(q.dtype), total


def _plain_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _shared(k, q), _shared(v, q)
    grad, out, queries = (one.to(total.dtype).transpose(1, 2) for one in (grad, out, q))
    weights = torch.exp(_scores(q, k, causal) - total[..., None])
    slopes = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    q_grad, k_grad, v_grad = slopes @ keys, slopes.mT @ queries, weights.mT @ grad
    k_grad, v_grad = (one.unflatten(1, (k.shape[2], -1)).sum(2) for one in (k_grad, v_grad))
    return q_grad.transpose(1, 2), k_grad.transpose(1, 2), v_grad.transpose(1, 2)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """`(batch, heads, queries, keys)`, in fp32 (fp64 for fp64)."""
    scores = q.to(accumulate_dtype(q.dtype)).transpose(1, 2) @ _shared(k, q).mT / math.sqrt(q.shape[-1])
    if not causal:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~seen, float("-inf"))


def _shared(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values by query head, `(batch, heads, keys, head_dim)`."""
    return x.to(accumulate_dtype(x.dtype)).repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)
